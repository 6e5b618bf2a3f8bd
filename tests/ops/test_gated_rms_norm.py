import pytest
import torch
from ops.examples_a import normal
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from firstlight.ops.gated_rms_norm import gated_rms_norm


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    norm = Qwen3NextRMSNormGated(33, eps=1e-5)
    norm.weight.data = normal(33, dtype=weight_dtype)
    x, gate = normal(7, 3, 33, dtype=dtype), normal(7, 3, 33, dtype=dtype, seed=1)
    out = gated_rms_norm(x, gate, norm.weight, eps=1e-5)
    assert out.dtype == dtype
    assert torch.equal(out, norm(x, gate))


def test_formula_in_float64() -> None:
    x, gate, weight = (normal(*shape, dtype=torch.float64, seed=9) for shape in ((5, 17), (5, 17), (17,)))
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = normed * weight * gate / (1 + torch.exp(-gate))
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, eps=1e-3), expected, rtol=1e-13, atol=0)
