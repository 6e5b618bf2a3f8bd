"""top-k and top-p: which tokens may be drawn."""

from __future__ import annotations

import torch
from torch import Tensor


def keep(z: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """z [N, V] with -inf for the tokens that top_k [N] (0: all), then top_p [N] (1: all) leave out.

    top_p takes tokens from the likeliest down until their probabilities, renormalised after top_k, reach it: a token stays
    if those before it sum to less. Equal values rank by token id.
    """
    ranked, token = z.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(z.shape[1], device=z.device)
    limit = torch.where(top_k > 0, top_k, z.shape[1])[:, None]
    ranked = ranked.masked_fill(rank >= limit, -torch.inf)
    probability = ranked.double().softmax(dim=-1)
    ranked.masked_fill_(dropped_by_top_p(probability, top_p), -torch.inf)
    return torch.empty_like(z).scatter_(1, token, ranked)


def dropped_by_top_p(probability: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens top_p leaves out, given probabilities [N, V] from the largest down."""
    before = probability.cumsum(dim=-1) - probability
    dropped = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    dropped[:, 0] = False
    return dropped
