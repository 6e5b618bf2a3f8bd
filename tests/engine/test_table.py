"""Which timings the options mean."""

from __future__ import annotations

import json
import logging

import pytest

from firstlight.engine import table as tables
from firstlight.engine.table import timings_of
from firstlight.errors import FirstlightError
from firstlight.hardware import CPU_GENERIC, H200

GROUP = {
    "op": "linear",
    "provider": "torch",
    "format": "float32",
    "fixed": {"rows": 2, "columns": 3},
    "axes": ["tokens"],
    "rows": [[1, 2.5]],
}


@pytest.fixture
def write(tmp_path):
    def write(gpu="CPU", versions=None, name="table.json"):
        path = tmp_path / name
        path.write_text(json.dumps({"gpu": gpu, "source": "a test", "versions": versions or {}, "groups": [GROUP]}))
        return str(path)

    return write


def test_a_file_is_read(write):
    found = timings_of(write(), CPU_GENERIC)
    assert [group.provider for group in found.table.groups] == ["torch"]


def test_none_and_hardware_without_a_table_leave_it_to_ranks():
    assert timings_of("none", H200) is None
    assert timings_of("auto", CPU_GENERIC) is None


def test_a_table_of_other_hardware_is_refused(write):
    with pytest.raises(
        FirstlightError, match=r"--table .*: measured on h200, and this is CPU; make one with firstlight calibrate"
    ):
        timings_of(write("h200"), CPU_GENERIC)
    assert timings_of(write("h200"), H200) is not None


def test_a_table_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FirstlightError, match=r"--table .*missing\.json: .*No such file"):
        timings_of(str(tmp_path / "missing.json"), CPU_GENERIC)


def test_other_versions_are_used_and_said_once(write, caplog, monkeypatch):
    monkeypatch.setattr(tables, "_WARNED", set())
    path = write(versions={"torch": "1.0", "no-such-package": "3"})
    with caplog.at_level(logging.WARNING, logger=tables.__name__):
        assert timings_of(path, CPU_GENERIC) is not None
        assert timings_of(path, CPU_GENERIC) is not None
    (warning,) = caplog.messages
    assert "torch 1.0 (here: " in warning
    assert "no-such-package" not in warning


@pytest.mark.parametrize("build", ["", "+cu130", "+another"])
def test_the_same_versions_are_not_worth_a_word(write, caplog, monkeypatch, build):
    """Whatever mark a build has, in the table or in the package's metadata."""
    import torch

    monkeypatch.setattr(tables, "_WARNED", set())
    with caplog.at_level(logging.WARNING, logger=tables.__name__):
        timings_of(write(versions={"torch": torch.__version__.partition("+")[0] + build}), CPU_GENERIC)
    assert not caplog.messages
