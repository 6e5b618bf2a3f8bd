"""Our models with the interface of vLLM's."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMambaPrefixCaching, SupportsMRoPE
from vllm.platforms import current_platform

from firstlight.cache import SlotSpec
from firstlight.nn.module import caches
from firstlight.plugin.core import HostBounds, HostedModel, mesh_of
from firstlight.plugin.vllm.memory import GroupMetadata, PageMemory, memory_of, state_tensors
from firstlight.plugin.vllm.takeover import GPU_PAGE_TOKENS, config_dict, described
from firstlight.step import StepBatch

logger = logging.getLogger("vllm.firstlight")


class ForCausalLM(torch.nn.Module):
    """A text model without recurrent states."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        """For a configuration that `takeover` has found nothing against."""
        super().__init__()
        model, scheduler, group = vllm_config.model_config, vllm_config.scheduler_config, get_tp_group()
        self.device = torch.get_default_device()
        captured = max(vllm_config.compilation_config.cudagraph_capture_sizes or [0])
        self.hosted = HostedModel(
            config_dict(model),
            dtype=model.dtype,
            device=self.device,
            bounds=HostBounds(
                tokens=max(scheduler.max_num_batched_tokens, captured),
                requests=max(scheduler.max_num_seqs, captured),
                context=model.max_model_len,
                page_size=GPU_PAGE_TOKENS if current_platform.is_cuda_alike() else vllm_config.cache_config.block_size,
            ),
            mesh=mesh_of(group.world_size, group.rank_in_group, group.device_group if group.world_size > 1 else None),
            logger=logger,
        )
        self.memory = memory_of(self.hosted, prefix)
        for name, layer in self.memory.items():
            vllm_config.compilation_config.static_forward_context[name] = layer
        self._rows = torch.arange(self.hosted.bounds.requests, dtype=torch.int32, device=self.device)
        self._exports = torch.zeros((0, 3), dtype=torch.int32, device=self.device)
        if vllm_config.load_config.load_format == "dummy":
            self.hosted.load_random(model.seed)
        logger.info("Firstlight: %s", self.hosted.summary())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the model from vLLM's stream; returns the names of all tensors that came. Raises CheckpointError."""
        return self.hosted.load(weights)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Part of vLLM's interface, for what we don't serve (`takeover`)."""
        raise NotImplementedError("Firstlight embeds tokens inside its forward pass")

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """input_ids [T] and positions [T] or [3, T] -> hidden states [T, H] after the last norm."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory, or warms up
            return self.hosted.hidden(self.hosted.null_step(input_ids, positions, self._page_size()))
        step = self._step(input_ids, positions, metadata)
        hidden = self.hosted.hidden(step)
        missing = input_ids.shape[0] - hidden.shape[0]
        return torch.nn.functional.pad(hidden, (0, 0, 0, missing)) if missing else hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, vocabulary]."""
        return self.hosted.logits(hidden_states)

    def _step(self, ids: torch.Tensor, positions: torch.Tensor, metadata: dict[str, GroupMetadata]) -> StepBatch:
        first = metadata[next(iter(self.memory))]
        groups = dict.fromkeys(spec.group for spec in self.hosted.caches().values())
        # A group has the name of its first layer (`GroupBuilder`).
        tables = {group: metadata[group].table(self._rows, self._exports, self._page_size()) for group in groups}
        return self.hosted.step(
            ids=ids[: first.tokens],
            positions=positions[..., : first.tokens],
            query_start=first.query_start,
            length=first.length,
            tables=tables,
            live=first.query_start[-1:],
            decode_requests=first.decode_requests,
            max_query=first.max_query,
            max_context=first.max_context,
        )

    def _page_size(self) -> int:
        """Of the pages that are bound: vLLM's, or the null page's where it has given none."""
        bound = next((layer.page_size for layer in self.memory.values() if isinstance(layer, PageMemory)), 0)
        return bound or self.hosted.bounds.page_size


class HybridForCausalLM(ForCausalLM, HasInnerState, IsHybrid, SupportsMambaPrefixCaching, SupportsMRoPE):
    """A text model with recurrent states, and perhaps with positions in three rows (which are equal for text)."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        """Of a slot's tensors on one rank."""
        return state_tensors(_state_spec(vllm_config))[1]

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        """Of a slot's tensors."""
        return state_tensors(_state_spec(vllm_config))[2]

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """A state moves to another block as a whole, and so does a convolution's window."""
        return get_temporal_copy_spec, get_temporal_copy_spec

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        """Positions of a prompt, [3, T] int64, and what later tokens fall behind their index: nothing, for text."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0


def _state_spec(vllm_config: Any) -> SlotSpec:
    return next(spec for spec in caches(described(vllm_config)).values() if isinstance(spec, SlotSpec))
