import pytest
import torch
from ops.examples_a import normal
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from firstlight.hardware import CPU_GENERIC
from firstlight.ops.op import Call
from firstlight.ops.rms_norm import rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("zero_centred", "reference"), [(False, LlamaRMSNorm), (True, Qwen3NextRMSNorm)])
def test_equals_transformers(dtype: torch.dtype, zero_centred: bool, reference: type[torch.nn.Module]) -> None:
    norm = reference(33, eps=1e-5).to(dtype)
    norm.weight.data = normal(33, dtype=dtype)
    x = normal(7, 3, 33, dtype=dtype, seed=1) * 3
    out = rms_norm(x, norm.weight, eps=1e-5, zero_centred=zero_centred)
    assert out.dtype == dtype
    assert torch.equal(out, norm(x))


@pytest.mark.parametrize("zero_centred", [False, True])
def test_formula_in_float64(zero_centred: bool) -> None:
    x, weight = normal(5, 17, dtype=torch.float64), normal(17, dtype=torch.float64)
    expected = x / (x.square().sum(-1, keepdim=True) / 17 + 1e-3).sqrt() * (weight + zero_centred)
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-3, zero_centred=zero_centred), expected, rtol=1e-14, atol=0)
    single = rms_norm(x.float(), weight.float(), eps=1e-3, zero_centred=zero_centred)
    torch.testing.assert_close(single.double(), expected, rtol=1e-6, atol=1e-7)


def test_the_two_roundings_differ_in_bfloat16() -> None:
    x, weight = normal(64, 64, dtype=torch.bfloat16), normal(64, dtype=torch.bfloat16)
    twice = rms_norm(x, 1 + weight, eps=1e-6)
    assert not torch.equal(twice, rms_norm(x, weight, eps=1e-6, zero_centred=True))


def test_fused_keeps_the_contract_where_it_says_so() -> None:
    fused = rms_norm.providers["torch_fused"]
    x, weight = normal(5, 6, 33)[:, ::2], normal(33)
    call = Call((x, weight), {"eps": 1e-6}, None, CPU_GENERIC)
    assert fused.when(call) is None
    torch.testing.assert_close(fused.run(x, weight, eps=1e-6), rms_norm(x, weight, eps=1e-6), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("x", "weight", "zero_centred", "reason"),
    [
        (torch.bfloat16, torch.bfloat16, False, "rounds to torch.bfloat16 once"),
        (torch.float32, torch.float32, True, "zero-centred"),
        (torch.float32, torch.bfloat16, False, "the weight is torch.bfloat16"),
    ],
)
def test_fused_refuses(x: torch.dtype, weight: torch.dtype, zero_centred: bool, reason: str) -> None:
    args = (normal(5, 3, dtype=x), normal(3, dtype=weight))
    call = Call(args, {"eps": 1e-6, "zero_centred": zero_centred}, None, CPU_GENERIC)
    assert reason in str(rms_norm.providers["torch_fused"].when(call))
