import pytest
import torch
from ops.examples_a import normal

from firstlight.hardware import CPU_GENERIC
from firstlight.ops.linear import linear
from firstlight.ops.op import Call, Shape
from firstlight.quant import Format, Packed, unpack
from firstlight.quant.blocks import pack_blocks
from firstlight.quant.gguf_blocks import quantize


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_formula(tokens: int, dtype: torch.dtype, rtol: float, biased: bool) -> None:
    x, weight = normal(tokens, 33, dtype=dtype), normal(17, 33, dtype=dtype)
    bias = normal(17, dtype=dtype) if biased else None
    expected = (x.double()[:, None] * weight.double()).sum(-1) + (bias.double() if bias is not None else 0)
    for run in (linear.body, linear.providers["torch"].run):
        out = run(x, weight, bias)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=rtol * 33**0.5)


def test_packed_weights_are_what_they_unpack_to() -> None:
    x = normal(5, 64, dtype=torch.bfloat16)
    for weight in (
        pack_blocks(normal(17, 64), (16, 48), torch.float8_e4m3fn, torch.bfloat16),
        Packed({"data": quantize(normal(17, 64), "Q4_0")}, Format("Q4_0"), (17, 64)),
    ):
        expected = torch.nn.functional.linear(x, unpack(weight, torch.float32).bfloat16())
        assert torch.equal(linear(x, weight), expected)


def test_packed_activations_need_a_result_dtype() -> None:
    x = pack_blocks(normal(5, 48), (1, 16), torch.float8_e4m3fn, torch.float32)
    weight = normal(17, 48)
    expected = torch.nn.functional.linear(unpack(x, torch.float32), weight)
    assert torch.equal(linear(x, weight, dtype=torch.float32), expected)
    with pytest.raises(TypeError, match=r"float8_e4m3fn/1x16:float32 activations needs dtype="):
        linear(x, weight)


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        (
            (normal(5, 4), pack_blocks(normal(3, 4), (1, 4), torch.float8_e4m3fn, torch.float32)),
            {},
            "the weight is float8",
        ),
        ((normal(5, 4), normal(3, 4, dtype=torch.bfloat16)), {}, "the weight is torch.bfloat16"),
        ((normal(5, 4), normal(3, 4)), {"bias": normal(3, dtype=torch.float16)}, "the bias is torch.float16"),
        ((normal(5, 4), normal(3, 4)), {"dtype": torch.bfloat16}, "the result is torch.bfloat16"),
        ((normal(5, 4), normal(3, 4), normal(3)), {}, None),
    ],
)
def test_torch_serves_plain_weights_of_one_dtype(args: tuple, kwargs: dict, reason: str | None) -> None:
    given = linear.providers["torch"].when(Call(args, kwargs, None, CPU_GENERIC))
    assert given is None if reason is None else reason in str(given)


def test_cost_counts_stored_bytes() -> None:
    x = torch.empty(6, 256, dtype=torch.bfloat16, device="meta")
    parts = {
        "data": torch.empty(512, 256, dtype=torch.float8_e4m3fn, device="meta"),
        "scale": torch.empty(4, 2, device="meta"),
    }
    weight = Packed(parts, Format("float8_e4m3fn", (128, 128), "float32"), (512, 256))
    cost = linear.cost(Shape(6, 1, 0, 0), x, weight)
    assert cost.flops == {"bfloat16": 2 * 6 * 256 * 512}
    assert (cost.read, cost.written) == (6 * 256 * 2 + 512 * 256 + 32, 6 * 512 * 2)
