"""`firstlight verify` as a user meets it: tables, verdict, JSON, exit status; and opening with layers cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from faults import everywhere
from reference import TINY_CONFIGS, save_checkpoint
from typer.testing import CliRunner

from firstlight.cli import verify as command_module
from firstlight.errors import FirstlightError
from firstlight.verify import opening
from firstlight.verify.opening import open_subject

LLAMA = str(TINY_CONFIGS / "llama.json")
NEXT = str(TINY_CONFIGS / "qwen3_next.json")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command_module.command)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_a_config_that_the_reference_refuses_is_no_fault_of_ours(tmp_path: Path) -> None:
    config = json.loads((TINY_CONFIGS / "deepseek_v3.json").read_text()) | {"n_shared_experts": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, output = run(str(tmp_path), "--weights", "random")
    assert status == 2
    assert "the reference, can't make a model of this config.json" in output
    assert "n_shared_experts" in output


def test_a_clean_model_ends_with_0(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    status, output = run(LLAMA, "--weights", "random", "--device", "cpu", "--layers", "2", "--json", str(report_path))
    assert status == 0, output
    assert "OK: every module agrees with transformers" in output
    assert "1 (full attention)" in output
    assert "2 (full attention)" not in output
    report = json.loads(report_path.read_text())
    assert report["ok"] is True
    assert (report["layers"], report["dtype"], report["first_fault"]) == (2, "float32", None)
    assert {finding["phase"] for finding in report["findings"]} == {
        "prefill",
        "decode",
        "second chunk",
        "batch",
        "quiet",
    }
    assert all(finding["error"] <= finding["tolerance"] for finding in report["findings"])


def test_a_fault_ends_with_1_and_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fault = next(fault for fault in everywhere() if fault.name == "second chunk: state isn't loaded")

    def broken(path: str, **options: Any) -> Any:
        subject = open_subject(path, **options)
        place = fault.place(subject.model)
        assert place is not None
        fault.change(subject.model, subject.model.get_submodule(place))
        return subject

    monkeypatch.setattr(opening, "open_subject", broken)
    report_path = tmp_path / "report.json"
    status, output = run(NEXT, "--weights", "random", "--device", "cpu", "--all", "--json", str(report_path))
    assert status == 1, output
    assert "FAULT: layers.2.mixer (GatedDeltaNet) is the first wrong module" in output
    assert "wrong in: second chunk, batch; right in: prefill, decode, quiet" in output
    assert "gated_delta at layers.2.mixer.mix.prefill" in output
    report = json.loads(report_path.read_text())
    assert report["first_fault"]["module"] == "layers.2.mixer"
    assert report["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.json"], "nowhere.json: no such file"),
        ([LLAMA], "for random ones say --weights random"),
        ([LLAMA, "--weights", "random", "--layers", "7"], "--layers 7: the model has 3 layers"),
        ([LLAMA, "--weights", "random", "--layers", "-1"], "greater than or equal to 0"),
        ([LLAMA, "--weights", "random", "--op", "attention=magic"], "op attention has no provider 'magic'"),
        ([LLAMA, "--weights", "sometimes"], "--weights"),
        ([LLAMA, "--weights", "random", "--json", "/"], "--json /: this is a directory"),
        ([LLAMA, "--weights", "random", "--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no folder"),
    ],
)
def test_what_cant_be_tried_ends_with_2(arguments: list[str], message: str) -> None:
    status, output = run(*arguments, "--device", "cpu")
    assert status == 2
    assert message in output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_findings_that_cannot_be_written_are_no_fault() -> None:
    status, output = run(LLAMA, "--weights", "random", "--device", "cpu", "--layers", "1", "--json", "/dev/full")
    assert status == 2
    assert "OK: every module agrees with transformers" in output
    assert "--json /dev/full: it can't be written: No space left on device" in output


def test_layers_of_a_checkpoint_can_be_cut(tmp_path: Path) -> None:
    save_checkpoint("qwen3_5", tmp_path)
    subject = open_subject(str(tmp_path), device="cpu", layers=1)
    assert len(subject.model.layers) == 1
    assert subject.config["text_config"]["layer_types"] == ["linear_attention"]
    assert not any(name.startswith("model.layers.1.") for name in subject.tensors)
    assert any(name.startswith("model.visual.") for name in subject.tensors)


def test_layers_are_cut_to_what_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_subject(NEXT, random=True, device="cpu").model
    layer = sum(
        torch.Size(spec.shape).numel()
        for path, module in whole.named_modules()
        for spec in getattr(module, "weight_specs", {}).values()
        if path.startswith("layers.0")
    )
    outside = 2 * 512 * 128 + 128
    needed = 8 * (outside + 2 * layer) / opening.MEMORY_SHARE  # float32 twice

    monkeypatch.setattr(opening, "_free_bytes", lambda device: int(needed * 1.01))
    assert len(open_subject(NEXT, random=True, device="cpu").model.layers) == 2
    monkeypatch.setattr(opening, "_free_bytes", lambda device: int(needed / 4))
    with pytest.raises(FirstlightError, match="not even one layer fits"):
        open_subject(NEXT, random=True, device="cpu")


def test_a_family_that_is_predicted_only_is_refused() -> None:
    status, output = run(str(TINY_CONFIGS / "gpt_oss.json"), "--weights", "random", "--device", "cpu")
    assert status == 2
    assert "models of type 'gpt_oss' can be predicted (firstlight explain), not run yet" in output
