import pytest
import torch
from ops.examples_a import normal

from firstlight.ops.sigmoid_mul import sigmoid_mul
from firstlight.ops.silu_mul import silu_mul

TOLERANCE = [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]


@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCE)
def test_silu_mul(dtype: torch.dtype, rtol: float) -> None:
    x = normal(5, 34, dtype=dtype)
    gate, up = x.double()[:, :17], x.double()[:, 17:]
    out = silu_mul(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), gate / (1 + torch.exp(-gate)) * up, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("columns", [1, 17])
@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCE)
def test_sigmoid_mul(dtype: torch.dtype, rtol: float, columns: int) -> None:
    x, gate = normal(5, 17, dtype=dtype), normal(5, columns, dtype=dtype, seed=1)
    out = sigmoid_mul(x, gate)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), x.double() / (1 + torch.exp(-gate.double())), rtol=rtol, atol=rtol)


def test_gates_round_as_transformers_does() -> None:
    x, gate = normal(5, 17, dtype=torch.bfloat16), normal(5, 17, dtype=torch.bfloat16, seed=1)
    assert torch.equal(silu_mul(torch.cat((gate, x), dim=-1)), torch.nn.functional.silu(gate) * x)
    assert torch.equal(sigmoid_mul(x, gate), x * torch.sigmoid(gate))
