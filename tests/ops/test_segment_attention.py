import pytest
import torch
from ops.examples_a import normal

from firstlight.ops.segment_attention import segment_attention

RUNS = [segment_attention.body, segment_attention.providers["torch_sdpa"].run]


@pytest.mark.parametrize("run", RUNS, ids=["reference", "torch_sdpa"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)]
)
def test_tokens_see_their_segment_alone(run, dtype: torch.dtype, tolerance: float) -> None:
    starts = [0, 3, 3, 10, 11]
    q, k, v = normal(13, 3, 36, dtype=dtype).chunk(3, dim=-1)
    segment = torch.tensor([sum(start <= t for start in starts) for t in range(13)])
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k.double()) * 0.3
    scores = scores.masked_fill(segment[:, None] != segment, -torch.inf)
    expected = torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v.double())
    expected[11:] = 0  # in no segment
    out = run(q, k, v, torch.tensor(starts, dtype=torch.int32), scale=0.3, max_segment=7)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
