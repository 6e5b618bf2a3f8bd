import math

import pytest
import torch
from ops.examples_a import normal

from firstlight.ops.sample import sample
from firstlight.ops.sample.kept import keep
from firstlight.ops.sample.noise import gumbel, gumbel_of


def draw(logits: torch.Tensor, count: int, **settings: float) -> torch.Tensor:
    """`count` draws from one row of logits, each at a position of its own."""
    rows = torch.ones(count)
    return sample(
        logits.expand(count, -1),
        rows * settings.get("temperature", 1.0),
        rows.int() * int(settings.get("top_k", 0)),
        rows * settings.get("top_p", 1.0),
        torch.full((count,), 42),
        torch.arange(count),
        filtered="top_k" in settings or "top_p" in settings,
    )


def chi_square(drawn: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Sum of (observed - expected)^2 / expected over the tokens that can be drawn."""
    observed = torch.bincount(drawn, minlength=len(probabilities)).double()
    possible = probabilities > 0
    assert observed[~possible].sum() == 0
    expected = probabilities[possible].double() * len(drawn)
    return float(((observed[possible] - expected).square() / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, -torch.inf, 0.0, 1.0, -1.0, 3.0, 0.5, 1.5])
    drawn = draw(logits, 100_000, temperature=temperature)
    assert chi_square(drawn, (logits / temperature).softmax(0)) < 22.5  # 6 degrees of freedom, p = 0.001


def test_draws_follow_the_softmax_in_a_large_vocabulary() -> None:
    """In a flat row of 2^18 tokens the winner's noise is far in the tail: halves of the vocabulary must be even."""
    drawn = draw(torch.zeros(2**18), 100)
    assert chi_square(drawn // 2**15, torch.full((8,), 1 / 8)) < 24.3  # 7 degrees of freedom, p = 0.001
    assert len(drawn.unique()) > 95


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, [5, 0]),
        ({"top_k": 1}, [5]),
        ({"top_k": 99}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.5}, [5]),  # 0.6 reaches it
        ({"top_p": 0.61}, [5, 0]),  # 0.6 doesn't, 0.8 does
        ({"top_p": 0.0}, [5]),
        ({"top_k": 2, "top_p": 0.74}, [5]),  # 0.6 / 0.8 = 0.75 of what top_k left
        ({"top_k": 2, "top_p": 0.76}, [5, 0]),
    ],
)
def test_filters(settings: dict[str, float], kept: list[int]) -> None:
    probabilities = torch.tensor([0.2, 0.02, 0.05, 0.1, 0.03, 0.6])
    drawn = draw(probabilities.log(), 20_000, **settings)
    left = torch.zeros(6)
    left[kept] = probabilities[kept]
    assert sorted(drawn.unique().tolist()) == sorted(kept)
    assert chi_square(drawn, left / left.sum()) < 20.6  # at most 5 degrees of freedom, p = 0.001


def test_equal_logits_are_kept_by_token_id() -> None:
    z = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]])
    assert keep(z, torch.tensor([2]), torch.tensor([1.0])).isfinite().tolist() == [[False, True, True, False, False]]
    assert keep(z, torch.tensor([4]), torch.tensor([1.0])).isfinite().tolist() == [[True, True, True, True, False]]
    flat = keep(torch.zeros(1, 8), torch.tensor([0]), torch.tensor([0.5]))
    assert flat.isfinite().tolist() == [[True] * 4 + [False] * 4]


def test_top_p_of_1_keeps_the_unlikeliest() -> None:
    z = torch.tensor([[0.0, -200.0, -300.0]])
    assert torch.equal(keep(z, torch.tensor([0]), torch.tensor([1.0])), z)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_0_takes_the_first_of_the_largest(dtype: torch.dtype, greedy: bool) -> None:
    logits = torch.tensor([[0, 3, 1, 3], [-5, -7, -5, -5]]).to(dtype)
    zeros = torch.zeros(2)
    out = sample(logits, zeros, zeros.int() + 2, zeros + 0.1, zeros.long(), zeros.long(), greedy=greedy)
    assert out.tolist() == [1, 0]
    assert out.dtype == torch.int64


def test_a_row_depends_on_itself_alone() -> None:
    count = 24
    logits = normal(count, 1001)
    parameters = (
        torch.arange(count) % 3 * 0.7,
        torch.arange(count) % 4 * 10,
        1 - torch.arange(count) % 2 * 0.3,
        torch.arange(count) * 77 - 500,
        torch.arange(count) // 2,
    )
    together = sample(logits, *parameters)
    for n in range(count):
        alone = sample(logits[n : n + 1], *(parameter[n : n + 1] for parameter in parameters))
        assert alone.item() == together[n]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits[order], *(parameter[order] for parameter in parameters)), together[order])


@pytest.mark.parametrize("vocabulary", [5, 256, 700, 2048, 5000])
def test_cpu_provider_equals_the_reference(vocabulary: int) -> None:
    """Peaked and flat rows, ties in all of them, more kept than there are candidates in some."""
    count = 60
    n = torch.arange(count)
    logits = (normal(count, vocabulary) * (n % 5)[:, None]).bfloat16()
    logits[:, ::3] -= torch.inf
    parameters = (
        (n % 4) * 0.6,
        torch.tensor([0, 1, 40, 600, 0])[n % 5],
        torch.tensor([1.0, 0.5, 0.95, 0.0, 0.999, 1.0, 0.9])[n % 7],
        n * 77 - 500,
        n // 2,
    )
    fast = sample.providers["torch_cpu"].run
    assert torch.equal(fast(logits, *parameters), sample(logits, *parameters))
    assert torch.equal(fast(logits, *parameters, greedy=True), logits.float().argmax(-1))
    assert torch.equal(fast(logits, *parameters, filtered=False), sample(logits, *parameters, filtered=False))


def test_cpu_provider_takes_the_first_of_the_largest() -> None:
    z = torch.zeros(4, 1000)
    z[0, [700, 701]] = 1  # within a block
    z[1, [300, 600]] = 1  # in two blocks
    z[2, [999]] = 1  # behind the last whole block
    z[3, [300, 999]] = 1  # before and behind
    zeros = torch.zeros(4)
    out = sample.providers["torch_cpu"].run(z, zeros, zeros.int(), zeros + 1, zeros.long(), zeros.long())
    assert out.tolist() == [700, 300, 999, 300]


def test_the_promises_change_nothing_where_they_hold() -> None:
    logits, rows = normal(9, 33), torch.ones(9)
    parameters = (rows * 0.8, rows.int() * 0, rows, torch.arange(9), torch.arange(9))
    assert torch.equal(sample(logits, *parameters), sample(logits, *parameters, filtered=False))


def noise_in_python(seed: int, position: int, token: int) -> float:
    """The hash of `noise`, in Python's unbounded integers."""

    def mix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def mix32(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    key = mix64((mix64(seed % 2**64) + position) % 2**64)
    h = mix32(mix32((token + key) % 2**32) ^ (key >> 32))
    return -math.log(-math.log1p(-((h % 2**31) + 0.5) / 2**31))


def test_noise_is_the_stated_hash() -> None:
    seeds, positions = [0, 1, -5, 2**63 - 1], [0, 7, 131_072, 2**31]
    noise = gumbel(torch.tensor(seeds), torch.tensor(positions), torch.arange(50_000))
    for n, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in (0, 1, 777, 49_999):
            assert noise[n, token].item() == pytest.approx(noise_in_python(seed, position, token), rel=1e-5, abs=1e-6)
    assert noise[0, 0].item() == pytest.approx(0.33270746)  # pinned: changing the hash changes every seeded answer
    assert noise[1, 1].item() == pytest.approx(noise_in_python(1, 7, 1), rel=1e-5)


def test_noise_of_extreme_hashes() -> None:
    noise = gumbel_of(torch.tensor([0, 2**31 - 1, -1, -(2**31)], dtype=torch.int32))
    likeliest, unlikeliest = 32 * math.log(2), -math.log(24 * math.log(2))
    assert noise.tolist() == pytest.approx([likeliest, unlikeliest, unlikeliest, likeliest], rel=1e-6)


def test_noise_is_standard_gumbel_and_uncorrelated() -> None:
    noise = gumbel(torch.arange(64) // 8, torch.arange(64) % 8, torch.arange(20_000)).double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.006)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    correlation = torch.corrcoef(noise) - torch.eye(64)
    assert correlation.abs().max() < 0.04
    shifted = torch.corrcoef(torch.stack((noise[:, 1:].flatten(), noise[:, :-1].flatten())))
    assert abs(shifted[0, 1].item()) < 0.005
