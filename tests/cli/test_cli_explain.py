"""`firstlight explain` as people run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from firstlight.predict.report import amount, counted, duration

CONFIGS = Path(__file__).parents[1] / "configs"


def explain(*arguments, columns=160, environment=None):
    command = [sys.executable, "-m", "firstlight", "explain", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={
            "COLUMNS": str(columns),
            "PATH": "",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),  # the package under test, not another that is installed
            **(environment or {}),
        },
    )


def test_a_step_is_explained():
    shown = explain(CONFIGS / "Qwen3.5-35B-A3B.json", "--gpu", "h200", "--batch", 64, "--context", 4096)
    assert shown.returncode == 0, shown.stderr
    for wanted in (
        "80% interval",
        "no implementation takes less",
        "per million tokens",
        "experts",
        "gated_delta",
        "What if",
        "FP8 KV",
    ):
        assert wanted in shown.stdout


def test_mixed_steps_drafts_and_layouts_are_priced():
    shown = explain(
        CONFIGS / "Qwen3-8B.json",
        "--gpu",
        "b200",
        "--tp",
        2,
        "--batch",
        8,
        "--prefill",
        512,
        "--drafts",
        2,
        "--fp8-weights",
    )
    assert shown.returncode == 0, shown.stderr
    assert "attention prefill" in shown.stdout
    assert "2 drafts a step" in shown.stdout


def test_products_that_only_the_reference_serves_are_named(tmp_path):
    """Rows of 192 are in no whole blocks of 128: experts have no kernel for that, whatever the weights' scales."""
    config = json.loads((CONFIGS / "Qwen3.5-35B-A3B-FP8.json").read_text())
    said = {}
    for size in (512, 192):
        config["text_config"]["moe_intermediate_size"] = size
        (tmp_path / "config.json").write_text(json.dumps(config))
        shown = explain(tmp_path / "config.json", "--bound", "--batch", 64)
        assert shown.returncode == 0, shown.stderr
        said[size] = " ".join(shown.stdout.split())
    assert "No kernel of ours serves experts everywhere in this step" in said[192]
    assert "No kernel" not in said[512]


def test_mistakes_end_in_one_line(tmp_path):
    h200 = tmp_path / "h200.json"
    h200.write_text('{"gpu": "h200", "groups": []}')
    for arguments, reason in [
        (["--gpu", "h300"], "described are b200"),
        (["--batch", 0], "an empty step"),
        (["--tp", 3], "--tp 3: model.layers.0.self_attn"),
        (["--tp", 4, "--ep", 3], "--ep 3: it must divide --tp 4 x --dp 1 = 4"),
        (["--table", "here.json"], "--table is for our own providers, which --bound prices"),
        (["--bound", "--table", "nowhere.json"], "--table nowhere.json: No such file"),
        (["--bound", "--table", h200, "--gpu", "b200"], "measured on h200, and this is b200"),
    ]:
        shown = explain(CONFIGS / "Qwen3-8B.json", *arguments)
        assert shown.returncode == 1
        assert reason in shown.stderr
        assert len(shown.stderr.strip().splitlines()) == 1


def test_numbers_beyond_64_bits_are_refused_by_option_and_the_most_is_priced():
    most = {"--context": 2**31 - 1, "--prompt": 2**31 - 1, "--prefill": 2**31 - 1, "--batch": 2**20, "--drafts": 2**10}
    for option, number in {**most, "--tp": 2**16, "--dp": 2**16, "--ep": 2**16}.items():
        for beyond in (number + 1, 10**21):
            shown = explain(CONFIGS / "Qwen3-8B.json", option, beyond)
            assert shown.returncode == 2
            assert f"'{option}'" in shown.stderr
            assert str(number) in shown.stderr
    for more in ([], ["--bound"]):
        shown = explain(CONFIGS / "Qwen3-8B.json", *(word for pair in most.items() for word in pair), *more)
        assert shown.returncode == 0, shown.stderr
        assert "80% interval" in shown.stdout
        assert "nan" not in shown.stdout


def test_the_environment_is_checked_as_by_other_commands():
    for name, value, reason in [
        ("FIRSTLIGHT_TABEL", "x", "FIRSTLIGHT_TABEL sets no option; unset it, or set FIRSTLIGHT_TABLE"),
        ("FIRSTLIGHT_MAX_RUNNING", "many", "--max-running (or FIRSTLIGHT_MAX_RUNNING): input should be"),
    ]:
        shown = explain(CONFIGS / "Qwen3-8B.json", environment={name: value})
        assert shown.returncode == 2
        [line] = shown.stderr.splitlines()
        assert reason in line


def test_what_does_not_fit_is_said_first_with_what_would():
    shown = explain(CONFIGS / "Qwen3.5-397B-A17B.json", "--batch", 4, "--no-what-if")
    assert shown.returncode == 0, shown.stderr
    [first, *_] = shown.stdout.splitlines()
    assert first == (
        "Doesn't fit: weights take 794 GB of a GPU's 150 GB; what would: --tp 8, or --tp 4 --fp8-weights. Priced as if it did."
    )


def test_nothing_is_cut_off_in_a_pipe():
    shown = explain(CONFIGS / "Qwen3.5-35B-A3B.json", "--batch", 1, columns=80)
    assert shown.returncode == 0, shown.stderr
    assert "…" not in shown.stdout
    assert "1 request at 4,096 tokens" in shown.stdout
    assert any(line.split()[:2] == ["linear", "in_proj_qkvz"] for line in shown.stdout.splitlines())


def test_figures_have_three_digits():
    assert [duration(seconds) for seconds in (2.5, 0.0123, 0.9999e-3, 68e-9, 0)] == [
        "2.50 s",
        "12.3 ms",
        "1.00 ms",
        "68 ns",
        "<1 ns",
    ]
    assert [amount(value, "B") for value in (408, 999.9e6, 20e6, 1)] == ["408 B", "1.00 GB", "20.0 MB", "1 B"]
    assert [counted(number, "page") for number in (1, 2911)] == ["1 page", "2,911 pages"]
