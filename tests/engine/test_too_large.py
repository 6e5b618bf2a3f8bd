"""What no memory can hold ends in an error that names the option."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.config import EngineOptions
from firstlight.engine.engine import Engine
from firstlight.errors import FirstlightError

TINY = Path(__file__).parents[1] / "tiny_configs"


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_a_cache_that_no_memory_holds(name):
    options = EngineOptions(model=str(TINY / f"{name}.json"), weights="random", device="cpu", cache_gib=1_048_576)
    with pytest.raises(FirstlightError, match=r"^--cache-gib: cpu can't give 104857\d\.\d GiB .*ask for less$"):
        Engine(options)


def test_a_table_that_no_memory_holds(monkeypatch):
    options = EngineOptions(
        model=str(TINY / "llama.json"), weights="random", device="cpu", cache_gib=0.01, max_running=65_536
    )
    Engine(options).close()  # the most that is legal is no trouble in itself

    def full(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("firstlight.engine.executor.RequestTable", full)
    with pytest.raises(FirstlightError, match=r"^--max-running 65536: cpu has no memory .*lower it, or --max-context$"):
        Engine(options)
