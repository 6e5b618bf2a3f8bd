"""experts against the model files' module, one token at a time, and over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

from firstlight.hardware import H200
from firstlight.ops.experts import experts
from firstlight.ops.experts.torch_grouped import run as grouped
from firstlight.ops.op import Call
from firstlight.quant import WHOLE_ROW, unpack
from firstlight.quant.blocks import pack_blocks

E, H, I, K = 8, 24, 16, 3


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    chosen = torch.rand(tokens, E, generator=torch.Generator().manual_seed(tokens)).topk(K).indices.int()
    weights = normal(tokens, K, dtype=dtype, seed=1).softmax(-1)
    return (
        normal(tokens, H, dtype=dtype, seed=2),
        weights,
        chosen,
        normal(E, 2 * I, H, dtype=dtype, seed=3),
        normal(E, H, I, dtype=dtype, seed=4),
    )


def formula(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Token by token, choice by choice."""
    y = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            if 0 <= expert < len(down):
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                y[token] += weight * (down[expert] @ (silu(gate) * up))
    return y


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
def test_is_the_formula(tokens: int) -> None:
    arguments = inputs(tokens)
    torch.testing.assert_close(experts(*arguments), formula(*arguments))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_is_the_model_files_module(dtype: torch.dtype, tolerance: float) -> None:
    """bfloat16: the model file adds in bfloat16, we in float32."""
    x, weights, chosen, gate_up, down = inputs(11, dtype)
    config = Qwen3_5MoeTextConfig(num_experts=E, hidden_size=H, moe_intermediate_size=I)
    config._experts_implementation = "eager"
    module = Qwen3_5MoeExperts(config)
    module.gate_up_proj.data, module.down_proj.data = gate_up, down
    expected = module(x, chosen.long(), weights).detach()
    scale = float(expected.abs().max())
    torch.testing.assert_close(experts(x, weights, chosen, gate_up, down), expected, rtol=0, atol=tolerance * scale)


def test_ranks_add_up_and_padding_gives_nothing() -> None:
    x, weights, chosen, gate_up, down = inputs(9)
    whole = experts(x, weights, chosen, gate_up, down)
    chosen[7:] = -1
    parts = [
        experts(x, weights, chosen, gate_up[part], down[part], first_expert=part.start)
        for part in (slice(0, 3), slice(3, 4), slice(4, 8))
    ]
    torch.testing.assert_close(sum(parts)[:7], whole[:7])
    assert all((part[7:] == 0).all() for part in parts)


def test_intermediate_shards_add_up() -> None:
    x, weights, chosen, gate_up, down = inputs(5)
    gate, up = gate_up.chunk(2, dim=1)
    parts = [
        experts(x, weights, chosen, torch.cat([gate[:, rows], up[:, rows]], dim=1), down[:, :, rows])
        for rows in (slice(0, 4), slice(4, 16))
    ]
    torch.testing.assert_close(parts[0] + parts[1], experts(x, weights, chosen, gate_up, down))


def test_a_token_does_not_depend_on_its_batch() -> None:
    x, weights, chosen, gate_up, down = inputs(13)
    whole = experts(x, weights, chosen, gate_up, down)
    alone = [experts(x[t : t + 1], weights[t : t + 1], chosen[t : t + 1], gate_up, down) for t in range(13)]
    torch.testing.assert_close(whole, torch.cat(alone))


def test_unrouted_nan_reaches_nobody() -> None:
    """A padding token of NaN, and NaN weights of an expert that nobody chose."""
    x, weights, chosen, gate_up, down = inputs(6)
    chosen = torch.where(chosen == 5, (chosen[:, :1] + 1) % 5, chosen)
    expected = experts(x, weights, chosen, gate_up, down)
    gate_up[5], down[5] = float("nan"), float("nan")
    chosen[5], weights[5], x[5] = -1, float("nan"), float("nan")
    y = experts(x, weights, chosen, gate_up, down)
    torch.testing.assert_close(y[:5], expected[:5])
    assert (y[5] == 0).all()


def test_packed_weights_are_the_values_they_stand_for() -> None:
    x, weights, chosen, gate_up, down = inputs(6, torch.float32)
    form: Any = ((16, 8), torch.float8_e4m3fn, torch.float32)
    packed = pack_blocks(gate_up, *form), pack_blocks(down, *form)
    values = [unpack(weight, torch.float32) for weight in packed]
    torch.testing.assert_close(
        experts(x, weights, chosen, *packed), experts(x, weights, chosen, *values), rtol=0, atol=0
    )


BLOCK, ROW = (128, 128), (1, WHOLE_ROW)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (None, None, None), (BLOCK, BLOCK, None), (ROW, ROW, None),
        (ROW, BLOCK, "not float8_e4m3fn/1xrow:float32 and float8_e4m3fn/128x128:float32"),
        (None, ROW, "not bfloat16 and float8_e4m3fn/1xrow:float32"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("provider", ["triton_few", "triton_grouped"])
def test_scales_that_triton_reads(provider: str, first: Any, second: Any, reason: str | None) -> None:
    """Those of both projections of one kind."""
    x, chosen = torch.zeros(3, 128, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int32)
    shapes = ((first, (4, 256, 128)), (second, (4, 128, 128)))
    gate_up, down = (
        x.new_zeros(shape)
        if block is None
        else pack_blocks(x.new_zeros(shape), block, torch.float8_e4m3fn, torch.float32)
        for block, shape in shapes
    )
    hardware = replace(H200, features=H200.features | {"triton"})
    found = experts.providers[provider].when(Call((x, chosen, chosen, gate_up, down), {}, None, hardware))
    assert found is None if reason is None else found is not None and found.endswith(reason)


@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_grouped_provider_is_the_reference(tokens: int) -> None:
    x, weights, chosen, gate_up, down = inputs(tokens, torch.bfloat16)
    chosen[-1] = -1
    for first in (0, 3):
        arguments = (x, weights, chosen, gate_up[: E - first], down[: E - first])
        expected = experts(*arguments, first_expert=first)
        actual = grouped(*arguments, first_expert=first)
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
        assert (actual[-1] == 0).all()
