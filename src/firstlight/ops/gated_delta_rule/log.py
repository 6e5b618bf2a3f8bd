"""The replay log: what tokens did to a state since it was last written.

Verifying drafts may not change the state that they start from, and writing one state per draft costs more than the step.
What a token adds to the state is a sum of decayed outer products, so keeping its key, its update u and its decay is
enough: the state after any number of entries is the state at the *fold point* with those entries replayed. Accepting
drafts is then counting them, and folding is writing the replayed state back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.ops.slots import append_to_log, log_entries


@dataclass(frozen=True, slots=True)
class DeltaLog:
    """One ring of entries a slot, for one layer; entry i is the i-th token since the fold point.

    k: [slots, ring, HK, K] normalised keys. u: [slots, ring, HV, V] updates, beta * (v - S k).
    g: [slots, ring, HV] log decays. conv: [slots, ring, C] raw columns of the convolution before.
    Replaying is exact if k has the activations' dtype and u and g are float32.
    """

    k: Tensor
    u: Tensor
    g: Tensor
    conv: Tensor


def replay(state: Tensor, log: DeltaLog, state_in: Tensor, log_length: Tensor) -> Tensor:
    """The states [R, HV, V, K] after each request's valid log entries, in the dtype of `state`."""
    keys = log_entries(log.k, state_in, log_length).to(state.dtype)
    updates = log_entries(log.u, state_in, log_length).to(state.dtype)
    decay = log_entries(log.g, state_in, log_length).to(state.dtype)
    total = decay.sum(1)
    weight = (total.unsqueeze(1) - decay.cumsum(1)).exp()
    keys = keys.repeat_interleave(state.shape[1] // keys.shape[2], dim=2)
    added = torch.einsum("rnhv,rnhk->rhvk", updates * weight.unsqueeze(-1), keys)
    return state * total.exp()[..., None, None] + added


def append(
    log: DeltaLog,
    k: Tensor,
    u: Tensor,
    g: Tensor,
    query_start: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    log_length: Tensor,
) -> None:
    """Add the step's tokens to the logs of the requests whose state isn't written."""
    for ring, values in ((log.k, k), (log.u, u), (log.g, g)):
        append_to_log(ring, values, query_start, state_in, state_out, log_length)
