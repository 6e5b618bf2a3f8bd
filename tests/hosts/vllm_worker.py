"""Runs real vLLM in this process on a job that is given as JSON: `python vllm_worker.py JOB RESULT`.

JOB: {"model": folder, "options": arguments of LLM, "rounds": [{"prompts": [[id, ...], ...], "new": tokens}, ...]}; a round may
have "logprobs": true, for those of its prompts' tokens.
RESULT: {"answers": [round][prompt][token], "logprobs": [round][prompt][token but the first], "metrics": [round]{name: value},
"model_class": name}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

COUNTERS = ("vllm:num_preemptions", "vllm:prefix_cache_hits", "vllm:prompt_tokens")


def counters(llm: Any) -> dict[str, float]:
    """vLLM's own counters, as they stand."""
    values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return {name: values[name] for name in COUNTERS}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Answer a job's rounds one after another on one engine."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    options = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 512,
        "disable_log_stats": False,
        **job["options"],
    }
    llm = LLM(job["model"], **options)
    answers, logprobs, metrics = [], [], []
    for asked in job["rounds"]:
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in asked["prompts"]]
        sampling = SamplingParams(
            temperature=0,
            max_tokens=asked["new"],
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=0 if asked.get("logprobs") else None,
        )
        outputs = llm.generate(given, sampling, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
        logprobs.append(
            [
                [
                    value[token].logprob
                    for token, value in zip(prompt[1:], (output.prompt_logprobs or ())[1:], strict=False)
                ]
                for prompt, output in zip(asked["prompts"], outputs, strict=True)
            ]
        )
        metrics.append(counters(llm))
    return {"answers": answers, "logprobs": logprobs, "metrics": metrics, "model_class": llm.apply_model(class_name)[0]}


def class_name(model: Any) -> str:
    """Where a model's class comes from."""
    return f"{type(model).__module__}.{type(model).__name__}"


def main() -> None:
    """See the module's docstring."""
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(run(job)))


if __name__ == "__main__":
    # In the calling process: a worker of its own would have to be sent functions, and starts slower.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main()
