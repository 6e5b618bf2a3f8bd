"""The engine on the GPU gives the tokens that it gives on the CPU, for every family, in float32."""

from __future__ import annotations

import pytest
import torch
from driver import answer, engine, prompts
from reference import FAMILIES, save_checkpoint


@pytest.mark.parametrize("options", [{}, {"step_tokens": 48, "depth": 1}], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_on_the_gpu_are_those_of_the_cpu(name, options, tmp_path):
    torch.backends.cuda.matmul.allow_tf32 = False
    checkpoint = save_checkpoint(name, tmp_path)
    want = answer(engine(checkpoint), prompts())
    running = engine(checkpoint, device="cuda", **options)
    for _ in range(2):  # the second time from the cache
        assert answer(running, prompts()) == want
