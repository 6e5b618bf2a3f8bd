"""Families beyond those that run: of the published size, and with the costs that their designs are known for."""

from __future__ import annotations

import math

import pytest
from predict.priced import config, priced

from firstlight.cli.explain import command
from firstlight.errors import FirstlightError
from firstlight.hardware import GPUS
from firstlight.models.registry import FAMILIES, PREDICTED_ONLY
from firstlight.nn.module import Module
from firstlight.predict.layout import Layout, build, step_model
from firstlight.predict.memory import weight_bytes
from firstlight.predict.shape import StepShape

PUBLISHED = {  # parameters in thousands of millions, without multi-token prediction
    "DeepSeek-V3.2": 671.9,
    "Kimi-K2-Instruct": 1026.5,
    "Kimi-Linear-48B-A3B": 49.1,
    "gpt-oss-120b": 116.8,
    "Qwen3-235B-A22B": 235.1,
    "Qwen3.5-397B-A17B": 396.8,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_their_published_size(name):
    model = build(config(name), Layout())
    count = sum(
        math.prod(spec.shape)
        for path, module in model.named_modules()
        if isinstance(module, Module) and not path.startswith("visual")
        for spec in module.weight_specs.values()
    )
    assert count / 1e9 == pytest.approx(PUBLISHED[name], rel=2e-3)


def attention_bytes(name, context):
    step = priced(name, "b200").time(StepShape.of_decode(1, context))
    return sum(float(item.moved[0]) for item in step.kernels if item.kernel.kind == "attention")


def test_sparse_attention_reads_few_latents_and_all_index_keys():
    layers, latent, index = 61, 576 * 2, 128 * 2
    grown = attention_bytes("DeepSeek-V3.2", 100_000) - attention_bytes("DeepSeek-V3.2", 50_000)
    assert grown == pytest.approx(50_000 * layers * index)
    below = attention_bytes("DeepSeek-V3.2", 2000) - attention_bytes("DeepSeek-V3.2", 1000)
    assert below == pytest.approx(1000 * layers * (index + latent))


def test_windows_stop_growing():
    row, layers = 2 * 8 * 64 * 2, 36
    grown = attention_bytes("gpt-oss-120b", 60_000) - attention_bytes("gpt-oss-120b", 50_000)
    assert grown == pytest.approx(10_000 * row * layers / 2)


def test_four_bit_experts_take_four_bits_and_their_scales():
    experts = 36 * 128 * 3 * 2880 * 2880
    assert weight_bytes(build(config("gpt-oss-120b"), Layout())) == pytest.approx(experts * 17 / 32 + 4.5e9, rel=0.02)


def test_four_bits_of_another_family_are_refused_as_by_a_run():
    for method in ("mxfp4", "awq"):
        with pytest.raises(FirstlightError, match=f"quant_method '{method}' .* is not supported"):
            build({**config("Qwen3-8B"), "quantization_config": {"quant_method": method}}, Layout())


@pytest.mark.parametrize("given", ["fp8", ["fp8"], 8])
@pytest.mark.parametrize("name", ["Qwen3-8B", "gpt-oss-120b"])
def test_quantization_that_is_no_object_is_refused(name, given):
    with pytest.raises(FirstlightError, match=r"quantization_config is .*; it must be an object"):
        build({**config(name), "quantization_config": given}, Layout())


@pytest.mark.parametrize("given", ["float99", "int8", "float64", "nn", "Tensor", ["bfloat16"], 16])
def test_a_dtype_that_cannot_be_predicted_is_named_with_those_that_can(given):
    raw = {key: value for key, value in config("Qwen3-8B").items() if key not in ("dtype", "torch_dtype")}
    for key in ("dtype", "torch_dtype"):
        with pytest.raises(FirstlightError) as caught:
            build({**raw, key: given}, Layout())
        assert str(caught.value) == (
            f"config.json: dtype {str(given)!r} can't be predicted; "
            "it must be one of bfloat16, float16, float32, or left out"
        )


def test_dtypes_that_can_be_predicted_are_the_models_own():
    raw = {key: value for key, value in config("Qwen3-8B").items() if key not in ("dtype", "torch_dtype")}
    plain = weight_bytes(build(raw, Layout()))
    for name, times in (("bfloat16", 1), ("torch.float16", 1), ("float32", 2)):
        model = build({**raw, "torch_dtype": name}, Layout())
        assert weight_bytes(model) == times * plain
        step_model(model, GPUS["h200"], Layout()).time(StepShape.of_decode(1, 4096))


def test_linear_layers_keep_a_state_and_no_keys():
    step = priced("Kimi-Linear-48B-A3B", "h200").time(StepShape.of_decode(1, 4096))
    states = sum(float(item.moved[0]) for item in step.kernels if item.kernel.kind == "state")
    assert states == pytest.approx(20 * 2 * 32 * 128 * 128 * 4, rel=0.1)
    assert (
        attention_bytes("Kimi-Linear-48B-A3B", 8192) - attention_bytes("Kimi-Linear-48B-A3B", 4096)
        == 4096 * 7 * 576 * 2
    )


def test_the_command_says_what_cannot_run(capsys):
    assert set(FAMILIES) > PREDICTED_ONLY
    path = str(__file__).replace("predict/test_families.py", "configs/gpt-oss-120b.json")
    command(model=path, table=None, batch=1, what_if=False)
    assert "can be predicted, not run yet" in capsys.readouterr().out
