"""A hybrid model cut to its first layers has no attention, and so no KV pages: it is served like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from driver import VARIANTS, answer, engine, prompts

TINY = Path(__file__).parents[1] / "tiny_configs"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states_alone")
    config = json.loads((TINY / "qwen3_next.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": None}))
    return folder


@pytest.mark.parametrize("variant", ["chunks of 16", "no prefix cache", "pages of 64", "two plans in flight"])
def test_answers_are_the_same_however_steps_are_made_up(checkpoint: Path, variant: str) -> None:
    plain = engine(checkpoint, weights="random")
    expected = answer(plain, prompts())
    assert answer(plain, prompts()) == expected  # from the cache
    assert answer(engine(checkpoint, weights="random", **VARIANTS[variant]), prompts()) == expected
