"""gated_delta_rule: each provider against the formula in float64, and its ways of keeping states against each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.delta_inputs import export_rows, ints, poisoned, rule_inputs, starts, worst_row_error
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from firstlight.hardware import CPU_GENERIC
from firstlight.ops.gated_delta_rule import DeltaLog, gated_delta_rule
from firstlight.ops.gated_delta_rule.torch_chunked import run as chunked
from firstlight.ops.gated_delta_rule.torch_decode import run as decode
from firstlight.ops.gated_delta_rule.torch_in_place import run as in_place
from firstlight.ops.op import Call
from firstlight.step import Bucket

HV, V, K = 6, 8, 16
NO_EXPORTS = export_rows()
Run = Callable[..., Tensor]
runs = pytest.mark.parametrize("run", [gated_delta_rule.reference, chunked], ids=["reference", "chunked"])


def formula(inputs: tuple[Tensor, ...], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(o [T, HV, V], states [T + 1, HV, V, K]) of one sequence, head by head, token by token."""
    q, k, v, g, beta = (x.double() for x in inputs)
    states = [torch.zeros(HV, V, K, dtype=torch.float64) if state is None else state.double()]
    out = torch.empty_like(v)
    for t in range(len(v)):
        states.append(torch.empty_like(states[0]))
        for head in range(HV):
            key, query = k[t, head // (HV // k.shape[1])], q[t, head // (HV // k.shape[1])]
            decayed = states[t][head] * g[t, head].exp()
            update = beta[t, head] * (v[t, head] - decayed @ key)
            states[-1][head] = decayed + torch.outer(update, key)
            out[t, head] = states[-1][head] @ query
    return out, torch.stack(states)


def some_state(seed: int = 7) -> Tensor:
    return torch.randn(HV, V, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut(inputs: tuple[Tensor, ...], *, start: int = 0, stop: int | None = None) -> tuple[Tensor, ...]:
    return tuple(x[start:stop] for x in inputs)


def join(*parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(group) for group in zip(*parts, strict=True))


def test_is_the_model_files_recurrence() -> None:
    q, k, v, g, beta = rule_inputs(37, dtype=torch.float32)
    pool = poisoned(2, HV, V, K, dtype=torch.float32)
    o = gated_delta_rule(q, k, v, g, beta, pool, ints(0, 37), ints(0), ints(1), NO_EXPORTS, max_query=37)
    # The model file scales q itself; older versions want key heads repeated.
    queries, keys = (x[None].repeat_interleave(3, dim=2) for x in (q * K**0.5, k))
    expected, state = torch_recurrent_gated_delta_rule(
        queries, keys, v[None], g[None], beta[None], output_final_state=True
    )
    torch.testing.assert_close(o, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pool[1], state[0].transpose(1, 2), rtol=1e-5, atol=1e-6)


@runs
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
def test_is_the_formula(run: Run, tokens: int) -> None:
    inputs = rule_inputs(tokens)
    pool = poisoned(4, HV, V, K)
    pool[2] = some_state()
    o = run(*inputs, pool, ints(0, tokens), ints(2), ints(3), NO_EXPORTS, max_query=tokens)
    expected, states = formula(inputs, pool[2])
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(pool[3], states[-1])
    assert pool[:2].isnan().all()


@runs
@pytest.mark.parametrize("cuts", [[1] * 12, [7] * 21, [64, 64, 3], [1, 65, 2, 80], [16, 100]])
def test_any_split_into_steps_is_the_whole(run: Run, cuts: list[int]) -> None:
    inputs = rule_inputs(sum(cuts))
    pool = poisoned(2, HV, V, K)
    parts, begin = [], 0
    for tokens in cuts:
        step = cut(inputs, start=begin, stop=begin + tokens)
        source = ints(1 if begin else 0)
        parts.append(run(*step, pool, ints(0, tokens), source, ints(1), NO_EXPORTS, max_query=tokens))
        begin += tokens
    expected, states = formula(inputs)
    torch.testing.assert_close(torch.cat(parts), expected)
    torch.testing.assert_close(pool[1], states[-1])


@runs
def test_batched_is_alone_with_padding_exports_and_a_shared_checkpoint(run: Run) -> None:
    counts = [3, 150, 64, 1]
    requests = [rule_inputs(n, seed=i) for i, n in enumerate(counts)]
    padding = rule_inputs(0, padding=5)
    pool = poisoned(16, HV, V, K)
    pool[1] = some_state()
    exports = [
        (1, 64, 6),
        (1, 77, 7),
        (1, 150, 8),
        (0, 2, 9),
        (2, 0, 10),
        (2, 64, 11),
        (1, 65, 0),
        (-1, 0, -1),
        (0, 0, 0),
    ]
    o = run(
        *join(*requests, padding),
        pool,
        starts([*counts, 0, 0]),
        ints(1, 1, 0, 1, 0, -1),
        ints(2, 3, 4, 0, 0, -1),
        export_rows(*exports),
        max_query=160,
    )
    state = [pool[1].clone(), pool[1].clone(), None, pool[1].clone()]
    expected = [formula(request, start) for request, start in zip(requests, state, strict=True)]
    torch.testing.assert_close(o[: sum(counts)], torch.cat([out for out, _ in expected]))
    torch.testing.assert_close(pool[1], some_state(), rtol=0, atol=0)
    for slot, request in {2: 0, 3: 1, 4: 2}.items():
        torch.testing.assert_close(pool[slot], expected[request][1][-1])
    for request, tokens, slot in exports:
        if slot > 0:
            torch.testing.assert_close(pool[slot], expected[request][1][tokens])
    assert pool[12:].isnan().all()
    assert pool[5].isnan().all()


@runs
def test_states_after_each_token(run: Run) -> None:
    requests = [rule_inputs(4, seed=1), rule_inputs(2, seed=2)]
    pool = poisoned(12, HV, V, K)
    pool[1] = some_state()
    slots = torch.stack([ints(2, 3, 0, 5), ints(6, 7, 8, 9)])
    run(*join(*requests), pool, starts([4, 2]), ints(1, 0), slots, NO_EXPORTS, max_query=4)
    first, second = formula(requests[0], pool[1])[1], formula(requests[1])[1]
    for slot, state in {2: first[1], 3: first[2], 5: first[4], 6: second[1], 7: second[2]}.items():
        torch.testing.assert_close(pool[slot], state)
    assert pool[8:].isnan().all()
    assert pool[4].isnan().all()


def make_log(slots: int = 4, ring: int = 8) -> DeltaLog:
    return DeltaLog(
        k=poisoned(slots, ring, 2, K),
        u=poisoned(slots, ring, HV, V),
        g=poisoned(slots, ring, HV),
        conv=poisoned(slots, ring, 1),
    )


@runs
@pytest.mark.parametrize("accepted", [(a, b) for a in range(4) for b in range(4)])
def test_verify_accept_fold_is_the_plain_recurrence(run: Run, accepted: tuple[int, int]) -> None:
    """Two requests with 3 drafts each: verify, keep any prefix, verify 2 tokens more, fold with one more."""
    drafts = [rule_inputs(3, seed=1), rule_inputs(3, seed=2)]
    more = [rule_inputs(3, seed=3), rule_inputs(3, seed=4)]
    pool, log = poisoned(5, HV, V, K), make_log()
    pool[1], pool[2] = some_state(1), some_state(2)
    start = [pool[1].clone(), pool[2].clone()]
    source = ints(1, 2)

    def step(parts: list[tuple[Tensor, ...]], state_out: Tensor, length: list[int]) -> tuple[Tensor, ...]:
        counts = [len(part[0]) for part in parts]
        o = run(
            *join(*parts),
            pool,
            starts(counts),
            source,
            state_out,
            NO_EXPORTS,
            max_query=max(counts),
            log=log,
            log_length=ints(*length),
        )
        return o.split(counts)

    first = step(drafts, ints(0, -1), [0, 0])
    second = step([cut(part, stop=2) for part in more], ints(0, 0), list(accepted))
    torch.testing.assert_close(pool[1:3], torch.stack(start), rtol=0, atol=0)
    third = step([cut(part, start=2) for part in more], ints(3, 2), [n + 2 for n in accepted])
    for request, target in enumerate((3, 2)):
        torch.testing.assert_close(first[request], formula(drafts[request], start[request])[0])
        kept = join(cut(drafts[request], stop=accepted[request]), more[request])
        expected, states = formula(kept, start[request])
        torch.testing.assert_close(torch.cat([second[request], third[request]]), expected[-3:])
        torch.testing.assert_close(pool[target], states[-1])


@runs
def test_prefill_beside_verify_logs_nothing(run: Run) -> None:
    """A fresh request longer than the ring writes its state; its slot's log and the null slot's stay as they are."""
    fresh, draft = rule_inputs(20, seed=1), rule_inputs(2, seed=2)
    pool, log = poisoned(4, HV, V, K), make_log()
    pool[1] = some_state()
    o = run(
        *join(draft, fresh),
        pool,
        starts([2, 20]),
        ints(1, 0),
        ints(0, 2),
        NO_EXPORTS,
        max_query=20,
        log=log,
        log_length=ints(0, 0),
    )
    torch.testing.assert_close(o[:2], formula(draft, pool[1])[0])
    torch.testing.assert_close(o[2:], formula(fresh)[0])
    torch.testing.assert_close(pool[2], formula(fresh)[1][-1])
    assert log.u[2:].isnan().all()
    assert log.k[1, 2:].isnan().all()
    assert log.g[1, :2].isfinite().all()


EXPORTS = export_rows((0, 1, 4), (2, 0, 7), (0, 0, 0))
# Ordinary, fresh, unwritten and padding requests, one without a token whose state is only copied, and one that continues
# a state which another request overwrites in the same step.
SLOTS = {
    "own": (ints(1, 2, 3, 0, 0), ints(1, 2, 3, 0, 0)),
    "mixed": (ints(1, 0, 3, 5, 0), ints(1, 2, 0, 6, 0)),
    "forked": (ints(1, 1, 2, 0, 0), ints(4, 5, 6, 0, 0)),
    "overwritten": (ints(1, 1, 0, 0, 0), ints(1, 2, 3, 0, 0)),
}


@pytest.mark.parametrize("run", [decode, in_place], ids=["decode", "in_place"])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("exports", [NO_EXPORTS, EXPORTS[2:], EXPORTS], ids=["none", "null", "two"])
def test_decode_providers_are_the_reference(run: Run, slots: str, exports: Tensor) -> None:
    inputs = rule_inputs(3, padding=2)
    results = []
    for each in (gated_delta_rule.reference, run):
        pool = torch.stack([some_state(i) for i in range(9)])
        pool[0] = float("nan")
        o = each(*inputs, pool, starts([1, 1, 1, 0, 0]), *SLOTS[slots], exports, max_query=1)
        results.append((o[:3], pool[1:]))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("run", [gated_delta_rule.reference, chunked, decode, in_place])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 5e-6), (torch.bfloat16, 4e-3)])
def test_512_steps_do_not_drift(run: Run, dtype: torch.dtype, limit: float) -> None:
    """Error by the rounding of inputs excluded: the formula sees the rounded inputs. bfloat16: the output's own rounding."""
    inputs = rule_inputs(512, dtype=dtype)
    pool = poisoned(2, HV, V, K, dtype=torch.float32)
    size = 1 if run in (decode, in_place) else 128
    parts = []
    for begin in range(0, 512, size):
        step = cut(inputs, start=begin, stop=begin + size)
        parts.append(run(*step, pool, ints(0, size), ints(1 if begin else 0), ints(1), NO_EXPORTS, max_query=size))
    expected, states = formula(inputs)
    assert worst_row_error(torch.cat(parts), expected) < limit
    assert worst_row_error(pool[1], states[-1]) < 5e-6


@pytest.mark.parametrize("run", [gated_delta_rule.reference, chunked, decode, in_place])
def test_states_in_bfloat16_are_rounded_once_as_they_are_written(run: Run) -> None:
    """Outputs come from what was computed; a state after the step and an export of it are the same number, rounded."""
    tokens = 1 if run in (decode, in_place) else 100
    inputs = rule_inputs(tokens, dtype=torch.float32)
    pool = poisoned(5, HV, V, K, dtype=torch.bfloat16)
    pool[1] = some_state()
    exports = export_rows((0, tokens, 3), (0, 0, 4))
    o = run(*inputs, pool, ints(0, tokens), ints(1), ints(2), exports, max_query=tokens)
    expected, states = formula(inputs, pool[1])
    assert worst_row_error(o, expected) < 5e-6
    # The nearest: half a unit in the last place, of 8 bits; and the float32 sum's own error.
    off = (pool[2].double() - states[-1]).abs()
    assert (off <= states[-1].abs() * 2**-8 + 1e-5).all()
    assert off.max() > 1e-4
    assert torch.equal(pool[3], pool[2])
    assert torch.equal(pool[4], pool[1])


def test_states_in_bfloat16_are_not_updated_in_place() -> None:
    pool = torch.zeros(2, HV, V, K, dtype=torch.bfloat16)
    args = (*rule_inputs(1, dtype=torch.float32), pool, ints(0, 1), ints(0), ints(1), NO_EXPORTS)
    kwargs = {"max_query": 1}
    provider = gated_delta_rule.providers["torch_in_place"]
    assert provider.when(Call(args, kwargs, Bucket(), CPU_GENERIC)) == (
        "computes in the states themselves, and so in float32, not in bfloat16"
    )
    kept = (*args[:5], pool.float(), *args[6:])
    assert provider.when(Call(kept, kwargs, Bucket(), CPU_GENERIC)) is None


@runs
@pytest.mark.parametrize("change", [{"key_heads": 6}, {"key_heads": 1}, {"key_heads": 3}])
def test_heads_are_shared_as_stated(run: Run, change: dict[str, Any]) -> None:
    inputs = rule_inputs(9, **change)
    pool = poisoned(2, HV, V, K)
    o = run(*inputs, pool, ints(0, 9), ints(0), ints(1), NO_EXPORTS, max_query=9)
    torch.testing.assert_close(o, formula(inputs)[0])


@runs
def test_strong_decay_stays_finite(run: Run) -> None:
    """Differences of summed log decays reach +-6,000 here; only the negative ones may be exponentiated."""
    q, k, v, g, beta = rule_inputs(64, dtype=torch.float32)
    pool = poisoned(2, HV, V, K, dtype=torch.float32)
    o = run(q, k, v, g - 100, beta, pool, ints(0, 64), ints(0), ints(1), NO_EXPORTS, max_query=64)
    assert worst_row_error(o, formula((q, k, v, g - 100, beta))[0]) < 1e-6


@runs
def test_two_ways_of_keeping_states_are_refused(run: Run) -> None:
    inputs = rule_inputs(2)
    with pytest.raises(ValueError, match="pass one of them"):
        run(
            *inputs,
            poisoned(4, HV, V, K),
            ints(0, 2),
            ints(0),
            torch.stack([ints(1, 2)]),
            NO_EXPORTS,
            max_query=2,
            log=make_log(),
            log_length=ints(0),
        )
