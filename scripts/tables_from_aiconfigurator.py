"""Write calibration tables from the kernel timings of aiconfigurator (Apache-2.0), a sample of them for each GPU.

    pip install pyarrow, and unzip the wheel of aiconfigurator-core somewhere; then
    python scripts/tables_from_aiconfigurator.py WHERE/aiconfigurator_core/systems/data src/firstlight/hardware/tables

Its tables have kernels of three engines, each timed in CUDA graphs. Linear layers run the same kernels in all of them (cuBLAS,
DeepGEMM and the like), so a row here is their median; elsewhere kernels differ and a row is the best of the three: what a well-kept
engine reaches. Sizes are spread over what models have; nothing is chosen by its time.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

GPUS = {
    "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm", "gb200": "gb200", "gb300": "gb300",
}  # fmt: skip
VERSIONS = {"sglang": "0.5.14", "vllm": "0.24.0", "trtllm": "1.3.0rc20"}
SOURCE = "aiconfigurator-core 0.12.0 (github.com/ai-dynamo/aiconfigurator, Apache-2.0), kernels timed in CUDA graphs"

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
MATRICES = (
    (128, 2048), (256, 2048), (256, 7168), (512, 2048), (768, 7168), (1024, 1024), (1024, 2048), (1024, 4096), (1024, 8192),
    (1536, 7168), (2048, 512), (2048, 1024), (2048, 2048), (2048, 4096), (2048, 7168), (2560, 4096), (3072, 1536),
    (3072, 5120), (4096, 512), (4096, 1024), (4096, 2048), (4096, 4096), (4096, 7168), (5120, 1024), (5120, 5120),
    (6144, 2048), (7168, 256), (7168, 1024), (7168, 2048), (7168, 16384), (8192, 1024), (8192, 4096), (8192, 8192),
    (10240, 8192), (12288, 2048), (12288, 4096), (16384, 2048), (16384, 8192), (51200, 2048), (51200, 4096), (65536, 5120),
)  # fmt: skip
"""(rows, columns): projections of small and large models, whole and cut over ranks."""
EXPERT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
EXPERTS = (
    (2048, 512, 8, 256), (2048, 768, 8, 128), (2880, 2880, 4, 32), (2880, 2880, 4, 128), (3072, 1536, 8, 256),
    (4096, 1024, 10, 512), (4096, 1536, 8, 128), (6144, 2048, 8, 256), (7168, 2048, 8, 256), (7168, 2048, 8, 384),
)  # fmt: skip
"""(hidden, intermediate, top k, experts); each whole and with its intermediate size over 2, 4 and 8 ranks."""
EXPERT_FORMS = {
    "bfloat16": ("bfloat16",),
    "float8_e4m3fn": ("fp8_block",),
    "mxfp4": ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"),
}
HEADS = (
    (4, 1, 128), (8, 1, 64), (8, 1, 128), (16, 1, 128), (16, 2, 128), (16, 2, 256), (16, 4, 128), (32, 2, 256),
    (32, 4, 128), (32, 8, 128), (64, 8, 64), (64, 8, 128),
)  # fmt: skip
"""(query heads, KV heads, head dim)."""
REQUESTS = (1, 4, 16, 64, 256)
CONTEXTS = (128, 1024, 4096, 16384, 65536, 131072)
QUERIES = (128, 512, 1024, 2048, 4096, 8192, 16384)
LATENT_HEADS = (8, 16, 32, 64, 128)
DELTA_HEADS = (4, 8, 12, 16, 24, 32, 48, 64, 96)

Row = Mapping[str, Any]
Rows = dict[tuple[Any, ...], list[float]]


def rows_of(root: Path, system: str, name: str, engines: Mapping[str, str], file: str) -> Iterable[Row]:
    """The rows of a table of every engine that has it, each with "engine"."""
    for engine, version in engines.items():
        path = root / system / name / engine / version / f"{file}.parquet"
        if path.exists():
            for row in parquet.read_table(path).to_pylist():
                yield {**row, "engine": engine}


def collect(rows: Iterable[Row], key: Callable[[Row], tuple[Any, ...] | None]) -> Rows:
    """Microseconds by key, of rows that have one."""
    found: Rows = {}
    for row in rows:
        place = key(row)
        if place is not None and row["latency"] > 0:
            found.setdefault(place, []).append(row["latency"] * 1e3)
    return found


def group(
    op: str, label: str, provider: str, form: str, axes: str, rows: Rows,
    includes: str = "", note: str = "",
) -> dict[str, Any] | None:  # fmt: skip
    """A group of a calibration table with the best time of each key, or None without rows."""
    if not rows:
        return None
    extra = {"label": label} if label else {}
    extra |= {"includes": includes} if includes else {}
    return {
        "op": op, **extra, "provider": provider, "format": form, "source": SOURCE + note, "versions": VERSIONS,
        "axes": axes.split(), "rows": [[*key, round(min(times), 2)] for key, times in sorted(rows.items())],
    }  # fmt: skip


def products(root: Path, system: str) -> Iterable[dict[str, Any] | None]:
    rows = list(rows_of(root, system, "gemm", VERSIONS, "gemm_perf"))
    for form, dtypes in (("bfloat16", ("bfloat16",)), ("float8_e4m3fn", ("fp8", "fp8_block"))):
        medians: Rows = {}
        for dtype in dtypes:

            def key(r: Row, dtype: str = dtype) -> tuple[Any, ...] | None:
                wanted = r["gemm_dtype"] == dtype and r["m"] in TOKENS and (r["n"], r["k"]) in MATRICES
                return (r["m"], r["n"], r["k"]) if wanted else None

            for place, times in collect(rows, key).items():
                medians.setdefault(place, []).append(statistics.median(times))
        note = "; median of three engines" + (
            ", for the better of scales a tensor and a block" if len(dtypes) > 1 else ""
        )
        yield group("linear", "", "engines", form, "tokens rows columns", medians, note=note)


def experts(root: Path, system: str) -> Iterable[dict[str, Any] | None]:
    rows = list(rows_of(root, system, "moe", VERSIONS, "moe_perf"))
    for form, dtypes in EXPERT_FORMS.items():

        def key(r: Row, dtypes: tuple[str, ...] = dtypes) -> tuple[Any, ...] | None:
            sizes = (r["hidden_size"], r["inter_size"], r["topk"], r["num_experts"])
            wanted = r["moe_dtype"] in dtypes and sizes in EXPERTS and r["num_tokens"] in EXPERT_TOKENS
            if not wanted or r["distribution"] != "balanced" or r["moe_ep_size"] != 1 or r["moe_tp_size"] > 8:
                return None
            return r["num_tokens"], sizes[3], sizes[2], 1, sizes[0], sizes[1] // r["moe_tp_size"]

        yield group(
            "experts", "", "engines", form, "tokens experts top_k ranks hidden intermediate", collect(rows, key),
            includes="activation", note="; tokens dealt out evenly; the best of three engines",
        )  # fmt: skip


def attention(root: Path, system: str) -> Iterable[dict[str, Any] | None]:
    axes, note = "requests context query heads kv_heads head_dim", "; the best of three engines"
    for form, cache in (("bfloat16", "bfloat16"), ("float8_e4m3fn", "fp8")):

        def heads(r: Row, cache: str = cache) -> tuple[int, int, int] | None:
            found = (r["num_heads"], r["num_key_value_heads"], r["head_dim"])
            return found if found in HEADS and r["kv_cache_dtype"] == cache and not r["window_size"] else None

        def decode(r: Row) -> tuple[Any, ...] | None:
            sizes, context = heads(r), r["step"] + 1
            wanted = sizes and r["batch_size"] in REQUESTS and context in CONTEXTS
            return (r["batch_size"], context, 1, *sizes) if wanted and sizes else None

        def prefill(r: Row) -> tuple[Any, ...] | None:
            sizes, query = heads(r), r["isl"]
            wanted = sizes and query in QUERIES and r["batch_size"] in (1, 8) and not r["step"]
            # Prefill in the engines' BF16; its FP8 products are an option that few turn on.
            return (
                (r["batch_size"], query, query, *sizes) if wanted and sizes and r["attn_dtype"] == "bfloat16" else None
            )

        found = collect(rows_of(root, system, "attention", VERSIONS, "generation_attention_perf"), decode)
        yield group("attention", "decode", "engines", form, axes, found, note=note)
        if form == "bfloat16":
            found = collect(rows_of(root, system, "attention", VERSIONS, "context_attention_perf"), prefill)
            yield group("attention", "prefill", "engines", form, axes, found, note=note)


def latent_attention(root: Path, system: str) -> Iterable[dict[str, Any] | None]:
    axes, note = "requests context query heads", "; the best of three engines"
    for form, cache in (("bfloat16", "bfloat16"), ("float8_e4m3fn", "fp8")):

        def wanted(r: Row, cache: str = cache) -> bool:
            return r["num_heads"] in LATENT_HEADS and r["kv_cache_dtype"] == cache

        def decode(r: Row) -> tuple[Any, ...] | None:
            right = wanted(r) and r["batch_size"] in REQUESTS and r["step"] + 1 in CONTEXTS
            return (r["batch_size"], r["step"] + 1, 1, r["num_heads"]) if right else None

        def prefill(r: Row) -> tuple[Any, ...] | None:
            right = wanted(r) and r["isl"] in QUERIES and r["batch_size"] in (1, 8) and not r["step"]
            return (r["batch_size"], r["isl"], r["isl"], r["num_heads"]) if right else None

        found = collect(rows_of(root, system, "mla", VERSIONS, "generation_mla_perf"), decode)
        yield group("latent_attention", "decode", "engines", form, axes, found, note=note)
        if form == "bfloat16":
            found = collect(rows_of(root, system, "mla", VERSIONS, "context_mla_perf"), prefill)
            yield group("latent_attention", "prefill", "engines", form, axes, found, note=note)


def delta_rules(root: Path, system: str) -> Iterable[dict[str, Any] | None]:
    for op, name, file, engines in (
        ("gated_delta_rule", "linear_attention", "gdn_perf", VERSIONS),
        ("channel_delta_rule", "kda", "kda_perf", {"sglang": "0.5.16", "vllm": "0.1.dev19262"}),
    ):
        rows = list(rows_of(root, system, name, engines, file))

        def decode(r: Row) -> tuple[Any, ...] | None:
            right = r["phase"] == "generation" and "conv" not in r["kernel_source"] and r["num_v_heads"] in DELTA_HEADS
            right = right and "fused_decode" not in r["kernel_source"]  # with what stands round the rule
            sizes = (r["num_v_heads"], r["head_v_dim"], r["head_k_dim"])
            return (r["batch_size"], *sizes) if right and r["seq_len"] == 1 else None

        def prefill(r: Row) -> tuple[Any, ...] | None:
            right = r["phase"] == "context" and r["kernel_source"].startswith(("chunk", "flash", "gdn", "kda"))
            right = right and r["num_v_heads"] in DELTA_HEADS and r["seq_len"] in QUERIES and r["batch_size"] in (1, 8)
            sizes = (r["num_v_heads"], r["head_v_dim"], r["head_k_dim"])
            return (r["batch_size"], r["seq_len"], *sizes) if right else None

        note = "; the best of the engines"
        yield group(
            op, "decode", "engines", "float32", "requests heads value_dim key_dim", collect(rows, decode), note=note
        )
        axes = "requests query heads value_dim key_dim"
        yield group(op, "prefill", "engines", "float32", axes, collect(rows, prefill), note=note)


def all_reduces(root: Path, system: str) -> Iterable[dict[str, Any] | None]:
    rows = rows_of(root, system, "comm", VERSIONS, "custom_allreduce_perf")

    def key(r: Row) -> tuple[Any, ...] | None:
        right = "eager" not in str(r["kernel_source"]) and 1024 <= r["message_size"] <= 1 << 28 and r["num_gpus"] <= 8
        return (r["message_size"], r["num_gpus"]) if right else None

    yield group(
        "all_reduce", "", "engines", "bfloat16", "bytes ranks", collect(rows, key), note="; the best of three engines"
    )


MAKERS = (products, experts, attention, latent_attention, delta_rules, all_reduces)


def main(root: str, target: str) -> None:
    """Write a file for each GPU."""
    for gpu, system in GPUS.items():
        groups = [found for maker in MAKERS for found in maker(Path(root), system) if found]
        lines = []
        for found in groups:
            rows = ",\n   ".join(json.dumps(row) for row in found.pop("rows"))
            lines.append(f'  {json.dumps(found)[:-1]}, "rows": [\n   {rows}\n  ]}}')
        text = f'{{\n "gpu": "{gpu}",\n "groups": [\n' + ",\n".join(lines) + "\n ]\n}\n"
        path = Path(target) / f"{gpu}.engines.json"
        path.write_text(text)
        print(
            path,
            {
                f"{g['op']} {g.get('label', '')} {g['format']}": line.count("\n")
                for g, line in zip(groups, lines, strict=True)
            },
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
