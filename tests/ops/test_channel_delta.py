"""The delta rule with a decay for each channel, against the one with a decay for each head."""

from __future__ import annotations

import torch
from ops.examples_c import delta_example

from firstlight.ops.channel_delta_rule import channel_delta_rule
from firstlight.ops.gated_delta_rule import gated_delta_rule


def test_equal_decays_give_the_gated_delta_rule():
    (q, k, v, g, beta, pool, *rows), kwargs = delta_example("prefill")()
    per_head = g[..., 0]
    other = pool.clone()
    want = gated_delta_rule(q, k, v, per_head, beta, pool, *rows, **kwargs)
    got = channel_delta_rule(q, k, v, per_head.unsqueeze(-1).expand_as(g), beta, other, *rows, **kwargs)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(other, pool)


def test_a_channel_that_forgets_all_is_as_if_it_began():
    (q, k, v, g, beta, pool, *rows), kwargs = delta_example("decode")()
    forgotten = torch.full_like(g, -200.0)
    empty = torch.zeros_like(pool)
    got = channel_delta_rule(q, k, v, forgotten, beta, pool.clone(), *rows, **kwargs)
    torch.testing.assert_close(got, channel_delta_rule(q, k, v, g, beta, empty, *rows, **kwargs))


def test_one_step_by_hand():
    q = k = torch.tensor([[[1.0, 0.0]]])
    v, beta = torch.tensor([[[3.0, 5.0]]]), torch.tensor([[0.5]])
    g = torch.tensor([[[0.0, -1e9]]])
    pool = torch.tensor([[[[0.0, 0.0], [0.0, 0.0]]], [[[1.0, 7.0], [2.0, 7.0]]]])
    start, slot = torch.tensor([0, 1]), torch.tensor([1])
    out = channel_delta_rule(
        q, k, v, g, beta, pool, start, slot, slot, torch.zeros(0, 3, dtype=torch.int32), max_query=1
    )
    # The second channel is forgotten; the first goes half of the way from what it held, (1, 2), to v.
    torch.testing.assert_close(out[0, 0], torch.tensor([2.0, 3.5]))
    torch.testing.assert_close(pool[1, 0], torch.tensor([[2.0, 0.0], [3.5, 0.0]]))
