"""benchmarks/soak.py: a few seconds of it on a real engine, and each fault that it must find."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import soak as subject  # noqa: E402
from serving import firstlight_server  # noqa: E402

CONFIG = str(ROOT / "tests" / "tiny_configs" / "qwen3_5_moe_text.json")


@pytest.mark.parametrize("prefix_cache", ["--prefix-cache", "--no-prefix-cache"])
def test_a_short_soak(prefix_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "CHECK_SECONDS", 0)
    options = [CONFIG, "--weights", "random", "--device", "cpu", "--threads", "1", "--max-context", "160"]
    # A cache so small that requests wait and are preempted.
    options += ["--max-running", "6", "--cache-gib", "0.003", prefix_cache]
    with firstlight_server(options) as server:
        result, metrics = asyncio.run(subject.soak(server, 6, 8, 120, 40, seed=0))
        log = server.log.read_text()
    cached = prefix_cache == "--prefix-cache"
    assert subject.verdicts(result, metrics, log, cached=cached, growth_mib=200, stall_seconds=5) == {}
    assert result.ways["whole"] > 5
    assert sum(result.ways.values()) == result.sent


GIB = 2**30


def looks(memory: list[int], tokens: list[int]) -> list[subject.Look]:
    return [
        subject.Look(float(number), size, running=4, pages_used=3, tokens=count)
        for number, (size, count) in enumerate(zip(memory, tokens, strict=True))
    ]


def good(gpu: bool = True) -> dict[str, Any]:
    """What `verdicts` finds nothing wrong with."""
    metrics = {
        'firstlight_requests_total{outcome="length",service_class="online"}': 7.0,
        'firstlight_requests_total{outcome="abort",service_class="online"}': 2.0,
        'firstlight_requests_running{service_class="online"}': 0.0,
        'firstlight_requests_waiting{service_class="online"}': 0.0,
        "firstlight_pages_used": 0.0,
        "firstlight_pages_capacity": 10.0,
        "firstlight_slots_used": 0.0,
        "firstlight_slots_capacity": 10.0,
        "firstlight_device_reserved_bytes": float(gpu),
        "firstlight_allocator_retries_total": 0.0,
    }
    result = subject.Soak(
        ways=Counter({"whole": 7, "after some tokens": 2, "before the first token": 1}),
        sent=10,
        silent=1,
        looks=looks([GIB] * 20, list(range(20))),
    )
    return {
        "result": result,
        "metrics": metrics,
        "log": "all well",
        "cached": False,
        "growth_mib": 10,
        "stall_seconds": 5,
    }


def verdicts(case: dict[str, Any]) -> dict[str, str]:
    return subject.verdicts(case.pop("result"), case.pop("metrics"), case.pop("log"), **case)


def test_nothing_wrong() -> None:
    assert verdicts(good()) == verdicts(good(gpu=False)) == {}


def _set(case: dict[str, Any], name: str, value: Any) -> None:
    if name.startswith("firstlight_"):
        case["metrics"] = {**case["metrics"], name: value}
    elif name in case:
        case[name] = value
    else:
        setattr(case["result"], name, value)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("failures", Counter({"http_500": 1}), "requests"),
        ("wrong_lengths", 1, "lengths"),
        ("ways", Counter({"whole": 10}), "load"),
        ("sent", 12, "requests counted"),
        ("sent", 8, "requests counted"),
        ('firstlight_requests_total{outcome="abort",service_class="online"}', 4.0, "aborts"),
        ('firstlight_requests_running{service_class="online"}', 1.0, "running"),
        ('firstlight_requests_waiting{service_class="online"}', 1.0, "waiting"),
        ("firstlight_pages_used", 1.0, "pages"),
        ("firstlight_slots_used", 1.0, "slots"),
        ("firstlight_allocator_retries_total", 1.0, "allocator"),
        ("looks", looks([GIB] * 19 + [GIB + 1], list(range(20))), "memory"),
        ("looks", looks([GIB] * 20, [*range(10), *[9] * 10]), "stall"),
        ("log", "firstlight engine: ERROR: the caches' accounts don't add up: 3 pages", "log"),
    ],
)
def test_each_fault_is_found(name: str, value: Any, found: str) -> None:
    case = good()
    _set(case, name, value)
    assert found in verdicts(case)


def test_on_a_cpu_growth_has_a_bound() -> None:
    case = good(gpu=False)
    case["result"].looks = looks([GIB + number * 2**20 for number in range(20)], list(range(20)))
    assert "memory" in verdicts(case)
    case = good(gpu=False)
    case["result"].looks = looks([GIB] * 2 + [GIB + 2**30] * 18, list(range(20)))  # before it has settled
    assert verdicts(case) == {}
