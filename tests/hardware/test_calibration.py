"""Calibration tables: what ships is sound, and what is not is refused with a reason."""

from __future__ import annotations

import json

import pytest

from firstlight.hardware import CPU_GENERIC, GPUS
from firstlight.hardware.calibration import CALIBRATED, CalibrationError, all_tables, packaged_table, read_table

GOOD = {
    "op": "linear", "provider": "cublas", "format": "bfloat16", "source": "a bench",
    "axes": ["tokens", "rows", "columns"], "rows": [[1, 2, 3, 4.5]],
}  # fmt: skip


def write(tmp_path, group, **shared):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"gpu": "h200", **shared, "groups": [group]}))
    return path


def groups_of(path):
    return read_table(path).groups


def test_tables_that_ship_are_sound():
    for table in all_tables():
        assert table.gpu in GPUS
        assert table.source
        assert all(seconds < 1 for _, seconds in table.rows)


def test_rows_are_read_with_their_sizes(tmp_path):
    (table,) = groups_of(write(tmp_path, {**GOOD, "versions": {"triton": "3.6"}}))
    assert table.rows == (((1.0, 2.0, 3.0), pytest.approx(4.5e-6)),)
    assert table.versions == {"triton": "3.6"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": [[1, 2, 4.5]]}, "needs 3 sizes"),
        ({"rows": [[1, 2, 3, 0.0]]}, "a time above 0"),
        ({"rows": [[1, 2, 3, 4.5], [1, 2, 3, 5.0]]}, "given twice"),
        ({"rows": [[1, 2, 3, 4.5, 6]]}, "needs 3 sizes"),
        ({"rows": [[]]}, "needs 3 sizes"),
        ({"rows": [[1, 2, 3, float("inf")]]}, "a time above 0"),
        ({"rows": [[1, 2, 3, float("nan")]]}, "a time above 0"),
        ({"rows": [[10**400, 2, 3, 4.5]]}, "table.json: "),
        ({"rows": [1, 2, 3, 4.5]}, r"expected `array`, got `int` - at `\$.groups\[0\].rows\[0\]`"),
        ({"rows": [[1, "2", 3, 4.5]]}, r"got `str` - at `\$.groups\[0\].rows"),
        ({"rows": {}}, r"expected `array`, got `object` - at `\$.groups\[0\].rows`"),
        ({"axes": None}, r"expected `array`, got `null` - at `\$.groups\[0\].axes`"),
        ({"op": 7}, r"expected `str`, got `int` - at `\$.groups\[0\].op`"),
        ({"fixed": [1]}, r"expected `object`, got `array` - at `\$.groups\[0\].fixed`"),
        ({"rows": [[0, 2, 3, 4.5]]}, "tokens is 0; "),
        ({"rows": [[1, -2, 3, 4.5]]}, "rows is -2; "),
        ({"refused": [[float("nan"), 2, 3, "bad"]]}, "tokens is nan; "),
        ({"axes": ["tokens"], "fixed": {"rows": float("inf")}, "rows": [[1, 4.5]]}, "rows is inf; "),
        ({"refused": [[]]}, "needs 3 sizes and a reason"),
        ({"refused": [["1", 2, 3, "bad"]]}, "needs 3 sizes and a reason"),
        ({"fixed": {"rows": 2}}, "rows is fixed and an axis"),
        ({"refused": [[1, 2, "bad"]]}, "needs 3 sizes and a reason"),
        ({"refused": [[1, 2, 3, "bad"]]}, "has a time as well"),
    ],
)
def test_bad_rows_are_refused(tmp_path, change, reason):
    with pytest.raises(CalibrationError, match=reason):
        read_table(write(tmp_path, {**GOOD, **change}))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "missing required field `gpu`"),
        ('{"gpu": "h200"}', "missing required field `groups`"),
        ('{"gpu": "h200", "groups": {}}', r"expected `array`, got `object` - at `\$.groups`"),
        ('{"gpu": "h200", "groups": ["linear"]}', r"expected `object`, got `str` - at `\$.groups\[0\]`"),
        ('{"gpu": "h200", "groups": [], "versions": ["3.6"]}', r"got `array` - at `\$.versions`"),
        ("[]", "expected `object`, got `array`"),
        ("3", "expected `object`, got `int`"),
        ("not JSON", "which is JSON"),
        ("[" * 100_000, "which is JSON"),
        (b"\xff\xfe", "which is JSON"),
    ],
)
def test_what_is_no_table_is_said_to_be_none_and_why(tmp_path, content, reason):
    path = tmp_path / "table.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CalibrationError, match=f"{path}: not a table of `firstlight calibrate`, .*{reason}"):
        read_table(path)


def test_what_is_missing_is_named(tmp_path):
    group = {key: value for key, value in GOOD.items() if key != "source"}
    with pytest.raises(CalibrationError, match=r"group linear: source missing"):
        read_table(write(tmp_path, group))


def test_sizes_that_rows_share_are_given_once(tmp_path):
    group = {
        **GOOD, "fixed": {"rows": 2, "columns": 3}, "axes": ["tokens"], "rows": [[1, 4.5], [8, 9]], "refused": [[2, "NaN"]],
    }  # fmt: skip
    (table,) = groups_of(write(tmp_path, group))
    assert table.axes == ("tokens", "rows", "columns")
    assert [sizes for sizes, _ in table.rows] == [(1.0, 2.0, 3.0), (8.0, 2.0, 3.0)]
    assert table.refused == (((2.0, 2.0, 3.0), "NaN"),)


def test_what_groups_share_stands_beside_them(tmp_path):
    group = {key: value for key, value in GOOD.items() if key != "source"}
    path = write(tmp_path, group, source="one bench", versions={"torch": "2.11"}, dtype="bfloat16")
    table = read_table(path)
    assert (table.gpu, table.versions, table.path) == ("h200", {"torch": "2.11"}, str(path))
    (measured,) = table.groups
    assert (measured.source, measured.dtype, measured.versions) == ("one bench", "bfloat16", {"torch": "2.11"})


def test_calibrated_tables_that_ship_are_of_described_hardware():
    for path in CALIBRATED.glob("*.json"):
        table = read_table(path)
        assert table.gpu == path.stem
        assert packaged_table(GPUS[table.gpu]).groups == table.groups


def test_hardware_without_a_table_has_none():
    assert packaged_table(CPU_GENERIC) is None
