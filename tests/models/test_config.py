"""What a config.json may say, and what it is told when it says something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from reference import tiny_config

from firstlight.models import FAMILIES, ConfigError, build_model, family

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_published_configs_build(path):
    model = build_model(json.loads(path.read_text()), dtype=torch.bfloat16)
    assert len(model.layers) == model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: .*llama"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big'; it must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number of at least 1"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads 3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; it must be a number above 0"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope type 'longrope' is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"layer_types": ["full_attention"]}, "layer_types lists 1 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer type 'sliding_attention' is not supported"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        build_model(tiny_config("llama") | change, dtype=torch.float32)


def test_sections_of_mrope_must_fit():
    config = tiny_config("qwen3_5_text")
    config["rope_parameters"] = config["rope_parameters"] | {"mrope_section": [4, 4, 4]}
    with pytest.raises(ConfigError, match=r"mrope_section \[4, 4, 4\] must be three numbers that sum to 8"):
        build_model(config, dtype=torch.float32)


def test_a_tower_that_does_not_fit_the_text_is_refused():
    config = tiny_config("qwen3_5")
    config["vision_config"] = config["vision_config"] | {"out_hidden_size": 64}
    with pytest.raises(ConfigError, match="out_hidden_size is 64; it must be hidden_size 128"):
        build_model(config, dtype=torch.float32)


def test_every_family_has_a_file_under_its_name():
    for model_type in FAMILIES:
        assert family({"model_type": model_type}).__module__ == f"firstlight.models.{FAMILIES[model_type]}"
