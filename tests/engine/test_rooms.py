"""A step padded to what a graph has room for gives the tokens, states and lengths of the step itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from driver import GREEDY, answer, answer_arrivals, engine, prompts
from reference import save_checkpoint

from firstlight.config import EngineOptions
from firstlight.engine.batch import DeviceStep, HostStep, choose_bucket, fill, read_plan
from firstlight.engine.executor import Executor, Pending, largest_steps
from firstlight.engine.graphs import Room, draw_tokens, rooms, step_of_nobody
from firstlight.engine.request_table import RequestTable
from firstlight.hardware import GPUS
from firstlight.models.buckets import bucket_ladder
from firstlight.scheduling.plan import StepPlan
from firstlight.scheduling.sampling import SamplingParams


def padded(executor: Executor, step: HostStep, room: Room) -> Pending:
    """What a graph of this room would do, op by op on the CPU."""
    staging, fields = room.layout().stage()
    own = room.pad(step, fields)
    sent = DeviceStep(**room.layout().views(staging.clone()))
    batch, new_length = fill(
        executor.loaded,
        executor.table,
        sent,
        room.bucket,
        decodes=room.decodes,
        tokens=room.tokens,
        query=max(1, room.prompt_tokens),
        context=room.bucket.context,
        page_size=executor.pool.page_size,
    )
    logits = executor.loaded.model(batch)
    greedy, filtered = executor.table.way_of(step.rows[step.sampling])
    tokens = draw_tokens(
        executor.loaded, executor.table, room.bucket, logits, sent, new_length, greedy=greedy, filtered=filtered
    )
    return Pending(tokens, own)


class PaddedExecutor(Executor):
    """Pads every step to a room with more decode rows, prompts and tokens than it needs."""

    rooms: list[str]
    spare: int
    """Prompts that a room has beyond those of the step; with none, its padding is behind a real row."""

    def execute(self, plan: StepPlan) -> Pending:
        with torch.inference_mode():
            self.table.apply(plan)
            self._move(plan.moves)
            if plan.bounds.requests == 0:
                return Pending(torch.empty(0, dtype=torch.int64))
            step = read_plan(plan, self.table)
            bucket = choose_bucket(self.loaded.buckets, step)
            if step.decodes == len(step.rows):
                room = Room(bucket, step.decodes + 2)
            else:
                room = Room(
                    bucket,
                    step.decodes + 3,
                    len(step.rows) - step.decodes + self.spare,
                    len(step.prompt) + 20,
                    3 + len(step.exports),
                )
            assert room.holds(step)
            self.rooms.append("mixed" if room.prompts and step.decodes else "prompts" if room.prompts else "decode")
            return padded(self, step, room)


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=0.9, top_k=30, top_p=0.9, seed=2, max_tokens=16)]
)
@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe", "qwen3_next", "deepseek_v3"])
def test_padding_changes_nothing(name: str, sampling: SamplingParams, tmp_path) -> None:
    checkpoint = save_checkpoint(name, tmp_path)
    options = {"step_tokens": 96, "max_running": 6, "invariant": True}
    wanted = answer_arrivals(engine(checkpoint, **options), sampling)
    for spare in (2, 0):
        running = padding_engine(checkpoint, spare, **options)
        assert answer_arrivals(running, sampling) == wanted
        assert {"mixed", "prompts", "decode"} <= set(running.executor.rooms)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_5_moe"])
def test_padding_behind_a_prompt_that_ends_in_the_last_page(name: str, tmp_path) -> None:
    checkpoint = save_checkpoint(name, tmp_path)
    options = {"max_context": 64, "step_tokens": 96, "max_running": 2, "invariant": True}
    prompt = prompts([60])
    sampling = SamplingParams(temperature=0, max_tokens=4)
    assert answer(padding_engine(checkpoint, 0, **options), prompt, sampling) == answer(
        engine(checkpoint, **options), prompt, sampling
    )


def padding_engine(checkpoint, spare: int, **options):
    """An engine whose executor pads."""
    running = engine(checkpoint, **options)
    running.executor.__class__ = PaddedExecutor
    running.executor.rooms, running.executor.spare = [], spare
    return running


@pytest.mark.parametrize(("running", "prompts"), [(1, {1}), (4, {1, 4}), (32, {1, 32}), (256, {1, 32})])
def test_rooms_hold_as_many_prompts_as_can_be_in_a_step(running: int, prompts: set[int]) -> None:
    buckets = bucket_ladder(EngineOptions(model="-", max_running=running, step_tokens=128), 512, GPUS["h200"])
    found = rooms(buckets, running, exporting=True)
    assert len(set(found)) == len(found)
    assert {room.prompts for room in found} == {0} | prompts
    for room in found:
        assert room.rows <= room.bucket.requests
        assert room.tokens <= room.bucket.tokens


def test_one_prompt_has_no_room_that_it_cannot_fill() -> None:
    options = EngineOptions(model="-", max_running=8, step_tokens=8192)
    buckets = bucket_ladder(options, 300, GPUS["h200"])
    found = rooms(buckets, 8, exporting=True)
    assert max(room.prompt_tokens for room in found) == 8 * 300
    for decodes in (0, 8):
        alone = [room.prompt_tokens for room in found if room.prompts == 1 and room.decodes == decodes]
        assert alone == [64, 128, 256, 512]


@pytest.mark.parametrize(("max_context", "pages", "row"), [(512, 100, 512), (8192, 4, 256), (8192, 200, 8192)])
def test_steps_of_nobody_have_pages_for_all_their_tokens(max_context: int, pages: int, row: int) -> None:
    """A page number behind the end of the page table could be anything, and a kernel would follow it."""
    options = EngineOptions(model="-", max_running=1, step_tokens=8192)
    buckets = bucket_ladder(options, max_context, GPUS["h200"])
    table = RequestTable(2, min(max_context // 64, pages), torch.device("cpu"))
    longest = table.longest(64)
    assert longest == row
    steps = largest_steps(buckets, longest)
    steps += [step_of_nobody(room, longest) for room in rooms(buckets, 1, exporting=True)]
    assert max(step.query for step in steps) == row
    for step in steps:
        assert len(step.prompt) == step.tokens - step.decodes
        choose_bucket(buckets, step)
    for room in rooms(buckets, 1, exporting=True):
        assert room.holds(step_of_nobody(room, longest))


def test_a_token_a_step_gives_the_same_answers(tmp_path) -> None:
    checkpoint, asked = save_checkpoint("qwen3_next", tmp_path), prompts([1, 9, 20])
    sampling = SamplingParams(temperature=0, max_tokens=6)
    slow = engine(checkpoint, step_tokens=1)
    assert slow.loaded.buckets[-1].query == 2
    assert answer(slow, asked, sampling) == answer(engine(checkpoint), asked, sampling)


def test_a_prompt_of_one_token_is_a_prompt(tmp_path) -> None:
    """Its bucket is one where prefill is bound: what it rounds must not depend on how short its chunk is."""
    running = engine(save_checkpoint("llama", tmp_path), max_running=4, step_tokens=64)
    one = np.array([1], np.int32)
    step = HostStep(one, np.array([0, 1], np.int32), one, one, one, np.empty((0, 3), np.int32), np.arange(1), 0, 1)
    assert choose_bucket(running.loaded.buckets, step).query > 1


def test_a_room_refuses_what_it_has_no_room_for(tmp_path) -> None:
    bucket = engine(save_checkpoint("llama", tmp_path)).loaded.buckets[-1]
    room = Room(bucket, 2, 1, 8, 4)
    rows = np.array([1, 2, 3], np.int32)

    def step(counts: list[int], decodes: int, exports: int = 0) -> HostStep:
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        taken, prompt = rows[: len(counts)], np.zeros(sum(counts) - decodes, np.int32)
        states = np.zeros((exports, 3), np.int32)
        return HostStep(taken, starts, prompt, taken, taken, states, np.arange(len(counts)), decodes, 20)

    assert room.holds(step([1, 1, 8], 2))
    assert not room.holds(step([1, 1, 9], 2))
    assert not room.holds(step([1, 1, 1], 3))
    assert not room.holds(step([1, 4, 4], 1))
    assert not room.holds(step([8], 0, room.exports + 1))
