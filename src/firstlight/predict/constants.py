"""Every number of the time model that is neither a datasheet's nor a calibration table's, each with where it comes from.

None is specific to a model or to a published benchmark.
"""

from __future__ import annotations

MICROSECOND = 1e-6

# --- starting kernels --------------------------------------------------------------------------------------------------
SMALL_KERNEL = 2.0 * MICROSECOND
"""What an elementwise kernel takes in a CUDA graph before bytes count: 1 us from the end of the kernel before, one trip to memory
and back, and the tail of the last block. An empty kernel takes 1.3 us on an H200, conv updates of a few rows 1.8 to 2 us,
norms up to 2.5."""
HEAVY_START = {
    "product": 3.5 * MICROSECOND,
    "experts": 7.0 * MICROSECOND,
    "attention": 5.0 * MICROSECOND,
    "state": 3.5 * MICROSECOND,
    "chunks": 9.0 * MICROSECOND,
    "all_reduce": 2.0 * MICROSECOND,
}
"""What a heavy kernel takes in a graph before its roofline counts: starting after the one before, filling its pipeline, the tail of its last wave, a second kernel that
joins splits (attention), multiplies again (experts) or makes what the chain of chunks reads (chunks). Chosen so that held-out rows of the calibration tables are predicted
best; an H200's products of few rows take 6 to 10 us "whatever the size", its recurrent decode of one request 4.7 us."""
EAGER_LAUNCH = 6.0 * MICROSECOND
"""Of the host, for each kernel launched from Python: 4 us in the driver and framework for a tuned one, 8 us for a plain op."""
STEP_START = 150.0 * MICROSECOND
"""A step's own: filling its inputs, the sampler's small kernels (some thirty, of 2 us) and the graph's
launch, with the scheduler's work hidden behind the previous step."""

# --- shares of the peak, where no table decides ------------------------------------------------------------------------
ELEMENTWISE_BANDWIDTH = 0.80
"""A plain copy reaches 0.88 of an H200's 4.8 TB/s; kernels that reduce along rows somewhat less."""
STREAM_BANDWIDTH = 0.85
"""Kernels that stream weights, KV or state at large sizes: 0.82 to 0.88 of the datasheet's bandwidth on H200 and H800."""
LARGE_PRODUCT = 1e11
"""Multiplications from which on a product shows what a GPU sustains: 8,192 tokens through 4,096 x 3,072 and more, some 0.2 ms."""
MATRIX_PEAK = 0.70
"""Large matrix products: 0.69 to 0.81 of the peak in bfloat16 on an H200 with random data, 0.63 to 0.73 in FP8 on an H800."""
ATTENTION_PEAK = 0.62
"""Prefill attention at contexts of 4 to 16 thousand: 0.61 to 0.77 of the bfloat16 peak on an H200."""
CHUNK_PEAK = 0.3
"""Chunked delta rules in prefill: share of one processor's peak that a chain of chunks reaches, with the operations of the
recurrence: 48.6 us for 1,024 tokens on an H200 is 0.32, 38.5 us on a B200 0.20."""

SUSTAINED_CLOCK = 0.88
"""Of the matrix rate that a kernel timed alone reaches, in a step that keeps the GPU hot, where the GPU's clock follows its
power: an FP8 product of 8,192 x 12,288 x 2,048 took 363 us in a short run on an H200 and 404 to 422 in longer ones, and the
large FP8 products of an H100 reach 0.65 of the peak where they are repeated in a graph, those of an H800 0.74 alone."""
POWER_LIMITED = 0.85
"""Share of the peak that large products reach, timed alone, below which a GPU's clock follows its power: 0.65 to 0.81 on GPUs that
have all their matrix units, 0.94 on an H20, which has their power and a seventh of their rate."""

# --- tiles of the matrix units -----------------------------------------------------------------------------------------
MATRIX_TILE_ROWS = 64
"""Rows that a matrix product is padded to: the height of Hopper's wgmma, and of the tiles that grouped products give each
expert. AMD's MFMA takes 16 or 32; their tuned kernels use tiles of 32 and more."""

# --- links -------------------------------------------------------------------------------------------------------------
LINK_SHARE = 0.62
"""Of a link's nominal bandwidth that large collectives reach: 32 MiB all-reduces over NVLink run at 0.55 (2 GPUs) and 0.65
(4 GPUs) of 450 GB/s; all-to-all in a server at 0.63."""
NETWORK_SHARE = 0.85
"""The same for 400 Gbit/s ports: all-to-all over 16 to 128 GPUs moves 39 to 44 GB/s of 50."""
EXCHANGE_START = 10.0 * MICROSECOND
"""Of a dispatch or a combine inside a server that carries one token: 10.2 and 10.4 us on eight H200 (DeepEP, low latency)."""
ALL_TO_ALL_START = 20.0 * MICROSECOND
"""Of a dispatch or a combine between servers that carries next to nothing."""
COMMUNICATION_PROCESSORS = 20
"""SMs that a bandwidth-bound all-to-all of a prefill takes from computing (DeepSeek-V3's report; DeepEP's default)."""

EXCHANGE_TRIPS = 3
"""Times that an exchanged token goes through memory on the way: read by its sender, written where it arrives, and read from
there into place (or into the sum)."""

# --- what a kernel of an expert layer does beside its products ---------------------------------------------------------
EXPERT_LAUNCHES = 4
"""Sorting tokens by expert (2), activation (1), weighted sum (1); the two products are counted with the op."""
EXCHANGED_EXPERT_LAUNCHES = 1
"""Where tokens come from other ranks they arrive sorted, and are summed as they return: the activation is left."""

# --- trust -------------------------------------------------------------------------------------------------------------
OTHER_FORMAT, OTHER_GPU, OTHER_ARCHITECTURE = 1.0, 1.0, 4.0
"""How far (in octaves squared) rows of another format, GPU or architecture stand from the call, on top of their sizes; and as
far again as the GPUs' balances of operations to bytes differ: a row counts less the less its GPU resembles the one in
question, and never not at all."""
TRANSFER_SPREAD = 0.10
"""Standard deviation of ln(time) added where efficiencies come from another GPU or another format: FP8 products of the same
size reach 0.92 of an H20's peak and 0.66 to 0.73 of an H800's, so a transfer between those would be off by 0.27; between GPUs
of like balance by about 0.1."""
DATASHEET_SPREAD = 0.25
"""The same where only the constants above stand behind a figure."""
STEP_SPREAD = 0.03
"""Between steps of one shape on one machine, and what no kernel accounts for."""
QUANTILE_80 = 1.2816
"""Standard deviations either side that hold 80 % of a normal distribution."""
