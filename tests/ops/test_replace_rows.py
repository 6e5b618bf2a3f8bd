import torch
from ops.examples_a import normal

from firstlight.ops.replace_rows import replace_rows


def test_positive_rows_replace_and_others_keep() -> None:
    x, values = normal(4, 5), normal(3, 5, seed=1)
    values[0] = torch.nan
    out = replace_rows(x, torch.tensor([0, 2, -1, 1], dtype=torch.int32), values)
    assert torch.equal(out, torch.stack((x[0], values[2], x[2], values[1])))


def test_values_are_cast() -> None:
    x, values = normal(1, 5, dtype=torch.bfloat16), normal(2, 5, seed=1)
    assert torch.equal(replace_rows(x, torch.tensor([1]), values), values[1:].bfloat16())
