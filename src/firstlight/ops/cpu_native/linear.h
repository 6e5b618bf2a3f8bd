// y = x W^T for weights arranged in tiles, from one row of x (decoding) to thousands (prefill).
//
// A tile holds 16 rows of W (16 outputs) for all columns, pair of columns by pair of columns: one register holds 16 rows x
// 2 columns, and one `dot_pairs` with a pair of x in every lane advances 16 outputs. Nothing is summed across lanes, and
// a weight is read once, in the order in which it lies in memory.
//
//   bfloat16   [tile][column / 2][16][2]
//   4-bit      [tile][column / 8][16][2] uint16: nibble s of a word is the integer of column 8 i + 2 s + (0 or 1)
//   8-bit      [tile][column / 4][16][2] uint16: byte s of a word is the integer of column 4 i + 2 s + (0 or 1)
//   scale and minimum of quantised weights: [tile][column / group][16], float16 or float32
//
// Rows are padded with zeros to whole tiles, bfloat16 columns to pairs; quantised columns are whole groups.
// Quantised integers are exact in bfloat16, so up to `EXACT_ROWS` rows of x are multiplied by the integers themselves and
// the sum of each group is scaled in float32. With more rows, tiles are turned into bfloat16 once and then used for all.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "simd.h"

constexpr int64_t EXACT_ROWS = 16;

struct PackedWeight {
    const void* data;
    const void* scale;
    const void* minimum;  // null if values are scale * integer
    int64_t rows;         // outputs
    int64_t columns;      // inputs
    int bits;             // 16 (bfloat16), 8 or 4
    int zero;             // subtracted from 4-bit integers
    int64_t group;        // columns that share a scale
    bool wide_scale;      // scales are float32, not float16
};

struct Output {
    void* data;
    int64_t stride;  // elements between rows
    bool wide;       // float32, not bfloat16
    const bf16* bias;  // null, or one per column
};

static inline void store_outputs(const Output& output, int64_t row, int64_t column, int64_t columns, __m512 value) {
    const __mmask16 lanes = first_lanes(columns - column);
    if (output.bias) value = _mm512_add_ps(value, load_bf16(output.bias + column, lanes));
    const int64_t at = row * output.stride + column;
    if (output.wide) {
        _mm512_mask_storeu_ps(static_cast<float*>(output.data) + at, lanes, value);
    } else {
        store_bf16(static_cast<bf16*>(output.data) + at, lanes, value);
    }
}

// ROWS rows of x times TILES tiles of bfloat16 weights, all sums in registers. While it computes it may fetch memory that will
// be needed next into the cache: two lines from `ahead` for each pair of columns.
template <int TILES, int ROWS, bool FETCH>
static inline void multiply_block(const bf16* x, int64_t x_stride, const bf16* tiles, int64_t tile_size, int64_t pairs,
                                  const bf16* ahead, __m512 (&sum)[TILES][ROWS]) {
    for (int t = 0; t < TILES; t++)
        for (int r = 0; r < ROWS; r++) sum[t][r] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512i weight[TILES];
        for (int t = 0; t < TILES; t++) weight[t] = _mm512_loadu_si512(tiles + t * tile_size + pair * 32);
        if (FETCH) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead + pair * 64), _MM_HINT_T1);
            _mm_prefetch(reinterpret_cast<const char*>(ahead + pair * 64 + 32), _MM_HINT_T1);
        }
        for (int r = 0; r < ROWS; r++) {
            const __m512i input = broadcast_pair(x + r * x_stride + 2 * pair);
            for (int t = 0; t < TILES; t++) sum[t][r] = dot_pairs(sum[t][r], input, weight[t]);
        }
    }
}

template <int TILES, int ROWS, bool FETCH>
static void multiply_store(const bf16* x, int64_t x_stride, const bf16* tiles, int64_t pairs, int64_t row, int64_t column,
                           int64_t columns, const bf16* ahead, const Output& output) {
    __m512 sum[TILES][ROWS];
    multiply_block<TILES, ROWS, FETCH>(x + row * x_stride, x_stride, tiles, pairs * 32, pairs, ahead, sum);
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < TILES; t++) store_outputs(output, row + r, column + t * LANES, columns, sum[t][r]);
}

// All rows of x times TILES tiles: 6 rows x 4 tiles keep 24 of the 32 registers busy as sums. With several blocks of rows the
// first two fetch the four tiles that come next, so that memory works while the others compute.
template <int TILES>
static void multiply_tiles(const bf16* x, int64_t x_stride, int64_t rows, const bf16* tiles, int64_t pairs, int64_t column,
                           int64_t columns, const Output& output) {
    for (int64_t row = 0; row < rows;) {
        const int64_t count = std::min<int64_t>(6, rows - row);
        if (TILES == 4 && count == 6 && row <= 6 && rows > 6) {
            const bf16* ahead = tiles + (4 * 32 + row / 6 * 64) * pairs;
            multiply_store<TILES, 6, TILES == 4>(x, x_stride, tiles, pairs, row, column, columns, ahead, output);
            row += 6;
            continue;
        }
        switch (count) {
#define CASE(ROWS)                                                                                               \
    case ROWS:                                                                                                   \
        multiply_store<TILES, ROWS, false>(x, x_stride, tiles, pairs, row, column, columns, nullptr, output);     \
        row += ROWS;                                                                                             \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
        }
    }
}

static void multiply_any_tiles(int64_t count, const bf16* x, int64_t x_stride, int64_t rows, const bf16* tiles, int64_t pairs,
                               int64_t column, int64_t columns, const Output& output) {
    switch (count) {
        case 1: return multiply_tiles<1>(x, x_stride, rows, tiles, pairs, column, columns, output);
        case 2: return multiply_tiles<2>(x, x_stride, rows, tiles, pairs, column, columns, output);
        case 3: return multiply_tiles<3>(x, x_stride, rows, tiles, pairs, column, columns, output);
        default: return multiply_tiles<4>(x, x_stride, rows, tiles, pairs, column, columns, output);
    }
}

// Tables that turn an integer into bfloat16. Lookups take five bits of a word; the fifth is whatever lies beside the
// nibble, so both halves of a table are alike and no mask is needed.
struct IntegerTables {
    __m512i low;   // 4-bit integers less `zero`, or the low nibble of a byte
    __m512i high;  // 16 * the signed high nibble of a byte

    explicit IntegerTables(int zero) {
        alignas(64) bf16 first[32], second[32];
        for (int i = 0; i < 32; i++) {
            first[i] = from_integer((i & 15) - zero);
            second[i] = from_integer(((i & 15) < 8 ? (i & 15) : (i & 15) - 16) * 16);
        }
        low = _mm512_load_si512(first);
        high = _mm512_load_si512(second);
    }

    static bf16 from_integer(int value) {
        const float number = static_cast<float>(value);
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof(bits));
        return static_cast<bf16>(bits >> 16);
    }
};

static inline __m512 load_scale(const void* scales, int64_t index, bool wide) {
    if (wide) return _mm512_loadu_ps(static_cast<const float*>(scales) + index);
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(scales) + index)));
}

// ROWS rows of x times one tile of 4- or 8-bit weights. sums: [rows][groups] float32, each group's sum of x (for minima).
template <int BITS, int ROWS>
static void multiply_quantised(const bf16* x, int64_t x_stride, const float* sums, const PackedWeight& weight,
                               const IntegerTables& tables, int64_t row, int64_t tile, const Output& output) {
    constexpr int CHAINS = ROWS == 1 ? 4 : (ROWS <= 3 ? 2 : 1);  // independent sums, to hide the latency of an addition
    constexpr int COLUMNS = BITS == 4 ? 8 : 4;                   // in one register of words
    const int64_t groups = weight.columns / weight.group;
    const int64_t steps = weight.group / COLUMNS;
    const uint16_t* words = static_cast<const uint16_t*>(weight.data) + tile * (weight.columns / COLUMNS) * 32;
    const bf16* input = x + row * x_stride;
    __m512 total[ROWS];
    for (int r = 0; r < ROWS; r++) total[r] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++) {
        __m512 sum[ROWS][CHAINS];
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < CHAINS; c++) sum[r][c] = _mm512_setzero_ps();
        for (int64_t step = 0; step < steps; step++, words += 32, input += COLUMNS) {
            const __m512i packed = _mm512_loadu_si512(words);
            const __m512i nibble[4] = {packed, _mm512_srli_epi16(packed, 4), _mm512_srli_epi16(packed, 8),
                                       _mm512_srli_epi16(packed, 12)};
            for (int s = 0; s < 4; s++) {
                const __m512i table = BITS == 8 && s % 2 ? tables.high : tables.low;
                const __m512i integer = _mm512_permutexvar_epi16(nibble[s], table);
                for (int r = 0; r < ROWS; r++) {
                    const __m512i pair = broadcast_pair(input + r * x_stride + 2 * (BITS == 4 ? s : s / 2));
                    sum[r][s % CHAINS] = dot_pairs(sum[r][s % CHAINS], pair, integer);
                }
            }
        }
        const int64_t index = (tile * groups + group) * LANES;
        const __m512 scale = load_scale(weight.scale, index, weight.wide_scale);
        for (int r = 0; r < ROWS; r++) {
            for (int c = 1; c < CHAINS; c++) sum[r][0] = _mm512_add_ps(sum[r][0], sum[r][c]);
            total[r] = _mm512_fmadd_ps(sum[r][0], scale, total[r]);
        }
        if (weight.minimum) {
            const __m512 minimum = load_scale(weight.minimum, index, weight.wide_scale);
            for (int r = 0; r < ROWS; r++) {
                total[r] = _mm512_fmadd_ps(_mm512_set1_ps(sums[(row + r) * groups + group]), minimum, total[r]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++) store_outputs(output, row + r, tile * LANES, weight.rows, total[r]);
}

template <int BITS>
static void multiply_quantised_rows(const bf16* x, int64_t x_stride, int64_t rows, const float* sums,
                                    const PackedWeight& weight, const IntegerTables& tables, int64_t tile,
                                    const Output& output) {
    for (int64_t row = 0; row < rows;) {
        switch (std::min<int64_t>(8, rows - row)) {
#define CASE(ROWS)                                                                                        \
    case ROWS:                                                                                            \
        multiply_quantised<BITS, ROWS>(x, x_stride, sums, weight, tables, row, tile, output);              \
        row += ROWS;                                                                                      \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
        }
    }
}

// One quantised tile as a bfloat16 tile: integer * scale + minimum in float32, rounded once.
template <int BITS>
static void dequantise_tile(const PackedWeight& weight, const IntegerTables& tables, int64_t tile, bf16* target) {
    constexpr int COLUMNS = BITS == 4 ? 8 : 4;
    const int64_t groups = weight.columns / weight.group;
    const int64_t steps = weight.group / COLUMNS;
    const uint16_t* words = static_cast<const uint16_t*>(weight.data) + tile * (weight.columns / COLUMNS) * 32;
    for (int64_t group = 0; group < groups; group++) {
        const int64_t index = (tile * groups + group) * LANES;
        const __m512 scale = load_scale(weight.scale, index, weight.wide_scale);
        const __m512 minimum =
            weight.minimum ? load_scale(weight.minimum, index, weight.wide_scale) : _mm512_setzero_ps();
        for (int64_t step = 0; step < steps; step++, words += 32) {
            const __m512i packed = _mm512_loadu_si512(words);
            const __m512i nibble[4] = {packed, _mm512_srli_epi16(packed, 4), _mm512_srli_epi16(packed, 8),
                                       _mm512_srli_epi16(packed, 12)};
            for (int s = 0; s < 4; s += BITS == 4 ? 1 : 2, target += 32) {
                const __m512i low = _mm512_permutexvar_epi16(nibble[s], tables.low);
                __m512 even = even_as_float(low), odd = odd_as_float(low);
                if (BITS == 8) {
                    const __m512i high = _mm512_permutexvar_epi16(nibble[s + 1], tables.high);
                    even = _mm512_add_ps(even, even_as_float(high));
                    odd = _mm512_add_ps(odd, odd_as_float(high));
                }
                const __m512i first = _mm512_cvtepu16_epi32(to_bf16(_mm512_fmadd_ps(even, scale, minimum)));
                const __m512i second = _mm512_cvtepu16_epi32(to_bf16(_mm512_fmadd_ps(odd, scale, minimum)));
                _mm512_storeu_si512(target, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
            }
        }
    }
}

template <int BITS>
static void quantised_tiles(const bf16* x, int64_t x_stride, int64_t rows, const float* sums, const PackedWeight& weight,
                            int64_t first, int64_t last, const Output& output) {
    const IntegerTables tables(BITS == 4 ? weight.zero : 0);
    if (rows <= EXACT_ROWS) {
        for (int64_t tile = first; tile < last; tile++) {
            multiply_quantised_rows<BITS>(x, x_stride, rows, sums, weight, tables, tile, output);
        }
        return;
    }
    thread_local std::vector<bf16> unpacked;
    const int64_t tile_size = weight.columns * LANES;
    unpacked.resize(4 * tile_size);
    for (int64_t tile = first; tile < last; tile += 4) {
        const int64_t count = std::min<int64_t>(4, last - tile);
        for (int64_t i = 0; i < count; i++) {
            dequantise_tile<BITS>(weight, tables, tile + i, unpacked.data() + i * tile_size);
        }
        multiply_any_tiles(count, x, x_stride, rows, unpacked.data(), weight.columns / 2, tile * LANES, weight.rows, output);
    }
}

// Each group's sum of x, in float32: [rows][groups].
static void sum_groups(const bf16* x, int64_t x_stride, int64_t rows, int64_t columns, int64_t group, float* sums) {
    const __m512i ones = _mm512_set1_epi16(0x3F80);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t column = 0; column < columns; column += group) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t at = column; at < column + group; at += 32) {
                const __mmask32 words = first_words(column + group - at);
                sum = dot_pairs(sum, _mm512_maskz_loadu_epi16(words, x + row * x_stride + at), ones);
            }
            *sums++ = _mm512_reduce_add_ps(sum);
        }
    }
}

// output[rows, weight.rows] = x[rows, weight.columns] W^T (+ bias). x_stride: elements between rows of x.
static void linear(const bf16* x, int64_t x_stride, int64_t rows, const PackedWeight& weight, const Output& output) {
    if (rows == 0 || weight.rows == 0) return;
    const int64_t tiles = (weight.rows + LANES - 1) / LANES;
    const int64_t pairs = (weight.columns + 1) / 2;
    thread_local std::vector<bf16> padded;
    if (weight.columns % 2) {  // the last pair would reach past the row
        padded.assign(rows * 2 * pairs, 0);
        for (int64_t row = 0; row < rows; row++) {
            std::memcpy(padded.data() + row * 2 * pairs, x + row * x_stride, weight.columns * sizeof(bf16));
        }
        x = padded.data();
        x_stride = 2 * pairs;
    }
    thread_local std::vector<float> group_sums;
    if (weight.minimum && rows <= EXACT_ROWS) {
        group_sums.resize(rows * (weight.columns / weight.group));
        sum_groups(x, x_stride, rows, weight.columns, weight.group, group_sums.data());
    }
    const float* sums = group_sums.data();
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t first = tiles * thread / threads, last = tiles * (thread + 1) / threads;
        if (weight.bits == 4) {
            quantised_tiles<4>(x, x_stride, rows, sums, weight, first, last, output);
        } else if (weight.bits == 8) {
            quantised_tiles<8>(x, x_stride, rows, sums, weight, first, last, output);
        } else {
            const bf16* data = static_cast<const bf16*>(weight.data);
            for (int64_t tile = first; tile < last; tile += 4) {
                multiply_any_tiles(std::min<int64_t>(4, last - tile), x, x_stride, rows, data + tile * pairs * 32, pairs,
                                   tile * LANES, weight.rows, output);
            }
        }
    }
}
