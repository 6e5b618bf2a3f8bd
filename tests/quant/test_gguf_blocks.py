"""The GGUF block formats, against the gguf package and against blocks small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as GgmlType

from firstlight.quant.gguf_blocks import GGML_TYPES, block_format, bytes_per_row, dequantize, quantize

WRITABLE = [t for t in GGML_TYPES if not t.endswith("_K")]
PACKED = [t for t, block in GGML_TYPES.items() if block.dtype is None]


def random_rows(ggml_type: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Random bytes in which every float16 scale is finite, so that equality can be asked for."""
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks, GGML_TYPES[ggml_type].bytes), dtype=np.uint8)
    halves = {"Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0]}.get(ggml_type, [0, 2])
    for start in halves:
        raw[:, :, start + 1] &= 0b10111111  # clears the exponent's top bit: no infinity, no NaN
    return raw.reshape(rows, -1)


def test_sizes_are_those_of_the_gguf_package():
    for ggml_type, block in GGML_TYPES.items():
        assert GGML_QUANT_SIZES[GgmlType[ggml_type]] == (block.weights, block.bytes)


@pytest.mark.parametrize("ggml_type", PACKED)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 5), (7, 2)])
def test_dequantize_equals_the_gguf_package(ggml_type, rows, blocks):
    raw = random_rows(ggml_type, rows, blocks, seed=rows)
    expected = torch.from_numpy(quants.dequantize(raw, GgmlType[ggml_type]))
    actual = dequantize(torch.from_numpy(raw), ggml_type)
    assert actual.shape == (rows, blocks * GGML_TYPES[ggml_type].weights)
    assert torch.equal(actual, expected)
    assert actual.unique().numel() >= 8
    assert torch.equal(dequantize(torch.from_numpy(raw), ggml_type, torch.bfloat16), expected.to(torch.bfloat16))


@pytest.mark.parametrize("ggml_type", WRITABLE)
def test_quantize_then_dequantize(ggml_type):
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    raw = quantize(values, ggml_type)
    assert raw.shape == (6, bytes_per_row(64, ggml_type))
    assert raw.dtype == torch.uint8
    back = dequantize(raw, ggml_type)
    assert torch.equal(back, torch.from_numpy(quants.dequantize(raw.numpy(), GgmlType[ggml_type]).reshape(6, 64)))
    step = {"F32": 0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 0.02, "Q5_0": 0.2, "Q5_1": 0.2}.get(ggml_type, 0.4)
    assert (back - values).abs().max() <= step


@pytest.mark.parametrize("ggml_type", PACKED)
def test_rows_can_be_sliced_permuted_and_cut_at_blocks(ggml_type):
    block = GGML_TYPES[ggml_type]
    raw = torch.from_numpy(random_rows(ggml_type, 6, 4, seed=9))
    whole = dequantize(raw, ggml_type)
    order = torch.tensor([3, 0, 5])
    assert torch.equal(dequantize(raw[order], ggml_type), whole[order])
    cut = raw[:, block.bytes : 3 * block.bytes]
    assert torch.equal(dequantize(cut, ggml_type), whole[:, block.weights : 3 * block.weights])


def test_misaligned_rows_are_copied():
    storage = torch.zeros(9, dtype=torch.uint8)
    raw = storage[1:9]
    raw.copy_(torch.tensor([1.5, -2.0]).view(torch.uint8))
    assert dequantize(raw, "F32").tolist() == [1.5, -2.0]


HALF = 0x3800, 0x4000  # 0.5 and 2.0 as float16


def words(*values: int) -> bytes:
    return np.array(values, dtype="<u2").tobytes()


def test_golden_q4_0():
    # byte j holds weight j in its low half and weight j + 16 in its high half; stored with 8 added.
    raw = words(HALF[0]) + bytes([0x80, 0xF0] + [0x88] * 14)
    expected = [-4.0, -4.0] + [0.0] * 14 + [0.0, 3.5] + [0.0] * 14
    assert dequantize(torch.tensor(list(raw), dtype=torch.uint8), "Q4_0").tolist() == expected


def test_golden_q4_1():
    raw = words(*HALF) + bytes([0x1F] + [0x00] * 15)
    expected = [9.5] + [2.0] * 15 + [2.5] + [2.0] * 15
    assert dequantize(torch.tensor(list(raw), dtype=torch.uint8), "Q4_1").tolist() == expected


def test_golden_q5_0():
    # fifth bits: bit i of the little-endian word belongs to weight i; stored with 16 added.
    raw = words(HALF[0]) + bytes([0x01, 0x00, 0x00, 0x80]) + bytes([0x0F] + [0x00] * 14 + [0x10])
    expected = [7.5] + [-8.0] * 15 + [-8.0] * 15 + [0.5]
    assert dequantize(torch.tensor(list(raw), dtype=torch.uint8), "Q5_0").tolist() == expected


def test_golden_q5_1():
    raw = words(*HALF) + bytes([0x02, 0x00, 0x00, 0x00]) + bytes([0x00, 0x01] + [0x00] * 14)
    expected = [2.0, 10.5] + [2.0] * 30
    assert dequantize(torch.tensor(list(raw), dtype=torch.uint8), "Q5_1").tolist() == expected


def test_golden_q8_0():
    raw = words(HALF[1]) + bytes([0x7F, 0x80, 0xFF] + [0] * 29)
    assert dequantize(torch.tensor(list(raw), dtype=torch.uint8), "Q8_0").tolist() == [254.0, -256.0, -2.0] + [0.0] * 29


def test_golden_q4_k():
    # sub-block 0: scale 3, minimum 1; sub-block 4: scale 4 bits 0b0101 + top bits 0b01 << 4 = 21, minimum 2.
    scales = [0b01_000011, 0, 0, 0, 0b00_000001, 0, 0, 0, 0x25, 0, 0, 0]
    quants_ = [0] * 128
    quants_[0] = 0x07  # weight 0 = 7
    quants_[64] = 0x02  # third group of 32 bytes: weight 128 = 2 (sub-block 4)
    raw = words(*HALF) + bytes(scales) + bytes(quants_)
    actual = dequantize(torch.tensor(list(raw), dtype=torch.uint8), "Q4_K")
    expected = torch.zeros(256)
    expected[0:32] = -2.0 * 1
    expected[0] += 0.5 * 3 * 7
    expected[128:160] = -2.0 * 2
    expected[128] += 0.5 * 21 * 2
    assert torch.equal(actual, expected)


def test_golden_q5_k():
    fifth = [0] * 32
    fifth[5] = 0b00000010  # bit 1 of byte 5: weight 32 + 5
    raw = words(*HALF) + bytes([1, 1, 0, 0] + [0] * 8) + bytes(fifth) + bytes([0] * 5 + [0x30] + [0] * 122)
    expected = torch.zeros(256)
    expected[37] = 0.5 * (16 + 3)
    assert torch.equal(dequantize(torch.tensor(list(raw), dtype=torch.uint8), "Q5_K"), expected)


def test_golden_q6_k():
    low, top, scales = [0] * 128, [0] * 64, [0] * 16
    scales[0], scales[15] = 1, 0xFF  # 1 and -1
    low[0] = 0x05  # weight 0: low bits 5
    top[0] = 0b10  # weight 0: top bits 2, so 37 - 32 = 5
    low[127] = 0xF0  # weight 255: low bits 15
    top[63] = 0b11_000000  # weight 255: top bits 3, so 63 - 32 = 31
    raw = bytes(low) + bytes(top) + bytes(scales) + words(HALF[1])
    expected = torch.zeros(256)
    expected[0:16], expected[240:256] = -64.0, 64.0
    expected[0], expected[255] = 10.0, -62.0
    assert torch.equal(dequantize(torch.tensor(list(raw), dtype=torch.uint8), "Q6_K"), expected)


def test_errors_name_the_type_and_the_numbers():
    with pytest.raises(ValueError, match=r"IQ2_XXS is not supported; supported: F32, F16"):
        block_format("IQ2_XXS")
    with pytest.raises(ValueError, match="bfloat16 is not supported"):
        block_format("bfloat16")
    with pytest.raises(ValueError, match=r"row of 33 weights .* Q4_0 blocks of 32"):
        bytes_per_row(33, "Q4_0")
    with pytest.raises(ValueError, match=r"rows of 19 bytes .* Q4_0 blocks of 18"):
        dequantize(torch.zeros(2, 19, dtype=torch.uint8), "Q4_0")
    with pytest.raises(TypeError, match="float32"):
        dequantize(torch.zeros(2, 18), "Q4_0")
    with pytest.raises(ValueError, match="Q4_K is not supported: the gguf package can only read it"):
        quantize(torch.zeros(2, 256), "Q4_K")
