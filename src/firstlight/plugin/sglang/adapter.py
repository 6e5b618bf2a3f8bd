"""The class that SGLang makes and calls in place of its own, for all families: SGLang's metadata in, a `StepBatch` out.

**The contract** (SGLang 0.5.17; nothing of SGLang is replaced, only its registries are added to).

*Made* as `Class(config=..., quant_config=...)` in the scheduler's process, under SGLang's default dtype and device. If
`options.objection` has a reason, SGLang's own class is made instead, and the log says why.

*Weights* come through `load_weights(iterator)`. With `--load-format dummy` nothing comes: random ones are drawn when the class
is made.

*Caches* are SGLang's. KV is `[rows, kv_heads, head_dim]` a layer, taken as pages of one token: a request's row of the table
`req_to_token` then is its page table as it stands, for any `--page-size`, since SGLang addresses each token. Convolution windows
`[slots, channels, width - 1]` and states `[slots, heads, values, keys]` are the Mamba pool's; a request's slot stands in
`req_index_to_mamba_index_mapping`. Row 0 of the request table, row 0 of KV and slot 0 belong to nobody, there as here.

*A step* is `forward(input_ids, positions, forward_batch)`. What is read of a `ForwardBatch`:

| field | meaning |
| --- | --- |
| `forward_mode` | DECODE: a token a request. EXTEND and MIXED: prompts, or parts of them; one-token rows may be among them |
| `req_pool_indices` [R] | the request's row in the tables; 0: padding of a graph |
| `seq_lens` [R] | context with this step; 1 in padding |
| `out_cache_loc` [T] | KV row of each new token; 0 in padding |
| `extend_start_loc`, `extend_seq_lens`, `extend_prefix_lens` [R] | EXTEND: first token, new tokens, context before |
| `extend_seq_lens_cpu`, `seq_lens_cpu` | the same on the host: bounds for grids, without waiting for the device |
| `mamba_track_mask`, `mamba_track_indices`, `mamba_track_seqlens` [R] | a state that the prefix cache wants: whether, into which slot, at which length (rounded down to SGLang's chunk from the prefix) |

*States* are updated in place. A prefix hit has been copied into the request's slot by SGLang before the step; a request
without a prefix starts from zeros, whatever its slot holds. What the prefix cache wants is exported by the kernels themselves.

*Graphs.* A decode step's batch is made of SGLang's static buffers by device operations of fixed shapes, which are captured with
it; so the request tables are read while the graph runs, not before. SGLang may write to them meanwhile, for steps to come:
behind a request's length, or in rows of requests that have ended, whose tokens it drops and whose new owner's slot its next
step clears or fills. Prompts run as they are (SGLang turns prefill graphs off by itself: our class has no `model` to cut up).

*Logits* come from SGLang's `LogitsProcessor` (rows, log probabilities, hidden states as everywhere), which asks our head for
the product; the head gathers over ranks itself.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_parallel, get_server_args
from sglang.srt.utils.hf_transformers_utils import get_context_length

from firstlight.cache.spec import PagedSpec
from firstlight.errors import FirstlightError
from firstlight.plugin.active import ACTIVE
from firstlight.plugin.core import HostBounds, HostedModel, mesh_of
from firstlight.plugin.sglang.options import objection, published_config
from firstlight.step import PageTable, SlotTable, StepBatch, Table

logger = logging.getLogger(__name__)

VERSION = version("firstlight")
ATTENTION, STATE = "attention", "state"


class HostAttributes(type):
    """What a class of ours lacks, SGLang's own has: it reads some attributes before it makes a model."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or name == "host_class":
            raise AttributeError(name)
        return getattr(cls.host_class, name)

    host_class: type


class HostedCausalModel(torch.nn.Module, metaclass=HostAttributes):
    """A causal language model as SGLang sees it. Subclasses are named as the architecture and know SGLang's own class."""

    host_class: type

    def __new__(cls, config: Any, quant_config: Any = None, **further: Any) -> Any:
        """A model of ours, or of SGLang's own class if ours doesn't serve what is asked for."""
        reason = objection(get_server_args(), config, torch.get_default_dtype(), get_parallel().tp_size)
        ACTIVE.labels("sglang", cls.__name__, VERSION).set(0 if reason else 1)
        if reason is None:
            return super().__new__(cls)
        logger.warning("SGLang's own class serves %s, not Firstlight's: %s", cls.__name__, reason)
        return cls.host_class(config=config, quant_config=quant_config, **further)

    def __init__(self, config: Any, quant_config: Any = None) -> None:
        """config: SGLang's view of config.json. quant_config isn't looked at: config.json says how weights are stored."""
        super().__init__()
        options, group = get_server_args(), get_parallel().tp_group
        text, size = config.get_text_config(), group.world_size
        device, self.dtype = torch.empty(0).device, torch.get_default_dtype()  # SGLang's defaults here
        context = options.context_length or get_context_length(text)
        self.bounds = _bounds(options, context)
        self.hosted = HostedModel(
            published_config(options),
            dtype=self.dtype,
            device=device,
            bounds=self.bounds,
            mesh=mesh_of(size, group.rank_in_group, group.device_group if size > 1 else None),
        )
        self.lm_head = _Head(self.hosted)
        self.logits_processor = LogitsProcessor(text, skip_all_gather=True)
        self._pools: tuple[Any, Any] | None = None
        rows = torch.arange(self.bounds.requests + 1, dtype=torch.int32, device=device)
        self._starts = rows
        self._exports = torch.stack([rows[:-1], torch.ones_like(rows[:-1]), torch.zeros_like(rows[:-1])], 1)
        if options.load_format == "dummy":
            self.hosted.load_random(options.random_seed or 0)
        logger.info("Firstlight %s serves %s: %s", VERSION, type(self).__name__, self.hosted.summary())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the model from SGLang's iterator. Raises what `HostedModel.load` does."""
        return self.hosted.load(weights)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
    ) -> Any:
        """One step: SGLang's LogitsProcessorOutput. input_embeds: [T, H] in place of the ids' own embeddings."""
        step = self._step(input_ids, positions, forward_batch)
        if input_embeds is not None:
            step.embeds = torch.nn.functional.pad(input_embeds.to(self.dtype), (0, 0, 1, 0))
            step.embed_row = torch.arange(1, len(input_embeds) + 1, dtype=torch.int32, device=input_embeds.device)
        return self.logits_processor(input_ids, self.hosted.hidden(step), self.lm_head, forward_batch)

    # From a ForwardBatch to a StepBatch

    def _step(self, ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> StepBatch:
        backend = get_attn_backend()
        requests, cache = backend.req_to_token_pool, backend.token_to_kv_pool
        if self._pools is None or self._pools[0] is not requests or self._pools[1] is not cache:
            self._bind(requests, cache)
        rows, decodes = batch.req_pool_indices, batch.forward_mode.is_decode()
        count = rows.shape[0]
        tables: dict[str, Table] = {ATTENTION: PageTable(requests.req_to_token, rows, batch.out_cache_loc, 1)}
        if decodes:
            start, live = self._starts[: count + 1], (rows > 0).sum(0, keepdim=True, dtype=torch.int32)
            max_query, max_context = 1, self.bounds.context
        elif batch.forward_mode.is_extend_without_speculative():
            total = batch.extend_start_loc[-1:] + batch.extend_seq_lens[-1:]
            start, live = torch.cat([batch.extend_start_loc, total]), total
            max_query = max(batch.extend_seq_lens_cpu or [ids.shape[0]])
            max_context = self.bounds.context if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.max())
        else:
            raise FirstlightError(f"SGLang asked for a step of kind {batch.forward_mode.name}, which isn't served")
        if self._has_state:
            tables[STATE] = self._slots(requests, batch, rows, decodes)
        return self.hosted.step(
            ids=ids,
            positions=positions,
            query_start=start,
            length=batch.seq_lens,
            tables=tables,
            live=live,
            decode_requests=count if decodes else 0,
            max_query=max_query,
            max_context=max_context,
        )

    def _slots(self, requests: Any, batch: ForwardBatch, rows: torch.Tensor, decodes: bool) -> SlotTable:
        """States in place, and exports for the prefix cache."""
        count = rows.shape[0]
        slot = requests.req_index_to_mamba_index_mapping[rows]
        source = slot if decodes else torch.where(batch.extend_prefix_lens > 0, slot, 0)
        exports = self._exports[:0]
        if batch.mamba_track_mask is not None:
            exports = self._exports[:count] if decodes else self._exports[:count].clone()
            exports[:, 2] = batch.mamba_track_indices * batch.mamba_track_mask
            if not decodes:
                chunk = get_server_args().mamba_cache_chunk_size
                exports[:, 1] = (batch.mamba_track_seqlens - batch.extend_prefix_lens) // chunk * chunk
        return SlotTable(source, slot, exports)

    def _bind(self, requests: Any, cache: Any) -> None:
        """Give the modules views of SGLang's pools. Raises ValueError, naming the module, for another layout."""
        self._pools, self._has_state = (requests, cache), False
        for path, spec in self.hosted.caches().items():
            layer = int(re.findall(r"\d+", path)[0])
            if isinstance(spec, PagedSpec):
                pair = cache.get_key_buffer(layer), cache.get_value_buffer(layer)
                self.hosted.bind_cache(path, {name: rows.unsqueeze(1) for name, rows in zip("kv", pair, strict=True)})
            else:
                state = requests.mamba2_layer_cache(layer)
                self.hosted.bind_cache(path, {"conv": state.conv[0], "state": state.temporal})
                self._has_state = True


class _Head(torch.nn.Module):
    """What LogitsProcessor takes for an output layer: a weight, and a method that applies it."""

    def __init__(self, hosted: HostedModel) -> None:
        super().__init__()
        self.quant_method = _Product(hosted)

    weight = None
    """There, but not looked into."""


class _Product(QuantizeMethodBase):
    """Logits by our head."""

    def __init__(self, hosted: HostedModel) -> None:
        self.hosted = hosted

    def create_weights(self, layer: torch.nn.Module, *weight_args: Any, **extra: Any) -> None:
        """Nothing: the head's weight is the model's."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[N, H] -> [N, vocabulary]."""
        return self.hosted.logits(x)


def _bounds(options: Any, context: int) -> HostBounds:
    """What no step exceeds: a prompt may be whole where SGLang doesn't cut them, and running requests may come on top."""
    requests = options.max_running_requests or 4096
    chunk = options.chunked_prefill_size or -1
    prompt = max(options.max_prefill_tokens, context) if chunk < 0 else max(options.max_prefill_tokens, chunk)
    return HostBounds(
        tokens=prompt + requests,
        requests=requests,
        context=context,
        page_size=1,
        exports=options.enable_mamba_extra_buffer(),
        index_dtype=torch.int64,
    )
