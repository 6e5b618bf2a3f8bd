"""What a config.json may say, and what it is told when it says something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import reference
import torch
from checkpoints import CHANNELS
from reference import tiny_config

from firstlight.models import FAMILIES, ConfigError, build_model, family
from firstlight.quant import WHOLE_ROW, scheme_of

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
        ({"layer_types": ["linear_attention"] * 3}, "layer type 'linear_attention' is not supported; supported: full_"),
        ({"layer_types": 3}, "layer_types is 3; it must be a list"),
        ({"model_type": ["llama"]}, "model_type .* is not supported"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 4096"),
        ({"hidden_size": 2**70}, "hidden_size is .*; it must be at most"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"rope_interleaved": True}, "rope_interleaved is true"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is None; it must be a number above 0"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        build_model(tiny_config("llama") | change, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False; supported: True"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'; supported: 'swish'"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads is missing"),
        ({"linear_num_key_heads": 10**9}, "linear_num_key_heads is 1000000000; it must be at most"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3; it must be a list"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
    ],
)
def test_what_is_wrong_with_a_hybrid_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        build_model(tiny_config("qwen3_next") | change, dtype=torch.float32)


def test_defaults_are_the_familys():
    """What transformers takes for a field that isn't there, or null."""
    config = tiny_config("qwen3_next")
    config.pop("norm_topk_prob")
    config.pop("rope_parameters", None)
    parsed = family(config).parse(config | {"partial_rotary_factor": None})
    assert parsed.norm_topk_prob
    assert parsed.rope.dim == parsed.head_dim // 4
    config = tiny_config("qwen3_moe")
    del config["head_dim"]
    assert family(config).parse(config).head_dim == config["hidden_size"] // config["num_attention_heads"]


@pytest.mark.parametrize("name", [name for name in reference.FAMILIES if name != "deepseek_v3"])
def test_a_config_means_the_same_as_transformers_writes_it(name):
    import transformers

    published = tiny_config(name)
    fields = {key: value for key, value in published.items() if key != "model_type"}
    written = transformers.AutoConfig.for_model(published["model_type"], **fields).to_dict()
    assert family(written).parse(written) == family(published).parse(published)


def test_yarn_magnitude_follows_mscale():
    scaling = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = tiny_config("qwen3") | {"rope_scaling": scaling, "rope_parameters": None}
    assert family(config).parse(config).rope.magnitude == 1.0


def channels(**changes):
    """compressed-tensors' FP8 by channel, with changes of its group's parts; `...` for a field leaves it out."""
    group = CHANNELS["config_groups"]["group_0"]
    parts = {
        part: {key: value for key, value in {**group[part], **values}.items() if value is not ...}
        for part, values in changes.items()
    }
    return {**CHANNELS, "config_groups": {"group_0": {**group, **parts}}}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("fp8", "quantization_config is 'fp8'; it must be an object"),
        ({"quant_method": "awq"}, "'awq' .* is not supported"),
        ({"quant_method": "compressed-tensors"}, "config_groups is None; exactly one group is supported"),
        (channels(weights={"num_bits": 4}), "has weights .*'num_bits': 4.* is supported"),
        (channels(weights={"strategy": "tensor"}), "has weights .*'tensor'"),
        (channels(input_activations={"dynamic": False}), "has input_activations .*'dynamic': False"),
        (channels(weights={"strategy": ...}), "has weights {'type': 'float', 'num_bits': 8, 'dynamic'"),
        (channels(input_activations={"dynamic": ...}), "has input_activations .*'token', 'symmetric': True}"),
        ({**channels(), "format": "pack-quantized"}, "format 'pack-quantized' is not supported; supported: 'float-"),
        ({**channels(), "ignore": ["re:.*gate", "re:("]}, r"ignore has '\(', which is no regular .*: unclosed group"),
        ({**channels(), "ignore": ["re:a{99999999999}"]}, r"ignore has 'a\{99999999999\}'"),
        ({**channels(), "ignore": ["re:" + "(" * 5000]}, r"ignore has '\(+\.\.\.', which is no regular expression"),
        ({**channels(), "ignore": ["re:(?!.*gate).*"]}, "linear time: look-around, .*, is not supported"),
        (
            {**channels(), "ignore": [r"re:\w{200}" + "x" * i for i in range(30)]},
            "the 30 regular .* too large together",
        ),
        ({**channels(), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is {'num_bits': 8}, .*; it must be null"),
        ({**channels(), "transform_config": {"config_groups": {"R1": {}}}}, "transform_config is .*; it must be null"),
        ({**channels(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is .*sparse-24-bitmask"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "both must be at least 1"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128 is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "static"}, "'static' is not supp"),
    ],
)
def test_quantisation_that_is_not_supported_is_named(quantization, message):
    with pytest.raises(ValueError, match=message):
        scheme_of({"quantization_config": quantization}, torch.bfloat16)


def test_modules_kept_in_high_precision_are_found_under_all_their_names():
    skip = ["model.language_model.layers.3.self_attn", "o_proj"]
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": skip}
    scheme = scheme_of({"quantization_config": quantization}, torch.bfloat16)
    plain = [
        layer for layer in (3, 4, 33) if scheme.format(f"model.layers.{layer}.self_attn.q_proj.weight").block is None
    ]
    assert plain == [3]
    assert scheme.format("model.layers.4.self_attn.o_proj.weight").block is None


def test_scales_by_channel_are_told_by_the_config_or_by_what_is_stored():
    quantization = {**channels(), "ignore": ["lm_head", "re:.*self_attn.o_proj$"]}
    declared = scheme_of({"quantization_config": quantization}, torch.bfloat16)
    names = [f"model.layers.0.{module}.weight" for module in ("mlp.up_proj", "self_attn.o_proj", "mlp.gate")]
    assert [declared.format(name).block for name in names] == [(1, WHOLE_ROW), None, None]
    assert str(declared.format(names[0])) == "float8_e4m3fn/1xrow:bfloat16"
    stored = {names[1] + "_scale_inv": torch.float32}
    found = scheme_of({"quantization_config": quantization}, torch.bfloat16, stored=stored)
    assert [found.format(name).block for name in names] == [None, (1, WHOLE_ROW), None]


def test_what_compressed_tensors_writes_beside_the_scheme_is_accepted():
    """Fields that say nothing, as checkpoints of several years have them; those of 2024 under `compression_config`."""
    unset = {"actorder": None, "block_structure": None, "group_size": None, "observer": "minmax", "observer_kwargs": {}}
    quantization = {**channels(weights=unset, input_activations={**unset, "observer": None}), "version": "0.12.2"}
    quantization |= {"sparsity_config": {"format": "dense"}, "transform_config": {}, "global_compression_ratio": None}
    quantization["config_groups"]["group_0"] |= {"output_activations": None, "format": "float-quantized"}
    for key in ("quantization_config", "compression_config"):
        scheme = scheme_of({key: quantization}, torch.bfloat16)
        assert scheme.format("model.layers.0.mlp.up_proj.weight").block == (1, WHOLE_ROW)


@pytest.mark.timeout(20)
def test_patterns_of_an_untrusted_config_take_no_longer_than_names_are_long():
    patterns = ["re:(([a-z0-9_.])+)+!", "re:" + "(.*)" * 30 + "!", *(f"re:.*x{i}$" for i in range(2000))]
    scheme = scheme_of({"quantization_config": {**channels(), "ignore": patterns}}, torch.bfloat16)
    for layer in range(100):
        assert scheme.format(f"model.layers.{layer}.self_attn.q_proj.weight").block == (1, WHOLE_ROW)


def test_patterns_of_stored_tensors_are_not_asked():
    """What is stored decides, so that a pattern that we can't match keeps no checkpoint from being served."""
    quantization = {**channels(), "ignore": ["re:(?!.*gate).*"]}
    stored = {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.float32}
    scheme = scheme_of({"quantization_config": quantization}, torch.bfloat16, stored=stored)
    assert scheme.format("model.layers.0.mlp.up_proj.weight").block == (1, WHOLE_ROW)


def test_patterns_see_published_names():
    ignored = [
        r"re:model\.language_model\.layers\.0\..*",
        "re:^(?:model.visual|lm_head)",
        "model.language_model.layers.2.mlp",
    ]
    quantization = {**channels(), "ignore": ignored}
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(3)]
    several = scheme_of({"quantization_config": quantization, "text_config": {}}, torch.bfloat16)
    assert [several.format(name).is_plain for name in names] == [True, False, True]
    text = scheme_of({"quantization_config": quantization}, torch.bfloat16)
    assert [text.format(name).is_plain for name in names] == [False, False, True]


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
