"""Positions of a prompt with images (MRoPE), and which of its tokens take an image's embedding.

A token has three positions: time, row, column. For text the three are equal and count up. The tokens of an image of
t x h x w merged patches that starts at p stand at p + (frame, row, column), and the text after it goes on at
p + max(h, w): an image takes less room than it has tokens. `delta` is what the whole prompt fell behind; a later token
with index n in the context stands at n + delta in all three.

    tokens     a   b   I   I   I   I   I   I   c
    time       0   1   2   2   2   2   2   2   5      an image of 1 x 2 x 3 merged patches;
    row        0   1   2   2   2   3   3   3   5      delta = 6 - 9 = -3
    column     0   1   2   3   4   2   3   4   5

A video's frames are stored as one grid, but stand in the prompt apart, each with its time written before it: each is an
image of one frame. Source: "Qwen2-VL" (Wang et al. 2024), section 2.1; the frames as in transformers' Qwen3.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from firstlight.nn.vision_config import Grid, merged_grid


def mrope_positions(
    ids: ArrayLike, grids: Sequence[Grid], *, image_token_id: int, video_token_id: int | None = None, merge: int = 2
) -> tuple[NDArray[np.int64], int]:
    """(positions [3, T] int64, delta) of a prompt.

    ids: [T] token ids, every image and video already as as many placeholder tokens as it has embeddings. grids: of images
    and videos in the order of the prompt, in patches. merge: rows (and columns) of patches that become one embedding.
    Raises ValueError if placeholders and grids don't belong together.
    """
    tokens = np.asarray(ids, dtype=np.int64)
    count = tokens.shape[0]
    index = np.arange(count, dtype=np.int64)
    images = list(_images(tokens, grids, image_token_id, video_token_id, merge))
    shift = np.zeros(count + 1, dtype=np.int64)  # at the token after an image: how far its positions lag its tokens
    for first, (frames, rows, columns) in images:
        shift[first + frames * rows * columns] = max(rows, columns) - frames * rows * columns
    positions = np.tile(index + shift.cumsum()[:count], (3, 1))
    for first, size in images:
        tokens_of_image = slice(first, first + size[0] * size[1] * size[2])
        positions[:, tokens_of_image] = positions[0, first] + np.indices(size).reshape(3, -1)
    delta = int(positions.max()) + 1 - count if count else 0
    return positions, delta


def embed_rows(ids: ArrayLike, image_token_id: int, video_token_id: int | None = None) -> NDArray[np.int32]:
    """[T] int32: for each token its row of `StepBatch.embeds`, 0 (the null row) for text.

    The n placeholder tokens have rows 1 to n in the order of the prompt, as `VisionTower` returns the embeddings when it is
    given the images in that order; a null row goes before them.
    """
    placeholder = _placeholders(np.asarray(ids, dtype=np.int64), image_token_id, video_token_id)
    return np.where(placeholder, placeholder.cumsum(), 0).astype(np.int32)


def _placeholders(tokens: NDArray[np.int64], image_token_id: int, video_token_id: int | None) -> NDArray[np.bool_]:
    placeholder: NDArray[np.bool_] = tokens == image_token_id
    return placeholder if video_token_id is None else placeholder | (tokens == video_token_id)


def _images(
    tokens: NDArray[np.int64], grids: Sequence[Grid], image_token_id: int, video_token_id: int | None, merge: int
) -> Iterator[tuple[int, Grid]]:
    """(first token, merged size) of every image and of every frame of a video."""
    where = np.flatnonzero(_placeholders(tokens, image_token_id, video_token_id))
    used = 0
    for number, grid in enumerate(grids):
        frames, height, width = merged_grid(grid, merge)
        is_video = used < len(where) and video_token_id is not None and tokens[where[used]] == video_token_id
        parts = [(1, height, width)] * frames if is_video else [(frames, height, width)]
        for part in parts:
            size = part[0] * height * width
            run = where[used : used + size]
            if len(run) < size or run[-1] - run[0] != size - 1 or (tokens[run] != tokens[run[0]]).any():
                raise ValueError(
                    f"image {number} with the grid {tuple(grid)} needs {size} placeholder tokens in a row; "
                    f"the prompt's placeholders from number {used} on don't form such a run ({len(where)} placeholders in all)"
                )
            yield int(run[0]), part
            used += size
    if used < len(where):
        raise ValueError(
            f"the prompt has {len(where)} image placeholder tokens, but its {len(grids)} images have {used} embeddings"
        )
