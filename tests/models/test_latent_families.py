"""Families with latent attention give transformers' logits, in every way that a sequence is cut."""

from __future__ import annotations

from dataclasses import replace

import forward
import pytest
from forward import load, logits, reference_logits, sequence, worst_row
from reference import reference_model, save_checkpoint

TOLERANCE = 1e-4
FAMILIES = ("deepseek_v3", "deepseek_v32")


@pytest.fixture(autouse=True)
def _pages_for_every_group(monkeypatch):
    """The sequence's pages serve the indexer's keys as well: they have the same numbers in a pool of their own."""
    step_of = forward.step_of

    def with_index(model, ids, start):
        step = step_of(model, ids, start)
        return replace(step, tables={**step.tables, "index": step.tables["attention"]})

    monkeypatch.setattr(forward, "step_of", with_index)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cuts", [(), (50, *range(51, 75)), (1, 8, 64, 65)], ids=["whole", "decode", "chunks"])
def test_logits_are_those_of_transformers(name, cuts, tmp_path):
    model = load(save_checkpoint(name, tmp_path))
    want = reference_logits(reference_model(name), sequence())
    assert worst_row(logits(model, sequence(), cuts), want) < TOLERANCE
