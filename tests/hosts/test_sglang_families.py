"""Every family inside real SGLang, with little memory: chunked prefill, retraction and the radix cache change no token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hosts.answers import NEW_TOKENS, check_equal, native, prompts
from hosts.sglang_runs import EXTERNAL, EXTRA_BUFFER, Outcome, run
from reference import reference_model, save_checkpoint

pytestmark = pytest.mark.timeout(900)

LITTLE: dict[str, Any] = {"max_total_tokens": 1472, "chunked_prefill_size": 64, "schedule_conservativeness": 0.05}
"""All prompts with their answers take 2,495 tokens. Many prompts are longer than a chunk."""
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@dataclass(frozen=True)
class Case:
    """family: of the checkpoint. options: of SGLang, besides `LITTLE`. environment: besides the usual."""

    family: str
    options: dict[str, Any]
    environment: dict[str, str]


TRACKS = {"mamba_track_interval": 64, "chunked_prefill_size": 128}
"""States are exported at multiples of 64 tokens, while a prompt runs and while an answer grows."""
CASES = {
    "llama-pages": Case("llama", {"page_size": 64}, {}),
    "smollm2": Case("smollm2", {"enable_mixed_chunk": True}, {}),
    "qwen3-external-package": Case("qwen3", {}, EXTERNAL),
    "qwen3_moe": Case("qwen3_moe", {}, {}),
    "qwen3_next": Case("qwen3_next", TRACKS, EXTRA_BUFFER),
    "qwen3_next-in-order": Case("qwen3_next", {"disable_overlap_schedule": True}, EXTERNAL),
    "qwen3_5_text": Case("qwen3_5_text", {}, {}),
    "qwen3_5_text_tied-pages": Case("qwen3_5_text_tied", {**TRACKS, "page_size": 64}, EXTRA_BUFFER),
    "qwen3_5_moe_text-two-ranks": Case("qwen3_5_moe_text", {"tp_size": 2}, TWO_RANKS),
    "qwen3_5": Case("qwen3_5", TRACKS, EXTRA_BUFFER),
}


@dataclass(frozen=True)
class Ran:
    """A case, its checkpoint, and what SGLang answered in two rounds."""

    case: Case
    checkpoint: Path
    outcome: Outcome


@pytest.fixture(scope="module", params=CASES)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All prompts at once; then a further turn of the longest, whose beginnings are cached."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    checkpoint = save_checkpoint(case.family, folder / "checkpoint")
    everything = prompts()
    rounds = [
        {"prompts": everything, "new": NEW_TOKENS},
        {"turns": [i for i, prompt in enumerate(everything) if len(prompt) > 100], "new": NEW_TOKENS},
    ]
    return Ran(case, checkpoint, run(folder, checkpoint, rounds, case.environment, **{**LITTLE, **case.options}))


def test_our_class_serves_and_says_so(ran: Ran) -> None:
    architecture = reference_model(ran.case.family).config.architectures[0]
    assert len(ran.outcome.said(f"serves {architecture}: model_type")) == ran.case.options.get("tp_size", 1)


def test_answers_are_the_native_engines(ran: Ran) -> None:
    reference = reference_model(ran.case.family)
    for asked in ran.outcome.rounds:
        want = native(ran.checkpoint, asked["prompts"], asked["new"])
        check_equal(reference, asked["prompts"], want, asked["answers"])


def test_requests_were_retracted(ran: Ran) -> None:
    assert sum(ran.outcome.rounds[0]["retracted"]) > 0


def test_prefixes_were_found_in_the_cache(ran: Ran) -> None:
    cached = ran.outcome.rounds[1]["cached"]
    assert sum(cached) > 0
    if ran.case.environment is EXTRA_BUFFER:  # a state that was exported while the answer grew
        longest = [len(prompt) for prompt in ran.outcome.rounds[0]["prompts"] if len(prompt) > 100]
        assert any(found > before for found, before in zip(cached, longest, strict=True))
