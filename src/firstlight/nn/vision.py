"""The vision tower of Qwen3.5: patches of images and video frames in, embeddings of placeholder tokens out.

A vision transformer ("An Image is Worth 16x16 Words", Dosovitskiy et al. 2021) without a class token. An image of t x h x w
patches is t frames that don't see each other. A patch learns its place twice: from a learned square grid of embeddings,
stretched to h x w, that is added once; and from rotary angles, half of a head turned by its row and half by its column. At
the end each block of 2 x 2 patches becomes one embedding of the text model's size.

Patches come in the order of the image processor, *merge-block order*: frame, block row, block column, row in the block,
column in the block; so those that merge are neighbours. The tower is small beside the text model, so every rank holds all
of it, and it runs once an image, outside the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.nn.module import Build, Module, Segment, WeightSpec
from firstlight.nn.rope import Rope
from firstlight.nn.vision_config import ACTIVATIONS, Grid, VisionConfig, merged_grid
from firstlight.ops.add import add
from firstlight.ops.gelu import gelu
from firstlight.ops.layer_norm import layer_norm
from firstlight.ops.linear import linear
from firstlight.ops.op import CallSite
from firstlight.ops.rope import rope
from firstlight.ops.rope_angles import rope_angles
from firstlight.ops.segment_attention import segment_attention
from firstlight.quant import Weight, plain

EPS = 1e-6


class ReplicatedLinear(Module):
    """y = x W^T + b, all of it on every rank: [P, columns] -> [P, rows].

    flatten: the stored weight has more than two dimensions; those after the first are columns (the patch convolution).
    """

    def __init__(self, build: Build, name: str, rows: int, columns: int, *, flatten: bool = False) -> None:
        super().__init__()
        source = Segment(f"{name}.weight", rows)
        form = build.scheme.format(source.source)
        self.declare("weight", WeightSpec((rows, columns), ((source,),), form, build.mesh.tp, flatten=flatten))
        self.vector("bias", f"{name}.bias", rows, build.dtype, init="zeros", group=build.mesh.tp)
        self.product = CallSite(linear)

    def forward(self, x: torch.Tensor, bucket: int) -> torch.Tensor:
        """[P, columns] -> [P, rows]."""
        return self.product[bucket](x, self.weight, self.bias)

    weight: Weight
    bias: torch.Tensor


class LayerNorm(Module):
    """Layer norm over the last dimension."""

    def __init__(self, build: Build, name: str, size: int) -> None:
        super().__init__()
        self.vector("weight", f"{name}.weight", size, build.dtype, init="ones", group=build.mesh.tp)
        self.vector("bias", f"{name}.bias", size, build.dtype, init="zeros", group=build.mesh.tp)
        self.norm = CallSite(layer_norm)

    def forward(self, x: torch.Tensor, bucket: int) -> torch.Tensor:
        """[P, C] -> [P, C]."""
        return self.norm[bucket](x, self.weight, self.bias, eps=EPS)

    weight: torch.Tensor
    bias: torch.Tensor


class VisionMLP(Module):
    """fc2(gelu(fc1 x)). approximate: of GELU, "tanh" or "none"."""

    def __init__(self, build: Build, name: str, sizes: tuple[int, int, int], approximate: str) -> None:
        """sizes: of the input, between, and of the output."""
        super().__init__()
        size, between, out = sizes
        self.linear_fc1 = ReplicatedLinear(build, f"{name}.linear_fc1", between, size)
        self.linear_fc2 = ReplicatedLinear(build, f"{name}.linear_fc2", out, between)
        self.activation = CallSite(gelu)
        self.approximate = approximate

    def forward(self, x: torch.Tensor, bucket: int) -> torch.Tensor:
        """[P, input] -> [P, output]."""
        between = self.activation[bucket](self.linear_fc1(x, bucket), approximate=self.approximate)
        return self.linear_fc2(between, bucket)


@dataclass(frozen=True, slots=True)
class Frames:
    """Where patches are and which see each other: the same for all blocks.

    angles: [P, head_dim] float32, cos | sin, each of rows | columns. start: [frames + 1] int32, the first patch of every
    frame, and P. longest: patches of the largest frame.
    """

    angles: torch.Tensor
    start: torch.Tensor
    longest: int


class VisionAttention(Module):
    """Softmax attention among the patches of a frame, with rotary q and k."""

    def __init__(self, build: Build, name: str, config: VisionConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.qkv = ReplicatedLinear(build, f"{name}.qkv", 3 * config.hidden_size, config.hidden_size)
        self.proj = ReplicatedLinear(build, f"{name}.proj", config.hidden_size, config.hidden_size)
        self.rotate = CallSite(rope)
        self.attend = CallSite(segment_attention)

    def forward(self, x: torch.Tensor, frames: Frames, bucket: int) -> torch.Tensor:
        """[P, C] -> [P, C]."""
        heads = self.heads
        qkv = self.qkv(x, bucket).unflatten(-1, (3 * heads, self.head_dim))
        qk = self.rotate[bucket](qkv[:, : 2 * heads], frames.angles)
        y = self.attend[bucket](
            qk[:, :heads],
            qk[:, heads:],
            qkv[:, 2 * heads :],
            frames.start,
            scale=self.head_dim**-0.5,
            max_segment=frames.longest,
        )
        return self.proj(y.flatten(1), bucket)


class VisionBlock(Module):
    """x += attention(norm1(x)); x += mlp(norm2(x))."""

    def __init__(self, build: Build, name: str, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm1 = LayerNorm(build, f"{name}.norm1", size)
        self.attn = VisionAttention(build, f"{name}.attn", config)
        self.norm2 = LayerNorm(build, f"{name}.norm2", size)
        sizes = (size, config.intermediate_size, size)
        self.mlp = VisionMLP(build, f"{name}.mlp", sizes, ACTIVATIONS[config.hidden_act])
        self.add_attention = CallSite(add)
        self.add_mlp = CallSite(add)

    def forward(self, x: torch.Tensor, frames: Frames, bucket: int) -> torch.Tensor:
        """[P, C] -> [P, C]."""
        x = self.add_attention[bucket](x, self.attn(self.norm1(x, bucket), frames, bucket))
        return self.add_mlp[bucket](x, self.mlp(self.norm2(x, bucket), bucket))


class VisionTower(Module):
    """Patches to merged embeddings. Checkpoint names are those of `model.visual`."""

    def __init__(self, build: Build, name: str, config: Mapping[str, Any]) -> None:
        """config: the `vision_config` of a config.json. Raises ValueError for one that can't be run."""
        super().__init__()
        self.config = vision = VisionConfig.parse(config)
        size, merged = vision.hidden_size, vision.hidden_size * vision.merged
        self.dtype = build.dtype
        self.patch_embed = ReplicatedLinear(build, f"{name}.patch_embed.proj", size, vision.patch_values, flatten=True)
        positions = Segment(f"{name}.pos_embed.weight", vision.grid_side**2)
        shape = (vision.grid_side**2, size)
        spec = WeightSpec(shape, ((positions,),), plain(build.dtype), build.mesh.tp, init="embedding")
        self.declare("pos_embed", spec)
        self.blocks = torch.nn.ModuleList(VisionBlock(build, f"{name}.blocks.{i}", vision) for i in range(vision.depth))
        self.merger_norm = LayerNorm(build, f"{name}.merger.norm", size)
        # The merger's GELU is exact, whatever `hidden_act` says of the blocks'.
        self.merger = VisionMLP(build, f"{name}.merger", (merged, merged, vision.out_hidden_size), "none")
        self.rope = Rope(vision.head_dim // 2, vision.rope_theta)
        self.angles = CallSite(rope_angles)
        self.add_positions = CallSite(add)

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid], bucket: int = 0) -> torch.Tensor:
        """Embeddings of some images, one after another: [P, values of a patch] -> [P / 4, H] in the activations' dtype.

        patches: any float dtype, in merge-block order; a patch's values are ordered channel, frame, row, column. grids: of
        each image or video; rows and columns are multiples of the merge size. Raises ValueError if they don't fit.
        """
        self._check(patches, grids)
        x = self.patch_embed(patches.to(self.dtype), bucket)
        x = self.add_positions[bucket](x, self._position_embeddings(grids))
        frames = self._frames(grids, patches.device, bucket)
        for block in self.blocks:
            x = block(x, frames, bucket)
        merged = self.merger_norm(x, bucket).reshape(-1, self.config.merged * self.config.hidden_size)
        return self.merger(merged, bucket)

    def _check(self, patches: torch.Tensor, grids: Sequence[Grid]) -> None:
        for grid in grids:
            merged_grid(grid, self.config.spatial_merge_size)
        expected = (sum(math.prod(grid) for grid in grids), self.config.patch_values)
        if not grids or tuple(patches.shape) != expected:
            raise ValueError(
                f"patches have the shape {tuple(patches.shape)}; {len(grids)} images with these grids have {expected}"
            )

    def _position_embeddings(self, grids: Sequence[Grid]) -> torch.Tensor:
        """The learned square stretched bilinearly to each grid, corners on corners: [P, C]; computed in float32."""
        side, merge = self.config.grid_side, self.config.spatial_merge_size
        square = self.pos_embed.float().unflatten(0, (side, side))
        images = []
        for frames, rows, columns in grids:
            along_rows = torch.einsum("hr,rsc->hsc", _bilinear(rows, side, square.device), square)
            stretched = torch.einsum("ws,hsc->hwc", _bilinear(columns, side, square.device), along_rows)
            images.append(_merge_block_order(stretched, merge).repeat(frames, 1))
        return torch.cat(images).to(self.dtype)

    def _frames(self, grids: Sequence[Grid], device: torch.device, bucket: int) -> Frames:
        """Rotary angles of every patch, and where frames begin."""
        places, lengths = [], []
        for frames, rows, columns in grids:
            place = torch.cartesian_prod(torch.arange(rows, device=device), torch.arange(columns, device=device))
            image = _merge_block_order(place.unflatten(0, (rows, columns)), self.config.spatial_merge_size)
            places.append(image.repeat(frames, 1))
            lengths += [rows * columns] * frames
        place = torch.cat(places)  # [P, 2]: row, column
        angles = self.angles[bucket](place.flatten(), self.rope.frequencies().to(device))
        # [P x (row, column), cos | sin] -> [P, cos of row, cos of column | sin of row, sin of column]
        angles = angles.unflatten(0, (-1, 2)).unflatten(-1, (2, -1)).transpose(1, 2).flatten(1)
        start = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
        return Frames(angles, start, max(lengths))

    pos_embed: torch.Tensor


def _bilinear(size: int, side: int, device: torch.device) -> torch.Tensor:
    """[size, side] float32: what each of `size` points, evenly from the first to the last of `side`, takes of each."""
    point = torch.linspace(0, side - 1, size, device=device)
    return (1 - (point[:, None] - torch.arange(side, device=device)).abs()).clamp(min=0)


def _merge_block_order(image: torch.Tensor, merge: int) -> torch.Tensor:
    """[rows, columns, C] -> [rows x columns, C], with the patches of each merge x merge block together."""
    blocks = image.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))
    return blocks.transpose(1, 2).flatten(0, 3)
