"""The tests that need a GPU can at least be read without one: nobody else would notice a name that has gone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

MODULES = sorted((Path(__file__).parents[1] / "gpu").glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"gpu_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
