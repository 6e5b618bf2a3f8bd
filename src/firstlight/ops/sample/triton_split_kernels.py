"""Kernels of `triton_split`.

Tokens rank by value, and equals by id, the lowest first. What top_k and top_p keep is a start of that ranking, so it is
named by two numbers: the value of the last token kept, and the largest id kept among its equals. Both are searched for bit by
bit, by counting tokens or by adding up probabilities in float64: nothing is sorted.

    largest_of_part    a part's largest, and for rows that use neither top_k nor top_p the largest with its noise
    count_buckets      how many tokens are within 1/32, 2/32, ... of the row's largest
    take_candidates    the most likely tokens, as many whole buckets as `CANDIDATES` holds
    draw               searches among the candidates, or, where these can't hold all that is kept, in the whole row
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.ops.sample.triton_split import CANDIDATES, MOST_PARTS
from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_inputs
from firstlight.ops.triton_support import cdiv, power_of_two

BLOCK = 2048
BUCKETS = tl.constexpr(1024)
RESOLUTION = tl.constexpr(32)
"""Buckets for a difference of 1 in logits."""


@triton.jit
def mix64(x):
    """`noise.mix64` on uint64."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def mix32(x):
    """`noise.mix32` on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel(seed, position, token):
    """`noise.gumbel` for one row: token is an int32 tensor."""
    key = mix64(mix64(seed.to(tl.uint64)) + position.to(tl.uint64))
    h = mix32(token.to(tl.uint32) + key.to(tl.uint32))
    h = mix32(h ^ (key >> 32).to(tl.uint32))
    u = ((h & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    u = tl.minimum(u, 1 - 2.0**-24)
    # log(1 - u) loses small u to rounding; dividing by the u that 1 - u stands for gives it back.
    rest = 1.0 - u
    exponential = tl.where(rest == 1.0, u, tl.log(rest) * (u / (rest - 1.0)))
    return -tl.log(exponential)


@triton.jit
def heated(logits_ptr, o_v, m_v, temperature):
    """Logits over the temperature, divided exactly as the reference does: what is equal there has to be equal here."""
    b_z = tl.load(logits_ptr + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
    return tl.div_rn(b_z, tl.zeros_like(b_z) + temperature)


@triton.jit
def ranked(b_z):
    """uint32 keys in the order of float32 values; both zeros are one."""
    b_bits = tl.where(b_z == 0.0, 0.0, b_z).to(tl.uint32, bitcast=True)
    return b_bits ^ tl.where(b_bits >> 31 == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def bucket_of(b_z, most, m_v):
    """Distance from the row's largest in 1/RESOLUTION, the last bucket for all beyond."""
    b_bucket = tl.minimum((most - b_z) * RESOLUTION, BUCKETS - 1.0)
    return tl.where(m_v & (b_z == b_z), b_bucket, BUCKETS - 1.0).to(tl.int32)


@triton.jit
def uses_filters(temperature_ptr, top_k_ptr, top_p_ptr, i_n):
    return (tl.load(temperature_ptr + i_n) > 0) & ((tl.load(top_k_ptr + i_n) > 0) | (tl.load(top_p_ptr + i_n) < 1))


@kernel
def largest_of_part(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, seed_ptr, position_ptr, value_ptr, token_ptr, counts_ptr,
    taken_ptr, V, logits_stride_n, part_size,
    BLOCK_V: tl.constexpr, GREEDY: tl.constexpr, FILTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """value, token [N, parts]: the largest of each part of each row, the lowest token of equals.

    With FILTERED, rows that use top_k or top_p get it without noise, and counts [N, BUCKETS] and taken [N] become 0.
    """
    wait_for_inputs(PDL)
    i_n, i_part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    noisy = not GREEDY
    if not GREEDY:
        temperature = tl.load(temperature_ptr + i_n).to(tl.float32)
        seed, position = tl.load(seed_ptr + i_n), tl.load(position_ptr + i_n)
        noisy = temperature > 0
        temperature = tl.where(noisy, temperature, 1.0)
    if FILTERED:
        noisy = noisy & (uses_filters(temperature_ptr, top_k_ptr, top_p_ptr, i_n) == 0)
        if i_part == 0:
            o_bucket = tl.arange(0, BUCKETS)
            tl.store(counts_ptr + i_n * BUCKETS + o_bucket, o_bucket * 0)
            tl.store(taken_ptr + i_n, 0)
    best = float("-inf")
    token = V
    for i_v in range(i_part * part_size, min(V, (i_part + 1) * part_size), BLOCK_V):
        o_v = i_v + tl.arange(0, BLOCK_V)
        m_v = o_v < V
        if GREEDY:
            b_z = tl.load(logits_ptr + i_n * logits_stride_n + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
        else:
            b_z = heated(logits_ptr + i_n * logits_stride_n, o_v, m_v, temperature)
            if noisy:
                b_z += gumbel(seed, position, o_v)
        largest = tl.max(b_z, axis=0)
        first = tl.min(tl.where((b_z == largest) & m_v, o_v, V), axis=0)
        better = (largest > best) | (token == V)
        best, token = tl.where(better, largest, best), tl.where(better, first, token)
    tl.store(value_ptr + i_n * parts + i_part, best)
    tl.store(token_ptr + i_n * parts + i_part, token)


@triton.jit
def largest_of_row(value_ptr, i_n, parts, BLOCK_PARTS: tl.constexpr):
    o_part = tl.arange(0, BLOCK_PARTS)
    return tl.max(tl.load(value_ptr + i_n * parts + o_part, mask=o_part < parts, other=float("-inf")), axis=0)


@kernel
def count_buckets(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, value_ptr, counts_ptr, sum_ptr, V, logits_stride_n, part_size,
    BLOCK_V: tl.constexpr, BLOCK_PARTS: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts [N, BUCKETS] += tokens by bucket; sum [N, parts] float64: of exp(z - largest), where top_p needs the row's."""
    wait_for_inputs(PDL)
    i_n, i_part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if uses_filters(temperature_ptr, top_k_ptr, top_p_ptr, i_n):
        temperature = tl.load(temperature_ptr + i_n).to(tl.float32)
        top_k = tl.load(top_k_ptr + i_n)
        wanted = (tl.load(top_p_ptr + i_n) < 1) & ((top_k <= 0) | (top_k > CAPACITY))
        most = largest_of_row(value_ptr, i_n, parts, BLOCK_PARTS)
        b_counts = tl.zeros([BUCKETS], dtype=tl.int32)
        b_sum = tl.zeros([BLOCK_V], dtype=tl.float64)
        for i_v in range(i_part * part_size, min(V, (i_part + 1) * part_size), BLOCK_V):
            o_v = i_v + tl.arange(0, BLOCK_V)
            m_v = o_v < V
            b_z = heated(logits_ptr + i_n * logits_stride_n, o_v, m_v, temperature)
            b_counts += tl.histogram(bucket_of(b_z, most, m_v), BUCKETS)
            if wanted:
                b_sum += tl.exp(b_z.to(tl.float64) - most)
        p_counts = counts_ptr + i_n * BUCKETS + tl.arange(0, BUCKETS)
        tl.atomic_add(p_counts, b_counts, mask=b_counts > 0, sem="relaxed")
        if wanted:
            tl.store(sum_ptr + i_n * parts + i_part, tl.sum(b_sum, axis=0))


@kernel
def take_candidates(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, value_ptr, counts_ptr, taken_ptr, z_ptr, id_ptr, mass_ptr,
    V, logits_stride_n, part_size,
    BLOCK_V: tl.constexpr, BLOCK_PARTS: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tokens of the first buckets, as many whole ones as fit, in any order; taken [N]: how many.

    z, id, mass [N, CAPACITY]: their heated logits, their numbers, exp(z - largest) in float64.
    """
    wait_for_inputs(PDL)
    i_n, i_part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if uses_filters(temperature_ptr, top_k_ptr, top_p_ptr, i_n):
        temperature = tl.load(temperature_ptr + i_n).to(tl.float32)
        most = largest_of_row(value_ptr, i_n, parts, BLOCK_PARTS)
        b_upto = tl.cumsum(tl.load(counts_ptr + i_n * BUCKETS + tl.arange(0, BUCKETS)), axis=0)
        buckets = tl.sum((b_upto <= CAPACITY).to(tl.int32), axis=0)
        for i_v in range(i_part * part_size, min(V, (i_part + 1) * part_size), BLOCK_V):
            o_v = i_v + tl.arange(0, BLOCK_V)
            m_v = o_v < V
            b_z = heated(logits_ptr + i_n * logits_stride_n, o_v, m_v, temperature)
            m_taken = m_v & (bucket_of(b_z, most, m_v) < buckets)
            b_taken = m_taken.to(tl.int32)
            count = tl.sum(b_taken, axis=0)
            if count > 0:
                first = tl.atomic_add(taken_ptr + i_n, count, sem="relaxed")
                o_row = first + tl.cumsum(b_taken, axis=0) - 1
                m_taken = m_taken & (o_row < CAPACITY)
                tl.store(z_ptr + i_n * CAPACITY + o_row, b_z, mask=m_taken)
                tl.store(id_ptr + i_n * CAPACITY + o_row, o_v, mask=m_taken)
                tl.store(mass_ptr + i_n * CAPACITY + o_row, tl.exp(b_z.to(tl.float64) - most), mask=m_taken)


@triton.jit
def tile_of(z_ptr, id_ptr, i, size, temperature, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr):
    """(z, id, which are tokens) of BLOCK_C candidates, or with WHOLE of as many logits."""
    o_c = i + tl.arange(0, BLOCK_C)
    m_c = o_c < size
    if WHOLE:
        b_z, b_id = heated(z_ptr, o_c, m_c, temperature), o_c
    else:
        b_z = tl.load(z_ptr + o_c, mask=m_c, other=float("-inf"))
        b_id = tl.load(id_ptr + o_c, mask=m_c, other=0)
    return b_z, b_id, m_c


@triton.jit
def kept_of(b_z, b_id, m_c, least, last):
    """Tokens that rank no lower than (value key `least`, id `last`)."""
    b_key = ranked(b_z)
    return m_c & ((b_key > least) | ((b_key == least) & (b_id <= last)))


@triton.jit
def count_of(
    z_ptr, id_ptr, size, temperature, least, last, exactly, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """How many tokens have a key of at least `least`; exactly: have that key, and an id up to `last`."""
    b_count = tl.zeros([BLOCK_C], dtype=tl.int32)
    for i in range(0, size, BLOCK_C):
        b_z, b_id, m_c = tile_of(z_ptr, id_ptr, i, size, temperature, BLOCK_C, WHOLE)
        b_key = ranked(b_z)
        m_c = m_c & tl.where(exactly, (b_key == least) & (b_id <= last), b_key >= least)
        b_count += m_c.to(tl.int32)
    return tl.sum(b_count, axis=0)


@triton.jit
def mass_above(
    z_ptr, id_ptr, mass_ptr, size, temperature, most, least, last, key, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Sum of exp(z - most) in float64 over tokens of a key above `key` that rank no lower than (least, last)."""
    b_mass = tl.zeros([BLOCK_C], dtype=tl.float64)
    for i in range(0, size, BLOCK_C):
        b_z, b_id, m_c = tile_of(z_ptr, id_ptr, i, size, temperature, BLOCK_C, WHOLE)
        m_c = kept_of(b_z, b_id, m_c, least, last) & (ranked(b_z) > key)
        if WHOLE:
            if tl.max(m_c.to(tl.int32), axis=0) > 0:
                b_mass += tl.where(m_c, tl.exp(b_z.to(tl.float64) - most), 0.0)
        else:
            b_mass += tl.load(mass_ptr + i + tl.arange(0, BLOCK_C), mask=m_c, other=0.0)
    return tl.sum(b_mass, axis=0)


@triton.jit
def last_id(
    z_ptr, id_ptr, size, temperature, key, wanted, V, ID_BITS: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """The id of the `wanted`-th token, by id, among those with this key; V if there are no more than `wanted`."""
    last = V
    if count_of(z_ptr, id_ptr, size, temperature, key, V, True, BLOCK_C, WHOLE) > wanted:
        last = V * 0
        bit = last + (1 << (ID_BITS - 1))
        for _ in range(ID_BITS):
            # The largest id below which fewer than `wanted` are: the wanted one itself.
            tried = last | bit
            bit = bit >> 1
            if count_of(z_ptr, id_ptr, size, temperature, key, tried - 1, True, BLOCK_C, WHOLE) < wanted:
                last = tried
    return last


@triton.jit
def drawn(
    z_ptr, id_ptr, mass_ptr, size, temperature, most, total, needs_total, top_k, top_p, seed, position, V,
    ID_BITS: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(token, whether everything that is kept is among these `size` tokens). total: the row's mass, if needs_total."""
    zero = (top_k * 0).to(tl.uint32)
    least = zero
    last = V
    complete = (top_k > 0) | WHOLE
    if top_k > 0:
        if top_k < size:
            bit = zero | 0x80000000
            for _ in range(32):
                tried = least | bit
                bit = bit >> 1
                if count_of(z_ptr, id_ptr, size, temperature, tried, V, False, BLOCK_C, WHOLE) >= top_k:
                    least = tried
            equal = count_of(z_ptr, id_ptr, size, temperature, least, V, True, BLOCK_C, WHOLE)
            above = count_of(z_ptr, id_ptr, size, temperature, least, V, False, BLOCK_C, WHOLE) - equal
            last = last_id(z_ptr, id_ptr, size, temperature, least, top_k - above, V, ID_BITS, BLOCK_C, WHOLE)
        elif not WHOLE:
            complete = (top_k == size) | (size == V)
    if (complete | (top_k <= 0)) & (top_p < 1):
        whole = total
        held = total
        if (needs_total == 0) | (not WHOLE):
            held = mass_above(z_ptr, id_ptr, mass_ptr, size, temperature, most, least, last, zero, BLOCK_C, WHOLE)
        if needs_total == 0:
            whole = held
        # The likeliest is kept even if top_p is 0.
        goal = tl.maximum(whole * top_p, 1e-300)
        complete = complete | (held >= goal)
        if complete:
            # The least key above which less than the goal lies: a token's, or 0 if all are kept.
            key = zero
            if mass_above(z_ptr, id_ptr, mass_ptr, size, temperature, most, least, last, key, BLOCK_C, WHOLE) >= goal:
                bit = zero | 0x80000000
                for _ in range(32):
                    tried = key | bit
                    bit = bit >> 1
                    if (
                        mass_above(
                            z_ptr, id_ptr, mass_ptr, size, temperature, most, least, last, tried - 1, BLOCK_C, WHOLE
                        )
                        >= goal
                    ):
                        key = tried
                above = mass_above(z_ptr, id_ptr, mass_ptr, size, temperature, most, least, last, key, BLOCK_C, WHOLE)
                equal = mass_above(
                    z_ptr, id_ptr, mass_ptr, size, temperature, most, least, last, key - 1, BLOCK_C, WHOLE
                )
                equals = count_of(z_ptr, id_ptr, size, temperature, key, last, key == least, BLOCK_C, WHOLE)
                if key != least:
                    equals -= count_of(z_ptr, id_ptr, size, temperature, key + 1, last, False, BLOCK_C, WHOLE)
                each = (equal - above) / equals
                wanted = tl.maximum(tl.ceil((goal - above) / each), 1.0).to(tl.int32)
                if wanted < equals:
                    last = last_id(z_ptr, id_ptr, size, temperature, key, wanted, V, ID_BITS, BLOCK_C, WHOLE)
                elif key != least:
                    last = V
                least = key
    best = float("-inf")
    token = V
    if complete:
        for i in range(0, size, BLOCK_C):
            b_z, b_id, m_c = tile_of(z_ptr, id_ptr, i, size, temperature, BLOCK_C, WHOLE)
            m_c = kept_of(b_z, b_id, m_c, least, last)
            b_z = tl.where(m_c, b_z + gumbel(seed, position, b_id), float("-inf"))
            largest = tl.max(b_z, axis=0)
            first = tl.min(tl.where((b_z == largest) & m_c, b_id, V), axis=0)
            better = (largest > best) | ((largest == best) & (first < token))
            best, token = tl.where(better, largest, best), tl.where(better, first, token)
    return token, complete


@kernel
def draw(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, seed_ptr, position_ptr, value_ptr, token_ptr, sum_ptr,
    taken_ptr, z_ptr, id_ptr, mass_ptr, out_ptr, V, logits_stride_n, parts,
    ID_BITS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK_PARTS: tl.constexpr, FILTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N]: the token of the largest part, the lowest of equals; with FILTERED of rows without top_k and top_p only."""
    wait_for_inputs(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    o_part = tl.arange(0, BLOCK_PARTS)
    m_part = o_part < parts
    b_value = tl.load(value_ptr + i_n * parts + o_part, mask=m_part, other=float("-inf"))
    most = tl.max(b_value, axis=0)
    filtered = False
    if FILTERED:
        filtered = uses_filters(temperature_ptr, top_k_ptr, top_p_ptr, i_n)
    if filtered:
        temperature = tl.load(temperature_ptr + i_n).to(tl.float32)
        seed, position = tl.load(seed_ptr + i_n), tl.load(position_ptr + i_n)
        top_k = tl.minimum(tl.load(top_k_ptr + i_n).to(tl.int64), V).to(tl.int32)
        top_p = tl.load(top_p_ptr + i_n).to(tl.float64)
        needs_total = (top_k <= 0) | (top_k > CAPACITY)
        total = top_p * 0
        if needs_total & (top_p < 1):
            total = tl.sum(tl.load(sum_ptr + i_n * parts + o_part, mask=m_part, other=0.0), axis=0)
        # With top_k the mass that counts is that of the k; among candidates only where all k are.
        needs_total = top_k <= 0
        size = tl.load(taken_ptr + i_n)
        token, complete = drawn(
            z_ptr + i_n * CAPACITY, id_ptr + i_n * CAPACITY, mass_ptr + i_n * CAPACITY, size, temperature, most, total,
            needs_total, top_k, top_p, seed, position, V, ID_BITS, CAPACITY, False,
        )  # fmt: skip
        if complete == 0:
            token, complete = drawn(
                logits_ptr + i_n * logits_stride_n, id_ptr, mass_ptr, V, temperature, most, total, needs_total, top_k, top_p,
                seed, position, V, ID_BITS, CAPACITY, True,
            )  # fmt: skip
    else:
        b_token = tl.load(token_ptr + i_n * parts + o_part, mask=m_part, other=V)
        token = tl.min(tl.where(b_value == most, b_token, V), axis=0)
    tl.store(out_ptr + i_n, tl.minimum(token, V - 1).to(tl.int64))  # a row of NaN has no largest: its last token


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor, greedy: bool,
    filtered: bool,
) -> Tensor:  # fmt: skip
    """logits [N, V], columns adjacent -> [N] int64."""
    rows, vocabulary = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return out
    # About a thousand programs in all: enough for every multiprocessor, few enough to look through.
    parts = min(max(1, 1024 // rows), MOST_PARTS, cdiv(vocabulary, BLOCK))
    part_size = cdiv(cdiv(vocabulary, parts), BLOCK) * BLOCK
    parts = cdiv(vocabulary, part_size)
    filtered = filtered and not greedy
    value = torch.empty((rows, parts), dtype=torch.float32, device=device)
    token = torch.empty((rows, parts), dtype=torch.int32, device=device)
    held = rows if filtered else 0
    counts = torch.empty((held, BUCKETS.value), dtype=torch.int32, device=device)
    taken = torch.empty(held, dtype=torch.int32, device=device)
    total = torch.empty((held, parts), dtype=torch.float64, device=device)
    z = torch.empty((held, CANDIDATES), dtype=torch.float32, device=device)
    number = torch.empty((held, CANDIDATES), dtype=torch.int32, device=device)
    mass = torch.empty((held, CANDIDATES), dtype=torch.float64, device=device)
    settings, stride, launch = (temperature, top_k, top_p), logits.stride(0), dependent_launch(logits)
    block_parts = power_of_two(parts)
    largest_of_part[(rows, parts)](
        logits, *settings, seed, position, value, token, counts, taken, vocabulary, stride, part_size,
        BLOCK_V=BLOCK, GREEDY=greedy, FILTERED=filtered, **launch,
    )  # fmt: skip
    if filtered:
        common = {"BLOCK_V": BLOCK, "BLOCK_PARTS": block_parts, "CAPACITY": CANDIDATES}
        count_buckets[(rows, parts)](
            logits, *settings, value, counts, total, vocabulary, stride, part_size, **common, **launch
        )
        take_candidates[(rows, parts)](
            logits, *settings, value, counts, taken, z, number, mass, vocabulary, stride, part_size, **common, **launch
        )
    draw[(rows,)](
        logits, *settings, seed, position, value, token, total, taken, z, number, mass, out, vocabulary, stride, parts,
        ID_BITS=vocabulary.bit_length(), CAPACITY=CANDIDATES, BLOCK_PARTS=block_parts, FILTERED=filtered,
        num_warps=16 if filtered else 4, **launch,
    )  # fmt: skip
    return out
