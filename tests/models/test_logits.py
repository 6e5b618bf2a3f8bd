"""Every family gives transformers' logits, whole and in pieces, whatever form its checkpoint is published in."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import quantise_checkpoint, stack_experts
from forward import load, logits, reference_logits, sequence, worst_row
from reference import FAMILIES, build_reference, reference_model, save_checkpoint, tiny_config
from safetensors.torch import load_file, save_file

from firstlight.quant import WHOLE_ROW

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cuts", [(), (50, *range(51, 75)), (1, 8, 64, 65)], ids=["whole", "decode", "chunks"])
def test_logits_are_those_of_transformers(name, cuts, tmp_path):
    model = load(save_checkpoint(name, tmp_path))
    want = reference_logits(reference_model(name), sequence())
    assert worst_row(logits(model, sequence(), cuts), want) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_checkpoints_with_a_vision_tower_load_and_read_text(name, tmp_path):
    model = load(save_checkpoint(name, tmp_path))
    want = reference_logits(reference_model(name), sequence())
    assert worst_row(logits(model, sequence()), want) < TOLERANCE


ROPE_SPELLINGS = {
    "v4 flat": lambda c: {"rope_theta": 12345.0, "rope_scaling": None},
    "v5 nested": lambda c: {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}},
    "v4 yarn": lambda c: {
        "rope_theta": 1e4,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "max_position_embeddings": 256,
    },
    "v5 yarn": lambda c: {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64,
            "beta_fast": 16.0, "beta_slow": 2.0,
        },
        "max_position_embeddings": 512,
    },
    "v4 linear": lambda c: {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "v5 llama3": lambda c: {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("spelling", ROPE_SPELLINGS)
def test_every_spelling_of_rope(spelling, tmp_path):
    config = {key: value for key, value in tiny_config("llama").items() if not key.startswith("rope")}
    config |= ROPE_SPELLINGS[spelling](config)
    reference = build_reference(config)
    reference.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert worst_row(logits(load(tmp_path), sequence()), reference_logits(reference, sequence())) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe_text", "qwen3_next"])
def test_stacked_experts_load_like_single_ones(name, tmp_path):
    save_checkpoint(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(stack_experts(tensors), tmp_path / "model.safetensors")
    want = reference_logits(reference_model(name), sequence())
    assert worst_row(logits(load(tmp_path), sequence()), want) < TOLERANCE


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize(
    ("block", "scale_dtype"),
    [
        ((128, 128), torch.bfloat16),
        ((128, 128), torch.float32),
        ((48, 80), torch.float32),
        ((1, WHOLE_ROW), torch.bfloat16),
    ],
)
def test_fp8_blocks_stay_fp8_and_mean_what_they_say(name, block, scale_dtype, tmp_path):
    plain = quantise_checkpoint(tmp_path, name, block, scale_dtype)
    model = load(tmp_path)
    assert model.layers[-1].mixer.o_proj.weight.parts["data"].dtype == torch.float8_e4m3fn
    assert worst_row(logits(model, sequence()), logits(load(plain), sequence())) < 1e-5
