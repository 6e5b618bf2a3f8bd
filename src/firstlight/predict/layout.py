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
from firstlight.models.config import text_section
from firstlight.parallel import Mesh
from firstlight.predict.step_time import Conditions, StepModel
from firstlight.predict.walk import walk_model
from firstlight.quant import Format, Scheme, scheme_of
from firstlight.quant.scheme import HIGH_PRECISION
from firstlight.step import Bucket

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
    text = text_section(config)
    dtype = getattr(torch, str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch."))
    # MXFP4 is the experts' own affair: their module makes room for it, and all else stays plain.
    mxfp4 = (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    scheme = Scheme(dtype) if mxfp4 else scheme_of(config, dtype)
    if layout.float8_weights or layout.float8_head:
        scheme = Float8Where(dtype, scheme, layout.float8_weights, layout.float8_head)
    cache = torch.float8_e4m3fn if layout.float8_cache else dtype
    state = torch.bfloat16 if layout.bfloat16_state else torch.float32
    return build_model(config, dtype=dtype, mesh=layout.mesh, scheme=scheme, cache_dtype=cache, state_dtype=state)


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
