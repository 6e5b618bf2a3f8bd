"""FP8 block weights through SGLang's own weight iterator, random ones for `dummy`, and embeddings in place of ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import quantise_checkpoint
from driver import answer, engine
from hosts.answers import prompts
from hosts.sglang_runs import run
from reference import save_checkpoint
from safetensors.torch import load_file, save_file

from firstlight.scheduling.sampling import SamplingParams

pytestmark = pytest.mark.timeout(900)

HALF_TIE = 0.05
"""SGLang takes FP8 checkpoints in 16 bits alone. Logits of these tiny models are about 3, and rounding moves them by this."""


def test_an_fp8_checkpoint_is_served(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    name, checkpoint = "qwen3_5_moe_text", tmp_path / "checkpoint"
    plain = quantise_checkpoint(checkpoint, name, (32, 32), torch.bfloat16)
    given = prompts()
    half = {"SGLANG_MAMBA_CONV_DTYPE": "float16"}
    outcome = run(tmp_path, checkpoint, [{"prompts": given, "new": 32}], half, dtype="float16")
    assert outcome.said(f"serves Qwen3_5MoeForCausalLM: model_type {name}")
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    native = engine(checkpoint, dtype="float16", max_context=512)
    want = answer(native, given, SamplingParams(temperature=0, max_tokens=32))
    equal = 0
    for prompt, expected, got in zip(given, want, outcome.rounds[0]["answers"], strict=True):
        first = next((i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b), None)
        equal += first is None
        if first is not None:
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *got[:first]]])
                logits = reference(input_ids=ids, use_cache=False).logits[0, -1]
            gap = abs(float(logits[got[first]] - logits[expected[first]]))
            assert gap < HALF_TIE, f"prompt of {len(prompt)}: token {first} differs at a gap of {gap:.3g}"
    assert equal >= len(given) // 2


def test_dummy_weights_are_drawn(tmp_path: Path) -> None:
    checkpoint = save_checkpoint("qwen3_next", tmp_path / "checkpoint")
    (checkpoint / "model.safetensors").unlink()
    rounds = [{"prompts": prompts((5, 9)), "new": 16}]
    outcome = run(tmp_path, checkpoint, rounds, load_format="dummy", disable_overlap_schedule=True)
    assert outcome.said("serves Qwen3NextForCausalLM: model_type")
    assert len({token for answered in outcome.rounds[0]["answers"] for token in answered}) > 4


def test_embeddings_stand_in_for_ids(tmp_path: Path) -> None:
    checkpoint = save_checkpoint("llama", tmp_path / "checkpoint")
    weights = load_file(checkpoint / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].bfloat16().float()  # SGLang hands them over in bfloat16
    save_file({**weights, "model.embed_tokens.weight": embedding}, checkpoint / "model.safetensors")
    given = prompts((1, 9, 70))
    rounds = [{"prompts": given, "new": 16}, {"prompts": given, "new": 16, "embeds": embedding.tolist()}]
    outcome = run(tmp_path, checkpoint, rounds, disable_radix_cache=True)
    assert outcome.said("serves LlamaForCausalLM: model_type")
    assert outcome.rounds[1]["answers"] == outcome.rounds[0]["answers"]
