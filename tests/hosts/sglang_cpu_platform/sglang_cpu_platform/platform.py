"""The platform: plain torch on a CPU."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU with nothing but torch."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"

    def get_dispatch_key_name(self) -> str:
        """SGLang's layers run their plain torch forms."""
        return "native"

    def get_default_attention_backend(self) -> str:
        """The one that needs no kernels."""
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        """SGLang's own pool."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        """SGLang's own pool."""
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def get_paged_allocator_cls(self) -> Any:
        """SGLang's own allocator of pages, whose kernels are Triton's, in plain torch."""
        from sglang_cpu_platform.allocator import allocator

        return allocator
