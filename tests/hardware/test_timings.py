"""What a calibrated table says between, beyond and beside the shapes that were measured."""

from __future__ import annotations

import pytest

from firstlight.hardware.calibration import Measured, Table
from firstlight.hardware.timings import Estimate, Timings, compared, situation

FIXED = {"rows": 64.0, "columns": 32.0}
SIZES = {"format": "bfloat16", "dtype": "bfloat16", "fixed": {"rows": 64, "columns": 32}}


def group(provider, rows, axes=("tokens",), op="linear", label="", refused=()):
    return Measured(
        "h200", op, label, provider, "bfloat16", "a test", (*axes, *FIXED),
        tuple(((*sizes, *FIXED.values()), seconds) for sizes, seconds in rows), dtype="bfloat16",
        refused=tuple(((*sizes, *FIXED.values()), reason) for sizes, reason in refused),
    )  # fmt: skip


def timings(*groups):
    return Timings(Table("h200", groups))


def seconds(asked, tokens, provider="p"):
    return asked.estimates("linear", "", step={"tokens": tokens}, **SIZES)[provider].seconds.get((), None)


def test_between_two_shapes_the_logarithm_is_linear():
    table = timings(group("p", [((1,), 1e-6), ((16,), 16e-6)]))
    assert seconds(table, 1) == pytest.approx(1e-6)
    assert seconds(table, 4) == pytest.approx(4e-6)
    assert seconds(table, 16) == pytest.approx(16e-6)


def test_beyond_an_octave_the_table_says_nothing():
    table = timings(group("p", [((4,), 1e-6), ((16,), 2e-6)]))
    assert seconds(table, 2) == pytest.approx(1e-6)
    assert seconds(table, 32) == pytest.approx(2e-6)
    assert seconds(table, 1) is None
    assert seconds(table, 33) is None


def test_other_sizes_formats_and_labels_are_other_calls():
    table = timings(group("p", [((4,), 1e-6)]))
    step = {"tokens": 4}
    assert table.estimates("linear", "", step=step, **SIZES)
    assert not table.estimates("linear", "decode", step=step, **SIZES)
    assert not table.estimates("linear", "", step=step, **{**SIZES, "format": "float8_e4m3fn"})
    assert not table.estimates("linear", "", step=step, **{**SIZES, "dtype": "float32"})
    assert not table.estimates("linear", "", step=step, **{**SIZES, "fixed": {"rows": 64, "columns": 33}})


@pytest.mark.parametrize(("tokens", "refused"), [(1, False), (2, False), (5, True), (8, True), (11, True), (12, False)])
def test_a_call_nearer_to_a_failure_than_to_a_success_is_refused(tokens, refused):
    rows = [((1,), 1e-6), ((2,), 1e-6), ((16,), 1e-6)]
    table = timings(group("p", rows, refused=[((8,), "gives NaN")]))
    found = table.estimates("linear", "", step={"tokens": tokens}, **SIZES)["p"]
    assert (found.refused == "gives NaN") is refused
    assert bool(found.seconds) is not refused


AXES = ("tokens", "requests", "query", "context")


def test_contexts_are_situations_up_to_the_bound():
    rows = [((8, 8, 1, 1024), 1e-6), ((8, 8, 1, 32768), 9e-6), ((8, 1, 8, 8), 5e-6)]
    table = timings(group("p", rows, axes=AXES, op="attention"))

    def found(context, query=1):
        step = {"tokens": 8, "requests": 8, "query": query, "context": context}
        return table.estimates("attention", "", step=step, **SIZES)["p"].seconds

    assert found(2048) == {(0.0, 1024.0): pytest.approx(1e-6)}
    assert set(found(1 << 20)) == {(0.0, 1024.0), (0.0, 32768.0)}
    assert set(found(16)) == {(0.0, 1024.0), (0.0, 32768.0)}, "none is within the bound, so all speak"
    assert set(found(1 << 20, query=8)) == {(1.0, 0.0)}, "prompts are compared with prompts"


def test_situations_name_what_tokens_leave_open():
    assert situation({"tokens": 8}) == ()
    assert situation({"tokens": 8, "requests": 8, "query": 1}) == (0.0,)
    assert situation({"tokens": 8, "requests": 8, "query": 1, "context": 99}) == (0.0, 99)
    assert situation({"tokens": 8, "requests": 2, "query": 4, "context": 10}) == (2, 6)


def test_providers_are_compared_where_all_were_measured():
    one, two, three = (0.0, 1.0), (0.0, 2.0), (0.0, 4.0)
    found = compared(
        {
            "a": Estimate({one: 1e-6, two: 4e-6}),
            "b": Estimate({one: 3e-6, two: 3e-6, three: 1e-9}),
            "silent": Estimate({}),
        }
    )
    assert found == {"a": pytest.approx(2e-6), "b": pytest.approx(3e-6)}
    assert compared({"a": Estimate({one: 1.0}), "b": Estimate({two: 1.0})}) == {}
    assert compared({}) == {}
