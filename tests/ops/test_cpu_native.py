"""The native CPU kernels against float64 formulas and the ops' references, on odd shapes and poisoned memory."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from firstlight.hardware import H200, Hardware, detect
from firstlight.ops.add_rms_norm import add_rms_norm
from firstlight.ops.attention import attention
from firstlight.ops.attention_prologue import attention_prologue
from firstlight.ops.cpu_native import build, layout, providers
from firstlight.ops.op import Call
from firstlight.ops.rms_norm import rms_norm
from firstlight.ops.silu_mul import silu_mul
from firstlight.quant import Format, Packed, plain
from firstlight.quant.gguf_blocks import GGML_TYPES, dequantize

BF16 = torch.bfloat16
NAN = float("nan")
REASON = providers.unavailable(detect("cpu"))
needs_kernels = pytest.mark.skipif(REASON is not None, reason=str(REASON))
SCALE_BYTES = {name: (0, 2) if kind.has_minimum else (0,) for name, kind in layout.KINDS.items()} | {"Q6_K": (208,)}
SHAPES = [(1, 1), (16, 2), (17, 31), (33, 66), (70, 577), (129, 64)]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def random_blocks(rows: int, columns: int, ggml_type: str, seed: int = 0) -> Packed:
    """Blocks of random bytes, extreme integers among them, with scales of ordinary size."""
    generator = torch.Generator().manual_seed(seed)
    form = GGML_TYPES[ggml_type]
    blocks = columns // form.weights
    raw = torch.randint(0, 256, (rows, blocks, form.bytes), dtype=torch.uint8, generator=generator)
    for at in SCALE_BYTES[ggml_type]:
        scale = torch.randn((rows, blocks, 1), generator=generator).half()
        raw[..., at : at + 2] = scale.view(torch.uint8).reshape(rows, blocks, 2)
    return Packed({"data": raw.reshape(rows, -1)}, Format(ggml_type), (rows, columns))


def values_of(weight: Packed) -> Tensor:
    return dequantize(weight.parts["data"], weight.format.dtype, torch.float32)


def worst_row(result: Tensor, expected: Tensor) -> float:
    """The largest error of a row, relative to the row's largest value."""
    assert not result.isnan().any()
    error = (result.double() - expected.double()).abs().flatten(1).amax(1)
    return float((error / expected.double().abs().flatten(1).amax(1).clamp(min=1e-30)).max())


# Layout


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_tiles_give_back_the_matrix(shape: tuple[int, int]) -> None:
    weight = normal(*shape)
    packed = layout.pack(weight)
    assert torch.equal(layout.unpack(packed), weight)
    assert packed.nbytes == layout.nbytes(plain(BF16), shape)


@pytest.mark.parametrize("ggml_type", layout.KINDS)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_quantised_tiles_have_the_same_values(ggml_type: str, rows: int) -> None:
    weight = random_blocks(rows, 512, ggml_type)
    packed = layout.pack(weight)
    assert torch.equal(layout.unpack(packed), values_of(weight))
    assert packed.nbytes == layout.nbytes(weight.format, weight.shape)


def test_tiles_refuse_what_they_cannot_hold() -> None:
    assert "3 dimensions" in str(layout.accepts(plain(BF16), (2, 16, 32)))
    assert "bfloat16" in str(layout.accepts(plain(torch.float32), (16, 32)))
    assert "bfloat16" in str(layout.accepts(Format("float8_e4m3fn", (128, 128), "float32"), (16, 32)))


# Linear and embedding


@needs_kernels
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 16, 17, 33])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_bf16(rows: int, shape: tuple[int, int], threads: int) -> None:
    weight, x, bias = normal(*shape), normal(rows, shape[1], seed=1), normal(shape[0], seed=2)
    expected = x.double() @ weight.double().t()
    packed = layout.pack(weight)
    assert worst_row(providers.linear(x, packed, dtype=torch.float32), expected) < 2e-5
    assert worst_row(providers.linear(x, packed, bias), expected + bias.double()) < 2**-7


@needs_kernels
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9, 16, 17, 33])
@pytest.mark.parametrize("ggml_type", layout.KINDS)
def test_linear_quantised(rows: int, ggml_type: str, threads: int) -> None:
    """Up to 16 rows use the values as stored; with more, they are rounded to bfloat16 first."""
    weight, x = random_blocks(37, 512, ggml_type), normal(rows, 512, seed=1)
    values = values_of(weight) if rows <= 16 else values_of(weight).to(BF16)
    result = providers.linear(x, layout.pack(weight), dtype=torch.float32)
    assert worst_row(result, x.double() @ values.double().t()) < 2e-5


@needs_kernels
@pytest.mark.parametrize(
    "packed", [layout.pack(normal(40, 96)), layout.pack(random_blocks(40, 96, "Q4_1"))], ids=["bf16", "Q4_1"]
)
def test_linear_of_strided_rows_keeps_nan_in_its_row(packed: Packed) -> None:
    x = torch.full((20, 200), NAN, dtype=BF16)[:, 3:99]
    x[1:19] = normal(18, 96)
    result = providers.linear(x, packed)
    assert result[0].isnan().all()
    assert result[19].isnan().all()
    assert torch.equal(result[1:19], providers.linear(x[1:19].contiguous(), packed))


@needs_kernels
def test_linear_without_rows_and_of_wrong_size() -> None:
    packed = layout.pack(normal(5, 6))
    assert providers.linear(normal(0, 6), packed).shape == (0, 5)
    with pytest.raises(ValueError, match="x has 7 columns, the weight 6"):
        providers.linear(normal(2, 7), packed)


@needs_kernels
@pytest.mark.parametrize("ggml_type", ["bfloat16", *layout.KINDS])
def test_embedding_is_exact_and_zero_outside(ggml_type: str) -> None:
    if ggml_type == "bfloat16":
        packed, values = layout.pack(normal(37, 255)), normal(37, 255)
    else:
        weight = random_blocks(37, 512, ggml_type)
        packed, values = layout.pack(weight), values_of(weight).to(BF16)
    ids = torch.tensor([0, 36, 15, 16, 9], dtype=torch.int32)
    assert torch.equal(providers.embedding(ids + 100, packed, start=100, dtype=BF16), values[ids.long()])
    outside = torch.tensor([99, 137, -5])
    assert not providers.embedding(outside, packed, start=100, dtype=BF16).any()


# Row-wise kernels


@needs_kernels
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 33), (3, 4, 64), (2, 3, 5, 16), (300, 576)])
def test_norms_equal_the_references(shape: tuple[int, ...], zero_centred: bool, threads: int) -> None:
    x, weight = normal(*shape), normal(shape[-1], seed=1)
    settings = {"eps": 1e-5, "zero_centred": zero_centred}
    assert worst_row(providers.rms_norm(x, weight, **settings), rms_norm(x, weight, **settings)) <= 2**-7
    if x.dim() == 2:
        residual = normal(*shape, seed=2)
        normed, total = providers.add_rms_norm(x, residual, weight, **settings)
        expected, expected_total = add_rms_norm(x, residual, weight, **settings)
        assert torch.equal(total, expected_total)
        assert worst_row(normed, expected) <= 2**-7


@needs_kernels
def test_norms_of_views_do_not_touch_what_lies_between() -> None:
    wide = torch.full((4, 6, 100), NAN, dtype=BF16)
    heads = wide[1:3, 1:4, 5:69]
    heads.copy_(normal(2, 3, 64))
    weight = normal(64, seed=1)
    result = providers.rms_norm(heads, weight, eps=1e-6)
    assert torch.equal(result, providers.rms_norm(heads.contiguous(), weight, eps=1e-6))
    assert not result.isnan().any()


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 66), (40, 3072)])
def test_silu_mul_equals_the_reference(shape: tuple[int, int], threads: int) -> None:
    x = normal(*shape) * 8
    assert worst_row(providers.silu_mul(x), silu_mul(x)) <= 2**-7


@needs_kernels
def test_silu_mul_at_extremes() -> None:
    gate = torch.tensor([-3e38, -200.0, -90.0, 0.0, 90.0, 3e38, NAN])
    result = providers.silu_mul(torch.cat((gate, torch.ones(7))).to(BF16)[None])[0]
    assert torch.equal(result[:6], torch.tensor([0.0, 0.0, 0.0, 0.0, 90.0, 3e38]).to(BF16))
    assert result[6].isnan()


# Attention


def poisoned_pages(pages: int, page_size: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """K and V of one layer in a pool of three, all NaN."""
    pool = torch.full((pages, 3, 2, page_size, kv_heads, head_dim), NAN, dtype=BF16)
    return pool[:, 1, 0], pool[:, 1, 1]


@needs_kernels
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "turned", "gated", "norm"),
    [
        (9, 3, 64, 64, False, False),
        (4, 2, 48, 16, True, True),
        (8, 1, 128, 128, False, True),
        (3, 3, 10, 6, True, False),
    ],
)
def test_prologue_equals_the_reference(
    heads: int, kv_heads: int, head_dim: int, turned: int, gated: bool, norm: bool, page_size: int
) -> None:
    qkv = normal(5, head_dim * (heads * (1 + gated) + 2 * kv_heads) + 3)[:, :-3]
    angle = torch.rand((5, turned // 2), generator=torch.Generator().manual_seed(1)) * 6
    angles = torch.cat((angle.cos(), angle.sin()), 1)
    weight = normal(head_dim, seed=2) if norm else None
    slot = torch.tensor([page_size, 2 * page_size, -1, 6 * page_size - 1, 0])  # the third and the last are null
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "gated": gated, "zero_centred": norm}
    pools = [poisoned_pages(7, page_size, kv_heads, head_dim) for _ in range(2)]
    q, gate = providers.attention_prologue(qkv, weight, weight, angles, *pools[0], slot, **sizes)
    expected, expected_gate = attention_prologue(qkv, weight, weight, angles, *pools[1], slot, **sizes)
    torch.testing.assert_close(q, expected, rtol=2**-7, atol=1e-3)
    assert gate is None or torch.equal(gate, expected_gate)
    for pages, expected_pages in zip(*pools, strict=True):
        torch.testing.assert_close(pages[1:], expected_pages[1:], rtol=2**-7, atol=1e-3, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("window", "causal"), [(0, True), (50, True), (0, False), (50, False)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 48), (16, 1, 128), (5, 1, 33)])
def test_attention_equals_the_reference(
    heads: int, kv_heads: int, head_dim: int, window: int, causal: bool, page_size: int, threads: int
) -> None:
    """Ragged rows, among them one of length 1 and one of padding; null pages within a row; all that is unused is NaN."""
    lengths, counts = [1, 200, 129, 0, 300, 64], [1, 1, 5, 1, 40, 1]
    columns = -(-max(lengths) // page_size)
    k_pages, v_pages = poisoned_pages(len(lengths) * columns + 1, page_size, kv_heads, head_dim)
    generator = torch.Generator().manual_seed(3)
    free = (torch.randperm(len(lengths) * columns, generator=generator) + 1).tolist()
    row = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)].int()
    pages = torch.zeros((len(lengths) + 2, columns), dtype=torch.int32)
    for r, length in enumerate(lengths):
        for column in range(-(-length // page_size)):
            page = free.pop()
            pages[row[r], column] = page
            filled = min(page_size, length - column * page_size)
            k_pages[page, :filled] = torch.randn((filled, kv_heads, head_dim), generator=generator).to(BF16)
            v_pages[page, :filled] = torch.randn((filled, kv_heads, head_dim), generator=generator).to(BF16)
    if page_size < 64:
        pages[row[1], 1], pages[row[4], 0] = 0, -1
    query_start = torch.tensor([0, *counts]).cumsum(0).int()
    q = torch.randn((sum(counts), heads, head_dim), generator=generator).to(BF16)
    arguments = (pages, row, query_start, torch.tensor(lengths).int())
    settings = {"scale": head_dim**-0.5, "max_query": 40, "max_context": 300, "window": window, "causal": causal}
    result = providers.attention(q, k_pages, v_pages, *arguments, **settings)
    expected = attention(q.double(), k_pages.double(), v_pages.double(), *arguments, **settings)
    assert not result.isnan().any()
    assert not result[int(query_start[3])].any()  # the row of padding
    torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-4)
    out = torch.full((sum(counts), heads, 2 * head_dim), NAN, dtype=BF16)[..., :head_dim]
    assert providers.attention(q, k_pages, v_pages, *arguments, out=out, **settings) is out
    assert torch.equal(out, result)


@needs_kernels
def test_attention_does_not_depend_on_the_batch() -> None:
    k_pages, v_pages = poisoned_pages(40, 16, 2, 32)
    k_pages.copy_(normal(*k_pages.shape))
    v_pages.copy_(normal(*v_pages.shape, seed=1))
    pages = torch.arange(1, 40, dtype=torch.int32).view(3, 13)
    row, length, q = torch.arange(3).int(), torch.tensor([200, 3, 150]).int(), normal(3, 4, 32, seed=2)
    settings = {"scale": 0.2, "max_query": 1, "max_context": 200}
    together = providers.attention(q, k_pages, v_pages, pages, row, torch.arange(4).int(), length, **settings)
    for r in range(3):
        one = slice(r, r + 1)
        alone = providers.attention(
            q[one], k_pages, v_pages, pages, row[one], torch.arange(2).int(), length[one], **settings
        )
        assert torch.equal(alone, together[one])


@needs_kernels
def test_attention_over_more_than_its_scratch_memory() -> None:
    """2,000 new tokens of one request are computed in several runs."""
    tokens, k_pages, v_pages = 2000, *poisoned_pages(126, 16, 1, 64)
    k_pages.copy_(normal(*k_pages.shape))
    v_pages.copy_(normal(*v_pages.shape, seed=1))
    q, pages = normal(tokens, 8, 64, seed=2), torch.arange(1, 126, dtype=torch.int32)[None]
    arguments = (pages, torch.zeros(1).int(), torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int())
    settings = {"scale": 0.125, "max_query": tokens, "max_context": tokens}
    result = providers.attention(q, k_pages, v_pages, *arguments, **settings)
    expected = attention(q, k_pages, v_pages, *arguments, **settings)
    torch.testing.assert_close(result, expected, rtol=2**-6, atol=1e-3)


# Refusals and the build


def call(*args: object, hardware: object = None, **kwargs: object) -> Call:
    return Call(args, kwargs, None, hardware or detect("cpu"))


def test_refusals_say_why() -> None:
    x, weight = normal(2, 32), normal(16, 32)
    assert "NVIDIA" in str(providers.linear_when(call(x, weight, hardware=H200)))
    assert "x is torch.float32" in str(providers.linear_when(call(x.float(), weight)))
    assert "bias is torch.float32" in str(providers.linear_when(call(x, weight, torch.zeros(16))))
    assert "float64" in str(providers.linear_when(call(x, weight, dtype=torch.float64)))
    assert "residual is torch.float32" in str(providers.norm_when(call(x, x.float(), weight[0], eps=1e-6)))
    indices = [torch.zeros(1).int()] * 3
    k_pages = torch.zeros((2, 16, 1, 32), dtype=BF16)
    q, pages = torch.zeros((1, 17, 32), dtype=BF16), torch.zeros((1, 1)).int()
    assert "17 query heads" in str(providers.attention_when(call(q, k_pages, k_pages, pages, *indices)))
    assert "sinks" in str(providers.attention_when(call(q, k_pages, k_pages, pages, *indices, sinks=torch.zeros(17))))
    assert "int64" in str(providers.attention_when(call(q, k_pages, k_pages, pages.long(), *indices)))


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert "no C++ compiler found" in str(build.missing_requirement())


def test_an_old_cpu_is_a_reason() -> None:
    old = Hardware("an old CPU", "cpu", "avx2", features=frozenset({"avx2"}))
    assert providers.unavailable(old) == "an old CPU has no avx512f"


def test_what_the_compiler_says_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if build.compiler() is None:
        pytest.skip("no compiler here")
    (tmp_path / "module.cpp").write_text("#error broken on purpose\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(build.NativeUnavailableError, match="broken on purpose"):
        build.build(tmp_path / "cache" / "kernels.so")
    assert not list((tmp_path / "cache").iterdir())


@needs_kernels
def test_kernels_share_torchs_threads(threads: int) -> None:
    torch.ones(4) + 1
    assert providers.kernels.threads() == threads


@needs_kernels
def test_one_openmp_runtime_in_the_process() -> None:
    code = (
        "import torch; from firstlight.ops.cpu_native import build; build.load();"
        "print(len({l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l or 'libiomp' in l}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "1"


@needs_kernels
def test_wrong_arguments_are_an_error_not_a_crash() -> None:
    with pytest.raises(TypeError, match="expected 5 arguments, got 2"):
        providers.kernels.silu_mul(0, 0)
    with pytest.raises(TypeError):
        providers.kernels.silu_mul("a", 0, 0, 0, 0)


@needs_kernels
def test_plain_avx512_code_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for CPUs without bfloat16 instructions, compiled on this one."""
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-mno-avx512bf16"))
    library = tmp_path / f"{build.MODULE}.so"
    build.build(library)
    plain_kernels = build.import_library(library)
    weight, x = layout.pack(normal(40, 96)), normal(7, 96, seed=1)
    quantised = layout.pack(random_blocks(40, 96, "Q4_1"))
    natives = [providers.linear(x, w, dtype=torch.float32) for w in (weight, quantised)]
    norm = providers.rms_norm(x, weight=normal(96, seed=2), eps=1e-6)
    monkeypatch.setattr(providers, "kernels", plain_kernels)
    for native, w in zip(natives, (weight, quantised), strict=True):
        assert worst_row(providers.linear(x, w, dtype=torch.float32), native) < 1e-5
    assert torch.equal(providers.rms_norm(x, weight=normal(96, seed=2), eps=1e-6), norm)
    special = torch.tensor([[NAN, 3.4e38, -0.0, 1.00390625]])
    assert torch.equal(providers.silu_mul(torch.cat((special, torch.ones(1, 4)), 1).to(BF16)).isnan(), special.isnan())


def test_compiling_is_announced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "compiler", lambda: "g++")
    monkeypatch.setattr(build, "run_compiler", lambda command: Path(command[-1]).touch())
    with caplog.at_level("INFO"):
        build.build(tmp_path / "kernels" / "module.so")
    assert "compiling the CPU kernels, once (about 5 s)" in caplog.text
