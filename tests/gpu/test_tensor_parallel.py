"""Two ranks on two GPUs, over NCCL: captured steps are the steps themselves, and two ranks are one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from driver import answer, answer_arrivals, engine, prompts
from reference import reference_model, save_checkpoint
from served_model import rank_processes, served

from firstlight.scheduling.sampling import SamplingParams

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs; there are {torch.cuda.device_count()}"
)

NAME = "qwen3_5_moe_text"
OPTIONS = {"device": "cuda", "max_running": 8, "step_tokens": 128}
WARM = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3, max_tokens=16)
TIE = 1e-3
"""Logits closer than this may be ranked either way: two ranks add in another order than one."""


def test_captured_steps_of_two_ranks_are_the_steps_bit_for_bit(tmp_path):
    checkpoint = save_checkpoint(NAME, tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, str(Path(__file__).with_name("two_ranks.py"))]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), store, str(checkpoint)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            said = rank.communicate(timeout=150)[0].decode()
            assert rank.returncode == 0, said
            assert "graphs are equal" in said
    finally:
        for rank in ranks:
            rank.kill()


def check_equal_within_ties(want: list[list[int]], got: list[list[int]]) -> None:
    """Answers to `prompts()`, once or over and over, agree or part where the reference's logits are close."""
    for asked, expected, tokens in zip(prompts() * (len(want) // len(prompts())), want, got, strict=True):
        assert len(expected) == len(tokens)
        if expected != tokens:
            first = next(i for i, (a, b) in enumerate(zip(expected, tokens, strict=True)) if a != b)
            with torch.no_grad():
                ids = torch.tensor([[*asked, *tokens[:first]]])
                logits = reference_model(NAME)(input_ids=ids, use_cache=False).logits[0, -1]
            gap = abs(float(logits[expected[first]] - logits[tokens[first]]))
            assert gap < TIE, f"prompt of {len(asked)}: token {first} differs at a gap of {gap:.3g}"


def test_two_ranks_give_the_tokens_of_one_captured_or_op_by_op(tmp_path):
    checkpoint = save_checkpoint(NAME, tmp_path)
    want = answer_arrivals(engine(checkpoint, **OPTIONS))
    answers, drawn = {}, {}
    for graphs in (True, False):
        both = engine(checkpoint, tensor_parallel=2, graphs=graphs, **OPTIONS)
        try:
            assert bool(both.executor.executor.captured) is graphs
            answers[graphs], drawn[graphs] = answer_arrivals(both), answer(both, prompts(), WARM)
            assert both.scheduler.metrics.matched_tokens > 0
            [process] = both.followers._processes
        finally:
            both.close()
        assert process.returncode == 0  # it ended by itself: no graph held the communicator
    assert drawn[True] == drawn[False]
    check_equal_within_ties(answers[False], answers[True])
    check_equal_within_ties(want, answers[True])


def test_a_server_of_two_ranks_streams_and_ends_with_a_rank_that_dies(tmp_path):
    """The other rank is then waiting in a captured collective, which has no timeout."""
    options = "--tensor-parallel 2 --dtype float32 --device cuda --cache-gib 0.05 --max-running 8 --step-tokens 128"
    with served(save_checkpoint(NAME, tmp_path), *options.split()) as (url, process, log):
        body = {
            "model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"],
            "prompt": prompts()[2],
            "temperature": 0,
        }
        body |= {"max_tokens": 16, "return_token_ids": True, "ignore_eos": True}
        whole = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["token_ids"]
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as reply:
            streamed = [token for line in reply.iter_lines() for token in token_ids(line)]
        assert streamed == whole
        assert len(whole) == 16
        ranks = [process.pid, *rank_processes(process.pid)]
        assert len(ranks) == 2
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={**body, "max_tokens": 300, "stream": True}, timeout=60
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(ranks[1], signal.SIGKILL)
            assert any("rank 1 of 2 has died" in line for line in lines)
        assert process.wait(60) != 0
        assert "rank 1 of 2 has died (exit status -9)" in log.read_text()


def token_ids(line: str) -> list[int]:
    """The tokens of one line of a stream of events."""
    if not line.startswith("data: {"):
        return []
    return [token for choice in json.loads(line[6:])["choices"] for token in choice.get("token_ids") or []]


def test_a_server_of_two_ranks_leaves_no_process_behind(tmp_path):
    options = "--tensor-parallel 2 --dtype float32 --device cuda --cache-gib 0.05 --max-running 2 --step-tokens 64"
    with served(save_checkpoint(NAME, tmp_path), *options.split()) as (_, process, _):
        ranks = rank_processes(process.pid)
    assert len(ranks) == 1
    assert process.returncode == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
