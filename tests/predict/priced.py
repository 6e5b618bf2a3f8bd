"""Models to price in tests: published configs, built and walked once."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from firstlight.hardware import GPUS
from firstlight.predict.layout import Layout, build, step_model
from firstlight.predict.step_time import StepModel

CONFIGS = Path(__file__).parents[1] / "configs"
TINY = Path(__file__).parents[1] / "tiny_configs"


def config(name: str) -> dict[str, Any]:
    """A published config, or a tiny one."""
    path = CONFIGS / f"{name}.json"
    return json.loads((path if path.exists() else TINY / f"{name}.json").read_text())


@cache
def priced(name: str, gpu: str = "h200", layout: Layout | None = None) -> StepModel:
    """A config on a GPU."""
    layout = layout or Layout()
    return step_model(build(config(name), layout), GPUS[gpu], layout)
