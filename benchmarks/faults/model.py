"""Faults of embeddings, norms of the residual stream, rotary angles, the head, and the wiring between modules."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from faults import at, change_weight, fault, swap_rows, through_bfloat16, transpose_square, wrap, wrap_forward
from firstlight.verify.workload import make_sequences

rotary = at("rotary")
mrope = at("rotary", lambda model: model.position_rows == 3)
scaled_rope = at("rotary", lambda model: model.config.rope.kind != "default")
first_norm, last_norm = at("layers.0.input_layernorm"), at("layers.{last}.input_layernorm")
inner_norm, final_norm = at("layers.{second}.post_attention_layernorm"), at("norm")
second_layer, last_layer = at("layers.{second}"), at("layers.{last}")
untied_head = at("lm_head", lambda model: not model.config.tie_word_embeddings)


@fault("embedding: two rows swapped", at("embed_tokens"))
def _(model, module):
    used = make_sequences(model.config.vocab_size, model.position_rows, seed=0)[0].ids.tolist()
    if model.config.tie_word_embeddings:  # the head keeps its own, so that one place is wrong
        model.lm_head._tied = [SimpleNamespace(weight=module.weight)]
    change_weight(module, "weight", lambda w: swap_rows(w, used[5], used[6]))


@fault("embedding: in bfloat16", at("embed_tokens"))
def _(model, module):
    wrap(module.lookup, through_bfloat16)


@fault("input norm: +1 the wrong way round", last_norm)
def _(model, module):
    module.weight = module.weight + (-1 if module.zero_centred else 1)


@fault("first norm: +1 the wrong way round", first_norm)
def _(model, module):
    module.weight = module.weight + (-1 if module.zero_centred else 1)


@fault("norm after the mixer: eps ten times too large", inner_norm, wrong={"quiet"})
def _(model, module):
    module.eps *= 10


@fault("final norm: eps left out", final_norm, wrong={"quiet"})
def _(model, module):
    module.eps = 0.0


@fault("norm after the mixer: mean subtracted", inner_norm)
def _(model, module):
    def centred(run, x, residual, weight, **kwargs):
        total = x + residual
        return run(x - total.mean(-1, keepdim=True), residual, weight, **kwargs)[0], total

    wrap(module.add_norm, centred)


@fault("input norm in bfloat16", last_norm)
def _(model, module):
    wrap(module.add_norm, through_bfloat16)


@fault("residual sum in bfloat16", inner_norm)
def _(model, module):
    def rounded(run, *args, **kwargs):
        normed, total = run(*args, **kwargs)
        return normed, total.bfloat16().to(total.dtype)

    wrap(module.add_norm, rounded)


@fault("final norm left out", final_norm)
def _(model, module):
    wrap(module.add_norm, lambda run, x, residual, weight, **kwargs: (x + residual, x + residual))


@fault("rope: theta twice as large", rotary)
def _(model, module):
    module.rope = replace(module.rope, theta=module.rope.theta * 2)
    module.frequencies = module.rope.frequencies()


@fault("rope: scaling ignored", scaled_rope)
def _(model, module):
    module.rope = replace(module.rope, kind="default")
    module.frequencies = module.rope.frequencies()


@fault("rope: angles in bfloat16", rotary)
def _(model, module):
    wrap(module.angles, through_bfloat16)


@fault("positions off by one, in decode only", rotary, wrong={"decode"}, right={"prefill", "second chunk", "quiet"})
def _(model, module):
    def late(forward, step):
        if step.decode_requests == len(step.length):
            step = replace(step, positions=step.positions + 1, _parts=None)
        return forward(step)

    wrap_forward(module, late)


@fault("positions wrap around at 256", rotary, wrong={"prefill", "second chunk"}, right={"decode", "batch"})
def _(model, module):
    wrap(module.angles, lambda run, positions, *args, **kwargs: run(positions % 256, *args, **kwargs))


@fault("mrope: sections swapped", mrope, wrong={"image"}, right={"prefill", "decode", "second chunk", "batch", "quiet"})
def _(model, module):
    wrap(module.angles, lambda run, positions, *args, **kwargs: run(positions[[0, 2, 1]], *args, **kwargs))


@fault("mrope: rows in runs instead of interleaved", mrope, wrong={"image"}, right={"prefill", "decode", "batch"})
def _(model, module):
    sections = module.rope.sections

    def runs(run, positions, frequencies, *, sections, factor):
        row = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
        angle = positions[row].t().float() * frequencies
        return torch.cat((angle.cos(), angle.sin()), -1) * factor

    assert sum(sections) == len(module.frequencies)
    wrap(module.angles, runs)


@fault("batch: the second row's token takes the first's place", rotary, wrong={"batch"}, right={"prefill", "decode"})
def _(model, module):
    def neighbour(forward, step):
        positions = step.positions.clone()
        if len(step.length) > 1:
            positions[..., int(step.query_start[1])] = positions[..., 0]
        return forward(replace(step, positions=positions, _parts=None))

    wrap_forward(module, neighbour)


@fault("head: two rows swapped", untied_head)
def _(model, module):
    change_weight(module, "weight", lambda w: swap_rows(w, 7, 8))


@fault("head: transposed", untied_head)
def _(model, module):
    change_weight(module, "weight", transpose_square)


@fault("head: the embedding in its place", untied_head)
def _(model, module):
    module._tied = [model.embed_tokens]


@fault("head: logits of the token before", at("lm_head"))
def _(model, module):
    wrap(module.rows, lambda run, x, rows: run(x, (rows - 1).clamp(min=0)))


@fault("a layer drops the residual", second_layer, kind="wiring")
def _(model, module):
    def dropping(forward, step, carry):
        forward(step, carry)
        carry.residual = torch.zeros_like(carry.residual)

    wrap_forward(module, dropping)


@fault("a layer adds the mixer's output to its own input's norm", last_layer, kind="wiring")
def _(model, module):
    def forward(step, carry):
        x, _ = module.input_layernorm(step, carry.hidden, carry.residual)
        hidden = module.mixer(step, x, carry.angles)
        x, carry.residual = module.post_attention_layernorm(step, hidden, x)
        carry.hidden = module.mlp(step, x)

    module.forward = forward


@fault("mixer and MLP side by side", second_layer, kind="wiring")
def _(model, module):
    def forward(step, carry):
        x, residual = module.input_layernorm(step, carry.hidden, carry.residual)
        hidden = module.mixer(step, x, carry.angles)
        carry.residual = residual
        normed, _ = module.post_attention_layernorm(step, torch.zeros_like(hidden), residual)
        carry.hidden = hidden + module.mlp(step, normed)

    module.forward = forward


@fault("layers run in the wrong order", at("layers.0"), kind="whole")
def _(model, module):
    def blocks(step, carry):
        for i in (1, 0, *range(2, len(model.layers))):
            model.layers[i](step, carry)
        return carry

    model.blocks = blocks


@fault("the last layer is left out", at("lm_head"), kind="whole")
def _(model, module):
    def blocks(step, carry):
        for layer in model.layers[:-1]:
            layer(step, carry)
        return carry

    model.blocks = blocks


@fault("the norms of a layer swapped", last_norm)
def _(model, module):
    other = model.layers[-1].post_attention_layernorm
    module.weight, other.weight = other.weight, module.weight
