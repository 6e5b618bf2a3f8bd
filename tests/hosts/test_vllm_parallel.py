"""Tensor parallelism in vLLM's own processes and group: two ranks answer what one does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts.answers import check_equal, native, prompts
from hosts.vllm_runs import run
from reference import reference_model, save_checkpoint


@pytest.mark.timeout(900)
def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    checkpoint = save_checkpoint("qwen3_5", tmp_path / "checkpoint")
    given = prompts()
    outcome = run(
        tmp_path,
        checkpoint,
        [{"prompts": given, "new": 32}],
        {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},  # the worker asks the ranks for the class of their model
        tensor_parallel_size=2,
        language_model_only=True,
        block_size=16,
        max_num_batched_tokens=64,
    )
    assert outcome.model_class.startswith("firstlight.")
    for rank in range(2):
        assert f"rank {rank} of 2" in outcome.log
    check_equal(reference_model("qwen3_5"), given, native(checkpoint, given, 32), outcome.answers[0])
