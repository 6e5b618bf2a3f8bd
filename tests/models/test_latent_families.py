"""DeepSeek-V3's family gives transformers' logits, although it is only marked for prediction so far."""

from __future__ import annotations

import pytest
from forward import load, logits, reference_logits, sequence, worst_row
from reference import reference_model, save_checkpoint

TOLERANCE = 1e-4


@pytest.mark.parametrize("cuts", [(), (50, *range(51, 75)), (1, 8, 64, 65)], ids=["whole", "decode", "chunks"])
def test_logits_are_those_of_transformers(cuts, tmp_path):
    model = load(save_checkpoint("deepseek_v3", tmp_path))
    want = reference_logits(reference_model("deepseek_v3"), sequence())
    assert worst_row(logits(model, sequence(), cuts), want) < TOLERANCE
