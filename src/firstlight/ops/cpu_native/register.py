"""Registers the native kernels as providers of their ops."""

from __future__ import annotations

from firstlight.ops.add_rms_norm import add_rms_norm
from firstlight.ops.attention import attention
from firstlight.ops.attention_prologue import attention_prologue
from firstlight.ops.cpu_native import providers
from firstlight.ops.cpu_native.layout import LAYOUT_NAME
from firstlight.ops.embedding import embedding
from firstlight.ops.linear import linear
from firstlight.ops.rms_norm import rms_norm
from firstlight.ops.silu_mul import silu_mul

NAME = "cpu_native"
RANK = 10

LAYOUT = {"weight": LAYOUT_NAME}

linear.provide(NAME, providers.linear, when=providers.linear_when, rank=RANK, layout=LAYOUT)
embedding.provide(NAME, providers.embedding, when=providers.embedding_when, rank=RANK, layout=LAYOUT)
rms_norm.provide(NAME, providers.rms_norm, when=providers.norm_when, rank=RANK)
add_rms_norm.provide(NAME, providers.add_rms_norm, when=providers.norm_when, rank=RANK)
silu_mul.provide(NAME, providers.silu_mul, when=providers.silu_when, rank=RANK)
attention_prologue.provide(NAME, providers.attention_prologue, when=providers.prologue_when, rank=RANK)
attention.provide(NAME, providers.attention, when=providers.attention_when, rank=RANK)
