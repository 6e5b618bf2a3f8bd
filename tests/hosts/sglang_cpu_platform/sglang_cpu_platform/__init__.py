"""A platform for SGLang's own entry point, so that its real scheduler, caches and server run on a CPU in tests.

SGLang publishes no CPU build. Its model runner does start on a CPU if a platform package says what device there is.
"""

from __future__ import annotations

import os


def activate() -> str:
    """Entry point of `sglang.srt.platforms`: where the platform's class is."""
    if os.environ.get("SGLANG_TEST_EXTRA_BUFFER") == "1":
        _allow_extra_buffer()
    return "sglang_cpu_platform.platform:TorchCpuPlatform"


def _allow_extra_buffer() -> None:
    """Let hybrids have the radix cache that they have on a GPU, with states exported while requests run.

    SGLang asks for a GPU there, because of its own kernels, and pins memory. Tests alone may change that.
    """
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    tensor = torch.tensor
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    torch.tensor = lambda *args, pin_memory=False, **kwargs: tensor(*args, **kwargs)
    HookRegistry.register(
        "sglang.srt.server_args.ServerArgs._validate_mamba_extra_buffer", lambda *_: None, HookType.REPLACE
    )
