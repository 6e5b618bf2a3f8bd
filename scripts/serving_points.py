"""Write benchmarks/accuracy/serving.json from the served measurements that aiconfigurator (Apache-2.0) collects from InferenceX.

    python scripts/serving_points.py WHERE/aiconfigurator_core/systems/silicon_sample.csv benchmarks/accuracy/serving.json

The rule, which looks at no error: aggregated serving by vLLM or SGLang, 1,024 tokens in and out (drawn from 0.8 to 1
times that), 4, 16 and 64 requests at a time, tensor parallelism alone, precision stated, models that are described here. Of
repeated measurements the median. (Rows say nothing of speculation; the few that had it can't be told apart.)
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from pathlib import Path

MODELS = {
    "deepseek-ai/DeepSeek-R1": "deepseek_v3",
    "meta-llama/Llama-3.1-70B": "llama_3_1_70b",
    "openai/gpt-oss-120b": "gpt_oss_120b",
    "Qwen/Qwen3.5-397B-A17B": "qwen3_5_397b_a17b",
}
LENGTH, REQUESTS = 1024, (4, 16, 64)


def main(source: str, target: str) -> None:
    """Read, choose by the rule, write."""
    found: dict[tuple[str, str, str, int, int], list[float]] = {}
    for row in csv.DictReader(Path(source).read_text().splitlines()):
        alone = {row["attention_dp_size"], row["moe_ep_size"]} <= {"1", "1.0", ""}
        stated = row["gemm_quant_mode"] in ("fp8", "fp8_block") or row["model_path"] == "openai/gpt-oss-120b"
        if row["mode"] != "agg" or row["backend"] not in ("vllm", "sglang") or row["model_path"] not in MODELS:
            continue
        if not (alone and stated) or {int(float(row["isl"])), int(float(row["osl"]))} != {LENGTH}:
            continue
        requests, ranks = int(float(row["batch_size"])), int(float(row["tp_size"]))
        if requests in REQUESTS and ranks <= 8:
            key = (MODELS[row["model_path"]], row["system"].removesuffix("_sxm"), row["backend"], ranks, requests)
            found.setdefault(key, []).append(float(row["silicon_tpot_ms"]))
    rows = [[*key, round(statistics.median(times), 3)] for key, times in sorted(found.items())]
    content = {
        "source": "InferenceX (SemiAnalysis), as collected in aiconfigurator-core 0.12.0 (Apache-2.0), silicon_sample.csv",
        "workload": "random prompts of 820 to 1,024 tokens and as many generated ones; so many requests at a time; FP8, or "
        "MXFP4 experts for gpt-oss; TPOT is the mean time between a request's tokens",
        "axes": ["config", "gpu", "engine", "tp", "requests", "tpot_ms"],
        "rows": rows,
    }
    head = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items() if name != "rows")
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    Path(target).write_text(f'{{\n{head},\n "rows": [\n{body}\n ]\n}}\n')
    print(len(rows), "points")


if __name__ == "__main__":
    main(*sys.argv[1:])
