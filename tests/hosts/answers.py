"""What a host's greedy answers are held against: our own engine, and transformers.

Hosts run in processes of their own, which exchange JSON with the tests. Their answers have to be the native engine's, token
for token, or differ first where the reference's two best logits are so close that rounding decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import driver
import torch

from firstlight.scheduling.sampling import SamplingParams

TIE = 1e-3
"""Logits closer than this may be ranked either way."""
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 75, 90, 100, 127, 128, 130, 200)
"""Of the prompts that a host gets at once."""
NEW_TOKENS = 64
MAX_CONTEXT = 512


def prompts(lengths: Sequence[int] = LENGTHS, seed: int = 5) -> list[list[int]]:
    """Random prompts of the given lengths."""
    return driver.prompts(lengths, seed)


def native(checkpoint: Path, given: Sequence[Sequence[int]], new: int = NEW_TOKENS) -> list[list[int]]:
    """The native engine's greedy answers to prompts that come at once."""
    engine = driver.engine(checkpoint, max_context=MAX_CONTEXT)
    return driver.answer(engine, given, SamplingParams(temperature=0, max_tokens=new))


def check_greedy(reference: Any, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Each token of an answer is the reference's best choice after what came before it, within a tie.

    reference: a transformers model in float32. Stronger than comparing with one answer of its, since it holds for every token.
    """
    ids = [*prompt, *answer]
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    short = logits.amax(dim=1) - chosen
    worst = int(short.argmax())
    assert short[worst] < TIE, f"prompt of {len(prompt)}: token {worst} is {short[worst]:.3g} below the best"


def check_equal(
    reference: Any, given: Sequence[Sequence[int]], want: Sequence[Sequence[int]], got: Sequence[Sequence[int]]
) -> None:
    """Two sets of answers agree, or part at a tie of the reference; each is greedy by the reference all the way."""
    assert [len(answer) for answer in got] == [len(answer) for answer in want]
    for prompt, expected, answer in zip(given, want, got, strict=True):
        check_greedy(reference, prompt, answer)
        if answer != expected:
            first = next(i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b)
            ids = [*prompt, *answer[:first]]
            with torch.no_grad():
                logits = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            gap = abs(float(logits[answer[first]] - logits[expected[first]]))
            assert gap < TIE, f"prompt of {len(prompt)}: token {first} differs at a gap of {gap:.3g}"
