"""Right models raise no alarm: every family, both precisions, and checkpoints in the forms in which they are published."""

from __future__ import annotations

import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import quantise_checkpoint
from reference import TINY_CONFIGS, save_checkpoint

from firstlight.models.registry import FAMILIES, PREDICTED_ONLY
from firstlight.quant import WHOLE_ROW
from firstlight.verify import verify
from firstlight.verify.findings import WHOLE
from firstlight.verify.opening import open_subject
from firstlight.verify.reference import Reference
from firstlight.verify.workload import IMAGE, make_phases

NAMES = sorted(
    path.stem
    for path in TINY_CONFIGS.glob("*.json")
    if json.loads(path.read_text())["model_type"] in FAMILIES.keys() - PREDICTED_ONLY
)
RESULTS = Path(__file__).parents[2] / "docs" / "verify-results.md"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_agrees_in_float32(name: str) -> None:
    subject = open_subject(str(TINY_CONFIGS / f"{name}.json"), random=True, device="cpu", dtype="float32")
    findings = verify(subject)
    assert findings.faults() == []
    assert 0 < findings.worst < 1e-4
    whole = {finding.phase for finding in findings.all if finding.kind == WHOLE}
    assert whole == {phase.name for phase in make_phases(subject.model.position_rows) if phase.whole_model}
    tower = [finding for finding in findings.all if finding.path == "visual"]
    assert [finding.phase for finding in tower] == ([IMAGE] if "vision_config" in subject.config else [])
    # The published table has this family, with the same verdict.
    assert re.search(rf"^\| `{name}` \|.*\| ok \|$", RESULTS.read_text(), re.MULTILINE)


def test_the_references_products_in_float32_are_not_rounded_to_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's convolutions are, by default: on a GPU the reference's windows were off by 2e-3."""

    def allowed() -> tuple[bool, bool]:
        return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32

    seen = []
    run = Reference.run

    def spy(self: Reference, *args: Any, **kwargs: Any) -> Any:
        seen.append(allowed())
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Reference, "run", spy)
    before = allowed()
    verify(open_subject(str(TINY_CONFIGS / "llama.json"), random=True, device="cpu", dtype="float32"))
    assert {*seen} == {(False, False)}
    assert allowed() == before == (True, False)  # our own model runs as it is served


def test_the_reference_is_written_in_torch_whatever_else_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers wraps its functions where flash-linear-attention is installed, whose products round to TF32."""
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    original = modeling.torch_chunk_gated_delta_rule
    assert inspect.unwrap(original) is not original

    @functools.wraps(original)
    def rounded(*args: Any, **kwargs: Any) -> Any:
        out, state = original(*args, **kwargs)
        return out * (1 + 2**-11), state

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", rounded)
    findings = verify(
        open_subject(str(TINY_CONFIGS / "qwen3_next.json"), random=True, device="cpu", dtype="float32"), quick=True
    )
    assert findings.faults() == []
    assert modeling.torch_chunk_gated_delta_rule is rounded


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe_text"])
def test_low_precision_stays_within_its_tolerance(name: str) -> None:
    subject = open_subject(str(TINY_CONFIGS / f"{name}.json"), random=True, device="cpu", dtype="bfloat16")
    findings = verify(subject)
    assert findings.faults() == []
    assert findings.worst > 1e-3, "bfloat16 can't be this good: was it float32?"


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "qwen3_5_moe"])
def test_a_published_checkpoint_agrees(name: str, tmp_path: Path) -> None:
    findings = verify(open_subject(str(save_checkpoint(name, tmp_path)), device="cpu"))
    assert findings.faults() == []


@pytest.mark.parametrize(
    ("block", "scale_dtype"), [((32, 32), torch.bfloat16), ((1, WHOLE_ROW), torch.float32)], ids=["blocks", "rows"]
)
def test_fp8_is_compared_by_the_values_it_stands_for(
    block: tuple[int, int], scale_dtype: torch.dtype, tmp_path: Path
) -> None:
    quantise_checkpoint(tmp_path, "qwen3_5_moe_text", block, scale_dtype)
    subject = open_subject(str(tmp_path), device="cpu")
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in subject.tensors.values())
    assert verify(subject).faults() == []
