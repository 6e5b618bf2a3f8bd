"""Sums over a step's rows, and how many experts its tokens touch, against counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.predict.shape import Part, StepShape, distinct_experts


def counted(rows, limit=None):
    """(keys, pairs) by going through every token."""
    keys = pairs = 0
    for query, context in rows:
        seen = [min(place, limit or place) for place in range(context - query + 1, context + 1)]
        pairs += sum(seen)
        keys += min(context, (limit or context) + query)
    return keys, pairs


ROWS = st.tuples(st.integers(1, 40), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(ROWS, min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_sums_are_those_of_counting(rows):
    part = Part.of_rows(rows)
    assert (float(part.keys), float(part.pairs)) == counted(rows)
    assert float(part.tokens) == sum(query for query, _ in rows)


@given(ROWS, st.integers(1, 50), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_limits_are_exact_for_even_rows(row, limit, requests):
    part = Part.even(requests, *row)
    keys, pairs = part.limited(limit)
    assert (float(keys), float(pairs)) == pytest.approx(counted([row] * requests, limit))


def test_a_mixed_step_is_one_batch():
    shape = StepShape.of_decode(8, 100) + StepShape.of_prefill(2, 50, 10)
    assert float(shape.tokens) == 108
    assert float(shape.logits) == 10
    assert float(shape.part("").keys) == 8 * 100 + 2 * 60


def test_impossible_rows_are_refused():
    with pytest.raises(ValueError, match="holds its new tokens"):
        Part.even(1, 5, 4)


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(256, 8, 32), (128, 8, 5), (16, 4, 1), (8, 8, 3)])
def test_distinct_experts_of_uniform_routing(experts, top_k, tokens):
    want = 1 - (1 - top_k / experts) ** tokens
    assert float(distinct_experts(experts, top_k, np.array(tokens))) == pytest.approx(want)


def test_distinct_experts_of_skewed_routing_are_those_of_draws():
    generator, experts, top_k, tokens = np.random.default_rng(0), 64, 4, 16
    popularity = np.arange(1, experts + 1) ** -0.8
    keys = generator.gumbel(size=(4000, tokens, experts)) + np.log(popularity)
    chosen = np.argsort(-keys, axis=-1)[..., :top_k].reshape(4000, -1)
    drawn = np.mean([len(np.unique(step)) / experts for step in chosen])
    predicted = float(distinct_experts(experts, top_k, np.array(tokens), skew=0.8))
    assert predicted == pytest.approx(drawn, rel=0.03)
    assert predicted < float(distinct_experts(experts, top_k, np.array(tokens)))


def test_more_tokens_never_touch_fewer_experts():
    shares = distinct_experts(256, 8, np.arange(0, 500), skew=1.2)
    assert np.all(np.diff(shares) >= 0)
    assert shares[0] == 0
    assert shares[-1] <= 1
