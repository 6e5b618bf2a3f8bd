"""Efficiencies from tables: held-out rows are predicted as well as the intervals say."""

from __future__ import annotations

import numpy as np
import pytest

from firstlight.hardware import GPUS
from firstlight.hardware.calibration import all_tables
from firstlight.predict import constants, efficiency
from firstlight.predict.efficiency import ACROSS, GRID, curve, held_out, points_of, spread_of, sustained, tables_of
from firstlight.predict.floor import FAMILIES

TABLES = [(key, i, all_tables()[i]) for key in FAMILIES for i in tables_of(*key) if len(all_tables()[i].rows) >= 40]
SIZES = {
    "rows": 999.0, "columns": 123456.0, "experts": 7.0, "hidden": 99.0, "intermediate": 1e5, "heads": 5.0, "kv_heads": 1.0,
    "head_dim": 72.0, "value_dim": 33.0, "key_dim": 77.0, "ranks": 8.0,
}  # fmt: skip


@pytest.mark.parametrize("key", FAMILIES)
def test_intervals_of_80_percent_hold_about_that_much_of_held_out_rows(key):
    """Each row is predicted without the rows of its shape, and its interval is taken from the other half of the rows."""
    inside = []
    for tables_key, index, _ in TABLES:
        if tables_key == key:
            errors = np.abs(held_out(*key, index))
            even = np.arange(len(errors)) % 2 == 0
            for half in (even, ~even):
                inside.append(errors[half] <= np.quantile(errors[~half], 0.8))
    if inside:
        assert 0.7 <= np.mean(np.concatenate(inside)) <= 0.9


def test_intervals_of_transfers_hold_about_that_much_of_other_gpus(monkeypatch):
    """Every table of a GPU is predicted from the tables of the other GPUs alone."""
    inside = []
    for key, index, table in TABLES:
        others = [i for i in tables_of(*key) if all_tables()[i].gpu != table.gpu]
        if not others:
            continue
        points, gpu = points_of(index), efficiency._key(GPUS[table.gpu])
        value, pull = efficiency._pulled(others, points.where, gpu, table.format)
        seconds = constants.HEAVY_START[FAMILIES[key].kind] + points.floor / np.exp(value)
        spread = np.array([spread_of(*key, others[i]) for i in pull.argmax(0)])
        reach = constants.QUANTILE_80 * np.hypot(spread, constants.TRANSFER_SPREAD)
        inside.append(np.abs(np.log(seconds / points.seconds)) <= reach)
    assert len(inside) > 50
    assert 0.7 <= np.mean(np.concatenate(inside)) <= 0.9


@pytest.mark.parametrize("key", FAMILIES)
def test_no_row_is_faster_than_its_floor(key):
    for index in tables_of(*key):
        points = points_of(index)
        assert np.all((points.efficiency > 0) & (points.efficiency <= 1))


def test_rows_of_the_gpu_itself_decide():
    sizes = {"rows": 6144, "columns": 2048}
    many = np.array([8192.0])
    assert curve("linear", "", GPUS["h20"], "float8_e4m3fn", sizes, 0.5).trust(many)[0] == "interpolated"
    assert curve("linear", "", GPUS["mi355x"], "bfloat16", sizes, 0.5).trust(many)[0] == "transferred"


def test_gpus_sustain_what_their_own_products_show():
    """Shares of the peak in BF16 and FP8, as published: AMD's own tests; H20, whose power is enough for its units."""
    for gpu, dtype, share in (
        ("mi300x", "bfloat16", 708 / 1307.4), ("mi300x", "float8_e4m3fn", 1273 / 2614.9), ("mi325x", "bfloat16", 831.4 / 1307.4),
    ):  # fmt: skip
        assert sustained(GPUS[gpu]).peak[dtype] / GPUS[gpu].peak[dtype] == pytest.approx(share, rel=1e-3)
    assert sustained(GPUS["h20"]).peak["bfloat16"] > 0.9 * GPUS["h20"].peak["bfloat16"]


def test_an_op_without_rows_has_the_default_and_says_so():
    found = curve("l2_norm", "", GPUS["h200"], "bfloat16", {}, 0.8)
    assert np.all(found.values == 0.8)
    assert found.trust(np.ones(1)) == ("datasheet", constants.DATASHEET_SPREAD, "constants.py")


@pytest.mark.parametrize("key", FAMILIES)
def test_efficiencies_stay_between_those_measured(key):
    values = curve(*key, GPUS["b200"], "bfloat16", SIZES, 0.5).values
    assert values.shape == ((len(ACROSS), len(GRID)) if FAMILIES[key].across else GRID.shape)
    measured = np.concatenate([points_of(index).efficiency for index in tables_of(*key)])
    assert measured.min() * (1 - 1e-9) <= values.min()
    assert values.max() <= measured.max() * (1 + 1e-9)


@pytest.mark.parametrize("key", [("attention", "prefill"), ("latent_attention", "prefill")])
def test_more_tokens_and_longer_queries_never_take_less(key):
    found = curve(*key, GPUS["h200"], "bfloat16", SIZES, 0.5)
    tokens, query = np.meshgrid(np.geomspace(16, 1e6, 80), np.geomspace(16, 1e5, 60))
    seconds = tokens * query / found.at(tokens.ravel(), query.ravel()).reshape(tokens.shape)
    assert np.all(np.diff(seconds, axis=0) >= -1e-9 * seconds[1:])
    assert np.all(np.diff(seconds, axis=1) >= -1e-9 * seconds[:, 1:])


def test_few_rows_of_an_expert_are_told_apart():
    """A token that meets an expert alone is another case than 16: curves reach below one row an expert."""
    sizes = {"experts": 256, "top_k": 8, "hidden": 2048, "intermediate": 512}
    few, one = curve("experts", "", GPUS["h200"], "float8_e4m3fn", sizes, 0.5).at(np.array([1 / 32, 1.0]))
    assert few < 0.8 * one
