"""Calibration tables: what ships is sound, and what is not is refused with a reason."""

from __future__ import annotations

import json

import pytest

from firstlight.hardware import GPUS
from firstlight.hardware.calibration import CalibrationError, all_tables, read_table

GOOD = {
    "op": "linear", "provider": "cublas", "format": "bfloat16", "source": "a bench",
    "axes": ["tokens", "rows", "columns"], "rows": [[1, 2, 3, 4.5]],
}  # fmt: skip


def write(tmp_path, group):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"gpu": "h200", "groups": [group]}))
    return path


def test_tables_that_ship_are_sound():
    for table in all_tables():
        assert table.gpu in GPUS
        assert table.source
        assert all(seconds < 1 for _, seconds in table.rows)


def test_rows_are_read_with_their_sizes(tmp_path):
    (table,) = read_table(write(tmp_path, {**GOOD, "versions": {"triton": "3.6"}}))
    assert table.rows == (((1.0, 2.0, 3.0), pytest.approx(4.5e-6)),)
    assert table.versions == {"triton": "3.6"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": [[1, 2, 4.5]]}, "needs 3 sizes"),
        ({"rows": [[1, 2, 3, 0.0]]}, "a time above 0"),
        ({"rows": [[1, 2, 3, 4.5], [1, 2, 3, 5.0]]}, "given twice"),
        ({"axes": None}, "NoneType"),
    ],
)
def test_bad_rows_are_refused(tmp_path, change, reason):
    with pytest.raises(CalibrationError, match=reason):
        read_table(write(tmp_path, {**GOOD, **change}))


def test_what_is_missing_is_named(tmp_path):
    group = {key: value for key, value in GOOD.items() if key != "source"}
    with pytest.raises(CalibrationError, match=r"group linear: source missing"):
        read_table(write(tmp_path, group))
