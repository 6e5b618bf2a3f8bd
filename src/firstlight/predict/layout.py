"""From a checkpoint (or its config.json alone) and a choice of hardware to a model that can be priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.errors import FirstlightError
from firstlight.hardware import GPUS, Hardware
from firstlight.hardware.calibration import Table
from firstlight.hardware.timings import Timings
from firstlight.models import CausalModel, build_model
from firstlight.models.buckets import GPU_DEFAULTS
from firstlight.models.config import ConfigError, own_dtype
from firstlight.parallel import Mesh
from firstlight.predict.step_time import Conditions, StepModel
from firstlight.predict.walk import walk_model
from firstlight.quant import Format, Scheme, scheme_of
from firstlight.quant.scheme import HIGH_PRECISION
from firstlight.step import Bucket

PREDICTED_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Of activations, those that GPUs are described for."""
FLOAT8 = Format("float8_e4m3fn", (128, 128), "float32")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is laid out over GPUs and in memory.

    tensor_parallel, data_parallel, expert_parallel: sizes; experts spread over the ranks of the others. float8_weights, _head,
    _cache: FP8 in place of what the checkpoint has. bfloat16_state: recurrent states in bfloat16 in place of float32.
    """

    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: int = 1
    float8_weights: bool = False
    float8_head: bool = False
    float8_cache: bool = False
    bfloat16_state: bool = False

    @property
    def mesh(self) -> Mesh:
        """The mesh of these sizes, seen from its first rank. Raises ValueError if they don't fit."""
        return Mesh.of(tp=self.tensor_parallel, dp=self.data_parallel, ep=self.expert_parallel)


@dataclass(frozen=True, slots=True)
class Float8Where(Scheme):
    """Another scheme, with FP8 blocks where asked for."""

    inner: Scheme | None = None
    weights: bool = False
    head: bool = False

    def format(self, name: str) -> Format:
        """Format of the weight with this checkpoint name."""
        assert self.inner is not None
        own = self.inner.format(name)
        if name.startswith("lm_head"):
            return FLOAT8 if self.head else own
        return FLOAT8 if self.weights and own.is_plain and not HIGH_PRECISION.search(name) else own


def gpu_of(name: str) -> Hardware:
    """A described GPU. Raises FirstlightError, listing what there is."""
    if name.lower() not in GPUS:
        raise FirstlightError(f"--gpu {name}: not described; described are {', '.join(sorted(GPUS))}")
    return GPUS[name.lower()]


def build(config: Mapping[str, Any], layout: Layout) -> CausalModel:
    """The model of a config on the meta device, for one rank. Raises ConfigError or ValueError, with messages for people."""
    dtype = _activations(config)
    scheme = Scheme(dtype) if _is_mxfp4_of_experts(config) else scheme_of(config, dtype)
    if layout.float8_weights or layout.float8_head:
        scheme = Float8Where(dtype, scheme, layout.float8_weights, layout.float8_head)
    cache = torch.float8_e4m3fn if layout.float8_cache else dtype
    state = torch.bfloat16 if layout.bfloat16_state else torch.float32
    return build_model(config, dtype=dtype, mesh=layout.mesh, scheme=scheme, cache_dtype=cache, state_dtype=state)


def _activations(config: Mapping[str, Any]) -> torch.dtype:
    """The checkpoint's own dtype, or bfloat16. Raises ConfigError for one that no GPU is described for."""
    name = own_dtype(config) or "bfloat16"
    if name not in PREDICTED_DTYPES:
        raise ConfigError(
            f"config.json: dtype {name!r} can't be predicted; it must be one of {', '.join(PREDICTED_DTYPES)}, or left out"
        )
    return PREDICTED_DTYPES[name]


def _is_mxfp4_of_experts(config: Mapping[str, Any]) -> bool:
    """Whether MXFP4 is the experts' own affair: gpt-oss' module makes room for it, and all else stays plain. Other models
    have no such module, so their MXFP4 is a scheme like any other, which `scheme_of` refuses."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    return method == "mxfp4" and config.get("model_type") == "gpt_oss"


def step_model(
    model: CausalModel,
    hardware: Hardware,
    layout: Layout,
    conditions: Conditions | None = None,
    *,
    page_size: int = GPU_DEFAULTS["page_size"],
    bucket: Bucket | None = None,
    table: Table | None = None,
    overrides: Sequence[str] = (),
) -> StepModel:
    """The priced model.

    bucket: where to bind, for conditions that ask for the providers bound here; table, overrides: for binding as the engine
    does, and for how long the bound providers take.
    """
    walked = walk_model(
        model,
        page_size=page_size,
        hardware=hardware if bucket else None,
        bucket=bucket,
        overrides=overrides,
        timings=Timings(table) if table else None,
    )
    return StepModel(walked, hardware, layout.mesh, conditions or Conditions(), table)
