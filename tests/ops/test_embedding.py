import pytest
import torch
from ops.examples_a import normal

from firstlight.ops.embedding import embedding
from firstlight.quant import Format, Packed, unpack
from firstlight.quant.blocks import pack_blocks
from firstlight.quant.gguf_blocks import quantize


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_picks_rows(dtype: torch.dtype) -> None:
    weight = normal(7, 5)
    ids = torch.tensor([6, 0, 3, 3], dtype=dtype)
    assert torch.equal(embedding(ids, weight), torch.nn.functional.embedding(ids, weight))


def test_shards_of_the_vocabulary_sum_to_the_whole() -> None:
    weight = normal(12, 5, dtype=torch.bfloat16)
    ids = torch.arange(12).flip(0)
    shards = [embedding(ids, weight[start : start + 4], start=start) for start in (0, 4, 8)]
    assert torch.equal(sum(shards), weight[ids])


def test_ids_of_other_shards_give_zeros_even_beside_nan() -> None:
    weight = torch.full((4, 3), torch.nan)
    assert torch.equal(embedding(torch.tensor([3, 8, 900]), weight, start=4), torch.zeros(3, 3))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_gguf_rows_are_unpacked(kind: str) -> None:
    weight = Packed({"data": quantize(normal(7, 64), kind)}, Format(kind), (7, 64))
    ids = torch.tensor([6, 2])
    expected = unpack(weight, torch.float32)[ids]
    assert torch.equal(embedding(ids, weight, dtype=torch.float32), expected)
    assert torch.equal(embedding(ids, weight, dtype=torch.bfloat16), expected.bfloat16())


def test_block_scaled_rows_are_unpacked() -> None:
    weight = pack_blocks(normal(7, 5), (4, 4), torch.float8_e4m3fn, torch.float32)
    ids = torch.tensor([6, 2])
    assert torch.equal(embedding(ids, weight, dtype=torch.float32), unpack(weight, torch.float32)[ids])
    with pytest.raises(TypeError, match=r"float8_e4m3fn/4x4:float32 weight needs dtype="):
        embedding(ids, weight)
