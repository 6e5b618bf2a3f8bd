"""The measure: worst row, NaN first, short rows, and how clear a routing is."""

from __future__ import annotations

import math

import pytest
import torch

from firstlight.verify.compare import TOLERANCES, routing_gaps, row_errors


def test_one_bad_row_isnt_averaged_away() -> None:
    reference = torch.ones(1000, 8)
    ours = reference.clone()
    ours[700] *= 1.5
    errors = row_errors(ours, reference)
    assert errors.argmax() == 700
    assert errors[700] == pytest.approx(0.5)
    assert errors.sum() == pytest.approx(0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_isnt_finite_is_an_infinite_error_on_either_side(value: float) -> None:
    good, bad = torch.ones(3, 4), torch.ones(3, 4)
    bad[1, 2] = value
    assert row_errors(bad, good).tolist() == [0, math.inf, 0]
    assert row_errors(good, bad)[1] == math.inf


def test_a_row_that_has_cancelled_counts_as_longer() -> None:
    reference = torch.ones(100, 4)
    reference[0] = 1e-6
    ours = reference.clone()
    ours[0] += 1e-6
    assert row_errors(ours, reference)[0] == pytest.approx(1e-4, rel=0.01)


def test_an_answer_of_zeros_is_wrong_and_zeros_for_zeros_is_right() -> None:
    assert row_errors(torch.zeros(2, 3), torch.ones(2, 3)).tolist() == [1, 1]
    assert row_errors(torch.zeros(2, 3), torch.zeros(2, 3)).tolist() == [0, 0]
    assert row_errors(torch.full((2, 3), 1e-3), torch.zeros(2, 3)).min() > 1


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"ours \[2, 3\], the reference's \[2, 4\]"):
        row_errors(torch.zeros(2, 3), torch.zeros(2, 4))


def test_routing_gap_is_between_the_last_chosen_and_the_first_left_out() -> None:
    logits = torch.tensor([[4.0, 1.0, 3.0, 2.0], [-8.0, 1.0, 1.0, 0.5]])
    assert routing_gaps(logits, 2).tolist() == pytest.approx([0.25, 0.5 / 8])
    assert routing_gaps(logits, 1).tolist() == pytest.approx([0.25, 0])
    assert routing_gaps(logits, 4).tolist() == [math.inf, math.inf]


def test_logits_that_softmax_rounds_to_one_score_are_a_toss_up() -> None:
    """Small inputs have small logits: what their scores' last digit decides isn't a clear choice."""
    generator = torch.Generator().manual_seed(0)
    logits = 1e-3 * torch.randn(20_000, 256, generator=generator)
    by_logit, by_score = (values.topk(8).indices.sort().values for values in (logits, logits.softmax(-1)))
    differ = (by_logit != by_score).any(-1)
    assert differ.any()
    tie = TOLERANCES[torch.float32].tie
    gaps = routing_gaps(logits, 8)
    assert (gaps[differ] <= tie).all()
    assert (gaps <= tie).float().mean() < 0.02


def test_routing_gap_counts_groups_too() -> None:
    #                        group 0     group 1     group 2 (values 1.9, 1.8, 0.6)
    choice = torch.tensor([[1.0, 0.9, 0.95, 0.85, 0.5, 0.1]])
    assert routing_gaps(choice, 1, groups=3, top_groups=2).item() == pytest.approx(0.05)  # experts 1.0 and 0.95
    assert routing_gaps(choice, 1, groups=3, top_groups=1).item() == pytest.approx(0.1 / 1.9)  # groups 1.9 and 1.8
    assert routing_gaps(choice, 2, groups=3, top_groups=1).item() == pytest.approx(0.1 / 1.9)  # both experts are in


def test_lower_precision_is_allowed_more() -> None:
    exact, half, brain = (TOLERANCES[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16))
    for name in ("module", "whole", "tie"):
        assert getattr(exact, name) < getattr(half, name) < getattr(brain, name)
    assert exact.whole <= 1e-4
