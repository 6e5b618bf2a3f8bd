"""Sampling on the CPU: work only where it can matter, which takes reading the data.

- The largest of a row is found by blocks, since torch's argmax is not vectorised and its maximum is.
- A row with top_k or top_p seldom keeps more than a few hundred tokens. They are looked for among the `CANDIDATES` largest,
  so that nothing sorts a vocabulary; the noise is computed for them alone. A row that keeps more takes the plain way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.sample.kept import dropped_by_top_p, keep
from firstlight.ops.sample.noise import gumbel

BLOCK = 256
CANDIDATES = 512


def when(call: Call) -> str | None:
    return None if call.hardware.kind == "cpu" else "it reads data on the host, which would wait for the device"


def workspace(call: Call) -> int:
    """The logits in float32, and the noise with the integers that it is made of: bytes."""
    return 64 * call.args[0].numel()


def run(
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
    tokens = first_largest(logits)
    if greedy or not (temperature > 0).any():
        return tokens
    warm = temperature > 0
    narrow = warm & ((top_k > 0) | (top_p < 1)) if filtered else torch.zeros_like(warm)
    settings = (temperature, top_k, top_p, seed, position)
    for rows, draw in ((narrow, _draw_narrow), (warm & ~narrow, _draw_wide)):
        picked = rows.nonzero()[:, 0]
        if len(picked):
            z = logits.index_select(0, picked).float()
            chosen = [setting.index_select(0, picked) for setting in settings]
            tokens[picked] = draw(z.div_(chosen[0][:, None].float()), *chosen[1:])
    return tokens


def first_largest(z: Tensor) -> Tensor:
    """argmax along rows [N, V], the lowest index of equals."""
    whole = z.shape[1] // BLOCK * BLOCK
    if not 0 < whole < z.shape[1]:
        return _by_blocks(z) if whole else z.argmax(dim=-1)
    front, back = _by_blocks(z[:, :whole]), whole + z[:, whole:].argmax(dim=-1)
    largest = [z.gather(1, token[:, None])[:, 0] for token in (front, back)]
    return torch.where(largest[0] >= largest[1], front, back)


def _by_blocks(z: Tensor) -> Tensor:
    blocks = z.unflatten(1, (-1, BLOCK))
    block = blocks.amax(dim=-1).argmax(dim=-1)
    inside = blocks[torch.arange(len(z)), block].argmax(dim=-1)
    return block * BLOCK + inside


def _draw_wide(z: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Draws from all tokens; z is overwritten."""
    return first_largest(z.add_(gumbel(seed, position, torch.arange(z.shape[1]))))


def _draw_narrow(z: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Draws after top_k and top_p, from the largest logits where these hold all that is kept."""
    count = min(CANDIDATES, z.shape[1])
    token = z.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values  # by id, for the stable sort after it
    values, order = z.gather(1, token).sort(dim=-1, descending=True, stable=True)
    token = token.gather(1, order)

    rank = torch.arange(count)
    cut = values.masked_fill((top_k > 0)[:, None] & (rank >= top_k[:, None]), -torch.inf)
    total = cut.double().logsumexp(dim=-1)
    beyond = (top_k <= 0) | (top_k > count)  # of these rows the total takes in tokens that aren't candidates
    if (beyond & (top_p < 1)).any():
        total = torch.where(beyond, _log_sum(z), total)
    probability = (cut.double() - total[:, None]).exp()
    kept = cut.masked_fill(dropped_by_top_p(probability, top_p), -torch.inf)

    last = kept.masked_fill(kept.isinf(), torch.inf).amin(dim=-1)
    complete = last > values[:, -1] if count < z.shape[1] else torch.ones_like(last, dtype=torch.bool)
    drawn = token.gather(1, (kept + gumbel(seed, position, token)).argmax(dim=-1, keepdim=True))[:, 0]
    rest = (~complete).nonzero()[:, 0]
    if len(rest):
        whole = keep(z[rest], top_k[rest], top_p[rest])
        drawn[rest] = _draw_wide(whole, top_k[rest], top_p[rest], seed[rest], position[rest])
    return drawn


def _log_sum(z: Tensor) -> Tensor:
    """log(sum(exp(z))) of rows, in float64: [N]. The terms are float32, whose exponential is quick."""
    highest = z.amax(dim=-1, keepdim=True)
    return (z - highest).exp_().sum(dim=-1, dtype=torch.float64).log() + highest[:, 0]
