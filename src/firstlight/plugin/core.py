"""A model of ours for a host that keeps scheduling, paging and sampling to itself. No host's name is in here.

A host's adapter

1. builds a `HostedModel` from the checkpoint's config, the host's tensor-parallel group and the bounds of its steps;
2. asks `caches()` what memory each module wants, has the host allocate it in the host's layout, and gives the modules views
   of it with `bind_cache`; with `set_group` it says which of the host's block tables a module's memory goes by;
3. hands the host's stream of weights to `load`, after which a GPU runs a step of every kind once (`warm_up`);
4. once a step turns the host's metadata into a `StepBatch` with `step(...)`, and calls `hidden` and, on the rows that the
   host picks, `logits`.

`step` does no arithmetic on the host's tensors and never looks into them, so nothing waits for the device and a host may
capture it in a graph: what it is given are views of the host's own buffers, or what the adapter computed from them with
device operations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from firstlight.cache.spec import CacheSpec, PagedSpec
from firstlight.config import EngineOptions
from firstlight.engine.table import timings_of
from firstlight.errors import FirstlightError
from firstlight.hardware import detect
from firstlight.models import CausalModel, build_model
from firstlight.models.buckets import bucket_ladder
from firstlight.models.registry import refuse_predicted_only
from firstlight.models.walk import bind_model
from firstlight.nn.module import Module
from firstlight.ops.op import REFERENCE, Shape, sites
from firstlight.parallel import Group, Mesh
from firstlight.quant import WHOLE_ROW, BlockFp8, Scheme, scheme_of
from firstlight.step import Bucket, PageTable, SlotTable, StepBatch, Table
from firstlight.weights.loader import load_weights, own_name
from firstlight.weights.random_weights import random_tensors
from firstlight.weights.streaming import load_streaming

logger = logging.getLogger(__name__)

TRIAL_TOKENS, TRIAL_ROWS = 16384, 512
"""Of prompts, and rows, in a trial step at most: larger ones launch much the same kernels, and the host may never ask for them."""
TRIAL_PROMPTS, MOST_TOGETHER = (5, 40, 96, 224, 448), 4096
"""Prompts at once, with so many tokens at most: kernels that look for a token's request come in sizes of 64 and more (`request_block`)."""
TRIAL_DECODE_ROWS = 3
"""Beside prompts; an odd number, so that the rows behind them don't begin at an aligned address."""
SHORT_PROMPTS, SPLIT_CONTEXT = (2, 4, 8, 16, 32), 1536
"""Tokens of prompts, of which attention takes all at once; and a context that it cuts in other parts than the shortest and the longest."""
UNREAD = {
    "rope_is_neox_style": True,
    "logit_scale": 1.0,
    "is_causal": True,
    "layer_scale": False,
    "bias": False,
    "qkv_bias": False,
}
"""Fields of a config.json that classes of hosts read for our families and we don't, with the value that changes nothing."""
TOWER = "model.visual."
"""Where the tensors of a vision tower are, which text-only models leave out."""


@dataclass(frozen=True, slots=True)
class HostBounds:
    """What no step of the host exceeds.

    tokens: new tokens; requests: rows; context: tokens of one row, with the step's; page_size: tokens in a page, of which
    providers are chosen knowing no more than this (the pages that a step names may have another size); exports: whether steps
    export states, for a prefix cache, at most one a row; index_dtype: of `PageTable.row` and `length` in a step.
    """

    tokens: int
    requests: int
    context: int
    page_size: int = 16
    exports: bool = False
    index_dtype: torch.dtype = torch.int32


def mesh_of(size: int = 1, index: int = 0, handle: Any = None) -> Mesh:
    """The mesh of one rank in a host that splits every layer over `size` ranks.

    handle: the host's torch.distributed process group of those ranks; None where size is 1, or only to describe a rank.
    """
    return replace(Mesh.of(index, tp=size), tp=Group("tp", size, index, handle))


def text_only(config: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's config.json without its vision tower."""
    return {name: value for name, value in config.items() if name != "vision_config"}


def describe(
    config: Mapping[str, Any], *, dtype: torch.dtype, mesh: Mesh | None = None, cache_dtype: torch.dtype | None = None
) -> CausalModel:
    """The text model of a config.json on the meta device: sizes and caches, no weights.

    Raises FirstlightError or ValueError, for people, where we can't run it: an unknown family, a quantisation that we don't
    read, sizes that the mesh can't split, a field that a host would heed and we don't. Adapters call it early to find out.
    """
    refuse_predicted_only(config, "config.json")
    for fields in (config, config.get("text_config") or {}):
        for name, usual in UNREAD.items():
            value = fields.get(name, usual)
            if value != usual and not (value is None and usual is False):
                raise FirstlightError(f"{name} = {value!r} in config.json is not served, only {usual!r}")
        if fields.get("attention_bias") and "qkv_bias" in fields:
            raise FirstlightError("qkv_bias beside attention_bias in config.json is not served")
    with _plain_defaults():
        return build_model(
            text_only(config), dtype=dtype, mesh=mesh, scheme=_scheme(config, dtype), cache_dtype=cache_dtype
        )


def _scheme(config: Mapping[str, Any], dtype: torch.dtype) -> Scheme:
    """As the config declares it. The checkpoint's tensors are seen too late to ask, and float32 holds scales of any dtype."""
    scheme = scheme_of(config, dtype)
    if not isinstance(scheme, BlockFp8):
        return scheme
    if scheme.block[1] == WHOLE_ROW:
        raise FirstlightError("FP8 with a scale a channel is served by `firstlight serve`, and not inside hosts")
    return replace(scheme, scale_dtype=torch.float32)


@contextmanager
def _plain_defaults() -> Iterator[None]:
    """Hosts build models under a default device and dtype of their choice; ours name theirs, and compute some on the CPU."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


class HostedModel(torch.nn.Module):
    """One rank's part of a model: bound for this device at once, its weights and caches given to it afterwards.

    `position_rows` is 3 for MRoPE and else 1; `vocab_size` is the length of a row of logits.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        bounds: HostBounds,
        mesh: Mesh | None = None,
        cache_dtype: torch.dtype | None = None,
        logger: logging.Logger = logger,
    ) -> None:
        """config: a config.json as a dict. dtype: of activations. mesh: see `mesh_of`. cache_dtype: of KV; default: dtype.
        logger: one that the host shows. Until the host has memory, all modules have the null page and slot (`bind_null`).

        Providers can be overridden as everywhere, by FIRSTLIGHT_OP, FIRSTLIGHT_INVARIANT and FIRSTLIGHT_TABLE.
        Raises what `describe` does, and BindingError for an override that can't be met.
        """
        super().__init__()
        self.device, self.bounds, self.logger = torch.device(device), bounds, logger
        self.model = describe(config, dtype=dtype, mesh=mesh, cache_dtype=cache_dtype)
        options = EngineOptions.load({"model": "-", "max_running": bounds.requests, "step_tokens": bounds.tokens})
        hardware = detect(str(self.device))
        # A host may ask for the logits of every token of a prompt, so a step's rows of logits are bounded by its tokens.
        ladder = bucket_ladder(options, bounds.context, hardware, fillable=False)
        self.buckets = tuple(replace(bucket, logits=bucket.tokens) for bucket in ladder)
        with _plain_defaults():
            _, self._layouts = bind_model(
                self.model,
                self.buckets,
                hardware,
                overrides=options.op,
                invariant=options.invariant,
                page_size=bounds.page_size,
                timings=timings_of(options.table, hardware),
            )
        # Looked up once: adapters ask for the caches in every step, and a walk over all modules takes longer than the rest.
        self._keepers: dict[str, Module] = {
            path: module
            for path, module in self.model.named_modules()
            if isinstance(module, Module) and module.cache_spec is not None
        }
        self._zeros = torch.zeros(bounds.requests, dtype=torch.int32, device=self.device)
        self._no_rows = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._loaded = False
        self.position_rows = self.model.position_rows
        self.vocab_size = self.model.config.vocab_size
        self.bind_null()

    # Caches

    def caches(self) -> dict[str, CacheSpec]:
        """What every module keeps between steps, by module path, in the order of the layers.

        A `PagedSpec` asks for rows of the context, a `SlotSpec` for tensors of fixed size for each request.
        """
        return {path: spec for path, module in self._keepers.items() if (spec := module.cache_spec) is not None}

    def set_group(self, path: str, group: str) -> None:
        """Have the module at `path` read its places from `tables[group]` of a step."""
        module = self._keepers[path]
        assert module.cache_spec is not None
        module.cache_spec = replace(module.cache_spec, group=group)

    def bind_cache(self, path: str, tensors: dict[str, torch.Tensor]) -> None:
        """Give the module at `path` views of the host's memory, under the names of its spec.

        A paged module's are [pages, page_size, kv_heads, head_dim] each, a state's [slots, *shape]; any strides, but 1 in the
        last dimension. Page and slot 0 must belong to nobody: padding is read from there and written there.
        Raises ValueError, naming the module, for shapes or dtypes that aren't its spec's.
        """
        spec = self.caches()[path]
        wanted = _cache_tensors(spec)
        if set(tensors) != set(wanted):
            raise ValueError(f"{path}: keeps {', '.join(wanted)}; got {', '.join(tensors)}")
        for name, (shape, dtype) in wanted.items():
            tensor = tensors[name]
            if tuple(tensor.shape[-len(shape) :]) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"{path}.{name}: needs {dtype} [..., {', '.join(map(str, shape))}], got {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
            if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
                raise ValueError(f"{path}.{name}: its last dimension must be dense; its strides are {tensor.stride()}")
        self._keepers[path].bind_cache(tensors)

    def bind_null(self, *paths: str) -> None:
        """Give the modules at these paths, or all, the null page and slot alone, for steps while the host has no memory."""
        for path, spec in self.caches().items():
            if paths and path not in paths:
                continue
            leading = (1, self.bounds.page_size) if isinstance(spec, PagedSpec) else (1,)
            wanted = _cache_tensors(spec)
            self.bind_cache(
                path, {n: torch.zeros((*leading, *s), dtype=d, device=self.device) for n, (s, d) in wanted.items()}
            )

    # Weights

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the model from (published name, tensor) pairs in any order; returns the names of all that came.

        A tensor isn't kept: its memory may be used for the next one. Raises CheckpointError for what is missing, unknown,
        misshapen or of the wrong dtype, and FirstlightError for a second call, since graphs hold the addresses of weights.
        """
        self._load_once()
        skipped: set[str] = set()

        def text() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                if own_name(type(self.model), name).startswith(TOWER):
                    skipped.add(name)
                else:
                    yield name, tensor

        with _plain_defaults():
            names = load_streaming(self.model, text(), self.device, self._layouts) | skipped
        self._warm_up_gpu()
        return names

    def load_random(self, seed: int = 0) -> None:
        """Fill the model with random weights that keep activations near 1. Raises FirstlightError for a second call."""
        self._load_once()
        with _plain_defaults():
            load_weights(self.model, random_tensors(self.model, seed, self.device), self.device, self._layouts)
        self._warm_up_gpu()

    def _load_once(self) -> None:
        if self._loaded:
            raise FirstlightError(
                "the weights of a running Firstlight model can't be replaced: restart the engine, "
                "or turn the plugin off with FIRSTLIGHT_PLUGIN=off"
            )
        self._loaded = True

    # Kernels

    def warm_up(self) -> None:
        """Run a step of every kind once (`kinds_of_steps`), on null memory, logits included.

        Kernels are compiled, or loaded from Triton's cache, when they are first launched; hosts run prompts op by op, so without
        this the first request of each kind would wait for that, a second or so a kernel. Needs weights.
        """
        with _plain_defaults(), torch.no_grad():
            for decode_rows, counts, context in kinds_of_steps(self.buckets, self.bounds):
                start = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=self.device)
                ids = torch.arange(sum(counts), device=self.device) % self.vocab_size
                step = self._null_step(ids, ids, start, decode_rows, max(counts), context, self.bounds.page_size)
                self.logits(self.hidden(step)[: len(counts)])

    def _warm_up_gpu(self) -> None:
        """`warm_up` where there are kernels to compile; the host measures memory afterwards, so none is kept."""
        if self.device.type != "cuda":
            return
        begin = time.monotonic()
        try:
            self.warm_up()
        except torch.OutOfMemoryError as error:
            if self.model.embed_tokens.group.size > 1:  # the other ranks are in the middle of a collective
                raise
            self.logger.warning(
                "Firstlight: not every kind of step could be tried, so that kernels will be compiled while requests wait: %s",
                error,
            )
        else:
            torch.cuda.synchronize(self.device)
            self.logger.info("Firstlight: a step of every kind has run, in %.1f s", time.monotonic() - begin)
        torch.cuda.empty_cache()

    # Steps

    def step(
        self,
        *,
        ids: torch.Tensor,
        positions: torch.Tensor,
        query_start: torch.Tensor,
        length: torch.Tensor,
        tables: Mapping[str, Table],
        live: torch.Tensor,
        decode_requests: int,
        max_query: int,
        max_context: int,
    ) -> StepBatch:
        """One step from tensors on the device, none of which is looked into.

        ids: [T] token ids of any integer dtype, the rows one behind the other, of which the first `decode_requests` have one
        token each. positions: [T], or [3, T] with MRoPE. query_start: [R + 1] int32. length: [R] int32 or int64, context with this
        step. tables: one for each group that `set_group` named; rows of a `PageTable` may be int64 as well. live: [1] int32, real
        tokens; what comes after them is padding, and so are rows without tokens at the end. max_query, max_context: bounds of a
        row, which the host knows without asking.
        Raises FirstlightError if the step exceeds the bounds that the model was built for.
        """
        tokens, requests = ids.shape[0], length.shape[0]
        if self.position_rows > 1 and positions.dim() == 1:
            positions = positions.expand(self.position_rows, -1)
        zeros = self._zeros[:requests]
        # Prompts of one token need a bucket for longer ones: where all rows are decode rows, nothing is bound for prompts.
        query = max_query if decode_requests == requests else max(max_query, 2)
        return StepBatch(
            bucket=self.bucket(tokens, requests, query),
            ids=ids if ids.dtype == torch.int64 else ids.long(),
            positions=(positions if positions.dtype == torch.int64 else positions.long()).contiguous(),
            query_start=query_start,
            length=length,
            log_length=zeros,
            adapter=zeros,
            logit_row=self._no_rows,
            live=live,
            tables=tables,
            decode_requests=decode_requests,
            decode_tokens=decode_requests,
            max_query=max_query,
            max_context=max_context,
            shape=Shape(tokens, requests, requests * max_context, tokens * max_context),
        )

    def null_step(self, ids: torch.Tensor, positions: torch.Tensor, page_size: int) -> StepBatch:
        """As many tokens as are in `ids`, dealt out to rows whose memory is all null: for a host that measures or warms up.

        page_size: of the pages that are bound.
        """
        tokens = ids.shape[0]
        requests = min(tokens, self.bounds.requests)
        query = -(-tokens // requests)
        start = (torch.arange(requests + 1, device=self.device) * tokens // requests).int()
        return self._null_step(ids, positions, start, requests if query == 1 else 0, query, query, page_size)

    def _null_step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        start: torch.Tensor,
        decode_rows: int,
        query: int,
        context: int,
        page_size: int,
    ) -> StepBatch:
        """Rows from `start` [R + 1] int32, each without context before it. query, context: bounds of a row."""
        integers: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        tokens, requests = ids.shape[0], start.shape[0] - 1
        row, index_dtype = torch.zeros(requests, **integers), self.bounds.index_dtype
        table = torch.zeros((1, -(-query // page_size)), **integers)
        pages = PageTable(table, row.to(index_dtype), row.new_zeros(tokens, dtype=torch.int64), page_size)
        # An export after one token of each row, into the null slot.
        exported = torch.arange(requests if self.bounds.exports else 0, **integers)
        exports = torch.stack([exported, torch.ones_like(exported), torch.zeros_like(exported)], 1)
        states = SlotTable(row, row, exports)
        specs = self.caches().values()
        return self.step(
            ids=ids,
            positions=positions,
            query_start=start,
            length=(start[1:] - start[:-1]).to(index_dtype),
            tables={spec.group: pages if isinstance(spec, PagedSpec) else states for spec in specs},
            live=start[-1:],
            decode_requests=decode_rows,
            max_query=query,
            max_context=context,
        )

    def bucket(self, tokens: int, requests: int, query: int) -> Bucket:
        """The first bucket that holds so many tokens, rows, and tokens of a row. Raises FirstlightError if none does."""
        needed = Bucket(0, tokens, requests, query, 1, 0)
        for bucket in self.buckets:
            if bucket.holds(needed):
                return bucket
        raise FirstlightError(
            f"a step of {tokens} tokens in {requests} rows, {query} of one row, exceeds what the model was bound for: "
            f"{self.bounds.tokens} tokens, {self.bounds.requests} rows"
        )

    def hidden(self, step: StepBatch) -> torch.Tensor:
        """[T, H]: every token's hidden state after the last norm; rows of padding mean nothing."""
        carry = self.model.blocks(step, self.model.embed(step))
        x, _ = self.model.norm(step, carry.hidden, carry.residual)
        return x

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, H], rows of `hidden` -> [N, vocabulary]; on every rank the whole vocabulary."""
        count = rows.shape[0]
        index = next((b.index for b in self.buckets if b.logits >= count), self.buckets[-1].index)
        return self.model.lm_head.logits(index, rows)

    def forward(self, step: StepBatch) -> torch.Tensor:
        """The same as `hidden`."""
        return self.hidden(step)

    # What is running

    def summary(self) -> str:
        """One line for the host's log: the family, and how many of its call sites have a provider faster than the reference."""
        largest = [site.choices[-1] for _, site in sites(self.model) if site.choices]
        provided = sum(choice.provider != REFERENCE for choice in largest)
        tp = self.model.embed_tokens.group
        return (
            f"model_type {self.model.config.model_type}, {self.model.config.num_hidden_layers} layers, "
            f"rank {tp.index} of {tp.size}, {len(self.buckets)} buckets, "
            f"{provided} of {len(largest)} call sites with a provider of their own"
        )


def kinds_of_steps(buckets: Iterable[Bucket], bounds: HostBounds) -> Iterator[tuple[int, list[int], int]]:
    """(decode rows at its start, tokens of each row, bound of contexts) of steps that between them launch what is bound for buckets.

    Short prompts with short and long contexts; decode rows alone; and of prompts as many tokens as a bucket is for: in as few rows
    as the context allows, one token fewer, in many rows, and behind decode rows.
    """
    longest = bounds.context
    for tokens in SHORT_PROMPTS:
        if tokens <= min(bounds.tokens, longest):
            for context in sorted({tokens, max(tokens, min(SPLIT_CONTEXT, longest)), longest}):
                yield 0, [tokens], context
    for bucket in buckets:
        most = min(bucket.requests, bounds.requests, TRIAL_ROWS)
        if bucket.query == 1:
            for rows in sorted({most, max(1, most - 1)}):
                yield rows, [1] * rows, longest
            continue
        tokens = min(bucket.query, TRIAL_TOKENS, most * longest)
        few = -(-tokens // longest)
        yield 0, dealt(tokens, few), longest
        if tokens - 1 > few:
            yield 0, dealt(tokens - 1, few), longest
        for rows in TRIAL_PROMPTS:
            if few < rows <= min(most, tokens // 2) and tokens <= MOST_TOGETHER:
                short = rows - few
                yield 0, [2] * short + dealt(tokens - 2 * short, few), longest
        decode = min(TRIAL_DECODE_ROWS, most - few)
        if 0 < decode <= bucket.tokens - tokens:
            yield decode, [1] * decode + dealt(tokens, few), longest


def dealt(tokens: int, rows: int) -> list[int]:
    """So many tokens, one at least, over rows, as evenly as they go."""
    return [tokens * (i + 1) // rows - tokens * i // rows for i in range(rows)]


def _cache_tensors(spec: CacheSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape (after pages and page_size, or slots) and dtype of what a module keeps, by name."""
    if isinstance(spec, PagedSpec):
        return dict.fromkeys(spec.names, ((spec.kv_heads, spec.head_dim), spec.dtype))
    return {name: (tuple(shape), dtype) for name, (shape, dtype) in spec.tensors.items()}
