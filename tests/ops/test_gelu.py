import math

import pytest
import torch
from ops.examples_a import normal

from firstlight.ops.gelu import gelu


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_formula(approximate: str, dtype: torch.dtype, atol: float) -> None:
    x = normal(7, 33, dtype=dtype) * 2
    wide = x.double()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    share = torch.erf(wide / math.sqrt(2)) if approximate == "none" else torch.tanh(inner)
    out = gelu(x, approximate=approximate)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), wide / 2 * (1 + share), rtol=2**-8 if dtype != torch.float32 else 1e-5, atol=atol
    )


def test_unknown_form_is_refused() -> None:
    with pytest.raises(RuntimeError, match="approximate"):
        gelu(normal(3), approximate="sigmoid")
