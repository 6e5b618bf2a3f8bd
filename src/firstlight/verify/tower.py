"""The vision tower beside transformers': merged embeddings of two small images and a short video."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.models import CausalModel
from firstlight.nn.vision_config import Grid
from firstlight.verify.candidate import Answer, failure_of

PATH = "visual"


@dataclass(frozen=True, slots=True)
class Images:
    """patches: [P, values of a patch]. grids: frames, rows and columns of each. embeddings: the reference's, [P / 4, H]."""

    patches: torch.Tensor
    grids: tuple[Grid, ...]
    embeddings: torch.Tensor


def reference_images(reference: Any, model: CausalModel, device: torch.device, seed: int) -> Images | None:
    """What transformers' tower makes of random patches; None for a model without one."""
    tower = getattr(model, PATH, None)
    if tower is None:
        return None
    merge = tower.config.spatial_merge_size
    grids = ((1, 2 * merge, 3 * merge), (1, 5 * merge, merge), (2, merge, 4 * merge))
    count = sum(math.prod(grid) for grid in grids)
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(count, tower.config.patch_values, generator=generator).to(device)
    with torch.no_grad():
        out = reference.model.visual(patches, grid_thw=torch.tensor(grids, device=device))
    return Images(patches, grids, out.pooler_output)


def run_tower(model: Any, images: Images, dtype: torch.dtype) -> Answer:
    """Our tower on the same patches."""
    try:
        embeddings = model.visual(images.patches.to(dtype), images.grids)
    except Exception as error:  # whatever a module raises is a finding about it
        return Answer(PATH, (), failure=failure_of(error))
    return Answer(PATH, ((embeddings, images.embeddings),))
