"""Checks of Triton providers against the references, on a GPU or, under Triton's interpreter, on the CPU.

Inputs are fresh on every run and their seed is printed. What must not be read is NaN: padding rows, experts that nobody
chose, columns between strided rows.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from firstlight.ops.op import REGISTRY
from firstlight.quant import WHOLE_ROW, Packed, Weight, unpack
from firstlight.quant.blocks import pack_blocks


def draw(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    """Normal numbers from a fresh seed, which is printed."""
    seed = random.randrange(2**31)
    print(f"seed {seed} for {shape}")
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(device)


def strided(x: Tensor, gap: int = 3) -> Tensor:
    """The same rows with NaN between them."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + gap), torch.nan)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def fp8(weight: Tensor, block: tuple[int, int] = (128, 128)) -> Packed:
    """A weight as FP8 checkpoints store it."""
    return pack_blocks(weight.float(), block, torch.float8_e4m3fn, torch.bfloat16)


def draw_weight(*shape: int, dtype: torch.dtype, device: str, block: tuple[int, int] | None) -> Weight:
    """A weight that keeps about the size of its input, plain for None.

    Rows with scales of their own differ in size, so that it shows where another's is taken.
    """
    weight = draw(*shape, dtype=dtype, device=device, scale=shape[-1] ** -0.5)
    if block is None:
        return weight
    if block[1] == WHOLE_ROW:
        weight *= 2.0 ** (torch.arange(shape[-2], device=device) % 3 - 1)[:, None]
    return fp8(weight, block)


def exactly(value: Any) -> Any:
    """Tensors and packed weights on the CPU, in float64."""
    if isinstance(value, Packed):
        parts = {name: part.cpu() for name, part in value.parts.items()}
        return unpack(replace(value, parts=parts), torch.float32).double()
    if isinstance(value, Tensor):
        return value.cpu().double() if value.is_floating_point() else value.cpu()
    return value


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The worst row's RMS error over its RMS, or over that of all rows if that is larger: errors grow with their row."""
    assert not actual.isnan().any(), "NaN in the result"
    rows = expected.double().flatten(0, -2).square().mean(-1).sqrt()
    errors = (actual.cpu().double() - expected).flatten(0, -2).square().mean(-1).sqrt()
    size = torch.maximum(rows, rows.square().mean().sqrt()).clamp(min=1e-30)
    ratio = float((errors / size).max())
    print(f"worst row's error over its RMS: {ratio:.2e}")
    return ratio


def assert_matches(op: str, run: Any, tolerance: float, *args: Any, **kwargs: Any) -> None:
    """A provider's result against the reference's in float64, as a share of the answer's RMS."""
    expected = REGISTRY[op].reference(*map(exactly, args), **{key: exactly(value) for key, value in kwargs.items()})
    actual = run(*args, **kwargs)
    if isinstance(expected, Tensor):
        expected, actual = (expected,), (actual,)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        if not other.is_floating_point():
            assert torch.equal(one.cpu(), other)
            continue
        assert relative_error(one, other) < tolerance


def routed(tokens: int, experts: int, top_k: int, device: str, padding: int = 0) -> tuple[Tensor, Tensor]:
    """(weights, distinct experts) of each token; the last `padding` tokens have expert -1 and weight 0."""
    seed = random.randrange(2**31)
    print(f"seed {seed} for the routing of {tokens} tokens")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).topk(top_k).indices.int()
    weights = torch.rand(tokens, top_k, generator=generator).softmax(-1)
    if padding:
        chosen[-padding:], weights[-padding:] = -1, 0
    return weights.to(device), chosen.to(device)


def poisoned(weight: Weight, chosen: Tensor, first_expert: int) -> Weight:
    """Experts that nobody chose become NaN."""
    used = torch.zeros(weight.shape[0], dtype=torch.bool)
    local = chosen.cpu().flatten().long() - first_expert
    used[local[(local >= 0) & (local < len(used))]] = True
    if isinstance(weight, Packed):
        scale = weight.parts["scale"].clone()
        scale[~used.to(scale.device)] = torch.nan
        return replace(weight, parts={**weight.parts, "scale": scale})
    weight = weight.clone()
    weight[~used.to(weight.device)] = torch.nan
    return weight


def check_linear(
    run: Any, device: str, dtype: torch.dtype, tokens: int, rows: int, columns: int, tolerance: float,
    *, block: tuple[int, int] | None = (128, 128), bias: bool = False, result: torch.dtype | None = None,
) -> None:  # fmt: skip
    """A provider of `linear`; block None: a plain weight."""
    x = strided(draw(tokens, columns, dtype=dtype, device=device))
    weight = draw_weight(rows, columns, dtype=dtype, device=device, block=block)
    added = draw(rows, dtype=dtype, device=device) if bias else None
    assert_matches("linear", lambda *args: run(*args, dtype=result), tolerance, x, weight, added)


def check_what_is_not_finite(run: Any, x: Tensor) -> None:
    """`run` takes x [T, K], T at least 3, to [T, N]: a NaN or an infinity makes its own token's result NaN or infinite, no other's."""
    finite = run(x)
    broken = x.clone()
    broken[0, -1], broken[-1, 1] = torch.nan, -torch.inf
    result = run(broken)
    assert finite.isfinite().all()
    assert not result[0].isfinite().any()
    assert not result[-1].isfinite().any()
    assert torch.equal(result[1:-1], finite[1:-1])


def check_experts(
    run: Any, device: str, dtype: torch.dtype, tokens: int, experts: int, top_k: int, hidden: int, size: int,
    tolerance: float, *, block: tuple[int, int] | None = (128, 128), first_expert: int = 0, padding: int = 1,
) -> None:  # fmt: skip
    """A provider of `experts`, block None: with plain weights. Two experts live elsewhere, unused ones and padding tokens are NaN."""
    x = strided(draw(tokens, hidden, dtype=dtype, device=device))
    x[tokens - padding :] = torch.nan
    gate_up = draw_weight(experts, 2 * size, hidden, dtype=dtype, device=device, block=block)
    down = draw_weight(experts, hidden, size, dtype=dtype, device=device, block=block)
    weights, chosen = routed(tokens, experts + 2, top_k, device, padding)
    weights = weights.to(dtype)
    arguments = map(exactly, (x.nan_to_num(0), weights, chosen, gate_up, down))
    expected = REGISTRY["experts"].reference(*arguments, first_expert=first_expert)
    gate_up, down = (poisoned(weight, chosen, first_expert) for weight in (gate_up, down))
    actual = run(x, weights, chosen, gate_up, down, first_expert=first_expert)
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) < tolerance
    if padding:
        assert (actual[-padding:] == 0).all()


def check_moe(
    run: Any, device: str, dtype: torch.dtype, tokens: int, experts: int, top_k: int, hidden: int, size: int, shared: int,
    tolerance: float, *, block: tuple[int, int] | None = (128, 128), gated: bool = True, scoring: str = "softmax",
) -> None:  # fmt: skip
    """A provider of `moe`, block None: with plain weights. The last token is padding.

    Tokens whose choice could turn on rounding the logits are left out.
    """
    x = strided(draw(tokens, hidden, dtype=dtype, device=device))
    router = draw(experts, hidden, dtype=dtype, device=device)
    shapes = [(experts, 2 * size, hidden), (experts, hidden, size), (2 * shared, hidden), (hidden, shared)]
    weights = [draw_weight(*shape, dtype=dtype, device=device, block=block) for shape in shapes]
    gate = draw(1, hidden, dtype=dtype, device=device, scale=hidden**-0.5) if gated else None
    live = torch.tensor([tokens - 1], device=device)
    options = {"live": live, "top_k": top_k, "renormalise": True, "scoring": scoring}
    logits = (x.double() @ router.double().t()).sort(descending=True).values
    sure = (logits[:, top_k - 1] - logits[:, top_k]) > 4e-3 * logits.abs().amax(1)
    sure[-1] = True
    assert (~sure).sum() <= max(1, tokens // 2)
    arguments = (x, router, *weights, gate)
    expected = REGISTRY["moe"].reference(*map(exactly, arguments), **{**options, "live": live.cpu()})
    actual = run(*arguments, **options)
    assert relative_error(actual[sure], expected[sure.cpu()]) < tolerance


def check_route(run: Any, device: str, tokens: int, experts: int, top_k: int, **options: Any) -> None:
    """A provider of `route`, in float32: weights and choices, ties to the lower index, padding."""
    logits = draw(tokens, experts, dtype=torch.float32, device=device)
    logits[0] = 0.5  # all equal
    if options.pop("biased", False):
        options["bias"] = draw(experts, dtype=torch.float32, device=device)
    live = torch.tensor([max(tokens - 1, 1)], device=device)
    assert_matches("route", run, 1e-5, strided(logits), top_k=top_k, live=live, **options)


def check_rows(
    device: str, dtype: torch.dtype, tokens: int, heads: int, columns: int, tolerance: float, zero_centred: bool
) -> None:
    """Norms, with and without an addition or a gate, and the two gates."""
    runs = {name: REGISTRY[name].providers["triton_fused"].run for name in ROW_OPS}

    def rows(*shape: int) -> Tensor:
        return strided(draw(*shape, dtype=dtype, device=device))

    weight = draw(columns, dtype=dtype, device=device)
    x = rows(tokens, heads, columns)
    assert_matches("rms_norm", runs["rms_norm"], tolerance, x, weight, eps=1e-6, zero_centred=zero_centred)
    assert_matches(
        "gated_rms_norm", runs["gated_rms_norm"], tolerance, x, rows(tokens, heads, columns), weight, eps=1e-6
    )
    x, y = rows(tokens, columns), rows(tokens, columns)
    run = runs["add_rms_norm"]
    assert_matches("add_rms_norm", run, tolerance, x, y, weight, eps=1e-6, zero_centred=zero_centred)
    assert_matches("sigmoid_mul", runs["sigmoid_mul"], tolerance, x, y)
    assert_matches("sigmoid_mul", runs["sigmoid_mul"], tolerance, x, draw(tokens, 1, dtype=dtype, device=device))
    assert_matches("silu_mul", runs["silu_mul"], tolerance, rows(tokens, 2 * columns))


ROW_OPS = ("rms_norm", "add_rms_norm", "gated_rms_norm", "silu_mul", "sigmoid_mul")


def check_sample(run: Any, device: str, rows: int, vocabulary: int, greedy: bool) -> None:
    """Tokens equal the reference's, ties included; rows of temperature 0 are greedy."""
    logits = draw(rows, vocabulary, dtype=torch.float32, device=device)
    logits[0, 3] = logits[0, vocabulary - 1] = 9.0
    logits[-1, :5] = -torch.inf
    temperature = torch.linspace(0, 1.5, rows, device=device)
    unused = torch.ones(rows, device=device)
    seed = draw(rows, dtype=torch.float64, device=device, scale=2.0**40).long()
    arguments = (strided(logits), temperature, unused, unused, seed, torch.arange(rows, device=device))
    expected = REGISTRY["sample"].reference(*arguments, greedy=greedy, filtered=False)
    assert torch.equal(run(*arguments, greedy=greedy, filtered=False), expected)


def check_filtered_sample(run: Any, device: str, vocabulary: int, dtype: torch.dtype, spread: float) -> None:
    """Rows with top_k and top_p, and rows without, in one batch: tokens equal the reference's whatever is kept.

    spread: standard deviation of the logits; a small one keeps more tokens than are ever candidates. Logits are in steps
    of 1/16, so many are equal, and drawn a few hundred times at other positions, so that a token too many shows.
    """
    cases = [
        (0.7, 20, 0.95), (1.0, 0, 0.9), (1.0, 0, 0.999), (0.6, 1, 1.0), (1.3, 50, 1.0), (1.0, 0, 0.0), (0.0, 20, 0.5),
        (0.9, 0, 1.0), (1.0, vocabulary, 0.5), (2.0, vocabulary // 2, 1.0), (1.0, vocabulary // 3, 0.97), (1.0, 2, 0.6),
    ]  # fmt: skip
    temperature, top_k, top_p = (torch.tensor(column, device=device) for column in zip(*cases, strict=True))
    logits = draw(len(cases), vocabulary, dtype=torch.float32, device=device, scale=spread)
    logits = ((logits * 16).round() / 16).to(dtype)
    logits[:, 5] = -torch.inf
    logits[1, 11] = -0.0
    logits[2, :] = logits[2, 0]  # all equal
    seed = draw(len(cases), dtype=torch.float64, device=device, scale=2.0**40).long()
    for position in range(1 if device == "cpu" else 30):
        arguments = (strided(logits), temperature, top_k, top_p, seed, torch.full_like(seed, position))
        expected = REGISTRY["sample"].reference(*arguments)
        actual = run(*arguments)
        wrong = (actual != expected).nonzero()[:, 0].tolist()
        assert not wrong, [(cases[i], int(actual[i]), int(expected[i])) for i in wrong]


def check_copies(device: str, count: int, columns: int) -> None:
    """Embedding and gathering are exact; ids of other ranks and padding rows bring no neighbour's NaN."""
    table = draw(50, columns, dtype=torch.float32, device=device)
    table[0] = torch.nan
    ids = torch.randint(8, 57, (count,), device=device)
    ids[0], ids[-1] = 3, 99
    run = REGISTRY["embedding"].providers["triton_rows"].run
    assert torch.equal(run(ids, table, start=7), REGISTRY["embedding"].reference(ids, table, start=7))
    rows = torch.randint(1, 50, (count,), device=device, dtype=torch.int32)
    rows[-1] = -1
    actual = REGISTRY["gather_rows"].providers["triton_rows"].run(table, rows)
    assert torch.equal(actual[:-1], table[rows[:-1].long()])
