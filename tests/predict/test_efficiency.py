"""Efficiencies from tables: held-out rows are predicted as well as the intervals say."""

from __future__ import annotations

import numpy as np
import pytest

from firstlight.hardware import GPUS
from firstlight.hardware.calibration import all_tables
from firstlight.predict import constants, links
from firstlight.predict.efficiency import GRID, curve, held_out, points_of, spread_of
from firstlight.predict.floor import FAMILIES

TABLES = [
    (i, table) for i, table in enumerate(all_tables()) if (table.op, table.label) in FAMILIES and len(table.rows) >= 10
]


@pytest.mark.parametrize(("index", "table"), TABLES, ids=[f"{t.gpu}-{t.op}-{t.provider}" for _, t in TABLES])
def test_intervals_of_80_percent_hold_about_that_much_of_held_out_rows(index, table):
    reach = constants.QUANTILE_80 * spread_of(table.op, table.label, index)
    inside = np.mean(np.abs(held_out(table.op, table.label, index)) <= reach)
    assert 0.7 <= inside <= 0.9


@pytest.mark.parametrize("key", FAMILIES)
def test_no_row_is_faster_than_its_floor(key):
    points = points_of(*key)
    assert np.all((points.efficiency > 0) & (points.efficiency <= 1))


def test_rows_of_the_gpu_itself_decide():
    sizes = {"rows": 6144, "columns": 2048}
    own = curve("linear", "", GPUS["h20"], "float8_e4m3fn", sizes, 0.5)
    other = curve("linear", "", GPUS["h800"], "float8_e4m3fn", sizes, 0.5)
    many = np.array([8192.0])
    assert own.trust(many)[0] == "interpolated"
    assert own.at(many) > 0.88 > other.at(many)
    assert curve("linear", "", GPUS["mi300x"], "bfloat16", sizes, 0.5).trust(many)[0] == "transferred"


def test_an_op_without_rows_has_the_default_and_says_so():
    found = curve("l2_norm", "", GPUS["h200"], "bfloat16", {}, 0.8)
    assert np.all(found.values == 0.8)
    assert found.trust(np.ones(1)) == ("datasheet", constants.DATASHEET_SPREAD, "constants.py")


def test_efficiencies_stay_between_those_measured():
    for key in FAMILIES:
        points = points_of(*key)
        sizes = {
            "rows": 999, "columns": 123456, "experts": 7, "hidden": 99, "intermediate": 100_000, "heads": 5,
            "kv_heads": 1, "head_dim": 72, "value_dim": 33, "key_dim": 77,
        }  # fmt: skip
        values = curve(*key, GPUS["b200"], "bfloat16", sizes, 0.5).values
        assert values.shape == GRID.shape
        assert points.efficiency.min() <= values.min()
        assert values.max() <= points.efficiency.max()


def test_all_reduces_are_as_fast_as_measured():
    """The link's constants against a table that they don't read."""
    table = next(table for table in all_tables() if table.op == "all_reduce")
    errors = []
    for (size, ranks), measured in table.rows:
        start = constants.COLLECTIVE_START + constants.COLLECTIVE_PER_RANK * (ranks - 2)
        sent = 2 * size * (ranks - 1) / ranks
        seconds = start + sent / links.link_of(GPUS["h200"], int(ranks)).bandwidth / constants.LINK_SHARE
        errors.append(abs(np.log(seconds / measured)))
    assert np.mean(errors) < 0.15
