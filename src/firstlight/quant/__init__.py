"""Formats of stored numbers: pack, unpack, bytes; quantisation schemes as checkpoints declare them."""

from firstlight.quant.activations import (
    FLOAT8_BY_COLUMN,
    FLOAT8_BY_TOKEN,
    Emission,
    emitted,
    empty_result,
    result_bytes,
)
from firstlight.quant.fnuz import E4M3FNUZ
from firstlight.quant.format import PLAIN, WHOLE_ROW, Format, Packed, Weight, dtype_name, format_of, nbytes, plain
from firstlight.quant.layouts import LAYOUTS, Layout, register_layout, repack, unpack
from firstlight.quant.scheme import SCALE_SUFFIX, BlockFp8, GgufBlocks, Scheme, scheme_of

__all__ = [
    "E4M3FNUZ",
    "FLOAT8_BY_COLUMN",
    "FLOAT8_BY_TOKEN",
    "LAYOUTS",
    "PLAIN",
    "SCALE_SUFFIX",
    "WHOLE_ROW",
    "BlockFp8",
    "Emission",
    "Format",
    "GgufBlocks",
    "Layout",
    "Packed",
    "Scheme",
    "Weight",
    "dtype_name",
    "emitted",
    "empty_result",
    "format_of",
    "nbytes",
    "plain",
    "register_layout",
    "repack",
    "result_bytes",
    "scheme_of",
    "unpack",
]
