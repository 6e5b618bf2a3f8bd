"""Loading proves that every weight is there, once, in the right shape; and a rank gets exactly its part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import CHANNELS, quantise_checkpoint, stack_experts
from forward import load
from reference import save_checkpoint, tiny_config
from safetensors.torch import load_file, save_file

from firstlight.errors import CheckpointError
from firstlight.models import build_model
from firstlight.models.registry import PREDICTED_ONLY
from firstlight.nn.module import Module
from firstlight.parallel import Mesh
from firstlight.quant import WHOLE_ROW, Scheme, scheme_of, unpack
from firstlight.weights.loader import load_weights
from firstlight.weights.random_weights import random_tensors

CONFIGS = Path(__file__).parent.parent / "configs"
RUNNABLE = [
    path for path in sorted(CONFIGS.glob("*.json")) if json.loads(path.read_text())["model_type"] not in PREDICTED_ONLY
]


def change(directory, edit):
    """Rewrite a saved checkpoint's tensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    return directory


def test_a_missing_tensor_is_named(tmp_path):
    save_checkpoint("qwen3", tmp_path)
    change(tmp_path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(tmp_path)


def test_a_missing_expert_is_named(tmp_path):
    save_checkpoint("qwen3_moe", tmp_path)
    change(tmp_path, lambda t: t.pop("model.layers.0.mlp.experts.5.down_proj.weight"))
    with pytest.raises(CheckpointError, match=r"experts\.5\.down_proj\.weight is missing"):
        load(tmp_path)


def test_an_unknown_tensor_is_named(tmp_path):
    save_checkpoint("llama", tmp_path)
    change(tmp_path, lambda t: t.update({"model.layers.0.self_attn.sinks": torch.zeros(4)}))
    with pytest.raises(
        CheckpointError, match=r"self_attn\.sinks is in the checkpoint, but the model has no use for it"
    ):
        load(tmp_path)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path):
    save_checkpoint("llama", tmp_path)
    change(tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(130)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[130\]; the model needs \[128\]"):
        load(tmp_path)


def test_a_tensor_in_two_places_is_named(tmp_path):
    save_checkpoint("qwen3_5", tmp_path)
    name = "model.language_model.norm.weight"
    change(tmp_path, lambda t: t.update({"model.norm.weight": t[name].clone()}))
    with pytest.raises(CheckpointError, match=r"is there twice"):
        load(tmp_path)


def test_experts_in_two_forms_are_refused(tmp_path):
    save_checkpoint("qwen3_moe", tmp_path)
    change(tmp_path, lambda t: t.update({k: v for k, v in stack_experts(t).items() if k not in t}))
    with pytest.raises(CheckpointError, match=r"stored in two forms"):
        load(tmp_path)


def test_a_missing_scale_is_a_plain_weight_of_the_wrong_type_only_if_declared(tmp_path):
    """Without its scale an FP8 weight would be read as plain numbers: the scale's absence decides, and shapes must fit."""
    quantise_checkpoint(tmp_path, "qwen3", (128, 128), torch.float32)
    change(tmp_path, lambda t: t.update({"model.layers.0.self_attn.k_proj.weight_scale_inv": torch.ones(7, 7)}))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight_scale_inv has shape \[7, 7\]"):
        load(tmp_path)


def test_fp8_values_without_their_scale_are_refused(tmp_path):
    quantise_checkpoint(tmp_path, "qwen3", (128, 128), torch.float32)
    change(tmp_path, lambda t: t.pop("model.layers.0.self_attn.k_proj.weight_scale_inv"))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight is float8_e4m3fn; .*weight_scale_inv is missing"):
        load(tmp_path)


def test_scales_by_channel_are_missed_under_their_names(tmp_path):
    quantise_checkpoint(tmp_path, "qwen3_moe", (1, WHOLE_ROW), torch.float32)
    missing = "model.layers.0.mlp.experts.2.down_proj.weight_scale"
    change(tmp_path, lambda t: t.pop(missing))
    with pytest.raises(CheckpointError, match=f"tensor {missing} or {missing}_inv is missing from the checkpoint"):
        load(tmp_path)
    missing = "model.layers.0.self_attn.k_proj.weight_scale"
    change(tmp_path, lambda t: t.pop(missing))
    with pytest.raises(CheckpointError, match=f"float8_e4m3fn; .*; tensor {missing} or {missing}_inv is missing"):
        load(tmp_path)


def _exponents(scale):
    return (scale.log2().round() + 127).to(torch.uint8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda scale: scale[:, 0].clone(), r"up_proj\.weight_scale has shape \[256\]; the model needs \[256, 1\]"),
        (lambda scale: scale[:-1].clone(), r"up_proj\.weight_scale has shape \[255, 1\]; the model needs \[256, 1\]"),
        (lambda scale: scale[0, 0].clone(), r"up_proj\.weight_scale has shape \[\]; the model needs \[256, 1\]"),
        (_exponents, r"up_proj\.weight_scale is uint8; scales in bfloat16, float16, float32 are supported"),
        (lambda scale: scale.to(torch.float8_e8m0fnu), r"up_proj\.weight_scale is float8_e8m0fnu; scales in bfloat16"),
    ],
    ids=["one dimension", "short", "one", "bytes", "exponents"],
)
def test_scales_by_channel_of_another_kind_are_refused(changed, message, tmp_path):
    quantise_checkpoint(tmp_path, "qwen3", (1, WHOLE_ROW), torch.float32)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    change(tmp_path, lambda t: t.update({name: changed(t[name])}))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_experts_whose_scales_differ_in_dtype_are_refused(tmp_path):
    """They share one stack, in which the finer scales would be rounded."""
    quantise_checkpoint(tmp_path, "qwen3_moe", (128, 128), torch.bfloat16)
    name = "model.layers.0.mlp.experts.5.down_proj.weight_scale_inv"
    change(tmp_path, lambda t: t.update({name: t[name].float()}))
    with pytest.raises(CheckpointError, match=r"5\.down_proj\.weight_scale_inv is float32; the rest .* is bfloat16"):
        load(tmp_path)


def test_a_head_that_is_tied_by_config_only_is_refused(tmp_path):
    save_checkpoint("smollm2", tmp_path)
    change(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(tmp_path)
    change(tmp_path, lambda t: t["lm_head.weight"].neg_())
    with pytest.raises(
        CheckpointError, match=r"tie_word_embeddings, but tensor lm_head\.weight isn't model\.embed_tok"
    ):
        load(tmp_path)


@pytest.mark.parametrize("part", ["mlp.experts.{expert}", "mlp.shared_expert"])
def test_gate_and_up_in_two_gguf_types_become_plain(part):
    """A Q4_0 row has as many bytes as a Q4_K row: one read as the other is noise, not an error."""
    config = tiny_config("qwen3_5_moe_text")
    names = [f"model.layers.0.{part.replace('{expert}', '0')}.{which}_proj.weight" for which in ("gate", "up")]
    for second, kept in (("Q4_0", "Q4_0"), ("Q8_0", "float32")):
        scheme = scheme_of(config, torch.float32, ggml_types=dict(zip(names, ("Q4_0", second), strict=True)))
        mlp = build_model(config, dtype=torch.float32, scheme=scheme).layers[0].mlp
        spec = mlp.weight_specs["gate_up_proj" if "experts." in part else "shared_gate_up_proj"]
        assert spec.format.dtype == kept


def weights(model):
    """Every weight of a model, unpacked, by path."""
    return {
        (path, name): unpack(getattr(module, name), torch.float32)
        for path, module in model.named_modules()
        if isinstance(module, Module)
        for name in module.weight_specs
    }


WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 192, "moe_intermediate_size": 96}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
HYBRID = {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "shared_expert_intermediate_size": 96}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize("quantisation", [{}, BLOCKS, CHANNELS], ids=["plain", "blocks", "channels"])
def test_each_rank_gets_exactly_its_part(name, ranks, quantisation, tmp_path):
    """Put together along the split, all ranks' weights are the whole; FP8 blocks and rows that are cut inside stay exact."""
    changes = WIDE | (HYBRID if name.startswith(("qwen3_next", "qwen3_5")) else {})
    config = json.loads((Path(__file__).parent.parent / "tiny_configs" / f"{name}.json").read_text()) | changes
    scheme = Scheme(torch.float32)
    if quantisation:
        config["quantization_config"] = quantisation
        scheme = scheme_of(config, torch.float32)
    whole = build_model(config, dtype=torch.float32, scheme=scheme)
    tensors = random_tensors(whole, 0, "cpu")
    load_weights(whole, tensors, "cpu")
    parts = []
    for rank in range(ranks):
        part = build_model(config, dtype=torch.float32, scheme=scheme, mesh=Mesh.of(rank, tp=ranks))
        load_weights(part, tensors, "cpu")
        if quantisation is CHANNELS:  # a rank's part of a row has the row's scale
            assert part.layers[-1].mixer.o_proj.weight.format.block == (1, WHOLE_ROW)
        parts.append(weights(part))
    for path, module in whole.named_modules():
        if not isinstance(module, Module):
            continue
        for attribute, spec in module.weight_specs.items():
            expected = unpack(getattr(module, attribute), torch.float32)
            offset = 0
            for segment in spec.segments:
                piece = expected.narrow(spec.axis, offset, segment.size)
                local = [_segment(part[path, attribute], spec, segment, rank, ranks) for rank, part in enumerate(parts)]
                units = 1 if segment.unit is None else segment.size // segment.unit
                copies = ranks if segment.unit is None else max(ranks // units, 1)
                for copy in range(copies):
                    assert torch.equal(torch.cat(local[copy::copies], spec.axis), piece), (
                        path,
                        attribute,
                        segment.source,
                    )
                offset += segment.size


def _segment(local, spec, segment, rank, ranks):
    """A segment's part of a rank's weight."""
    held = {id(s): (s.size if s.unit is None else max(s.size // ranks, s.unit)) for s in spec.segments}
    start = sum(held[id(s)] for s in spec.segments[: spec.segments.index(segment)])
    return local.narrow(spec.axis, start, held[id(segment)])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.stem)
def test_published_configs_split_over_ranks(path, ranks):
    """Every published model of these families is described as rank r of n; the parts add up to the whole."""
    config = json.loads(path.read_text())
    dtype = torch.bfloat16
    heads = (
        (config.get("text_config") or config)["linear_num_key_heads"] if "linear_num_key_heads" in str(config) else 8
    )
    model = build_model(config, dtype=dtype, scheme=scheme_of(config, dtype), mesh=Mesh.of(ranks - 1, tp=ranks))
    assert heads % ranks == 0
    down = model.layers[0].mlp
    spec = next(iter(down.weight_specs.values()), None) or next(iter(down.gate_up_proj.weight_specs.values()))
    assert spec.local_shape is not None
    sizes = sum(
        torch.Size(spec.local_shape).numel()
        for module in model.modules()
        if isinstance(module, Module)
        for spec in module.weight_specs.values()
        if all(segment.unit for segment in spec.segments) and not any(segment.replicate for segment in spec.segments)
    )
    whole = sum(
        torch.Size(spec.shape).numel()
        for module in model.modules()
        if isinstance(module, Module)
        for spec in module.weight_specs.values()
        if all(segment.unit for segment in spec.segments) and not any(segment.replicate for segment in spec.segments)
    )
    assert sizes * ranks == whole
