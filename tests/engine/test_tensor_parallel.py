"""TP2 = TP1: two real processes over gloo give the tokens of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from driver import answer, engine, prompts
from reference import save_checkpoint

from firstlight.engine import engine as engine_module
from firstlight.engine.ranks import Followers, decode_plan, encode_plan
from firstlight.errors import FirstlightError


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3"]
)
def test_two_ranks_give_the_tokens_of_one(name, tmp_path):
    checkpoint = save_checkpoint(name, tmp_path)
    alone = answer(engine(checkpoint), prompts())
    both = engine(checkpoint, tensor_parallel=2, step_tokens=48)
    try:
        assert answer(both, prompts()) == alone
        assert answer(both, prompts()) == alone  # from the cache
    finally:
        both.close()


def test_a_model_that_cannot_be_split_says_so(tmp_path):
    checkpoint = save_checkpoint("smollm2", tmp_path)
    with pytest.raises(ValueError, match=r"attention heads: 3 units of 1 can't be split evenly over 2 tp ranks"):
        engine(checkpoint, tensor_parallel=2)


def test_more_ranks_than_gpus_is_an_error_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(FirstlightError, match="--tensor-parallel 2 needs a GPU for each rank; there are 1"):
        engine(save_checkpoint("qwen3", tmp_path), tensor_parallel=2, device="cuda")


def test_an_unknown_device_is_an_error_for_people(tmp_path):
    with pytest.raises(FirstlightError, match="--device 'foo': there is no such device"):
        engine(save_checkpoint("qwen3", tmp_path), device="foo")


def test_a_rank_that_dies_while_loading_is_an_error(tmp_path, monkeypatch):
    """A socket whose only reader is gone waits for ever."""
    checkpoint = save_checkpoint("qwen3", tmp_path)
    load = engine_module.load_model

    def load_alone(options, mesh, device):
        loaded = load(options, mesh, device)
        [child] = followers[0]._processes
        child.kill()
        child.wait()
        return loaded

    followers = []
    monkeypatch.setattr(
        engine_module, "Followers", lambda options: followers.append(Followers(options)) or followers[0]
    )
    monkeypatch.setattr(engine_module, "load_model", load_alone)
    with pytest.raises(FirstlightError, match=r"rank 1 of 2 has died \(exit status -9\)"):
        engine(checkpoint, tensor_parallel=2)


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from driver import engine
running = engine(Path(sys.argv[1]), tensor_parallel=2)
print(running.followers._processes[0].pid, running.followers._directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_engine_leaves_nothing_behind(tmp_path):
    """Also with a temporary directory whose path is too long for a socket."""
    checkpoint = save_checkpoint("qwen3", tmp_path / "checkpoint")
    temporary = tmp_path / ("long" * 25)
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", KILLED, str(checkpoint)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, directory = done.stdout.split()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
    assert not Path(directory).exists()
    assert not list(temporary.iterdir())


def test_plans_survive_the_way_to_another_rank(tmp_path):
    running = engine(save_checkpoint("qwen3_5_text", tmp_path), step_tokens=70)
    seen = []
    execute = running.executor.execute

    def watch(plan):
        seen.append(plan)
        return execute(decode_plan(encode_plan(plan)))

    watched = engine(tmp_path, step_tokens=70)
    running.executor.execute = watch  # type: ignore[method-assign]
    assert answer(running, prompts()) == answer(watched, prompts())
    assert any(plan.exports for plan in seen)
    assert any(plan.joins for plan in seen)
