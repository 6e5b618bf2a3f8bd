"""What is asked: sessions of one turn or several, with random prompts of given lengths or a trace's own.

Prompts of token ids have exactly the tokens asked for. Where a server takes text alone, random ids are turned into
text, and tokens added or dropped until the server will count that many in it. The seed decides everything; prompts, lengths and arrivals
draw from generators of their own, so that changing one leaves the others as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from firstlight.bench.arrivals import arrival_times
from firstlight.bench.errors import BenchError
from firstlight.bench.trace import TraceLine
from firstlight.config import MOST_REQUESTS, BenchOptions, Span

Ids = npt.NDArray[np.int32]
Prompt = Ids | str | list[dict[str, Any]]
"""Token ids, text, or a chat's messages."""

OPEN_LOOP_REQUESTS = 100
CLOSED_LOOP_MULTIPLE = 4
"""Requests of a load by default."""
MOST_PROMPT_TOKENS = 2**32
"""Of all prompts of a load, which are in memory before it begins: 16 GiB."""
TEXT_TRIES = 30
"""How often a text is changed to get its length right."""
TEXT_POOL = 4096
"""Different tokens in random texts, at most."""
LENGTHS, TOKENS, PREFIXES, ARRIVALS, TURNS, WARM_UP = range(6)
"""Purposes of random numbers."""


class Codec(Protocol):
    """A tokenizer, as far as it is needed here."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """The ids that the server will make of the text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session. prompt: what is new in it. input_tokens: how many tokens that is, as far as is known."""

    prompt: Prompt
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other. due: seconds from the start at which the first is sent; None in a closed loop."""

    turns: tuple[Turn, ...]
    due: float | None = None


def generator(seed: int, purpose: int) -> np.random.Generator:
    """Random numbers for one purpose."""
    return np.random.default_rng([seed, purpose])


def request_count(options: BenchOptions, lines: Sequence[TraceLine] | None) -> int:
    """Sessions of a load, when --requests doesn't say."""
    if options.requests or lines:
        return min(options.requests or len(lines or ()), len(lines or ()) or options.requests)
    return OPEN_LOOP_REQUESTS if options.rate else CLOSED_LOOP_MULTIPLE * max(options.concurrency, 1)


def make_sessions(
    options: BenchOptions, lines: Sequence[TraceLine] | None, codec: Codec | None, vocabulary: Span | None
) -> list[Session]:
    """The load, in the order of sending. lines: a trace. codec: its tokenizer, when prompts are to be text.
    vocabulary: ids of random tokens.

    Raises BenchError when the options don't fit together.
    """
    count = request_count(options, lines)
    if lines is not None:
        if options.turns != Span(1, 1) or options.prefix_tokens:
            raise BenchError("--trace: a trace says what is asked; --turns and --prefix-tokens don't go with it")
        timed = lines[0].time_seconds is not None
        if timed and options.rate:
            raise BenchError(f"--rate {options.rate}: the trace has times of its own; leave one of them out")
        turns: list[tuple[Turn, ...]] = [(turn,) for turn in _trace_turns(options, lines[:count], codec, vocabulary)]
        due = [line.time_seconds for line in lines[:count]]
    else:
        turns = _random_turns(options, count, options.seed, codec, vocabulary)
        due = [None] * count
    if options.rate:
        try:
            due = [*arrival_times(count, options.rate, options.burstiness, generator(options.seed, ARRIVALS))]
        except ValueError as error:
            raise BenchError(f"--rate {options.rate} --burstiness {options.burstiness}: {error}") from None
    return [Session(*session) for session in zip(turns, due, strict=True)]


def make_warm_up(
    options: BenchOptions, lines: Sequence[TraceLine] | None, codec: Codec | None, vocabulary: Span | None
) -> list[Session]:
    """Sessions of one turn to send before the clock starts. Random prompts are others than those of the load, so that
    they put nothing of it in a prefix cache; a trace's own prompts are its first ones."""
    if lines is not None:
        chosen = [lines[number % len(lines)] for number in range(options.warm_up)]
        return [Session((turn,)) for turn in _trace_turns(options, chosen, codec, vocabulary)]
    seed = int(generator(options.seed, WARM_UP).integers(1 << 31))
    turns = _random_turns(options.model_copy(update={"turns": Span(1, 1)}), options.warm_up, seed, codec, vocabulary)
    return [Session(turn) for turn in turns]


def _draw(span: Span, rng: np.random.Generator) -> int:
    return int(rng.integers(span.low, span.high + 1))


def _random_turns(
    options: BenchOptions, count: int, seed: int, codec: Codec | None, vocabulary: Span | None
) -> list[tuple[Turn, ...]]:
    """Random sessions: the first turn of each begins with its group's prefix."""
    _refuse_more_than_memory(options, count)
    ids = _IdSource(seed, vocabulary)
    if codec is not None:
        ids.keep_texts(codec)
    lengths, turn_counts = generator(seed, LENGTHS), generator(seed, TURNS)
    prefix_rng = generator(seed, PREFIXES)
    prefixes = [ids.draw(options.prefix_tokens, prefix_rng) for _ in range(options.prefix_groups)]
    groups = prefix_rng.permutation(count) % options.prefix_groups
    sessions = []
    for group in groups:
        turns = []
        for number in range(_draw(options.turns, turn_counts)):
            size, answer = _draw(options.input_tokens, lengths), _draw(options.output_tokens, lengths)
            prefix = prefixes[group] if number == 0 else ids.draw(0)
            turns.append(_turn(options, prefix, ids, size, answer, codec))
        sessions.append(tuple(turns))
    return sessions


def _refuse_more_than_memory(options: BenchOptions, count: int) -> None:
    """Raises BenchError for a load that is too large only in all: each option by itself is within its bounds."""
    requests = count * options.turns.high
    if requests > MOST_REQUESTS:
        raise BenchError(
            f"--turns {options.turns}: with {count} conversations up to {requests} requests, of which a load has at most "
            f"{MOST_REQUESTS}; give fewer --requests or --turns"
        )
    prefixes = (count + options.prefix_groups) * options.prefix_tokens
    tokens = requests * options.input_tokens.high + prefixes
    if tokens > MOST_PROMPT_TOKENS:
        raise BenchError(
            f"--input-tokens {options.input_tokens}: with {requests} requests and --prefix-tokens {options.prefix_tokens} of "
            f"{options.prefix_groups} groups, prompts have up to {tokens} tokens in all, and at most {MOST_PROMPT_TOKENS} are "
            "kept in memory; give fewer or shorter ones"
        )


def _trace_turns(
    options: BenchOptions, lines: Sequence[TraceLine], codec: Codec | None, vocabulary: Span | None
) -> list[Turn]:
    lengths = generator(options.seed, LENGTHS)
    ids = _IdSource(options.seed, vocabulary)
    tokens = sum(line.input_tokens or 0 for line in lines)
    if tokens > MOST_PROMPT_TOKENS:
        raise BenchError(
            f"--trace {options.trace}: the `input_tokens` of {len(lines)} lines are {tokens} in all, and at most "
            f"{MOST_PROMPT_TOKENS} are kept in memory; give fewer --requests"
        )
    if codec is not None and any(line.input_tokens for line in lines):
        ids.keep_texts(codec)
    turns = []
    for line in lines:
        answer = line.output_tokens or _draw(options.output_tokens, lengths)
        if line.input_tokens is not None:
            turns.append(_turn(options, ids.draw(0), ids, line.input_tokens, answer, codec))
            continue
        if (line.kind == "messages") != (options.endpoint == "chat"):
            raise BenchError(
                f"--endpoint {options.endpoint}: the trace has a line with `{line.kind}`; chats take `messages` or "
                "`input_tokens`, completions `prompt`, `prompt_token_ids` or `input_tokens`"
            )
        if line.prompt_token_ids is not None:
            turns.append(Turn(np.array(line.prompt_token_ids, np.int32), len(line.prompt_token_ids), answer))
        elif line.prompt is not None:
            turns.append(Turn(line.prompt, len(codec.encode(line.prompt)) if codec else 0, answer))
        else:
            turns.append(Turn(line.messages or [], 0, answer))
    return turns


def _turn(options: BenchOptions, prefix: Ids, ids: _IdSource, size: int, answer: int, codec: Codec | None) -> Turn:
    """A random turn in the form that the endpoint takes."""
    total = len(prefix) + size
    if codec is None:
        if options.endpoint == "chat":
            raise BenchError("--endpoint chat: chats are text, so random ones need --tokenizer CHECKPOINT")
        return Turn(np.concatenate([prefix, ids.draw(size)]), total, answer)
    before = codec.decode(prefix.tolist()) if len(prefix) else ""
    text, tokens = _text(codec, ids, before, total, size)
    prompt: Prompt = [{"role": "user", "content": text}] if options.endpoint == "chat" else text
    return Turn(prompt, tokens, answer)


def _text(codec: Codec, ids: _IdSource, before: str, total: int, size: int) -> tuple[str, int]:
    """A text that begins with `before` and has `total` tokens, or as near as could be had; and how many it has."""
    best, nearest = "", 0
    tail = ids.draw(size)
    for _ in range(TEXT_TRIES):
        text = before + codec.decode(tail.tolist())
        tokens = len(codec.encode(text))
        if not best or abs(tokens - total) < abs(nearest - total):
            best, nearest = text, tokens
        if tokens == total:
            break
        # Neighbours that merged made fewer tokens, others more: as many again, or without as many.
        keep = max(len(tail) - max(tokens - total, 0), 0)
        tail = np.concatenate([tail[:keep], ids.draw(max(total - tokens, int(keep == 0)))])
    return best, nearest


class _IdSource:
    """Random token ids, uniform over a range."""

    def __init__(self, seed: int, vocabulary: Span | None) -> None:
        self._rng = generator(seed, TOKENS)
        self._vocabulary = vocabulary
        self._pool: Ids | None = None

    def draw(self, count: int, rng: np.random.Generator | None = None) -> Ids:
        """`count` ids. Raises BenchError when nobody said what ids there are."""
        if count == 0:
            return np.zeros(0, np.int32)
        rng = rng or self._rng
        if self._pool is not None:
            return rng.choice(self._pool, count)
        known = self._known()
        return rng.integers(known.low, known.high + 1, count, dtype=np.int32)

    def keep_texts(self, codec: Codec) -> None:
        """From now on, draw only ids that are a text by themselves: half a character is none, nor is a special token.

        Raises BenchError when there is no such id.
        """
        known = self._known()
        # Beyond the tokenizer's own ids there is no text, and a range may go on for billions.
        candidates = np.arange(known.low, min(known.high + 1, codec.vocab_size), dtype=np.int32)
        empty = len(codec.encode(""))
        pool: list[int] = []
        for id in self._rng.permutation(candidates).tolist():
            text = codec.decode([id])
            if text and len(codec.encode(text)) == empty + 1:
                pool.append(id)
                if len(pool) == TEXT_POOL:
                    break
        if not pool:
            raise BenchError(f"--token-range {known}: none of these tokens is a text by itself")
        self._pool = np.array(sorted(pool), np.int32)

    def _known(self) -> Span:
        if self._vocabulary is None:
            raise BenchError(
                "the server doesn't say how large its vocabulary is: give --token-range LOW-HIGH, or --tokenizer"
            )
        return self._vocabulary
