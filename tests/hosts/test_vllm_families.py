"""Every family inside real vLLM, with little memory: chunked prefill, preemption and prefix caching change no token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hosts.answers import NEW_TOKENS, check_equal, native, prompts
from hosts.vllm_runs import Outcome, need, run
from reference import reference_model, save_checkpoint

pytestmark = pytest.mark.timeout(900)

STEP_TOKENS = 64
"""Many prompts are longer, so that they are prefilled in chunks."""
DENSE: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 60}
# vLLM makes the blocks of these large enough for a state (32 tokens), or leaves them at 128 tokens.
# Version 0.26 caches prefixes of hybrid models where it is asked to.
HYBRID: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 60, "enable_prefix_caching": True}
LARGE_BLOCKS: dict[str, Any] = {"num_gpu_blocks_override": 40, "enable_prefix_caching": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "smollm2": {"block_size": 1, "num_gpu_blocks_override": 900},
    "qwen3": DENSE,
    "qwen3_moe": DENSE,
    "qwen3_next": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_5_text_tied": LARGE_BLOCKS,
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5": {**HYBRID, "language_model_only": True},
    "qwen3_5_moe": {**HYBRID, "limit_mm_per_prompt": {"image": 0, "video": 0}},
}


@dataclass(frozen=True)
class Family:
    """A family, its checkpoint, and what vLLM answered in three rounds."""

    name: str
    checkpoint: Path
    outcome: Outcome


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """All prompts at once; then the long ones, and at last these with a few tokens more, which find their prefixes cached."""
    need(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = save_checkpoint(request.param, folder / "checkpoint")
    everything = prompts()
    long = [prompt for prompt in everything if len(prompt) > 126]
    rounds = [
        {"prompts": everything, "new": NEW_TOKENS},
        {"prompts": long, "new": 4},
        {"prompts": [[*prompt, 7, 8, 9] for prompt in long], "new": NEW_TOKENS},
    ]
    options = {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 32, **FAMILIES[request.param]}
    return Family(request.param, checkpoint, run(folder, checkpoint, rounds, **options))


def test_our_class_serves_and_says_so(family: Family) -> None:
    assert family.outcome.model_class.startswith("firstlight.plugin.vllm.models.")
    architecture = reference_model(family.name).config.architectures[0]
    assert f"serves {architecture}" in family.outcome.log


def test_answers_are_the_native_engines(family: Family) -> None:
    reference = reference_model(family.name)
    for asked, answers in zip(family.outcome.rounds, family.outcome.answers, strict=True):
        want = native(family.checkpoint, asked["prompts"], asked["new"])
        check_equal(reference, asked["prompts"], want, answers)


def test_requests_were_preempted(family: Family) -> None:
    assert family.outcome.count("vllm:num_preemptions", 0) > 0


def test_prefixes_were_found_in_the_cache(family: Family) -> None:
    assert family.outcome.count("vllm:prefix_cache_hits", 2) > 0
