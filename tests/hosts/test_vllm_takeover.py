"""Who serves: our class where we serve every option, else vLLM's own, with a line that says why. Nothing is patched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts.answers import check_greedy, prompts
from hosts.vllm_runs import WORKER, run, start
from reference import build_reference, reference_model, save_checkpoint, tiny_config

pytestmark = pytest.mark.timeout(900)

# name: (tiny checkpoint, arguments of vLLM, what the line of the log names)
LEFT: dict[str, tuple[str, dict[str, Any], str]] = {
    "speculation": (
        "qwen3",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "--speculative-config",
    ),
    "lora": ("qwen3", {"enable_lora": True}, "--enable-lora"),
    "kv_dtype": ("llama", {"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16"),
    "pipeline": ("qwen3", {"pipeline_parallel_size": 2}, "--pipeline-parallel-size above 1"),
    "experts": ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, "--enable-expert-parallel"),
    "states": ("qwen3_next", {"mamba_ssm_cache_dtype": "bfloat16"}, "--mamba-ssm-cache-dtype bfloat16"),
    "images": ("qwen3_5", {}, "images and videos are not served; with --language-model-only"),
    "implementation": ("qwen3", {"model_impl": "vllm"}, "--model-impl vllm"),
    "embeds": ("qwen3", {"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
    "pooling": ("qwen3", {"runner": "pooling"}, "--runner pooling"),
    "format": ("qwen3", {"load_format": "sharded_state"}, "--load-format sharded_state"),
    "offload": ("qwen3", {"offload_backend": "prefetch", "offload_group_size": 2}, "--offload-group-size is"),
    "logit_scale": ("llama", {"hf_overrides": {"logit_scale": 0.5}}, "logit_scale = 0.5 in config.json is not served"),
    "both_ways": ("qwen3", {"hf_overrides": {"is_causal": False}}, "is_causal = False in config.json is not served"),
    "split": ("qwen3", {"tensor_parallel_size": 4, "hf_overrides": {"intermediate_size": 258}}, "258 units of 1"),
    "rope": (
        "llama",
        {"hf_overrides": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}},
        "longrope",
    ),
}
TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen3", {}),
    "no_prefix_cache": ("qwen3_next", {"enable_prefix_caching": False}),
    "text": ("qwen3_5_moe", {"language_model_only": True}),
    "tensor_parallel": ("qwen3_5", {"tensor_parallel_size": 2, "language_model_only": True}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny checkpoints by family, made when they are asked for."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def made(name: str) -> Path:
        return folder / name if (folder / name).exists() else save_checkpoint(name, folder / name)

    return made


@pytest.fixture(scope="module")
def finished(checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of every configuration above, all in one process."""
    given = {name: (family, options) for name, (family, options, _) in LEFT.items()} | TAKEN
    return configurations(
        tmp_path_factory.mktemp("configurations"),
        {name: {"model": str(checkpoints(family)), **options} for name, (family, options) in given.items()},
    )


def configurations(
    folder: Path, cases: dict[str, dict[str, Any]], environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Finish configurations in a process of its own."""
    (folder / "cases.json").write_text(json.dumps(cases))
    script = WORKER.with_name("vllm_configurations.py")
    ended = start([str(script), str(folder / "cases.json"), str(folder / "result.json")], environment)
    assert ended.returncode == 0, ended.stdout
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.parametrize("name", LEFT)
def test_vllm_serves_what_we_do_not(name: str, finished: dict[str, Any]) -> None:
    family, _, reason = LEFT[name]
    outcome = finished[name]
    assert len(outcome["log"]) == 1, outcome
    assert outcome["log"][0].startswith(f"WARNING vLLM's own class serves {tiny_config(family)['architectures'][0]}")
    assert reason in outcome["log"][0]
    if outcome["error"] is None:
        assert not outcome["architecture"].startswith("Firstlight")


@pytest.mark.parametrize("name", TAKEN)
def test_we_serve_the_rest(name: str, finished: dict[str, Any]) -> None:
    assert finished[name]["error"] is None
    assert finished[name]["architecture"].startswith("Firstlight")


def test_switches_leave_models_to_vllm(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    cases = {name: {"model": str(checkpoints(name))} for name in ("qwen3", "llama")}
    off = configurations(tmp_path, cases, {"FIRSTLIGHT_PLUGIN": "off"})
    assert [off[name]["architecture"] for name in cases] == ["Qwen3ForCausalLM", "LlamaForCausalLM"]
    skipped = configurations(tmp_path, cases, {"FIRSTLIGHT_PLUGIN_SKIP": "Qwen3ForCausalLM"})
    assert [skipped[name]["architecture"] for name in cases] == ["Qwen3ForCausalLM", "FirstlightForCausalLM"]


def test_our_class_asked_for_by_name_refuses_what_it_cannot(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    ours = {"model": str(checkpoints("qwen3")), "hf_overrides": {"architectures": ["FirstlightForCausalLM"]}}
    hybrid = {**ours, "model": str(checkpoints("qwen3_next"))}
    outcome = configurations(tmp_path, {"plain": ours, "lora": {**ours, "enable_lora": True}, "hybrid": hybrid})
    assert "this model keeps recurrent states: ask for FirstlightHybridForCausalLM" in outcome["hybrid"]["error"]
    assert outcome["plain"]["architecture"] == "FirstlightForCausalLM"
    assert "FirstlightForCausalLM was asked for, but --enable-lora is not served" in outcome["lora"]["error"]


def test_batch_invariance_is_left_to_vllm(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    outcome = configurations(tmp_path, {"plain": {"model": str(checkpoints("qwen3"))}}, {"VLLM_BATCH_INVARIANT": "1"})
    assert "VLLM_BATCH_INVARIANT is not served" in outcome["plain"]["log"][0]


def test_vllm_speculates_with_its_own_class(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    given = prompts((5, 40))
    outcome = run(tmp_path, checkpoints("qwen3"), [{"prompts": given, "new": 16}], **LEFT["speculation"][1])
    assert outcome.model_class.startswith("vllm.")
    for prompt, answer in zip(given, outcome.answers[0], strict=True):
        check_greedy(reference_model("qwen3"), prompt, answer)


def test_an_architecture_that_we_do_not_have_is_left_alone(tmp_path: Path) -> None:
    config = tiny_config("llama") | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    reference = build_reference(config)
    reference.save_pretrained(tmp_path / "qwen2")
    given = prompts((5, 40))
    outcome = run(tmp_path, tmp_path / "qwen2", [{"prompts": given, "new": 16}])
    assert outcome.model_class.startswith("vllm.")
    assert "Firstlight" not in outcome.log
    for prompt, answer in zip(given, outcome.answers[0], strict=True):
        check_greedy(reference, prompt, answer)


def test_only_registries_of_vllm_differ(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    script, result = WORKER.with_name("vllm_modules.py"), tmp_path / "result.json"
    ended = start([str(script), str(checkpoints("qwen3")), str(result)])
    assert ended.returncode == 0, ended.stdout
    outcome = json.loads(result.read_text())
    assert outcome["first"].startswith("vllm.")
    assert outcome["second"] == "firstlight.plugin.vllm.models"
    assert outcome["modules"] > 500
    assert outcome["registered"] == ["FirstlightForCausalLM", "FirstlightHybridForCausalLM"]
    assert outcome["attributes"] == []
    assert outcome["containers"] == ["vllm.model_executor.models.config:MODELS_CONFIG_MAP"]


def test_other_versions_are_refused() -> None:
    from firstlight.plugin.vllm import unsupported_version

    for found in ("0.26.0", "0.32.0", "0.32.5"):
        assert unsupported_version(found) is None
    for found in ("0.3.2", "0.31.9", "0.33.0", "1.0", "dev"):
        assert f"vLLM {found} is not one of those" in (unsupported_version(found) or "")
