"""The vision tower against transformers' Qwen3.5, alone and feeding the text model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from nn.vision_reference import (
    IMAGE,
    VIDEO,
    Runner,
    draw_patches,
    image,
    models,
    text,
    token_types,
    tower_of,
    video,
    worst_row_error,
)
from reference import tiny_config
from torch import Tensor

from firstlight.models import build_model
from firstlight.nn.mrope import embed_rows, mrope_positions
from firstlight.nn.vision import VisionTower
from firstlight.nn.vision_config import Grid
from firstlight.ops.op import sites
from firstlight.parallel import Mesh

FAMILIES = ("qwen3_5", "qwen3_5_moe")
TOLERANCE = 1e-5  # float32, two blocks: sums of up to 1,536 products in another order
LAYOUTS: dict[str, list[Grid]] = {
    "one": [(1, 4, 6)],
    "smallest": [(1, 2, 2)],
    "flat": [(1, 2, 14)],
    "tall": [(1, 10, 2)],
    "larger than the learned grid": [(1, 18, 22)],
    "as large as the learned grid": [(1, 8, 8)],
    "video": [(3, 4, 6)],
    "several": [(1, 6, 10), (4, 2, 6), (1, 14, 4), (1, 2, 2), (2, 6, 6)],
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def reference_tower(reference: Any, patches: Tensor, grids: list[Grid]) -> Tensor:
    embeddings: Tensor = reference.model.visual(patches, grid_thw=torch.tensor(grids)).pooler_output
    return embeddings


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_transformers(family: str, layout: str) -> None:
    reference, ours = models(family)
    grids = LAYOUTS[layout]
    patches = draw_patches(grids)
    embeddings = tower_of(ours)(patches, grids)
    error = worst_row_error(embeddings, reference_tower(reference, patches, grids))
    print(f"worst row: {error:.1e}")
    assert embeddings.shape == (patches.shape[0] // 4, 128)
    assert error < TOLERANCE


def test_blank_image() -> None:
    """Values of little variance, where the norms' epsilon counts; through the bias alone where patches are zeros."""
    reference, ours = models("qwen3_5")
    grids = LAYOUTS["one"]
    patches = torch.zeros(24, 1536)
    assert worst_row_error(tower_of(ours)(patches, grids), reference_tower(reference, patches, grids)) < TOLERANCE


def test_images_do_not_see_each_other() -> None:
    """Together as alone, and a frame of a video as an image."""
    tower = tower_of(models("qwen3_5")[1])
    grids = LAYOUTS["several"]
    patches = draw_patches(grids)
    frames = [(1, rows, columns) for count, rows, columns in grids for _ in range(count)]
    alone = [
        tower(part, [grid]) for part, grid in zip(patches.split([g[1] * g[2] for g in frames]), frames, strict=True)
    ]
    assert worst_row_error(tower(patches, grids), torch.cat(alone)) < TOLERANCE


def test_bfloat16_rounds_as_transformers() -> None:
    """In bfloat16 both are as far from float32, within a factor."""
    reference, ours = models("qwen3_5")
    grids = LAYOUTS["several"]
    patches = draw_patches(grids)
    exact = reference_tower(reference, patches, grids)
    half = tower_of(build_model(tiny_config("qwen3_5"), dtype=torch.bfloat16))
    copy_weights(tower_of(ours), half)
    reference_half = type(reference.model.visual)(reference.config.vision_config).eval()
    reference_half.load_state_dict(reference.model.visual.state_dict())
    theirs = reference_half.bfloat16()(patches.bfloat16(), grid_thw=torch.tensor(grids)).pooler_output
    embeddings = half(patches, grids)
    assert embeddings.dtype == torch.bfloat16
    assert worst_row_error(embeddings, exact) < 1.5 * worst_row_error(theirs, exact)


def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    for path, module in target.named_modules():
        for attribute, spec in getattr(module, "weight_specs", {}).items():
            setattr(module, attribute, getattr(source.get_submodule(path), attribute).to(spec.format.torch_dtype))


def test_every_rank_holds_the_whole_tower() -> None:
    one = tower_of(build_model(tiny_config("qwen3_5"), dtype=torch.float32))
    second_of_two = tower_of(build_model(tiny_config("qwen3_5"), dtype=torch.float32, mesh=Mesh.of(1, tp=2)))
    shapes = [
        {
            (path, name): spec.local_shape
            for path, module in tower.named_modules()
            for name, spec in getattr(module, "weight_specs", {}).items()
        }
        for tower in (one, second_of_two)
    ]
    assert shapes[0] == shapes[1]


def test_runs_on_shapes_alone() -> None:
    """On the meta device, with abstracts in place of ops: what binding and predictions walk."""
    tower = tower_of(build_model(tiny_config("qwen3_5"), dtype=torch.bfloat16))
    for _, site in sites(tower):
        site[:] = [site.op.abstract]
    grids = LAYOUTS["several"]
    embeddings = tower(draw_patches(grids).to("meta"), grids)
    assert (embeddings.shape, embeddings.dtype) == ((sum(t * h * w for t, h, w in grids) // 4, 128), torch.bfloat16)


@pytest.mark.parametrize(
    ("grids", "patches", "message"),
    [
        ([(1, 4, 5)], 20, "(1, 4, 5)"),
        ([(0, 4, 4)], 0, "(0, 4, 4)"),
        ([(1, 4, 4), (1, 2, 2)], 16, "(20, 1536)"),
        ([], 0, "0 images"),
    ],
)
def test_refuses_grids_that_do_not_fit(grids: list[Grid], patches: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tower_of(models("qwen3_5")[1])(torch.zeros(patches, 1536), grids)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 66, "66; it must be a multiple of 4 x num_heads = 16"),
        ("hidden_size", "64", "'64'; it must be a whole number"),
        ("depth", None, "depth is missing"),
        ("depth", True, "depth is True"),
        ("num_heads", 0, "num_heads is 0"),
        ("num_position_embeddings", 60, "60; it must be the square"),
        ("hidden_act", "relu", "'relu'; supported: gelu, gelu_pytorch_tanh"),
        ("deepstack_visual_indexes", [1], "[1]; only towers without deepstack"),
        ("patch_size", [16, 16], "patch_size is [16, 16]"),
        ("rope_parameters", {"rope_type": "yarn"}, "supported: rope_type 'axial'"),
        ("rope_parameters", {"rope_theta": float("inf")}, "rope_theta is inf"),
    ],
)
def test_refuses_configs_that_cannot_run(field: str, value: Any, message: str) -> None:
    config = tiny_config("qwen3_5")
    config["vision_config"][field] = value
    with pytest.raises(ValueError, match=r"config.json: vision_config\..*" + re.escape(message)):
        build_model(config, dtype=torch.float32)


def test_refuses_a_config_that_is_no_object() -> None:
    with pytest.raises(ValueError, match="vision_config is list; it must be an object"):
        build_model({**tiny_config("qwen3_5"), "vision_config": []}, dtype=torch.float32)


PROMPT_GRIDS: list[Grid] = [(1, 4, 6), (3, 4, 4), (1, 2, 10)]


def prompt() -> list[int]:
    """Text, an image, text, a video of three frames, text, an image, text."""
    first, clip, last = PROMPT_GRIDS
    return [*text(5, 1), *image(first), *text(9, 2), *video(clip), *text(1, 3), *image(last), *text(12, 4)]


def reference_logits(reference: Any, ids: list[int], patches: Tensor) -> Tensor:
    """transformers' logits of the prompt, [T, vocabulary]."""
    sizes = [frames * rows * columns for frames, rows, columns in PROMPT_GRIDS]
    first, clip, last = patches.split(sizes)
    logits: Tensor = reference(
        input_ids=torch.tensor([ids]),
        pixel_values=torch.cat((first, last)),
        image_grid_thw=torch.tensor([PROMPT_GRIDS[0], PROMPT_GRIDS[2]]),
        pixel_values_videos=clip,
        video_grid_thw=torch.tensor([PROMPT_GRIDS[1]]),
        mm_token_type_ids=token_types(ids),
    ).logits[0]
    return logits


def embeds_of(tower: VisionTower, patches: Tensor) -> Tensor:
    """The tower's embeddings under a null row, which may hold anything."""
    embeddings: Tensor = tower(patches, PROMPT_GRIDS)
    return torch.cat((torch.full_like(embeddings[:1], float("nan")), embeddings))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1000, 16])
def test_logits_of_a_prompt_with_images(family: str, chunk: int) -> None:
    """Images and a video through the whole model, in one piece and in chunks that cut images; then decoded tokens."""
    reference, ours = models(family)
    ids, patches = prompt(), draw_patches(PROMPT_GRIDS)
    generated = text(6, 5)
    positions, delta = mrope_positions(ids, PROMPT_GRIDS, image_token_id=IMAGE, video_token_id=VIDEO)
    rows, embeds = embed_rows(ids, IMAGE, VIDEO), embeds_of(tower_of(ours), patches)
    runner = Runner(ours, len(ids) + len(generated))
    logits = []
    for start in range(0, len(ids), chunk):
        part = slice(start, start + chunk)
        logits.append(runner(ids[part], positions[:, part], rows[part], embeds))
    for i, token in enumerate(generated):
        logits.append(runner([token], np.full((3, 1), len(ids) + i + delta)))
    expected = reference_logits(reference, [*ids, *generated], patches)
    error = worst_row_error(torch.cat(logits), expected)
    print(f"worst row: {error:.1e}")
    assert error < 1e-4
