"""Every op's cost is affine in the step's sums: what a walked model rests on."""

from __future__ import annotations

import pytest
from ops.examples import EXAMPLES
from ops.test_abstracts import to_meta

from firstlight.ops.op import REGISTRY, Shape

CASES = [(name, index) for name, makers in EXAMPLES.items() for index in range(len(makers))]
# Sums small enough that no window or selection of the examples cuts them.
LOW = {"tokens": 5.0, "requests": 3.0, "keys_read": 6.0, "query_keys": 5.0, "distinct_experts": 0.25}
HIGH = {"tokens": 9.0, "requests": 7.0, "keys_read": 8.0, "query_keys": 7.0, "distinct_experts": 0.75}


def figures(cost):
    plain = {name: getattr(cost, name) for name in ("read", "written", "sent", "messages", "chain", "launches")}
    return {**plain, **cost.flops}


@pytest.mark.parametrize(("name", "index"), CASES)
def test_costs_between_two_shapes_lie_on_a_line(name, index):
    args, kwargs = EXAMPLES[name][index]()
    meta_args = tuple(to_meta(argument) for argument in args)
    meta_kwargs = {key: to_meta(argument) for key, argument in kwargs.items()}

    def at(place):
        shape = Shape(**{key: LOW[key] + place * (HIGH[key] - LOW[key]) for key in LOW})
        return figures(REGISTRY[name].cost(shape, *meta_args, **meta_kwargs))

    low, middle, high = at(0.0), at(0.5), at(1.0)
    assert low.keys() == middle.keys() == high.keys()
    for figure in low:
        assert middle[figure] == pytest.approx((low[figure] + high[figure]) / 2, rel=1e-12)
        assert low[figure] <= high[figure]
