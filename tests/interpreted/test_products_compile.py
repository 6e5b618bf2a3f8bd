"""The product kernels compile for NVIDIA and AMD, fit their shared memory, and multiply FP8 as FP8. Before the wait they read weights only."""

from __future__ import annotations

import pytest
from interpreted.own_process import printed


@pytest.mark.parametrize(
    ("backend", "architecture", "shared_kib"), [("cuda", "90", 227), ("hip", "gfx942", 64), ("hip", "gfx950", 160)]
)
def test_compiles(backend: str, architecture: str, shared_kib: int) -> None:
    kernels = printed("compile_products.py", backend, architecture)
    assert len(kernels) == 32
    for kernel in kernels:
        assert kernel["shared"] <= shared_kib * 1024, kernel
        early = backend == "cuda" and (kernel["kernel"].startswith("skinny") or kernel["kernel"] == "choice")
        above, below = kernel["early"]
        assert (above > 0) == early, f"{kernel['kernel']}: {above} loads before the wait"
        assert not early or below > 0, f"{kernel['kernel']}: all it reads is read before the wait"
        dots = kernel["kernel"].startswith(("grouped", "block"))
        assert kernel["fp8"] == dots, f"{kernel['kernel']}: FP8 {'is widened before' if dots else 'in'} the product"
