import torch
from ops.examples_a import normal

from firstlight.ops.gather_rows import gather_rows


def test_picks_rows_in_order() -> None:
    x = normal(6, 10)[:, ::2]
    out = gather_rows(x, torch.tensor([5, 0, 5], dtype=torch.int32))
    assert torch.equal(out, torch.stack((x[5], x[0], x[5])))
    assert out.is_contiguous()


def test_padding_disturbs_nobody() -> None:
    x = normal(3, 5)
    assert torch.equal(gather_rows(x, torch.tensor([2, -1]))[0], x[2])
