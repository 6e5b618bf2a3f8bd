"""Faults of attention: its norms, rotary embedding, mask, pages and gate."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from faults import (
    attention,
    change_weight,
    fault,
    gated_attention,
    grouped_attention,
    normed_attention,
    part_of,
    replace_parts,
    swap_rows,
    through_bfloat16,
    transpose_square,
    wrap,
)


@fault("rope: pairs are neighbours", attention)
def _(model, module):
    rope = part_of(module.prologue, "rope")
    replace_parts(module.prologue, rope=lambda x, angles: rope(x, angles, interleaved=True))


@fault("rope: turns the other way for keys", attention)
def _(model, module):
    rope = part_of(module.prologue, "rope")

    def turned(x, angles):
        if x.shape[1] != module.kv_heads:
            return rope(x, angles)
        cos, sin = angles.chunk(2, dim=-1)
        return rope(x, torch.cat((cos, -sin), dim=-1))

    replace_parts(module.prologue, rope=turned)


@fault("rope before the norm of q and k", normed_attention)
def _(model, module):
    norm, rope = part_of(module.prologue, "rms_norm"), part_of(module.prologue, "rope")
    waiting = []

    def later(x, weight, **kwargs):
        waiting.append((weight, kwargs))
        return x

    def both(x, angles):
        weight, kwargs = waiting.pop()
        return norm(rope(x, angles), weight, **kwargs)

    replace_parts(module.prologue, rms_norm=later, rope=both)


@fault("q and k norms: +1 the wrong way round", normed_attention)
def _(model, module):
    shift = -1 if module.zero_centred else 1
    module.q_norm, module.k_norm = module.q_norm + shift, module.k_norm + shift


@fault("k norm left out", normed_attention)
def _(model, module):
    norm = part_of(module.prologue, "rms_norm")
    replace_parts(module.prologue, rms_norm=lambda x, w, **kw: x if x.shape[1] == module.kv_heads else norm(x, w, **kw))


@fault("q and k norms: eps ten times too large", normed_attention, wrong={"quiet"})
def _(model, module):
    module.eps *= 10


@fault("q projection transposed", attention)
def _(model, module):
    change_weight(module.qkv_proj, "weight", lambda w: transpose_square(w, module.heads * module.head_dim))


@fault("two rows of the v projection swapped", attention)
def _(model, module):
    change_weight(module.qkv_proj, "weight", lambda w: swap_rows(w, len(w) - 1, len(w) - 2))


@fault("o projection transposed", attention)
def _(model, module):
    change_weight(module.o_proj, "weight", transpose_square)


@fault("softmax scale left out", attention)
def _(model, module):
    module.scale = 1.0


@fault("query heads tiled over KV heads instead of grouped", grouped_attention)
def _(model, module):
    groups = module.heads // module.kv_heads
    order = torch.arange(module.heads).view(groups, module.kv_heads).t().flatten()

    def tiled(run, q, *args, out=None, **kwargs):
        result = run(q[:, order].contiguous(), *args, **kwargs)[:, order.argsort()]
        return result if out is None else out.copy_(result)

    for site in module.attend.values():
        wrap(site, tiled)


@fault("output gate left out", gated_attention)
def _(model, module):
    wrap(module.gate, lambda run, y, gate: y)


@fault("output gate is silu", gated_attention)
def _(model, module):
    wrap(module.gate, lambda run, y, gate: y * silu(gate))


@fault("output gate from the wrong half of q", gated_attention)
def _(model, module):
    def swap(weight):
        size = 2 * module.heads * module.head_dim
        weight[:size] = weight[:size].unflatten(0, (module.heads, 2, module.head_dim)).flip(1).flatten(0, 2)
        return weight

    change_weight(module.qkv_proj, "weight", swap)


@fault("attention in bfloat16", attention)
def _(model, module):
    for site in module.attend.values():
        wrap(site, lambda run, *args, **kwargs: _into(kwargs.pop("out", None), through_bfloat16(run, *args, **kwargs)))


def _into(out, result):
    return result if out is None else out.copy_(result)


@fault("mask: only the last 100 keys, past position 100", attention, wrong={"prefill"})
def _(model, module):
    for site in module.attend.values():
        site[:] = [lambda *args, **kwargs: module.attend["prefill"].op.reference(*args, window=100, **kwargs)] * len(
            site
        )


@fault("decode: the newest key isn't seen", attention, wrong={"decode"}, right={"prefill", "second chunk", "quiet"})
def _(model, module):
    def short(run, q, k, v, pages, row, query_start, length, **kwargs):
        return run(q, k, v, pages, row, query_start, length - 1, **kwargs)

    wrap(module.attend["decode"], short)


@fault(
    "second chunk: earlier keys aren't seen", attention, wrong={"second chunk"}, right={"prefill", "decode", "quiet"}
)
def _(model, module):
    def alone(run, q, k, v, pages, row, query_start, length, **kwargs):
        count = query_start[1:] - query_start[:-1]
        size = k.shape[1]
        first = (length - count) // size
        shifted = pages.clone()
        for r, line in enumerate(row.tolist()):
            shifted[line, : pages.shape[1] - int(first[r])] = pages[line, int(first[r]) :]
        return run(q, k, v, shifted, row, query_start, length - first * size, **kwargs)

    wrap(module.attend["prefill"], alone)


@fault(
    "batch: a row reads its neighbour's pages", attention, wrong={"batch"}, right={"prefill", "decode", "second chunk"}
)
def _(model, module):
    def neighbour(run, q, k, v, pages, row, query_start, length, **kwargs):
        row = row.clone()
        row[1:2] = row[:1]
        return run(q, k, v, pages, row, query_start, length, **kwargs)

    for site in module.attend.values():
        wrap(site, neighbour)


@fault("pages past the ninth are read from the beginning again", attention, wrong={"prefill"})
def _(model, module):
    def around(run, q, k, v, pages, *args, **kwargs):
        pages = pages.clone()
        pages[:, 9:] = pages[:, : pages.shape[1] - 9].clone()
        return run(q, k, v, pages, *args, **kwargs)

    for site in module.attend.values():
        wrap(site, around)


@fault("the last slot of each page is written one too early", attention, wrong={"prefill"})
def _(model, module):
    def early(run, qkv, q_norm, k_norm, angles, k, v, slot, **kwargs):
        size = k.shape[1]
        return run(qkv, q_norm, k_norm, angles, k, v, torch.where(slot % size == size - 1, slot - 1, slot), **kwargs)

    wrap(module.prologue, early)


@fault("k and v of a decode token are written to the next page", attention, wrong={"decode"}, right={"prefill"})
def _(model, module):
    def astray(run, qkv, q_norm, k_norm, angles, k, v, slot, **kwargs):
        if len(slot) <= 8:
            slot = (slot + k.shape[1]) % (k.shape[0] * k.shape[1])
        return run(qkv, q_norm, k_norm, angles, k, v, slot, **kwargs)

    wrap(module.prologue, astray)
