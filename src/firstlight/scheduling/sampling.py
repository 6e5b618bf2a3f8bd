"""How the tokens of a request are chosen. Pure data: the API checks it, the engine's sampler reads it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ServiceClass(enum.StrEnum):
    """Who waits for whom: an `online` request that fits once offline work is preempted is in the next plan."""

    ONLINE = "online"
    OFFLINE = "offline"


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens, or the model's context, is used up
    ABORT = "abort"  # the client left, or asked for it


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling.

    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k: keep the k likeliest tokens; 0 keeps all.
    top_p: then keep the likeliest tokens whose probabilities reach top_p; 1 keeps all.
    seed: noise is keyed by (seed, position), so the same seed gives the same tokens, batched or alone.
    max_tokens: new tokens at most.
    stop_token_ids: generation ends after one of these (it counts as generated).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
