"""The reference: transformers' own model of the same config and weights, in float32, with everything that flows recorded.

What a module was given and what it gave is recorded under the path of *our* module that does the same, so that ours can be
run on the reference's own inputs. Our norms take the sum before them along, so their inputs are its two terms.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.verify.compare import routing_gaps
from firstlight.verify.reference_weights import build_reference, silenced
from firstlight.verify.workload import Sequence
from firstlight.weights.stored import StoredTensor

QUIET_RMS = 1e-3
"""Root mean square of quiet inputs: its square is near the epsilons of norms, so these decide half of the result."""


@dataclass(slots=True)
class Call:
    """A module's call on one sequence: inputs and outputs are [T, ...]; gap: [T], see `routing_gaps`, of modules that route."""

    inputs: tuple[torch.Tensor | None, ...]
    outputs: tuple[torch.Tensor, ...]
    gap: torch.Tensor | None = None


Record = dict[str, Call]
"""By path of our module: "embed_tokens", "rotary", "layers.0.input_layernorm", ..., "layers.0" (a whole layer), "lm_head"."""


@contextmanager
def full_precision() -> Iterator[None]:
    """For as long as the block lasts, torch multiplies float32 as float32: by default cuDNN's convolutions round to TF32 on a GPU."""
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = convolutions, products


@contextmanager
def in_plain_torch(model: torch.nn.Module) -> Iterator[None]:
    """For as long as the block lasts, transformers' functions in this model's own file are those written in torch.

    Where flash-linear-attention or causal-conv1d is installed, transformers wraps them to call these instead, and they round
    float32 to TF32.
    """
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    wrapped = [
        (file, name, function)
        for file in files
        if file.__name__.startswith("transformers.models.")
        for name, function in vars(file).items()
        if inspect.isfunction(function) and function.__module__ == file.__name__ and hasattr(function, "__wrapped__")
    ]
    for file, name, function in wrapped:
        setattr(file, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for file, name, function in wrapped:
            setattr(file, name, function)


class Reference:
    """transformers' model with the given tensors."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], device: torch.device) -> None:
        """config: a config.json. tensors: by the names that `published_names` gives. Raises CheckpointError."""
        self.device = device
        self.model = build_reference(config, tensors, device)
        base = self.model.model
        self.text = getattr(base, "language_model", base)
        self.modules = self._modules()

    def _modules(self) -> dict[str, torch.nn.Module]:
        """The reference's modules by our paths."""
        modules = {"embed_tokens": self.text.embed_tokens, "rotary": self.text.rotary_emb}
        for i, layer in enumerate(self.text.layers):
            mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            modules[f"layers.{i}.input_layernorm"] = layer.input_layernorm
            modules[f"layers.{i}.mixer"] = mixer
            modules[f"layers.{i}.post_attention_layernorm"] = layer.post_attention_layernorm
            modules[f"layers.{i}.mlp"] = layer.mlp
            modules[f"layers.{i}"] = layer
        return {**modules, "norm": self.text.norm, "lm_head": self.model.lm_head}

    def run(self, sequence: Sequence, quiet: bool = False) -> tuple[Record, Record]:
        """What every module was given and gave on a sequence; and, if asked, what it gives on quiet inputs (else empty)."""
        observer = _Observer(self, quiet)
        hooks = [
            module.register_forward_hook(observer.watch(path), with_kwargs=True)
            for path, module in self.modules.items()
        ]
        for path, module in self.modules.items():
            if path.endswith(".mlp") and hasattr(module, "gate"):
                router = module.get_submodule("gate")
                hooks.append(router.register_forward_hook(observer.watch_router(path)))
        positions = sequence.positions.to(self.device)
        positions = positions[None] if positions.dim() == 1 else positions[:, None]
        try:
            with torch.no_grad(), silenced(), in_plain_torch(self.model):
                out = self.text(input_ids=sequence.ids[None].to(self.device), position_ids=positions, use_cache=False)
                self.model.lm_head(out.last_hidden_state)
        finally:
            for hook in hooks:
                hook.remove()
        return observer.record(), observer.quiet_calls


class _Observer:
    """Hooks that note what modules of the reference were given and gave, without the batch dimension."""

    def __init__(self, reference: Reference, quiet: bool) -> None:
        self.reference, self.quiet = reference, quiet
        self.given: dict[str, torch.Tensor] = {}
        self.gave: dict[str, torch.Tensor] = {}
        self.gaps: dict[str, torch.Tensor] = {}
        self.quiet_calls: Record = {}

    def watch(self, path: str) -> Any:
        """A forward hook."""

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if path == "rotary":
                cos, sin = (part[0] for part in output)
                half = cos.shape[-1] // 2
                self.gave[path] = torch.cat((cos[:, :half], sin[:, :half]), dim=-1).float()
                return
            given = args[0] if args else kwargs["hidden_states"]
            self.given[path], self.gave[path] = given[0], _first(output)[0]
            if self.quiet and path.count(".") != 1 and path not in ("embed_tokens", "lm_head"):
                self._run_quiet(path, module, args, kwargs, given)

        return hook

    def watch_router(self, path: str) -> Any:
        """A forward hook of a router, whose first output is its logits, [T, experts]."""

        def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
            choice = _first(output)
            if (bias := getattr(module, "e_score_correction_bias", None)) is not None:
                choice = choice.float().sigmoid() + bias
            groups, top_groups = getattr(module, "num_group", 1), getattr(module, "topk_group", 1)
            self.gaps[path] = routing_gaps(choice, module.top_k, groups, top_groups)

        return hook

    def _run_quiet(
        self, path: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: torch.Tensor
    ) -> None:
        small = given * (QUIET_RMS / given.square().mean().sqrt())
        # `forward` and not a call: a module's own hooks stay out of it, its router's are wanted.
        gap = self.gaps.get(path)
        out = _first(
            module.forward(small, *args[1:], **kwargs) if args else module.forward(**{**kwargs, "hidden_states": small})
        )
        quiet_gap = self.gaps.get(path)
        if gap is not None:
            self.gaps[path] = gap
        outputs = (out[0],) if path.endswith(("mixer", "mlp")) else (out[0], small[0])
        inputs = (small[0],) if path.endswith(("mixer", "mlp")) else (None, small[0])
        self.quiet_calls[path] = Call(inputs, outputs, quiet_gap)

    def record(self) -> Record:
        """The calls of every module, with the terms of the sums that our norms take."""
        given, gave = self.given, self.gave
        record = {"embed_tokens": Call((), (gave["embed_tokens"],)), "rotary": Call((), (gave["rotary"],))}
        hidden: torch.Tensor | None = None
        residual = gave["embed_tokens"]
        for i in range(len(self.reference.text.layers)):
            path = f"layers.{i}"
            first, mixer, second, mlp = (
                f"{path}.{part}" for part in ("input_layernorm", "mixer", "post_attention_layernorm", "mlp")
            )
            record[first] = Call((hidden, residual), (gave[first], given[first]))
            record[mixer] = Call((given[mixer],), (gave[mixer],))
            record[second] = Call((gave[mixer], given[first]), (gave[second], given[second]))
            record[mlp] = Call((given[mlp],), (gave[mlp],), self.gaps.get(mlp))
            record[path] = Call((hidden, residual), (gave[path],), self.gaps.get(mlp))
            hidden, residual = gave[mlp], given[second]
        record["norm"] = Call((hidden, residual), (gave["norm"], given["norm"]))
        record["lm_head"] = Call((given["lm_head"],), (gave["lm_head"],))
        if self.quiet:
            self.quiet_calls["rotary"] = record["rotary"]
        return record


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
