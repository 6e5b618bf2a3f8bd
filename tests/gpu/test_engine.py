"""The engine on the GPU gives the tokens that it gives on the CPU, for every family, in float32."""

from __future__ import annotations

import pytest
import torch
from driver import answer, engine, prompts
from reference import FAMILIES, save_checkpoint

from firstlight.scheduling.sampling import SamplingParams


@pytest.mark.parametrize("options", [{}, {"step_tokens": 48, "depth": 1}], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_on_the_gpu_are_those_of_the_cpu(name, options, tmp_path):
    torch.backends.cuda.matmul.allow_tf32 = False
    checkpoint = save_checkpoint(name, tmp_path)
    want = answer(engine(checkpoint), prompts())
    running = engine(checkpoint, device="cuda", **{"step_tokens": 256, "max_running": 8, **options})
    for _ in range(2):  # the second time from the cache
        assert answer(running, prompts()) == want


@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_give_the_tokens_of_single_launches(name, tmp_path):
    checkpoint = save_checkpoint(name, tmp_path)
    sampling = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3, max_tokens=16)
    eager = engine(checkpoint, device="cuda", graphs=False, max_running=8, step_tokens=256)
    want = [answer(eager, prompts()), answer(eager, prompts(), sampling)]
    captured = engine(checkpoint, device="cuda", max_running=8, step_tokens=256)
    assert captured.executor.graphs.graphs or captured.executor.graphs.reasons
    assert [answer(captured, prompts()), answer(captured, prompts(), sampling)] == want


def test_graphs_repeat_their_steps_bit_for_bit_and_allocate_nothing(tmp_path):
    """Each captured forward gives the logits of the same padded step run op by op. In bfloat16, as no provider for many
    tokens' experts in float32 can be captured."""
    options = {"device": "cuda", "dtype": "bfloat16", "max_running": 8, "step_tokens": 128}
    running = engine(save_checkpoint("qwen3_5_moe", tmp_path), **options)
    graphs = running.executor.graphs
    assert {bool(graph.room.prompts) for graph in graphs.graphs} == {False, True}
    with torch.inference_mode(), torch.cuda.stream(running.executor.stream):
        for graph in graphs.graphs:
            step, _, _ = graphs.step_of(graph.memory, graph.room)
            want = running.loaded.model(step).clone()
            graph.forward.replay()
            torch.testing.assert_close(
                graph.logits, want, rtol=0, atol=0, equal_nan=True, msg=lambda text, room=graph.room: f"{room}: {text}"
            )
    answer(running, prompts())
    reserved = torch.cuda.memory_reserved()
    for _ in range(3):
        answer(running, prompts())
    assert torch.cuda.memory_reserved() == reserved
