import pytest
import torch
from ops.examples_a import ALONE, normal

from firstlight.ops.add import add
from firstlight.ops.add_rms_norm import add_rms_norm
from firstlight.ops.op import Shape
from firstlight.ops.rms_norm import rms_norm
from firstlight.parallel import Group

NO_STEP = Shape(0, 0, 0, 0)


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_the_rounded_sum(dtype: torch.dtype, zero_centred: bool) -> None:
    x, residual, weight = normal(5, 9, dtype=dtype), normal(5, 9, dtype=dtype, seed=1), normal(9, dtype=dtype)
    normed, new_residual = add_rms_norm(x, residual, weight, eps=1e-6, zero_centred=zero_centred, group=ALONE)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, eps=1e-6, zero_centred=zero_centred))


def test_reduces_first_if_there_are_ranks() -> None:
    def tripled(x: torch.Tensor, group: Group) -> torch.Tensor:
        return x * group.size

    run = add_rms_norm.compose({"all_reduce": tripled, "add": add.body, "rms_norm": rms_norm.body})
    x, residual = normal(5, 9), normal(5, 9, seed=1)
    _, new_residual = run(x, residual, torch.ones(9), eps=1e-6, group=Group("tp", 3, 1))
    assert torch.equal(new_residual, x * 3 + residual)


def test_costs_are_those_of_the_parts() -> None:
    x, weight = torch.empty(6, 10, device="meta"), torch.empty(10, device="meta")
    alone = add_rms_norm.cost(NO_STEP, x, x, weight, eps=1e-6)
    assert (alone.read, alone.written, alone.sent) == (3 * 240 + 40, 2 * 240, 0)
    four = add_rms_norm.cost(NO_STEP, x, x, weight, eps=1e-6, group=Group("tp", 4, 0))
    assert (four.sent, four.messages) == (2 * 240 * 3 / 4, 1)
