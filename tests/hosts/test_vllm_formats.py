"""FP8 block weights through vLLM's own iterator, random ones for its load format `dummy`; log probabilities of prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import quantise_checkpoint
from hosts.answers import NEW_TOKENS, check_equal, native, prompts
from hosts.vllm_runs import need, run
from reference import reference_model, save_checkpoint

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(("name", "scale"), [("qwen3", torch.float32), ("qwen3_5_moe_text", torch.bfloat16)])
def test_an_fp8_checkpoint_is_served(name: str, scale: torch.dtype, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    need(name)
    checkpoint = tmp_path / "checkpoint"
    plain = quantise_checkpoint(checkpoint, name, (32, 16), scale)
    given = prompts()
    outcome = run(tmp_path, checkpoint, [{"prompts": given, "new": NEW_TOKENS}])
    assert outcome.model_class.startswith("firstlight.")
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    check_equal(reference, given, native(checkpoint, given), outcome.answers[0])


def test_dummy_weights_are_drawn(tmp_path: Path) -> None:
    checkpoint = save_checkpoint("qwen3_next", tmp_path / "checkpoint")
    (checkpoint / "model.safetensors").unlink()
    outcome = run(tmp_path, checkpoint, [{"prompts": prompts((5, 9)), "new": 16}], load_format="dummy")
    assert outcome.model_class.startswith("firstlight.")
    assert len({token for answer in outcome.answers[0] for token in answer}) > 4


def test_log_probabilities_of_prompts_are_the_references(tmp_path: Path) -> None:
    checkpoint = save_checkpoint("qwen3_next", tmp_path / "checkpoint")
    given = prompts((40, 130, 200))  # more rows of logits at once than there are requests
    outcome = run(tmp_path, checkpoint, [{"prompts": given, "new": 1, "logprobs": True}], max_num_batched_tokens=256)
    assert outcome.model_class.startswith("firstlight.")
    for prompt, got in zip(given, outcome.logprobs[0], strict=True):
        ids = torch.tensor(prompt)
        with torch.no_grad():
            logits = reference_model("qwen3_next")(input_ids=ids[None], use_cache=False).logits[0, :-1]
        want = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert (torch.tensor(got) - want).abs().max() < 1e-3
