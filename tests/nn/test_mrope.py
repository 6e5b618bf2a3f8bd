"""Positions of prompts with images against transformers', and the rows that take an image's embedding."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn.vision_reference import IMAGE, VIDEO, VISION_END, VISION_START, image, models, text, token_types, video

from firstlight.nn.mrope import embed_rows, mrope_positions
from firstlight.nn.vision_config import Grid

IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}

images = st.tuples(st.just("image"), st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)))
videos = st.tuples(st.just("video"), st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)))
texts = st.tuples(st.just("text"), st.integers(1, 20))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(texts, images, videos), min_size=1, max_size=8))
def test_equals_transformers(parts: list[tuple[str, Grid | int]]) -> None:
    ids: list[int] = []
    grids: dict[str, list[Grid]] = {"image": [], "video": []}
    in_order: list[Grid] = []
    for i, (kind, what) in enumerate(parts):
        if isinstance(what, int):
            ids += text(what, i)
            continue
        grid = (what[0], 2 * what[1], 2 * what[2])
        ids += image(grid) if kind == "image" else video(grid)
        grids[kind].append(grid)
        in_order.append(grid)
    expected, delta = models("qwen3_5")[0].model.get_rope_index(
        torch.tensor([ids]),
        token_types(ids),
        image_grid_thw=torch.tensor(grids["image"]) if grids["image"] else None,
        video_grid_thw=torch.tensor(grids["video"]) if grids["video"] else None,
    )
    positions, our_delta = mrope_positions(ids, in_order, **IDS)
    assert positions.dtype == np.int64
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())
    assert our_delta == int(delta)


def test_by_hand() -> None:
    """The example of the module's docstring, and what the next token has."""
    positions, delta = mrope_positions([7, 8, *[IMAGE] * 6, 9], [(1, 4, 6)], image_token_id=IMAGE)
    assert positions.tolist() == [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
    assert delta == -3
    longer, _ = mrope_positions([7, 8, *[IMAGE] * 6, 9, 9], [(1, 4, 6)], image_token_id=IMAGE)
    assert longer[:, -1].tolist() == [9 + delta] * 3


def test_images_without_anything_between() -> None:
    """Grids, not runs of placeholders, say where an image ends."""
    positions, delta = mrope_positions([IMAGE] * 3, [(1, 2, 4), (1, 2, 2)], image_token_id=IMAGE)
    assert positions.tolist() == [[0, 0, 2], [0, 0, 2], [0, 1, 2]]
    assert delta == 0


def test_other_merge_sizes() -> None:
    positions, delta = mrope_positions([IMAGE] * 2, [(1, 3, 6)], image_token_id=IMAGE, merge=3)
    assert positions.tolist() == [[0, 0], [0, 0], [0, 1]]
    assert delta == 0


def test_text_counts_up() -> None:
    for ids in ([], [5], text(30, 0)):
        positions, delta = mrope_positions(ids, [], **IDS)
        assert positions.tolist() == [list(range(len(ids)))] * 3
        assert delta == 0


@pytest.mark.parametrize(
    ("ids", "grids", "message"),
    [
        ([IMAGE] * 5, [(1, 4, 6)], "image 0 with the grid (1, 4, 6) needs 6 placeholder tokens in a row"),
        (
            [IMAGE] * 3 + [9] + [IMAGE] * 3,
            [(1, 4, 6)],
            "from number 0 on don't form such a run (6 placeholders in all)",
        ),
        ([IMAGE] * 3 + [VIDEO] * 3, [(1, 4, 6)], "needs 6 placeholder tokens in a row"),
        ([IMAGE] * 7, [(1, 4, 6)], "7 image placeholder tokens, but its 1 images have 6 embeddings"),
        ([IMAGE, 9], [], "1 image placeholder tokens, but its 0 images have 0 embeddings"),
        ([9], [(1, 2, 2)], "image 0 with the grid (1, 2, 2) needs 1 placeholder tokens"),
        ([VIDEO, VIDEO, 9], [(3, 2, 2)], "needs 1 placeholder tokens in a row"),
        ([IMAGE], [(1, 2, 3)], "an image has the grid (1, 2, 3)"),
        ([IMAGE], [(1, -2, -2)], "an image has the grid (1, -2, -2)"),
    ],
)
def test_refuses_placeholders_that_do_not_fit(ids: list[int], grids: list[Grid], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        mrope_positions(ids, grids, **IDS)


def test_embed_rows() -> None:
    ids = [VISION_START, IMAGE, IMAGE, VISION_END, 9, VIDEO, 9, IMAGE]
    rows = embed_rows(ids, IMAGE, VIDEO)
    assert rows.dtype == np.int32
    assert rows.tolist() == [0, 1, 2, 0, 0, 3, 0, 4]
    assert embed_rows(ids, IMAGE).tolist() == [0, 1, 2, 0, 0, 0, 0, 3]
    assert embed_rows([], IMAGE).tolist() == []
