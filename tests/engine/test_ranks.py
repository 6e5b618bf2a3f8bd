"""The life and death of ranks: what they agree on before the first step, and what is said when one of them fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from driver import answer, drain, engine, prompts, request
from reference import save_checkpoint
from served_model import rank_processes, served

from firstlight.config import EngineOptions
from firstlight.engine import engine as engine_module
from firstlight.engine.executor import Executor, Pending
from firstlight.engine.ranks import NOTICE_SECONDS, Followers
from firstlight.errors import FirstlightError

TESTS = str(Path(__file__).parents[1])
SEARCHED = os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH"))))
"""Where scripts look for modules: among the tests' own, and wherever this process does."""
DIED = r"rank 1 of 2 has died \(exit status -9\); its log says why"


@pytest.fixture
def give_followers(monkeypatch):
    """Sets options that only the followers get."""

    def give(**options):
        monkeypatch.setattr(engine_module, "Followers", lambda given: Followers(given.model_copy(update=options)))

    return give


def kill_follower(running) -> None:
    [process] = running.followers._processes
    process.kill()
    process.wait()


def test_caches_are_as_large_as_the_fullest_device_allows(tmp_path, give_followers):
    give_followers(cache_gib=0.005)
    both = engine(save_checkpoint("qwen3", tmp_path), cache_gib=0.02, tensor_parallel=2)
    try:
        assert 0.004 < both.pool.pages * both.pool.page_bytes / 2**30 <= 0.005
        answer(both, prompts())
        [process] = both.followers._processes
    finally:
        both.close()
    assert process.returncode == 0  # it ended by itself


def test_what_a_follower_cannot_do_is_said_in_its_words(tmp_path, give_followers):
    give_followers(max_context=10**9)
    said = r"rank 1 of 2 has died \(exit status 1\): --max-context 1000000000 is more than the model's own limit"
    with pytest.raises(FirstlightError, match=said):
        engine(save_checkpoint("qwen3", tmp_path), tensor_parallel=2)


def test_a_collective_that_breaks_at_the_start_is_told_as_what_broke_it(tmp_path, give_followers, monkeypatch):
    give_followers(max_context=10**9)

    def load_with_a_collective(options, mesh, device):
        torch.distributed.all_reduce(torch.ones(1), group=mesh.tp.handle)

    monkeypatch.setattr(engine_module, "load_model", load_with_a_collective)
    with pytest.raises(FirstlightError, match=r"rank 1 of 2 has died \(exit status 1\): --max-context 1000000000"):
        engine(save_checkpoint("qwen3", tmp_path), tensor_parallel=2)


FAILS = """
import sys
from firstlight.engine import ranks
from firstlight.errors import FirstlightError
def follow(*given):
    raise FirstlightError("no file m\\u00f6del-\\udcff")
ranks.follow = follow
sys.argv[1:] = [sys.argv[1], "1", "tcp://127.0.0.1:1"]
ranks.main()
"""


def test_a_reason_with_characters_that_the_locale_lacks_is_left_all_the_same(tmp_path):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": SEARCHED}
    command = [sys.executable, "-c", FAILS, f"ipc://{tmp_path}/plans1"]
    with subprocess.Popen(
        command, env=os.environ | ascii_only, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(EngineOptions.load({"model": "-"}).to_json() + b"\n")
        process.stdin.flush()
        assert process.wait(60) == 1, process.stderr.read()
    assert (tmp_path / "plans1.reason").read_text("utf-8") == "no file m\u00f6del-\\udcff"


def test_ranks_that_captured_different_graphs_do_not_start(tmp_path, monkeypatch):
    checkpoint = save_checkpoint("qwen3", tmp_path)
    monkeypatch.setattr(Executor, "captured", ["a room"])
    with pytest.raises(FirstlightError, match="rank 1 of 2 captured 0 CUDA graphs, not the 1 of rank 0"):
        engine(checkpoint, tensor_parallel=2)


def test_a_rank_that_dies_between_steps_or_without_work_is_noticed(tmp_path):
    running = engine(save_checkpoint("qwen3", tmp_path), tensor_parallel=2)
    try:
        answer(running, prompts())
        running.check()
        kill_follower(running)
        with pytest.raises(FirstlightError, match=DIED):
            running.check()
        running.add(request("late", [5, 6]))
        with pytest.raises(FirstlightError, match=DIED):
            running.step()
    finally:
        running.close()


def test_a_rank_that_dies_in_a_step_is_named_rather_than_the_broken_connection(tmp_path):
    running = engine(save_checkpoint("qwen3", tmp_path), tensor_parallel=2)
    send = running.followers.send

    def send_and_kill(plan):
        send(plan)
        os.kill(running.followers._processes[0].pid, signal.SIGKILL)

    running.followers.send = send_and_kill
    try:
        running.add(request("one", [5, 6]))
        with pytest.raises(FirstlightError, match=DIED):
            drain(running)
    finally:
        running.close()


class NeverReached:
    """An event of a GPU that waits for a rank that is gone."""

    def query(self) -> bool:
        return False


def test_waiting_for_a_step_ends_when_a_rank_has_died():
    looks = iter([None, None])

    def check() -> None:
        if next(looks, "dead") == "dead":
            raise FirstlightError("rank 1 of 2 has died")

    pending = Pending(torch.zeros(1, dtype=torch.int64))
    pending._event, pending.check = NeverReached(), check
    with pytest.raises(FirstlightError, match="rank 1 of 2 has died"):
        pending.wait()


STUCK = """
import sys, time
from pathlib import Path
from driver import engine
running = engine(Path(sys.argv[1]), tensor_parallel=2)
running.followers._processes[0].kill()
time.sleep(100)
"""


def test_a_process_that_is_stuck_on_a_dead_rank_ends(tmp_path):
    """As in a kernel of NCCL's, which waits for ever; here it sleeps."""
    environment = os.environ | {"PYTHONPATH": SEARCHED}
    command = [sys.executable, "-c", STUCK, str(save_checkpoint("qwen3", tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert re.search(f"{DIED}; this rank is stuck", done.stderr)


STUCK_AT_START = """
import sys, time
from pathlib import Path
from driver import engine
from firstlight.config import EngineOptions
from firstlight.engine import engine as engine_module
from firstlight.engine.ranks import Followers
engine_module.Followers = lambda given: Followers(given.model_copy(update={"max_context": 10**9}))
engine_module.load_model = lambda *given: time.sleep(100)
engine(Path(sys.argv[1]), tensor_parallel=2)
"""


def test_a_process_that_is_stuck_at_the_start_says_why_the_other_rank_ended(tmp_path):
    environment = os.environ | {"PYTHONPATH": SEARCHED}
    command = [sys.executable, "-c", STUCK_AT_START, str(save_checkpoint("qwen3", tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    [said] = [line for line in done.stderr.splitlines() if "this rank is stuck" in line]
    assert "(exit status 1): --max-context 1000000000 is more than the model's own limit" in said


def test_health_of_an_idle_server_tells_of_a_dead_rank(tmp_path):
    options = ("--dtype", "float32", "--device", "cpu", "--cache-gib", "0.02", "--tensor-parallel", "2")
    with served(save_checkpoint("qwen3", tmp_path), *options) as (url, process, log):
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        [follower] = rank_processes(process.pid)
        os.kill(follower, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while (health := httpx.get(f"{url}/health")).status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert health.status_code == 503
        assert re.match(DIED, health.json()["message"])
        assert process.wait(20 + NOTICE_SECONDS) != 0
        assert re.search(DIED, log.read_text())
