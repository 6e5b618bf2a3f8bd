import pytest
import torch
from ops.examples_a import normal

from firstlight.hardware import CPU_GENERIC
from firstlight.ops.layer_norm import layer_norm
from firstlight.ops.op import Call


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]
)
def test_reference_and_fused_agree_with_float64(dtype: torch.dtype, rtol: float) -> None:
    x, weight, bias = normal(7, 33, dtype=dtype) + 2, normal(33, dtype=dtype), normal(33, dtype=dtype, seed=1)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double() + bias.double()
    fused = layer_norm.providers["torch_fused"]
    for run in (layer_norm.body, fused.run):
        torch.testing.assert_close(run(x, weight, bias, eps=1e-6).double(), expected, rtol=rtol, atol=rtol)
    assert fused.when(Call((x, weight, bias), {"eps": 1e-6}, None, CPU_GENERIC)) is None


def test_fused_refuses_mixed_dtypes() -> None:
    args = (normal(7, 33, dtype=torch.bfloat16), normal(33, dtype=torch.bfloat16), normal(33))
    reason = layer_norm.providers["torch_fused"].when(Call(args, {"eps": 1e-6}, None, CPU_GENERIC))
    assert reason == "the bias is torch.float32, the input torch.bfloat16"
