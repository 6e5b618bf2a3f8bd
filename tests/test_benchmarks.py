"""The scripts in benchmarks/ find what they import."""

from __future__ import annotations

import json
import math
import time
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch

from benchmarks import h200, kernels_all, paths
from firstlight.hardware import Hardware
from firstlight.ops.binding import parse_overrides
from firstlight.ops.op import REGISTRY

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
OPTIONAL = {"kernels", "fla", "triton", "vllm", "sglang"}
"""Packages that may not be installed here and that something imports if they seem to be."""


def test_no_script_has_the_name_of_a_package() -> None:
    """A script's folder comes first in its path, so a neighbour named like a package stands in for it, in every import."""
    names = {path.stem for path in BENCHMARKS.glob("*.py")} | {
        path.name for path in BENCHMARKS.iterdir() if path.is_dir()
    }
    assert not names & (set(packages_distributions()) | OPTIONAL)


def test_a_kernel_that_fails_or_is_wrong_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_all, "DEVICE", torch.device("cpu"))
    x = torch.randn(4, 64)
    right = torch.nn.functional.silu(x[:, :32]) * x[:, 32:]

    def broken() -> None:
        raise ValueError("no such tile")

    others = {
        "broken": ([broken], None),
        "wrong": ([lambda: right * 2], lambda: right),
        "nan": ([lambda: right * math.nan], lambda: right),
        "right": ([lambda: right], lambda: right),
    }
    case = kernels_all.Case("silu_mul", "T=4", [((x,), {})], lambda: right, 1536.0, others=others)
    here = Hardware("a CPU", "cpu", "avx2", peak={"bfloat16": 1e12})
    rows = {row["who"]: row for row in kernels_all.measure(case, here, 1e9, "", kernels=False)}
    assert rows["broken"]["failed"] == "ValueError: no such tile"
    for name in ("wrong", "nan"):
        assert rows[name]["wrong"]
        assert "us" not in rows[name]
    assert rows["right"]["us"] > 0
    assert "FAILED: ValueError" in kernels_all.line(rows["broken"])
    assert "not timed" in kernels_all.line(rows["wrong"])


def test_cases_before_one_that_cannot_be_made_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def group():  # type: ignore[no-untyped-def]
        yield kernels_all.Case("silu_mul", "T=1", [], None, 1.0)
        yield kernels_all.Case("silu_mul", "T=2", [], None, 1.0)
        raise torch.OutOfMemoryError("no room")

    assert [case.name for case in kernels_all.cases_of(group, "T=2")] == ["T=2"]
    assert "group: FAILED to make the cases after T=2: OutOfMemoryError: no room" in capsys.readouterr().out


@pytest.mark.parametrize("name", paths.VARIANTS)
def test_every_path_that_can_be_turned_off_is_one_that_there_is(name: str) -> None:
    arguments = h200.arguments_parser().parse_args(["config.json", *paths.VARIANTS[name].arguments])
    options = h200.options_of(arguments)
    parse_overrides(options.op)
    for text in arguments.without:
        op, provider = text.split("=")
        assert provider in REGISTRY[op].providers
    assert vars(arguments) != vars(h200.arguments_parser().parse_args(["config.json"]))


def test_a_provider_that_is_taken_out_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REGISTRY["attention"], "providers", dict(REGISTRY["attention"].providers))
    h200.take_out("attention=hopper_paged")
    assert "hopper_paged" not in REGISTRY["attention"].providers
    with pytest.raises(SystemExit, match=r"attention has .*triton_paged"):
        h200.take_out("attention=hopper_paged")


STAND_IN = """
import json, os, sys, time
path = sys.argv[sys.argv.index("--json") + 1]
step = 3.0 if "--no-graphs" in sys.argv else 2.0
decode = [{"batch": 1, "steady_ms": step, "counts": None}, {"batch": 8, "steady_ms": 4.0, "counts": "--kv-dtype" not in sys.argv}]
result = {"first_token": [{"ms": 80.0}], "decode": decode}
result["providers"] = {"moe": ["parts" if "moe=parts" in sys.argv else "hopper_grouped"]}
if "--page-size" in sys.argv:
    print("--page-size 16: pages are as they are")
    raise SystemExit(1)
json.dump(result, open(path, "w"))
if "--depth" in sys.argv:
    time.sleep(60)
"""


def test_variants_that_fail_or_hang_leave_the_others_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    settings = paths.Settings("config.json", 4096, 2.0, time.monotonic() + 60, script)
    table = paths.Table(tmp_path / "paths.json", {})
    names = ("graphs", "pages", "depth", "mixture")
    assert paths.measure([paths.VARIANTS[name] for name in names], ["0", "1"], settings, table) == []
    rows = {row["variant"]: row for row in json.loads((tmp_path / "paths.json").read_text())["rows"]}
    assert rows["no CUDA graphs"]["decode_ms"] == {"1": 3.0, "8": 4.0}
    assert rows["pages of 16 tokens, not 64"]["reason"] == "ended with 1: --page-size 16: pages are as they are"
    assert rows["one plan in flight, not two"]["reason"] == "cut after 2 s"
    assert rows["one plan in flight, not two"]["first_ms"] == 80.0
    assert {"as is", "as is, again"} < rows.keys()
    said = capsys.readouterr().out
    assert "3.00 (1.500)" in said
    assert "moe: hopper_grouped -> parts" in said


def test_what_a_row_does_not_measure_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens that met too few experts, and a provider taken out that nothing had chosen."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    settings = paths.Settings("config.json", 4096, 5.0, time.monotonic() + 60, script)
    variants = [paths.VARIANTS[name] for name in ("kv", "products", "graphs", "mixture")]
    assert paths.measure(variants, ["0"], settings, paths.Table(None, {})) == []
    said = capsys.readouterr().out.split("\n")
    of = {v.name: said[next(i for i, text in enumerate(said) if text.startswith(v.name)) :][:2] for v in variants}
    assert "2.00 (1.000) " in of["lossy: KV in FP8"][0]
    assert "4.00 (1.000)!" in of["lossy: KV in FP8"][0]
    assert "!" not in of["no CUDA graphs"][0]
    nothing = {name for name, lines in of.items() if "measures nothing" in lines[1]}
    assert nothing == {"FP8 products in Triton alone"}


def test_variants_wait_for_nothing_when_nothing_can_be_measured(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no driver')")
    settings = paths.Settings("config.json", 4096, 5.0, time.monotonic() + 60, script)
    variants = [paths.VARIANTS["graphs"], paths.VARIANTS["depth"]]
    assert paths.measure(variants, ["0"], settings, paths.Table(None, {})) == variants


def test_a_rows_error_is_measured_by_its_own_size() -> None:
    """The first tokens of a prompt see few keys: their rows are large, and so is what rounding takes from them."""
    torch.manual_seed(0)
    expected = torch.randn(4096, 64) / torch.arange(1, 4097)[:, None].sqrt()
    rounded = expected.bfloat16().float()
    assert 1e-3 < kernels_all.error(rounded, expected) < kernels_all.ATTENTION_TOLERANCE
    wrong = rounded.clone()
    wrong[4000] *= 0.99
    assert kernels_all.error(wrong, expected) > kernels_all.ATTENTION_TOLERANCE
    cancelled = expected.clone()
    cancelled[7] = 1e-6
    assert kernels_all.error(cancelled + 1e-6, cancelled) < 1e-3


@pytest.mark.parametrize("dtype", kernels_all.PAGES.values(), ids=str)
def test_attention_over_pages_of_each_dtype_can_be_checked(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_all, "DEVICE", torch.device("cpu"))
    calls = kernels_all._paged(2, 3, 128, 2, dtype)
    for call in calls:
        q, k_pages = call[0][:2]
        assert k_pages.dtype == dtype
        assert k_pages[0].float().isnan().all()
        answer = kernels_all._reference("attention", call)
        assert answer.shape == q.shape
        assert answer.isfinite().all()
