"""Draws the next token of each request from its logits, reproducibly.

Gumbel-max: argmax(z + g) with independent Gumbel noise g is a draw from softmax(z). The noise belongs to (seed, position,
token id) alone, so a request draws the same token batched or alone, on the CPU or a GPU, and when a position is verified
after having been drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.sample import torch_cpu, triton_split
from firstlight.ops.sample.kept import keep
from firstlight.ops.sample.noise import gumbel


def body(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    position: Tensor,
    *,
    greedy: bool = False,
    filtered: bool = True,
) -> Tensor:
    """out[n] = argmax(logits[n]) if temperature[n] == 0, else argmax(logits[n] / temperature[n] + noise) over kept tokens.

    logits [N, V], of any float dtype, used in float32; -inf marks a token that can't be drawn.
    temperature [N] float; top_k [N] integer: keep the k likeliest tokens, 0 keeps all; top_p [N] float: of those, keep the
    likeliest whose probabilities, in float64 and summed from the top, reach top_p; 1 keeps all. Equal logits rank by
    token id, lowest first, in the argmax too. The likeliest token is always kept.
    seed, position [N] int64: the request's own, and the position at which the drawn token will stand: see `noise`.
    greedy: promises that every temperature is 0. filtered=False: promises that no row uses top_k or top_p. Static.
    Returns tokens [N] int64. Row n depends on nothing but row n. Exact, but for near ties: across devices the float32
    logarithms may differ in the last bit.
    Source: Gumbel-max trick, 1411.0030 section 2.
    """
    z = logits.float()
    if greedy:
        return z.argmax(dim=-1)
    warm = temperature > 0
    z = z / torch.where(warm, temperature, 1)[:, None].float()
    noise = gumbel(seed, position, torch.arange(logits.shape[1], device=logits.device))
    kept = keep(z, top_k, top_p) if filtered else z
    return torch.where(warm[:, None], kept + noise, z).argmax(dim=-1)


def abstract(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    position: Tensor,
    *,
    greedy: bool = False,
    filtered: bool = True,
) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


def cost(
    shape: Shape,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    position: Tensor,
    *,
    greedy: bool = False,
    filtered: bool = True,
) -> Cost:
    """The logits, once: what a fused sampler would read."""
    return Cost(read=logits.nbytes, written=8 * logits.shape[0])


sample = Op("sample", body, abstract=abstract, cost=cost)
sample.provide("torch_cpu", torch_cpu.run, when=torch_cpu.when, workspace=torch_cpu.workspace)
sample.provide("triton_split", triton_split.run, when=triton_split.when, rank=2, workspace=triton_split.workspace)
