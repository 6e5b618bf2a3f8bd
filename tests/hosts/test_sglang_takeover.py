"""Who serves: our class where we serve every option, else SGLang's own, with a line that says why. Nothing is patched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts.answers import check_greedy, prompts
from hosts.sglang_runs import WORKER, run, start
from reference import build_reference, reference_model, save_checkpoint, tiny_config

pytestmark = pytest.mark.timeout(900)

IN_ORDER = {"disable_overlap_schedule": True}
"""What SGLang's own rules want of hybrids on a CPU."""
# name: (tiny checkpoint, arguments of SGLang, what the objection names)
LEFT: dict[str, tuple[str, dict[str, Any], str]] = {
    "speculation": (
        "qwen3",
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4},
        "--speculative-algorithm NGRAM",
    ),
    "lora": ("qwen3", {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"]}, "--enable-lora"),
    "kv_dtype": ("llama", {"kv_cache_dtype": "bf16"}, "--kv-cache-dtype bf16"),
    "pipeline": ("qwen3", {"pp_size": 2}, "--pp-size 2"),
    "experts": ("qwen3_moe", {"tp_size": 2, "ep_size": 2}, "--ep-size 2"),
    "data": ("qwen3", {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, "--enable-dp-attention"),
    "images": ("qwen3_5", {**IN_ORDER, "enable_multimodal": True}, "images are not served (--enable-multimodal)"),
    "implementation": ("qwen3", {"model_impl": "transformers"}, "--model-impl transformers"),
    "embedding": ("qwen3", {"is_embedding": True}, "--is-embedding"),
    "format": ("qwen3", {"load_format": "sharded_state"}, "--load-format sharded_state"),
    "head": ("qwen3", {"enable_fp32_lm_head": True}, "--enable-fp32-lm-head"),
    "offload": ("qwen3", {"cpu_offload_gb": 1}, "--cpu-offload-gb 1"),
    "decrypted": ("llama", {"decrypted_config_file": "config.json"}, "--decrypted-config-file config.json"),
    "pairs": (
        "llama",
        {"json_model_override_args": '{"rope_is_neox_style": false}'},
        "rope_is_neox_style = False in config.json is not served",
    ),
    "split": ("qwen3", {"tp_size": 3}, "4 units of 1 can't be split evenly over 3"),
    "windows": (
        "qwen3_next",
        {**IN_ORDER, "env": {"SGLANG_MAMBA_CONV_DTYPE": "bfloat16"}},
        "SGLANG_MAMBA_CONV_DTYPE is",
    ),
    "states": ("qwen3_next", {**IN_ORDER, "env": {"SGLANG_MAMBA_SSM_DTYPE": "bfloat16"}}, "states in torch.bfloat16"),
    "window": (
        "qwen3",
        {"json_model_override_args": '{"use_sliding_window": true, "sliding_window": 64}'},
        "sliding-window",
    ),
}
TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "no_radix": ("qwen3_next", {"disable_radix_cache": True}),
    "in_order": ("qwen3_next", IN_ORDER),
    "text_hybrid": ("qwen3_5_text", {}),
    "text_of_images": ("qwen3_5_moe", IN_ORDER),
    "tensor_parallel": ("qwen3_5", {**IN_ORDER, "tp_size": 2}),
    "half": ("qwen3", {"dtype": "bfloat16", "kv_cache_dtype": "bf16"}),
    "mixed": ("qwen3_moe", {"enable_mixed_chunk": True, "chunked_prefill_size": 256}),
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
    folder = tmp_path_factory.mktemp("configurations")
    given = {name: (family, options) for name, (family, options, _) in LEFT.items()} | TAKEN
    cases = {name: {"model_path": str(checkpoints(family)), **options} for name, (family, options) in given.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    script = WORKER.with_name("sglang_configurations.py")
    ended = start([str(script), str(folder / "cases.json"), str(folder / "result.json")])
    assert ended.returncode == 0, ended.stdout
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.parametrize("name", LEFT)
def test_sglang_serves_what_we_do_not(name: str, finished: dict[str, Any]) -> None:
    outcome = finished[name]
    assert outcome["error"] is None
    assert LEFT[name][2] in outcome["objection"]
    assert outcome["log"] == []  # no default of ours was set


@pytest.mark.parametrize("name", TAKEN)
def test_we_serve_the_rest(name: str, finished: dict[str, Any]) -> None:
    assert (finished[name]["error"], finished[name]["objection"]) == (None, None)


def test_text_of_a_model_with_images_is_served_and_said(finished: dict[str, Any]) -> None:
    outcome = finished["text_of_images"]
    assert outcome["options"]["enable_multimodal"] is False
    assert "for images say --enable-multimodal" in outcome["log"][0]


def test_a_text_hybrid_keeps_states_in_order(finished: dict[str, Any]) -> None:
    options = finished["text_hybrid"]["options"]
    assert options["uses_mamba_radix_cache"] is True
    assert (options["mamba_radix_cache_strategy"], options["disable_overlap_schedule"]) == ("no_buffer", True)


def test_the_log_says_who_serves_and_why(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    given = prompts((5, 40))
    outcome = run(tmp_path, checkpoints("qwen3"), [{"prompts": given, "new": 16}], enable_fp32_lm_head=True)
    assert outcome.said("SGLang's own class serves Qwen3ForCausalLM, not Firstlight's: --enable-fp32-lm-head")
    for prompt, answer in zip(given, outcome.rounds[0]["answers"], strict=True):
        check_greedy(reference_model("qwen3"), prompt, answer)


@pytest.mark.parametrize(
    ("family", "environment", "said"),
    [
        ("qwen2", {}, []),
        ("llama", {"FIRSTLIGHT_PLUGIN": "off"}, ["Firstlight is not active: FIRSTLIGHT_PLUGIN=off"]),
    ],
)
def test_others_are_left_alone(family: str, environment: dict[str, str], said: list[str], tmp_path: Path) -> None:
    config = tiny_config("llama")
    if family == "qwen2":  # an architecture that we don't have
        config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    reference = build_reference(config)
    reference.save_pretrained(tmp_path / "model")
    given = prompts((5, 40))
    outcome = run(tmp_path, tmp_path / "model", [{"prompts": given, "new": 16}], environment)
    assert not outcome.said("Firstlight 0")
    for text in said:
        assert outcome.said(text)
    for prompt, answer in zip(given, outcome.rounds[0]["answers"], strict=True):
        check_greedy(reference, prompt, answer)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"FIRSTLIGHT_PLUGIN": "Off"}, "Firstlight: FIRSTLIGHT_PLUGIN: Input should be 'on' or 'off'; it is 'Off'"),
        (
            {"FIRSTLIGHT_PLUGIN_SKIP": "Qwen2ForCausalLM"},
            "Firstlight: FIRSTLIGHT_PLUGIN_SKIP: Qwen2ForCausalLM: we serve",
        ),
        ({"FIRSTLIGHT_PLUGINS": "off"}, "Firstlight: FIRSTLIGHT_PLUGINS sets no option"),
    ],
)
def test_a_wrong_switch_ends_the_start(environment: dict[str, str], said: str, tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text("{}")
    script = WORKER.with_name("sglang_configurations.py")
    ended = start([str(script), str(tmp_path / "cases.json"), str(tmp_path / "result.json")], environment)
    assert ended.returncode == 1, ended.stdout
    assert said in ended.stdout


def test_only_registries_of_sglang_differ(tmp_path: Path) -> None:
    from firstlight.plugin.sglang.architectures import SERVED

    script, result = WORKER.with_name("sglang_modules.py"), tmp_path / "result.json"
    ended = start([str(script), str(result)], {"SGLANG_PLUGINS": "none"})
    assert ended.returncode == 0, ended.stdout
    outcome = json.loads(result.read_text())
    assert outcome["modules"] > 500
    assert outcome["attributes"] == []
    assert outcome["containers"] == ["sglang.srt.arg_groups.overrides:_MODEL_OVERRIDE_FNS"]
    assert outcome["served"] == dict.fromkeys(SERVED, "firstlight.plugin.sglang.models.families")
    assert outcome["overrides"] == sorted(SERVED)
    assert outcome["others"] > 100


def test_versions_outside_the_range_are_refused() -> None:
    from firstlight.plugin.sglang import unsupported_version

    assert unsupported_version("0.5.17") is None
    assert unsupported_version("0.5.17.post1") is None
    for found in ("0.5.16", "0.5.18", "0.6", "dev"):
        assert f"SGLang {found} is not in the range" in (unsupported_version(found) or "")
