"""Runs in a process of its own: one engine of real SGLang, rounds of prompts, and what it said.

Usage: python sglang_worker.py JOB.json RESULT.json. The job: {"engine": {arguments of sglang.Engine}, "rounds": [{"prompts":
[[ids]], "new": n} or {"turns": [indices into the first round], "new": n}]}. A turn is a prompt of the first round, its
answer and three tokens more. With "embeds": [[H values] by id], a round's prompts go in as their embeddings.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DEFAULTS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 4096,
    "max_running_requests": 24,
    "random_seed": 0,
    "log_level": "info",
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """For each round: the prompts, the answers, and SGLang's account of every request."""
    import sglang
    from sglang.srt.managers.io_struct import GenerateReqInput

    engine = sglang.Engine(**{**DEFAULTS, **job["engine"]})
    rounds: list[dict[str, Any]] = []
    for asked in job["rounds"]:
        if "turns" in asked:
            first = rounds[0]
            prompts = [[*first["prompts"][i], *first["answers"][i], 7, 8, 9] for i in asked["turns"]]
        else:
            prompts = asked["prompts"]
        sampling = {"temperature": 0, "max_new_tokens": asked["new"], "ignore_eos": True}
        if "embeds" in asked:
            embeds = [[asked["embeds"][i] for i in prompt] for prompt in prompts]
            request = GenerateReqInput(input_embeds=embeds, sampling_params=sampling)
            told = engine.loop.run_until_complete(anext(engine.tokenizer_manager.generate_request(request, None)))
        else:
            told = engine.generate(input_ids=prompts, sampling_params=sampling)
        rounds.append(
            {
                "prompts": prompts,
                "new": asked["new"],
                "answers": [answer["output_ids"] for answer in told],
                "cached": [answer["meta_info"]["cached_tokens"] for answer in told],
                "retracted": [answer["meta_info"]["num_retractions"] for answer in told],
            }
        )
    engine.shutdown()
    return {"rounds": rounds}


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(run(json.loads(job_file.read_text()))))
