"""gated_delta against the model file's layer, through prefill, decode, second chunks, sharing and speculation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.delta_inputs import export_rows, ints, poisoned, starts, worst_row_error
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from firstlight.ops.causal_conv.torch_decode import run as conv_decode
from firstlight.ops.gated_delta import gated_delta
from firstlight.ops.gated_delta_rule import DeltaLog
from firstlight.ops.gated_delta_rule.torch_chunked import run as rule_chunked
from firstlight.ops.gated_delta_rule.torch_decode import run as rule_decode

SIZES = {"key_heads": 2, "value_heads": 6, "key_dim": 16, "value_dim": 8, "eps": 1e-6}
CHANNELS, SLOTS, RING = 2 * 2 * 16 + 6 * 8, 8, 8
NO_EXPORTS = export_rows()


class Layer:
    """The model file's layer with random weights, and ours on the same weights with its own pools."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        config = Qwen3_5TextConfig(
            hidden_size=32,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=16,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=4,
        )
        self.theirs: Any = Qwen3_5GatedDeltaNet(config, 0)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.theirs.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
        self.theirs.to(dtype)
        self.conv_pool = poisoned(SLOTS, CHANNELS, 3, dtype=dtype)
        self.state_pool = poisoned(SLOTS, 6, 8, 16, dtype=torch.float32 if dtype != torch.float64 else dtype)
        self.log = DeltaLog(
            k=poisoned(SLOTS, RING, 2, 16, dtype=dtype),
            u=poisoned(SLOTS, RING, 6, 8, dtype=self.state_pool.dtype),
            g=poisoned(SLOTS, RING, 6, dtype=self.state_pool.dtype),
            conv=poisoned(SLOTS, RING, CHANNELS, dtype=dtype),
        )

    @torch.no_grad()
    def expected(self, x: Tensor) -> Tensor:
        """The model file's output for whole sequences [T, H], before its out_proj."""
        taken: list[Tensor] = []
        handle = self.theirs.out_proj.register_forward_pre_hook(lambda module, args: taken.append(args[0][0]))
        self.theirs(x.unsqueeze(0))
        handle.remove()
        return taken[0]

    @torch.no_grad()
    def step(
        self,
        x: Tensor,
        counts: list[int],
        state_in: Tensor,
        state_out: Tensor,
        *,
        exports: Tensor = NO_EXPORTS,
        quick: bool = False,
        **options: Any,
    ) -> Tensor:
        """Our output for a step; `quick` takes the providers instead of the references."""
        layer = self.theirs
        run = gated_delta.reference
        if quick:
            decode = max(counts) == 1
            parts = {name: part.reference for name, part in gated_delta.parts.items()}
            parts["gated_delta_rule"] = rule_decode if decode else rule_chunked
            if decode:
                parts["causal_conv"] = conv_decode
            run = gated_delta.compose(parts)
        return run(
            layer.in_proj_qkv(x),
            layer.in_proj_z(x),
            layer.in_proj_a(x),
            layer.in_proj_b(x),
            layer.conv1d.weight.squeeze(1),
            layer.A_log,
            layer.dt_bias,
            layer.norm.weight,
            self.conv_pool,
            self.state_pool,
            starts(counts),
            state_in,
            state_out,
            exports,
            max_query=max(counts),
            **SIZES,
            **options,
        )


def tokens(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("quick", [False, True], ids=["references", "providers"])
@pytest.mark.parametrize("cuts", [[75], [50, *[1] * 25], [64, 11], [7] * 11])
def test_prefill_decode_and_chunks_are_the_model_files_layer(cuts: list[int], quick: bool) -> None:
    layer, x = Layer(), tokens(sum(cuts))
    parts = []
    for index, part in enumerate(x.split(cuts)):
        parts.append(layer.step(part, [len(part)], ints(1 if index else 0), ints(1), quick=quick))
    assert worst_row_error(torch.cat(parts), layer.expected(x)) < 1e-5


@pytest.mark.parametrize("quick", [False, True], ids=["references", "providers"])
def test_bfloat16_stays_within_its_rounding(quick: bool) -> None:
    """Against the same layer in float32 on the same rounded weights: not farther than the model file's own bfloat16."""
    layer, x = Layer(torch.bfloat16), tokens(96, dtype=torch.bfloat16)
    theirs = layer.expected(x)
    ours = layer.step(x, [96], ints(0), ints(1), quick=quick)
    layer.theirs.float()
    exact = layer.expected(x.float())
    assert worst_row_error(ours, exact) < 1.2 * worst_row_error(theirs, exact)


@pytest.mark.parametrize("quick", [False, True], ids=["references", "providers"])
def test_continuations_of_an_exported_prefix(quick: bool) -> None:
    """A prefix exported inside a prefill, read by three decoding requests at once, one of which is the null slot."""
    layer, prompt = Layer(), tokens(40)
    layer.step(prompt, [40], ints(0), ints(1), exports=export_rows((0, 33, 2)), quick=quick)
    x = tokens(4, 1)
    y = layer.step(x, [1, 1, 1, 1], ints(1, 2, 2, 0), ints(1, 3, 4, 5), quick=quick)
    prefixes = [prompt, prompt[:33], prompt[:33], prompt[:0]]
    expected = [layer.expected(torch.cat([prefix, x[i : i + 1]]))[-1:] for i, prefix in enumerate(prefixes)]
    assert worst_row_error(y, torch.cat(expected)) < 1e-5
    assert layer.conv_pool[6:].isnan().all()
    assert layer.state_pool[6:].isnan().all()


@pytest.mark.parametrize("quick", [False, True], ids=["references", "providers"])
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_speculation_is_plain_decoding(accepted: int, quick: bool) -> None:
    """Verify 3 drafts, keep some, verify 2 more, fold into another slot with one more, then decode from there."""
    layer, prompt, drafts, more = Layer(), tokens(10), tokens(3, 1), tokens(4, 2)
    layer.step(prompt, [10], ints(0), ints(1), quick=quick)
    states = layer.conv_pool[1].clone(), layer.state_pool[1].clone()

    def speculate(x: Tensor, state_out: int, length: int) -> Tensor:
        return layer.step(
            torch.cat([x, tokens(1, 9)]),
            [len(x), 1],
            ints(1, 0),
            ints(state_out, 0),
            quick=quick and len(x) > 1,
            log=layer.log,
            log_length=ints(length, 0),
        )[: len(x)]

    verified = speculate(drafts, 0, 0)
    second = speculate(more[:2], 0, accepted)
    torch.testing.assert_close((layer.conv_pool[1], layer.state_pool[1]), states, rtol=0, atol=0)
    third = speculate(more[2:3], 2, accepted + 2)
    fourth = layer.step(more[3:], [1], ints(2), ints(2), quick=quick)
    kept = layer.expected(torch.cat([prompt, drafts[:accepted], more]))[-4:]
    assert worst_row_error(verified, layer.expected(torch.cat([prompt, drafts]))[-3:]) < 1e-5
    assert worst_row_error(torch.cat([second, third, fourth]), kept) < 1e-5
