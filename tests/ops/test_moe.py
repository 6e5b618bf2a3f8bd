"""moe against the model files' blocks, and its partial sums over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from firstlight.hardware import H200
from firstlight.ops.moe import moe
from firstlight.ops.op import Call
from firstlight.quant import WHOLE_ROW
from firstlight.quant.blocks import pack_blocks

H, E, I, J = 24, 8, 10, 14


def randomised(module: nn.Module) -> nn.Module:
    """Every parameter and buffer random: nothing may be trivial."""
    generator = torch.Generator().manual_seed(0)
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = torch.randn(tensor.shape, generator=generator) * (tensor.shape[-1] ** -0.5)
    return module


def tokens() -> Tensor:
    return torch.randn(9, H, generator=torch.Generator().manual_seed(1))


def shared_weights(mlp: Any) -> tuple[Tensor, Tensor]:
    return torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach(), mlp.down_proj.weight.detach()


def qwen3_5() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = Qwen3_5MoeTextConfig(
        hidden_size=H,
        num_experts=E,
        num_experts_per_tok=3,
        moe_intermediate_size=I,
        shared_expert_intermediate_size=J,
    )
    config._experts_implementation = "eager"
    block: Any = randomised(Qwen3_5MoeSparseMoeBlock(config))
    weights = (block.gate.weight.data, block.experts.gate_up_proj.data, block.experts.down_proj.data)
    shared = (*shared_weights(block.shared_expert), block.shared_expert_gate.weight.data)
    return block, (*weights, *shared), {"top_k": 3, "renormalise": True}


def qwen3() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = Qwen3MoeConfig(
        hidden_size=H, num_experts=E, num_experts_per_tok=3, moe_intermediate_size=I, norm_topk_prob=False
    )
    config._experts_implementation = "eager"
    block: Any = randomised(Qwen3MoeSparseMoeBlock(config))
    weights = (block.gate.weight.data, block.experts.gate_up_proj.data, block.experts.down_proj.data)
    return block, (*weights, None, None, None), {"top_k": 3, "renormalise": False}


def deepseek() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = DeepseekV3Config(
        hidden_size=H,
        n_routed_experts=E,
        num_experts_per_tok=3,
        moe_intermediate_size=I,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    config._experts_implementation = "eager"
    block: Any = randomised(DeepseekV3MoE(config))
    weights = (block.gate.weight.data, block.experts.gate_up_proj.data, block.experts.down_proj.data)
    options = {"scoring": "sigmoid", "bias": block.gate.e_score_correction_bias.data, "scale": 2.5}
    options |= {"top_k": 3, "renormalise": True, "groups": 4, "top_groups": 2}
    return block, (*weights, *shared_weights(block.shared_experts), None), options


@pytest.mark.parametrize("family", [qwen3_5, qwen3, deepseek], ids=["qwen3_5_moe", "qwen3_moe", "deepseek_v3"])
def test_is_the_model_files_block(family: Any) -> None:
    block, weights, options = family()
    x = tokens()
    with torch.no_grad():
        expected = block(x.unsqueeze(0))[0]
    torch.testing.assert_close(moe(x, *weights, live=None, **options), expected, rtol=1e-5, atol=1e-5)


def test_the_router_computes_in_its_own_dtype() -> None:
    """Logits that differ by less than bfloat16 can hold still tell experts apart."""
    router = torch.zeros(E, H)
    router[5, 0], router[2, 0] = 1.0001, 1.0
    x = torch.ones(1, H, dtype=torch.bfloat16)
    gate_up = torch.ones(E, 2 * I, H, dtype=torch.bfloat16) / H
    down = torch.arange(E)[:, None, None].expand(E, H, I).bfloat16() / I
    y = moe(x, router, gate_up, down, None, None, None, live=None, top_k=1, renormalise=True)
    torch.testing.assert_close(y[0, 0].float(), torch.tensor(5 * 0.731), rtol=2e-2, atol=0)


@pytest.mark.parametrize("split", ["intermediate", "experts"])
def test_ranks_add_up(split: str) -> None:
    _, weights, options = qwen3_5()
    router, gate_up, down, shared_gate_up, shared_down, shared_gate = weights
    x, live = tokens(), torch.tensor([7])
    whole = moe(x, *weights, live=live, **options)

    def halves(tensor: Tensor, dim: int) -> list[Tensor]:
        """The two ranks' rows of gate | up stacked along `dim`."""
        gate, up = tensor.chunk(2, dim)
        return [torch.cat(pair, dim) for pair in zip(gate.chunk(2, dim), up.chunk(2, dim), strict=True)]

    shared = zip(halves(shared_gate_up, 0), shared_down.chunk(2, 1), strict=True)
    total = torch.zeros_like(x)
    for rank, (shared_rows, shared_columns) in enumerate(shared):
        if split == "intermediate":
            local, first = (halves(gate_up, 1)[rank], down.chunk(2, 2)[rank]), 0
        else:
            local, first = (gate_up.chunk(2)[rank], down.chunk(2)[rank]), rank * E // 2
        total += moe(
            x, router, *local, shared_rows, shared_columns, shared_gate, live=live, first_expert=first, **options
        )
    torch.testing.assert_close(total[:7], whole[:7], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored_alike", [True, False])
@pytest.mark.parametrize("provider", ["triton_few", "triton_grouped"])
def test_triton_folds_in_a_shared_expert_stored_like_the_others(provider: str, stored_alike: bool) -> None:
    """One that a checkpoint leaves plain, beside experts with a scale a row, is left to the parts."""
    x, gate = torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(1, 128, dtype=torch.bfloat16)
    gate_up, down, shared_gate_up, shared_down = (
        pack_blocks(x.new_zeros(shape), (1, WHOLE_ROW), torch.float8_e4m3fn, torch.float32)
        for shape in ((4, 256, 128), (4, 128, 128), (256, 128), (128, 128))
    )
    shared = (shared_gate_up, shared_down) if stored_alike else (x.new_zeros(256, 128), x.new_zeros(128, 128))
    options = {"live": None, "top_k": 2, "renormalise": True}
    hardware = replace(H200, features=H200.features | {"triton"})
    call = Call((x, x, gate_up, down, *shared, gate), options, None, hardware)
    expected = None if stored_alike else "shared_gate_up is bfloat16, the other experts float8_e4m3fn/1xrow:float32"
    assert moe.providers[provider].when(call) == expected
