"""docs/server.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from firstlight.engine.messages import EngineStats
from firstlight.server import fields
from firstlight.server.metrics import OUTCOMES, Metrics
from firstlight.server.protocol import ChatRequest, CompletionRequest, GenerationRequest

DOCUMENT = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
WORDS = set(re.findall(r"[\w.]+", DOCUMENT))


def metric_names() -> set[str]:
    """As they are on the page, without the parts that Prometheus derives from a histogram."""
    page = Metrics().render(EngineStats()).decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    return {name for name in types if not name.endswith("_created")}


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    documented = set(re.findall(r"`(firstlight_\w+)`", DOCUMENT))
    assert documented == metric_names()
    assert len(documented) > 15
    assert set(OUTCOMES) <= WORDS


@pytest.mark.parametrize("kind", [GenerationRequest, ChatRequest, CompletionRequest])
def test_every_field_is_documented(kind: type[GenerationRequest]) -> None:
    assert set(kind.model_fields) - {"prompt"} <= {word.removesuffix(".include_usage") for word in WORDS}


def test_every_refused_field_is_documented() -> None:
    for table in (fields.REQUEST_FIELDS, fields.MESSAGE_FIELDS, fields.STREAM_OPTIONS_FIELDS):
        assert set(table) <= WORDS
