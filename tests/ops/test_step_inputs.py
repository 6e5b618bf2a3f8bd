"""What a step's tokens are, against a loop over requests."""

from __future__ import annotations

import pytest
import torch
from ops.examples_d import STEPS, advance_example, step_example

from firstlight.ops.advance_rows import advance_rows
from firstlight.ops.step_inputs import step_inputs


@pytest.mark.parametrize("name", STEPS)
def test_tokens_one_by_one(name: str) -> None:
    (rows, starts, length, last, delta, pages, prompt), kwargs = step_example(*STEPS[name])
    ids, positions, new_length, slot = step_inputs(rows, starts, length, last, delta, pages, prompt, **kwargs)
    decodes = STEPS[name][2]
    token = 0
    for r, row in enumerate(rows.tolist()):
        count = int(starts[r + 1] - starts[r])
        before = int(length[row]) if row else 0
        assert new_length[r] == before + count
        for index in range(before, before + count):
            assert ids[token] == (last[row] if token < decodes else prompt[token - decodes])
            want = index + (int(delta[row]) if row else 0)
            assert torch.atleast_2d(positions)[:, token].tolist() == [want] * kwargs["position_rows"]
            assert slot[token] == int(pages[row, index // 4]) * 4 + index % 4
            token += 1
    assert (slot[token:] < 4).all()  # padding goes to page 0, whatever row it is behind


def test_advancing_leaves_padding_alone() -> None:
    args, _ = advance_example()
    length, last = args[0].clone(), args[1].clone()
    advance_rows(*args)
    length[[3, 5, 6]] = torch.tensor([9, 7, 6])
    last[[3, 6]] = torch.tensor([41, 43])
    assert torch.equal(args[0], length)
    assert torch.equal(args[1], last)
