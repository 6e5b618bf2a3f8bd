// Row-wise kernels: RMSNorm with and without a residual, the gated activation, what stands between the qkv projection and
// attention, and embedding lookup from tiled weights. Threads share the rows of large inputs; small ones stay on the caller's thread,
// where they are done before another thread would have woken up.
#pragma once

#include <cmath>

#include "linear.h"

constexpr int64_t ELEMENTS_PER_THREAD = 6144;  // fewer aren't worth a second thread

// Calls `work(row)` for each of `rows` rows of `size` elements.
template <class Work>
static inline void for_rows(int64_t rows, int64_t size, const Work& work) {
    if (rows * size < 2 * ELEMENTS_PER_THREAD) {
        for (int64_t row = 0; row < rows; row++) work(row);
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) work(row);
}

// A [rows, heads, size] view: element (r, h, i) is at data + r * row_stride + h * head_stride + i.
struct Heads {
    bf16* data;
    int64_t row_stride;
    int64_t head_stride;
    bf16* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};

// 1 / sqrt(mean(x^2) + eps)
static inline float inverse_rms(const bf16* x, int64_t size, float eps) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 32) {
        const __m512i pairs = _mm512_maskz_loadu_epi16(first_words(size - i), x + i);
        even = _mm512_fmadd_ps(even_as_float(pairs), even_as_float(pairs), even);
        odd = _mm512_fmadd_ps(odd_as_float(pairs), odd_as_float(pairs), odd);
    }
    return 1.0f / std::sqrt(_mm512_reduce_add_ps(_mm512_add_ps(even, odd)) / static_cast<float>(size) + eps);
}

// Llama rounds x / rms to bfloat16 before it multiplies by the weight; with zero-centred weights all is float32 until the
// end, and the factor is 1 + weight.
static inline void normalise_row(const bf16* x, const bf16* weight, bf16* output, int64_t size, float eps,
                                 bool zero_centred) {
    const __m512 factor = _mm512_set1_ps(inverse_rms(x, size, eps));
    for (int64_t i = 0; i < size; i += LANES) {
        const __mmask16 lanes = first_lanes(size - i);
        const __m512 value = _mm512_mul_ps(load_bf16(x + i, lanes), factor);
        const __m512 gain = load_bf16(weight + i, lanes);
        const __m512 result = zero_centred ? _mm512_mul_ps(value, _mm512_add_ps(gain, _mm512_set1_ps(1.0f)))
                                           : _mm512_mul_ps(round_to_bf16(value), gain);
        store_bf16(output + i, lanes, result);
    }
}

static void rms_norm(const Heads& x, const Heads& output, const bf16* weight, int64_t rows, int64_t heads, int64_t size,
                     float eps, bool zero_centred) {
    for_rows(rows, heads * size, [&](int64_t row) {
        for (int64_t head = 0; head < heads; head++) {
            normalise_row(x.at(row, head), weight, output.at(row, head), size, eps, zero_centred);
        }
    });
}

// sum = x + residual (rounded to bfloat16), output = normalised sum; both contiguous.
static void add_rms_norm(const bf16* x, int64_t x_stride, const bf16* residual, int64_t residual_stride, bf16* sum,
                         bf16* output, const bf16* weight, int64_t rows, int64_t size, float eps, bool zero_centred) {
    for_rows(rows, size, [&](int64_t row) {
        for (int64_t i = 0; i < size; i += LANES) {
            const __mmask16 lanes = first_lanes(size - i);
            const __m512 total = _mm512_add_ps(load_bf16(x + row * x_stride + i, lanes),
                                               load_bf16(residual + row * residual_stride + i, lanes));
            store_bf16(sum + row * size + i, lanes, total);
        }
        normalise_row(sum + row * size, weight, output + row * size, size, eps, zero_centred);
    });
}

// output = silu(gate) * up, where silu(gate) is rounded to bfloat16 first, as torch does between the two.
// x: [rows, gate | up].
static void silu_mul(const bf16* x, int64_t x_stride, bf16* output, int64_t rows, int64_t size) {
    for_rows(rows, size, [&](int64_t row) {
        for (int64_t i = 0; i < size; i += LANES) {
            const __mmask16 lanes = first_lanes(size - i);
            const __m512 value = load_bf16(x + row * x_stride + i, lanes);
            const __m512 falling = exponential(_mm512_sub_ps(_mm512_setzero_ps(), value));
            const __m512 silu = _mm512_div_ps(value, _mm512_add_ps(falling, _mm512_set1_ps(1.0f)));
            const __m512 factor = load_bf16(x + row * x_stride + size + i, lanes);
            store_bf16(output + row * size + i, lanes, _mm512_mul_ps(round_to_bf16(silu), factor));
        }
    });
}

// A paged pool [pages, page_size, heads, size]; elements of a head are contiguous.
struct Pages {
    bf16* data;
    int64_t page_stride;
    int64_t token_stride;
    int64_t head_stride;
    bf16* at(int64_t page, int64_t offset) const { return data + page * page_stride + offset * token_stride; }
};

// What comes between the qkv projection and attention, a token at a time.
struct Prologue {
    const bf16* qkv;  // [tokens, q | k | v], each q head followed by its gate if there are gates
    int64_t qkv_stride;
    bf16* query;  // [tokens, heads, size], contiguous
    bf16* gate;   // [tokens, heads, size], contiguous; null: no gates
    const bf16* query_norm;  // [size]; null: not normalised
    const bf16* key_norm;
    const float* angles;  // [tokens, 2 * half]: cosines, then sines
    int64_t angle_stride;
    int64_t half;  // element i of a head is paired with i + half; those from 2 * half on aren't turned
    Pages key, value;
    const int64_t* slot;  // page * page_size + offset; those in page 0 are written nowhere
    int64_t page_size, tokens, heads, key_heads, size;
    float eps;
    bool zero_centred;
};

// target = head turned by the angles, in float32, rounded once.
static inline void turn_head(const bf16* head, const float* cosine, const float* sine, int64_t half, int64_t size,
                             bf16* target) {
    for (int64_t i = 0; i < half; i += LANES) {
        const __mmask16 lanes = first_lanes(half - i);
        const __m512 first = load_bf16(head + i, lanes), second = load_bf16(head + half + i, lanes);
        const __m512 c = _mm512_maskz_loadu_ps(lanes, cosine + i), s = _mm512_maskz_loadu_ps(lanes, sine + i);
        store_bf16(target + i, lanes, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)));
        store_bf16(target + half + i, lanes, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)));
    }
    std::memcpy(target + 2 * half, head + 2 * half, (size - 2 * half) * sizeof(bf16));
}

static inline void norm_and_turn(const Prologue& p, int64_t token, const bf16* head, const bf16* norm, bf16* target) {
    const float* cosine = p.angles + token * p.angle_stride;
    if (!norm) return turn_head(head, cosine, cosine + p.half, p.half, p.size, target);
    thread_local std::vector<bf16> normed;
    normed.resize(p.size);
    normalise_row(head, norm, normed.data(), p.size, p.eps, p.zero_centred);
    turn_head(normed.data(), cosine, cosine + p.half, p.half, p.size, target);
}

static void attention_prologue(const Prologue& p) {
    const int64_t query_columns = p.heads * p.size * (p.gate ? 2 : 1), key_columns = p.key_heads * p.size;
    for_rows(p.tokens, query_columns + 2 * key_columns, [&](int64_t token) {
        const bf16* row = p.qkv + token * p.qkv_stride;
        for (int64_t head = 0; head < p.heads; head++) {
            const bf16* source = row + head * p.size * (p.gate ? 2 : 1);
            const int64_t at = (token * p.heads + head) * p.size;
            norm_and_turn(p, token, source, p.query_norm, p.query + at);
            if (p.gate) std::memcpy(p.gate + at, source + p.size, p.size * sizeof(bf16));
        }
        const int64_t slot = p.slot[token];
        if (slot < p.page_size) return;
        const int64_t page = slot / p.page_size, offset = slot % p.page_size;
        for (int64_t head = 0; head < p.key_heads; head++) {
            const bf16* key = row + query_columns + head * p.size;
            norm_and_turn(p, token, key, p.key_norm, p.key.at(page, offset) + head * p.key.head_stride);
            std::memcpy(p.value.at(page, offset) + head * p.value.head_stride, key + key_columns, p.size * sizeof(bf16));
        }
    });
}

// One row of a tiled weight, as bfloat16.
template <int BITS>
static void unpack_row(const PackedWeight& weight, int64_t row, bf16* target) {
    const int64_t tile = row / LANES, lane = row % LANES;
    if constexpr (BITS == 16) {
        const int64_t pairs = (weight.columns + 1) / 2;
        const bf16* data = static_cast<const bf16*>(weight.data) + tile * pairs * 32 + lane * 2;
        for (int64_t column = 0; column < weight.columns; column++) target[column] = data[column / 2 * 32 + column % 2];
    } else {
        constexpr int COLUMNS = BITS == 4 ? 8 : 4;
        const int64_t groups = weight.columns / weight.group;
        const uint16_t* words = static_cast<const uint16_t*>(weight.data) + tile * (weight.columns / COLUMNS) * 32 + lane * 2;
        for (int64_t group = 0; group < groups; group++) {
            const int64_t index = (tile * groups + group) * LANES;
            alignas(64) float scale[LANES], minimum[LANES] = {};
            _mm512_store_ps(scale, load_scale(weight.scale, index, weight.wide_scale));
            if (weight.minimum) _mm512_store_ps(minimum, load_scale(weight.minimum, index, weight.wide_scale));
            for (int64_t column = group * weight.group; column < (group + 1) * weight.group; column++) {
                const uint16_t word = words[column / COLUMNS * 32 + column % 2];
                const int64_t place = column % COLUMNS / 2;
                const int integer = BITS == 4 ? (word >> (4 * place) & 15) - weight.zero
                                              : static_cast<int8_t>(word >> (8 * place) & 255);
                const __m512 value = _mm512_set1_ps(std::fmaf(static_cast<float>(integer), scale[lane], minimum[lane]));
                store_bf16(target + column, 1, value);
            }
        }
    }
}

// output[i] = row ids[i] - start of the weight; zeros where that isn't one of its rows.
static void embedding(const int64_t* ids, int64_t count, int64_t start, const PackedWeight& weight, bf16* output) {
    for_rows(count, weight.columns, [&](int64_t i) {
        const int64_t row = ids[i] - start;
        bf16* target = output + i * weight.columns;
        if (row < 0 || row >= weight.rows) {
            std::memset(target, 0, weight.columns * sizeof(bf16));
        } else if (weight.bits == 4) {
            unpack_row<4>(weight, row, target);
        } else if (weight.bits == 8) {
            unpack_row<8>(weight, row, target);
        } else {
            unpack_row<16>(weight, row, target);
        }
    });
}
