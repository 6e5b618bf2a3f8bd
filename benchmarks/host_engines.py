"""The offline engines of SGLang and vLLM with one face, and what each host's log says of who serves; for `host_side.py`."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Engine(Protocol):
    """An engine that runs. steady_ms: of the last call, a step while all its requests decoded; None if it isn't known here."""

    version: str
    steady_ms: float | None

    def __init__(self, flags: dict[str, Any]) -> None:
        """Start it."""

    def generate(self, prompts: list[list[int]], temperature: float, new: int) -> list[list[int]]:
        """`new` tokens for each prompt, all at once."""

    def shutdown(self) -> None:
        """End it, with its processes."""


class SglangEngine:
    """SGLang's. How long steps take is in its log."""

    steady_ms = None

    def __init__(self, flags: dict[str, Any]) -> None:
        """As `Engine`."""
        import sglang

        self.version = sglang.__version__
        self.engine = sglang.Engine(**flags)

    def generate(self, prompts: list[list[int]], temperature: float, new: int) -> list[list[int]]:
        """As `Engine`."""
        sampling = {"temperature": temperature, "max_new_tokens": new, "ignore_eos": True}
        return [answer["output_ids"] for answer in self.engine.generate(input_ids=prompts, sampling_params=sampling)]

    def shutdown(self) -> None:
        """As `Engine`."""
        self.engine.shutdown()


class VllmEngine:
    """vLLM's, step by step: each step's tokens come by themselves, so the time between two is seen from outside."""

    def __init__(self, flags: dict[str, Any]) -> None:
        """As `Engine`."""
        import vllm

        self.version, self.steady_ms = vllm.__version__, None
        self.engine = vllm.LLM(**flags).llm_engine
        self._names = itertools.count()

    def generate(self, prompts: list[list[int]], temperature: float, new: int) -> list[list[int]]:
        """As `Engine`."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        answers: dict[str, list[int]] = {}
        for prompt in prompts:
            name = str(next(self._names))
            answers[name] = []
            self.engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
        steps: list[tuple[float, int]] = []
        while self.engine.has_unfinished_requests():
            told = self.engine.step()
            steps.append((time.perf_counter(), sum(len(one.outputs[0].token_ids) for one in told)))
            for one in told:
                answers[one.request_id] += one.outputs[0].token_ids
        full = [
            (after - before) * 1e3
            for (before, some), (after, tokens) in itertools.pairwise(steps)
            if some == tokens == len(prompts)
        ]
        self.steady_ms = statistics.median(full) if full else None
        return list(answers.values())

    def shutdown(self) -> None:
        """As `Engine`."""
        self.engine.engine_core.shutdown()


@dataclass(frozen=True)
class Host:
    """name: for people. model, ranks: the engine's arguments for these. serves: a line of each rank where Firstlight's class serves.
    declines: what is said where it doesn't. environment: of the engine's process, on both sides. flags: for any use; several_ranks:
    with more than one; timing: to time it.
    """

    name: str
    engine: type[Engine]
    model: str
    ranks: str
    serves: re.Pattern[str]
    declines: re.Pattern[str]
    environment: dict[str, str]
    flags: dict[str, Any]
    several_ranks: dict[str, Any]
    timing: dict[str, Any]

    def options(self, model: Path, ranks: int) -> dict[str, Any]:
        """The engine's arguments for any use of a model on so many ranks."""
        return {self.model: str(model), self.ranks: ranks, **self.flags, **(self.several_ranks if ranks > 1 else {})}


HOSTS = {
    "sglang": Host(
        name="SGLang",
        engine=SglangEngine,
        model="model_path",
        ranks="tp_size",
        serves=re.compile(r"Firstlight \S+ serves \S+: model_type"),
        declines=re.compile(r"SGLang's own class serves .*"),
        environment={},
        flags={
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "attention_backend": "triton",
            "mm_attention_backend": "triton_attn",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "random_seed": 0,
            "log_level": "info",
        },
        # Firstlight's layers use the ranks' process group alone. SGLang's own all-reduces would be set up for nothing, and they
        # map memory for NVLink multicast, which not every machine allows.
        several_ranks={"disable_custom_all_reduce": True, "enforce_disable_flashinfer_allreduce_fusion": True},
        timing={
            "load_format": "dummy",
            "disable_radix_cache": True,
            "mem_fraction_static": 0.85,
            "max_running_requests": 256,
            "max_prefill_tokens": 16384,
            "chunked_prefill_size": 16384,
            "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64, 128],
            # SGLang's own classes run prompts in graphs. These hold what is timed; the many others would only delay the start.
            "cuda_graph_bs_prefill": [4096, 8192, 16384],
        },
    ),
    "vllm": Host(
        name="vLLM",
        engine=VllmEngine,
        model="model",
        ranks="tensor_parallel_size",
        serves=re.compile(r"Firstlight: model_type"),
        declines=re.compile(r"vLLM's own class serves .*"),
        # Firstlight's class serves in vLLM's first model runner alone, so both sides are timed in it.
        environment={"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1"},
        flags={"skip_tokenizer_init": True, "seed": 0},
        several_ranks={},
        timing={
            "load_format": "dummy",
            "language_model_only": True,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.85,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 16384,
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128],
        },
    ),
}
