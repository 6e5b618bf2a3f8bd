"""causal_conv against torch's convolution, and its windows against slices of the sequence."""

from __future__ import annotations

import pytest
import torch
from ops.delta_inputs import export_rows, ints, poisoned, starts
from torch import Tensor
from torch.nn.functional import conv1d, silu

from firstlight.ops.causal_conv import causal_conv
from firstlight.ops.causal_conv.torch_decode import run as decode

CHANNELS, WIDTH = 10, 4
NO_EXPORTS = export_rows()


def sequence(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(CHANNELS, WIDTH, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return torch.randn(tokens, CHANNELS, generator=generator, dtype=torch.float64), weight


def whole(x: Tensor, weight: Tensor) -> Tensor:
    """The formula over a whole sequence."""
    padded = torch.cat([x.new_zeros(WIDTH - 1, CHANNELS), x]).T.unsqueeze(0)
    return silu(conv1d(padded, weight.unsqueeze(1), groups=CHANNELS))[0].T


def window(x: Tensor, tokens: int) -> Tensor:
    """The window after the first `tokens` tokens of a sequence: [C, W - 1]."""
    return torch.cat([x.new_zeros(WIDTH - 1, CHANNELS), x[:tokens]])[-(WIDTH - 1) :].T


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 65])
def test_is_the_convolution(tokens: int) -> None:
    x, weight = sequence(tokens)
    pool = poisoned(3, CHANNELS, WIDTH - 1)
    y = causal_conv(x, weight, pool, ints(0, tokens), ints(0), ints(2), NO_EXPORTS, max_query=tokens)
    torch.testing.assert_close(y, whole(x, weight))
    torch.testing.assert_close(pool[2], window(x, tokens), rtol=0, atol=0)
    assert pool[:2].isnan().all()


@pytest.mark.parametrize("cuts", [[1] * 9, [2, 1, 3, 3], [5, 4], [1, 8]])
def test_any_split_into_steps_is_the_whole(cuts: list[int]) -> None:
    x, weight = sequence(sum(cuts))
    pool = poisoned(2, CHANNELS, WIDTH - 1)
    parts, source = [], 0
    for part in x.split(cuts):
        parts.append(
            causal_conv(part, weight, pool, ints(0, len(part)), ints(source), ints(1), NO_EXPORTS, max_query=len(part))
        )
        source = 1
    torch.testing.assert_close(torch.cat(parts), whole(x, weight))


def test_requests_share_a_checkpoint_and_write_their_own_slots() -> None:
    """Three continuations of one prefix of 5 tokens, padding requests and tokens, two exports and a null one."""
    prefix, weight = sequence(5)
    tails = [sequence(n, seed)[0] for seed, n in enumerate([2, 7, 1], start=1)]
    pool = poisoned(8, CHANNELS, WIDTH - 1)
    pool[3] = window(prefix, 5)
    padding = torch.full((2, CHANNELS), float("nan"), dtype=torch.float64)
    y = causal_conv(
        torch.cat([*tails, padding]),
        weight,
        pool,
        starts([2, 7, 1, 0, 0]),
        ints(3, 3, 3, 0, -1),
        ints(4, 5, 0, 0, -1),
        export_rows((1, 2, 6), (1, 0, 7), (0, 1, 0), (-1, 0, -1)),
        max_query=7,
    )
    alone = [whole(torch.cat([prefix, tail]), weight)[5:] for tail in tails]
    torch.testing.assert_close(y[:10], torch.cat(alone))
    full = [torch.cat([prefix, tail]) for tail in tails]
    expected = {3: window(prefix, 5), 4: window(full[0], 7), 5: window(full[1], 12), 6: window(full[1], 7), 7: pool[3]}
    for slot, value in expected.items():
        torch.testing.assert_close(pool[slot], value, rtol=0, atol=0)
    assert pool[1:3].isnan().all()


def test_windows_after_each_token() -> None:
    prefix, weight = sequence(4)
    tail, _ = sequence(3, 1)
    pool = poisoned(9, CHANNELS, WIDTH - 1)
    pool[1] = window(prefix, 4)
    # The second request has one token of the three that its slots could hold.
    x = torch.cat([tail, tail[:1]])
    causal_conv(
        x,
        weight,
        pool,
        starts([3, 1]),
        ints(1, 1),
        torch.stack([ints(2, 3, 4), ints(5, 6, 7)]),
        NO_EXPORTS,
        max_query=3,
    )
    full = torch.cat([prefix, tail])
    for slot, tokens in {2: 5, 3: 6, 4: 7, 5: 5}.items():
        torch.testing.assert_close(pool[slot], window(full, tokens), rtol=0, atol=0)
    assert pool[6:].isnan().all()


@pytest.mark.parametrize("first_accepted", [0, 1, 2, 3])
def test_log_continues_and_folds(first_accepted: int) -> None:
    """Verify 3 drafts, keep some, verify 2 more, then fold all with one token more."""
    prefix, weight = sequence(6)
    drafts, _ = sequence(3, 1)
    more, _ = sequence(3, 2)
    pool, log = poisoned(3, CHANNELS, WIDTH - 1), poisoned(3, 8, CHANNELS)
    pool[1] = window(prefix, 6)

    def step(x: Tensor, state_out: int, length: int) -> Tensor:
        return causal_conv(
            x,
            weight,
            pool,
            ints(0, len(x)),
            ints(1),
            ints(state_out),
            NO_EXPORTS,
            max_query=3,
            log=log,
            log_length=ints(length),
        )

    kept = torch.cat([prefix, drafts[:first_accepted], more])
    torch.testing.assert_close(step(drafts, 0, 0), whole(torch.cat([prefix, drafts]), weight)[6:])
    y = torch.cat([step(more[:2], 0, first_accepted), step(more[2:], 2, first_accepted + 2)])
    torch.testing.assert_close(y, whole(kept, weight)[-3:])
    torch.testing.assert_close(pool[1], window(prefix, 6), rtol=0, atol=0)
    torch.testing.assert_close(pool[2], window(kept, len(kept)), rtol=0, atol=0)


def test_decode_provider_is_the_reference() -> None:
    x, weight = sequence(4)
    pools = []
    for run in (causal_conv.reference, decode):
        pool = sequence(8 * (WIDTH - 1), 3)[0].view(8, WIDTH - 1, CHANNELS).transpose(1, 2).contiguous()
        pool[0] = float("nan")
        y = run(
            x,
            weight,
            pool,
            starts([1, 1, 1, 0]),
            ints(1, 0, 3, 5),
            ints(1, 2, 0, 6),
            export_rows((0, 1, 4), (2, 0, 7), (0, 0, 0)),
            max_query=1,
        )
        pools.append((y[:3], pool[1:]))
    torch.testing.assert_close(pools[1], pools[0])


def test_pool_strides_are_free_and_low_precision_is_rounded_once() -> None:
    x, weight = sequence(5)
    x, weight = x.bfloat16(), weight.bfloat16()
    pool = torch.zeros(3, WIDTH - 1, 2 * CHANNELS, dtype=torch.bfloat16).transpose(1, 2)[:, ::2]
    y = causal_conv(x, weight, pool, ints(0, 5), ints(0), ints(1), NO_EXPORTS, max_query=5)
    torch.testing.assert_close(y, whole(x.double(), weight.double()).bfloat16())
    torch.testing.assert_close(pool[1], window(x, 5), rtol=0, atol=0)


def test_refusals_name_the_argument() -> None:
    x, weight = sequence(1)
    pool = poisoned(2, CHANNELS, WIDTH - 1)
    with pytest.raises(ValueError, match="'relu' is unknown"):
        causal_conv(x, weight, pool, ints(0, 1), ints(0), ints(1), NO_EXPORTS, max_query=1, activation="relu")
    log = poisoned(2, 4, CHANNELS)
    with pytest.raises(ValueError, match="state_out"):
        causal_conv(
            x, weight, pool, ints(0, 1), ints(0), ints(1)[None], NO_EXPORTS, max_query=1, log=log, log_length=ints(0)
        )
