"""Faults of MLPs and of mixtures of experts."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu

from faults import (
    change_weight,
    fault,
    gated_shared_moe,
    mlp,
    moe,
    part_of,
    replace_parts,
    shared_moe,
    swap_rows,
    through_bfloat16,
    transpose_square,
    wrap,
)


@fault("MLP: gelu for silu", mlp)
def _(model, module):
    def wrong(run, x):
        gate, up = x.chunk(2, dim=-1)
        return gelu(gate) * up

    wrap(module.activation, wrong)


@fault("MLP: gate and up swapped", mlp)
def _(model, module):
    wrap(module.activation, lambda run, x: run(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)))


@fault("MLP: down projection transposed", mlp)
def _(model, module):
    change_weight(module.down_proj, "weight", transpose_square)


@fault("MLP: two rows of the gate swapped", mlp)
def _(model, module):
    change_weight(module.gate_up_proj, "weight", lambda w: swap_rows(w, 3, 4))


@fault("MLP: activation in bfloat16", mlp)
def _(model, module):
    wrap(module.activation, through_bfloat16)


@fault("MoE: two experts swapped", moe)
def _(model, module):
    change_weight(module, "gate_up_proj", lambda w: swap_rows(w, 2, 5))
    change_weight(module, "down_proj", lambda w: swap_rows(w, 2, 5))


@fault("MoE: gate and up of one expert swapped", moe)
def _(model, module):
    def swap(weight):
        weight[3] = weight[3].unflatten(0, (2, -1)).flip(0).flatten(0, 1)
        return weight

    change_weight(module, "gate_up_proj", swap)


@fault("MoE: down projection of one expert transposed", moe)
def _(model, module):
    def turn(weight):
        weight[1] = transpose_square(weight[1])
        return weight

    change_weight(module, "down_proj", turn)


@fault("MoE: one expert too few", moe)
def _(model, module):
    module.top_k -= 1


@fault("MoE: weights aren't renormalised", moe)
def _(model, module):
    module.renormalise = not module.renormalise


@fault("MoE: softmax for sigmoid, or sigmoid for softmax", moe)
def _(model, module):
    module.scoring = "softmax" if module.scoring == "sigmoid" else "sigmoid"


@fault("MoE: weights of the first and last choice swapped", moe)
def _(model, module):
    route = part_of(module.mixture, "route")

    def swapped(logits, **kwargs):
        weights, chosen = route(logits, **kwargs)
        return weights.flip(1), chosen

    replace_parts(module.mixture, route=swapped)


@fault("MoE: routing in bfloat16", moe)
def _(model, module):
    route = part_of(module.mixture, "route")
    replace_parts(module.mixture, route=lambda logits, **kwargs: route(logits.bfloat16().float(), **kwargs))


@fault("MoE: the last token of a step counts as padding", moe)
def _(model, module):
    wrap(module.mixture, lambda run, *args, live, **kwargs: run(*args, live=live - 1, **kwargs))


@fault("shared expert left out", shared_moe)
def _(model, module):
    module.shared_gate_up_proj = module.shared_down_proj = module.shared_gate = None


@fault("gate of the shared expert left out", gated_shared_moe)
def _(model, module):
    module.shared_gate = None


@fault("shared expert: gate and up swapped", shared_moe)
def _(model, module):
    change_weight(module, "shared_gate_up_proj", lambda w: w.unflatten(0, (2, -1)).flip(0).flatten(0, 1))
