"""Memory of vLLM's for our modules, and where a step's requests have theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from firstlight.cache import PagedSpec, SlotSpec
from firstlight.plugin.core import HostedModel
from firstlight.plugin.vllm.takeover import GPU_PAGE_TOKENS
from firstlight.step import PageTable, SlotTable, Table


class PageMemory(AttentionLayerBase):
    """KV pages of one module."""

    def __init__(self, hosted: HostedModel, path: str, spec: PagedSpec) -> None:
        self.spec, self.page_size = spec, 0
        self._bind = lambda tensors: hosted.bind_cache(path, tensors)
        self._unbind = lambda: hosted.bind_null(path)
        self.set_group: Callable[[str], None] = lambda group: hosted.set_group(path, group)
        self._pages = torch.empty(0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """How vLLM finds the builder of the metadata."""
        return PageBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec:
        """What vLLM allocates for a block."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.spec.kv_heads,
            head_size=self.spec.head_dim,
            dtype=self.spec.dtype,
        )

    @property
    def kv_cache(self) -> torch.Tensor:
        """[pages, kv_heads, page_size, 2 head_dim], a row's keys before its values, with vLLM's strides.

        Empty where there is no memory: at first, and again when vLLM has measured what graphs take.
        """
        return self._pages

    @kv_cache.setter
    def kv_cache(self, pages: torch.Tensor) -> None:
        self._pages = pages
        if pages.numel() == 0:
            self.page_size = 0
            self._unbind()
            return
        self.page_size = pages.shape[2]
        rows = pages.transpose(1, 2)
        self._bind({"k": rows[..., : self.spec.head_dim], "v": rows[..., self.spec.head_dim :]})


class StateMemory(MambaBase):
    """States of one module. The widest elements come first, so that each tensor is aligned to its own."""

    def __init__(self, hosted: HostedModel, path: str, spec: SlotSpec) -> None:
        self.names, self.shapes, self.dtypes = state_tensors(spec)
        self._bind = lambda tensors: hosted.bind_cache(path, tensors)
        self._unbind = lambda: hosted.bind_null(path)
        self.set_group: Callable[[str], None] = lambda group: hosted.set_group(path, group)
        self._states: Sequence[torch.Tensor] = ()

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """A label for vLLM."""
        return MambaAttentionBackendEnum.CUSTOM

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Of one slot's tensors."""
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Of one slot's tensors."""
        return self.dtypes

    def get_attn_backend(self) -> type[AttentionBackend]:
        """How vLLM finds the builder of the metadata."""
        return StateBackend

    @property
    def kv_cache(self) -> Sequence[torch.Tensor]:
        """A [slots, *shape] of each tensor, cut by vLLM out of its blocks; none where there is no memory."""
        return self._states

    @kv_cache.setter
    def kv_cache(self, states: Sequence[torch.Tensor]) -> None:
        self._states = states
        if states:
            self._bind(dict(zip(self.names, states, strict=True)))
        else:
            self._unbind()


def state_tensors(spec: SlotSpec) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
    """Names, shapes and dtypes of a slot's tensors, in the order in which they lie in vLLM's blocks."""
    items = sorted(spec.tensors.items(), key=lambda item: -item[1][1].itemsize)
    return tuple(n for n, _ in items), tuple(tuple(s) for _, (s, _) in items), tuple(d for _, (_, d) in items)


@dataclass
class GroupMetadata:
    """One cache group's part of a step: vLLM's own tensors on the device, and what the host knows without asking it.

    query_start: [R + 1] int32. length: [R] int32. blocks: [R, n] int32. slot: [T] int64. tokens: real ones; what is behind
    them in the buffers is padding. decode_requests: how many rows come first with one token each. spec: of the group's layers.
    """

    query_start: torch.Tensor
    length: torch.Tensor
    blocks: torch.Tensor
    slot: torch.Tensor
    tokens: int
    decode_requests: int
    max_query: int
    max_context: int
    spec: Any
    mode: str

    def table(self, rows: torch.Tensor, exports: torch.Tensor, page_size: int) -> Table:
        """Where the group's memory is, by device operations alone. rows: 0, 1, 2, ... int32. exports: an empty [0, 3]."""
        count = self.length.shape[0]
        if not isinstance(self.spec, MambaSpec):
            return PageTable(self.blocks, rows[:count], self.slot[: self.tokens], page_size)
        state = mamba_get_block_table_tensor(self.blocks, self.length, self.spec, self.mode)[:, 0]
        computed = self.length - (self.query_start[1:] - self.query_start[:-1])
        return SlotTable(torch.where(computed > 0, state, 0), state, exports)


class GroupBuilder(AttentionMetadataBuilder[GroupMetadata]):
    """Notes what vLLM says of a step. Decode rows come first, and steps of them alone can be captured in graphs."""

    reorder_batch_threshold = 1
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.mode = vllm_config.cache_config.mamba_cache_mode
        for name in layer_names:
            vllm_config.compilation_config.static_forward_context[name].set_group(layer_names[0])

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> GroupMetadata:
        """The real tokens of a step that isn't captured, whatever it is padded to."""
        return self._note(common_attn_metadata, int(common_attn_metadata.query_start_loc_cpu[-1]))

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> GroupMetadata:
        """All tokens of the buffers: a replay has as many, and rows without a token are null."""
        return self._note(common_attn_metadata, common_attn_metadata.num_actual_tokens)

    def _note(self, common: Any, tokens: int) -> GroupMetadata:
        counts = common.query_start_loc_cpu.diff()
        ones = counts == 1 if common.max_query_len > 1 else counts <= 1
        return GroupMetadata(
            query_start=common.query_start_loc,
            length=common.seq_lens,
            blocks=common.block_table_tensor,
            slot=common.slot_mapping,
            tokens=tokens,
            decode_requests=int(ones.long().cumprod(0).sum()),
            max_query=common.max_query_len,
            max_context=common.max_seq_len,
            spec=self.kv_cache_spec,
            mode=self.mode,
        )


class PageBackend(AttentionBackend):
    """For `PageMemory`."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        """A label for vLLM's log."""
        return "FIRSTLIGHT"

    @staticmethod
    def get_impl_cls() -> Any:
        """None of vLLM's attention layers is used."""
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[GroupBuilder]:
        """How vLLM tells us of a step."""
        return GroupBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tokens of a page, into which vLLM cuts its blocks: on a GPU this one, which blocks are multiples of; else any."""
        return [GPU_PAGE_TOKENS] if current_platform.is_cuda_alike() else [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Of `PageMemory.kv_cache`: vLLM 0.26 asks for it, later ones have no other."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)


class StateBackend(PageBackend):
    """For `StateMemory`."""

    @staticmethod
    def get_name() -> str:
        """A label for vLLM's log."""
        return "FIRSTLIGHT_STATE"

    @classmethod
    def is_ssm(cls) -> bool:
        """It is for recurrent states."""
        return True


def memory_of(hosted: HostedModel, prefix: str) -> Mapping[str, PageMemory | StateMemory]:
    """A layer of vLLM's for each module that keeps something, by the name under which vLLM finds it."""
    layers: dict[str, PageMemory | StateMemory] = {}
    for path, spec in hosted.caches().items():
        name = f"{prefix}.{path}" if prefix else path
        layers[name] = (
            PageMemory(hosted, path, spec) if isinstance(spec, PagedSpec) else StateMemory(hosted, path, spec)
        )
    return layers
