// Causal attention over a paged cache, for grouped queries: softmax(q K^T * scale) V in float32 over bfloat16.
//
// Work is cut into items (token, KV head, run of CHUNK keys), so that one request with a long context keeps every thread
// busy. An item leaves its running maximum, sum and weighted values; a second pass joins a token's items. Chunks don't
// depend on the batch or on the number of threads, so neither do the results.
#pragma once

#include "elementwise.h"

constexpr int64_t CHUNK = 128;       // keys of an item
constexpr int64_t GROUP_LIMIT = 16;  // query heads of an item
constexpr int64_t SCRATCH_FLOATS = 1 << 22;  // results of items before they are joined: 16 MiB, then the next tokens

struct Attention {
    Heads query;   // [tokens, query_heads, size]
    Heads output;  // [tokens, query_heads, size]
    Pages key, value;
    const int32_t* pages;  // [., columns] page numbers; <= 0 is null: those keys aren't there
    int64_t pages_stride;
    int64_t pages_columns;
    const int32_t* row;          // [requests] row of `pages`
    const int32_t* query_start;  // [requests + 1]
    const int32_t* length;       // [requests] context with this step
    int64_t requests, query_heads, key_heads, size, page_size;
    int64_t window;  // keys that a token sees up to itself; 0: all
    bool causal;     // no key after the token
    float scale;
};

// Sixteen partial sums of each of four keys -> the four sums.
static inline __m128 reduce_four(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(sums),
                                        _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sums), 1)));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

static inline __m512i load_words(const bf16* source, int64_t left) {
    return left >= 32 ? _mm512_loadu_si512(source) : _mm512_maskz_loadu_epi16(first_words(left), source);
}

// Keys or values that will be needed next: while row i of the current ones is computed, two of these are fetched.
struct Ahead {
    const bf16* const* rows;
    int64_t count;

    void fetch(int64_t first, int64_t last, int64_t size) const {
        for (int64_t i = 2 * first; i < std::min(2 * last, count); i++) {
            for (int64_t at = 0; at < size; at += 32) {
                _mm_prefetch(reinterpret_cast<const char*>(rows[i] + at), _MM_HINT_T1);
            }
        }
    }
};

// scores[i] = q . keys[i] for `count` keys; entries up to the next multiple of 16 become -infinity.
static inline void score_keys(const bf16* query, const bf16* const* keys, int64_t count, int64_t size, float scale,
                              const Ahead& ahead, float* scores) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        ahead.fetch(i, i + 4, size);
        __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t at = 0; at < size; at += 32) {
            const __m512i q = load_words(query + at, size - at);
            for (int j = 0; j < 4; j++) sum[j] = dot_pairs(sum[j], q, load_words(keys[i + j] + at, size - at));
        }
        _mm_storeu_ps(scores + i, _mm_mul_ps(reduce_four(sum[0], sum[1], sum[2], sum[3]), _mm_set1_ps(scale)));
    }
    for (; i < count; i++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t at = 0; at < size; at += 32) {
            sum = dot_pairs(sum, load_words(query + at, size - at), load_words(keys[i] + at, size - at));
        }
        scores[i] = _mm512_reduce_add_ps(sum) * scale;
    }
    for (; i % LANES; i++) scores[i] = -INFINITY;
}

// Turns scores into e^(score - maximum); returns (maximum, sum). A NaN score makes the sum NaN.
static inline void exponentiate(float* scores, int64_t count, float& maximum, float& sum) {
    __m512 highest = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES) highest = _mm512_max_ps(highest, _mm512_loadu_ps(scores + i));
    maximum = _mm512_reduce_max_ps(highest);
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += LANES) {
        const __m512 score = _mm512_loadu_ps(scores + i);
        const __mmask16 lanes = first_lanes(count - i);
        const __m512 value = _mm512_maskz_mov_ps(lanes, exponential(_mm512_sub_ps(score, _mm512_set1_ps(maximum))));
        _mm512_storeu_ps(scores + i, value);
        total = _mm512_add_ps(total, value);
    }
    sum = _mm512_reduce_add_ps(total);
}

// sums[h][.] = sum over keys of weight[h][key] * values[key], for HEADS heads at once, so that a value is read once.
// Even and odd elements of each 32 are kept apart, as the registers hold them: see `join_halves`.
template <int HEADS>
static inline void weigh_values(const float* weights, const bf16* const* values, int64_t count, int64_t size,
                                const Ahead& ahead, float* sums, int64_t sums_stride) {
    for (int64_t at = 0; at < size; at += 32) {
        __m512 even[HEADS], odd[HEADS];
        for (int h = 0; h < HEADS; h++) even[h] = odd[h] = _mm512_setzero_ps();
        for (int64_t i = 0; i < count; i++) {
            if (at == 0) ahead.fetch(i, i + 1, size);
            const __m512i value = load_words(values[i] + at, size - at);
            const __m512 low = even_as_float(value), high = odd_as_float(value);
            for (int h = 0; h < HEADS; h++) {
                const __m512 weight = _mm512_set1_ps(weights[h * CHUNK + i]);
                even[h] = _mm512_fmadd_ps(low, weight, even[h]);
                odd[h] = _mm512_fmadd_ps(high, weight, odd[h]);
            }
        }
        for (int h = 0; h < HEADS; h++) {
            _mm512_storeu_ps(sums + h * sums_stride + at, even[h]);
            _mm512_storeu_ps(sums + h * sums_stride + at + LANES, odd[h]);
        }
    }
}

// Sixteen even and sixteen odd elements -> 32 bfloat16 in order.
static inline __m512i join_halves(__m512 even, __m512 odd) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(to_bf16(even)), _mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(odd)), 16));
}

struct Item {
    int64_t token;
    int64_t request;
    int64_t first, last;  // keys
    int64_t head;         // KV head
};

// Where the keys and values of an item are, without those in null pages.
struct Rows {
    const bf16* keys[CHUNK];
    const bf16* values[CHUNK];
    int64_t count = 0;

    void find(const Attention& a, const Item& item) {
        count = 0;
        const int32_t* pages = a.pages + a.row[item.request] * a.pages_stride;
        for (int64_t position = item.first; position < item.last;) {
            const int64_t column = position / a.page_size;
            int64_t offset = position % a.page_size;
            const int64_t stop = std::min(item.last, position - offset + a.page_size);
            const int64_t page = column < a.pages_columns ? pages[column] : 0;
            if (page > 0) {
                const bf16* key = a.key.at(page, offset) + item.head * a.key.head_stride;
                const bf16* value = a.value.at(page, offset) + item.head * a.value.head_stride;
                for (; position < stop; position++, key += a.key.token_stride, value += a.value.token_stride) {
                    keys[count] = key;
                    values[count++] = value;
                }
            }
            position = stop;
        }
    }
};

// Results of an item: for each query head the maximum, the sum, and `padded` weighted values.
// Pages lie apart, so that every one would be waited for: the next item's rows are fetched while this one is computed.
static void attend_item(const Attention& a, const Item& item, const Rows& rows, const Rows& next, int64_t padded,
                        float* results) {
    const int64_t group = a.query_heads / a.key_heads, stride = padded + 2;
    alignas(64) float weights[GROUP_LIMIT * CHUNK];
    for (int64_t h = 0; h < group; h++) {
        float* result = results + h * stride;
        score_keys(a.query.at(item.token, item.head * group + h), rows.keys, rows.count, a.size, a.scale,
                   {next.keys, h == 0 ? next.count : 0}, weights + h * CHUNK);
        exponentiate(weights + h * CHUNK, rows.count, result[0], result[1]);
    }
    for (int64_t h = 0; h < group;) {
        float* sums = results + h * stride + 2;
        const Ahead ahead{next.values, h == 0 ? next.count : 0};
        switch (std::min<int64_t>(4, group - h)) {
#define CASE(HEADS)                                                                                             \
    case HEADS:                                                                                                 \
        weigh_values<HEADS>(weights + h * CHUNK, rows.values, rows.count, a.size, ahead, sums, stride);          \
        h += HEADS;                                                                                             \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
        }
    }
}

static void attend_items(const Attention& a, const Item* items, int64_t first, int64_t last, int64_t padded,
                         int64_t item_floats, float* results) {
    if (first >= last) return;
    Rows rows[2];
    rows[first % 2].find(a, items[first]);
    for (int64_t i = first; i < last; i++) {
        Rows& next = rows[(i + 1) % 2];
        next.count = 0;
        if (i + 1 < last) next.find(a, items[i + 1]);
        attend_item(a, items[i], rows[i % 2], next, padded, results + i * item_floats);
    }
}

// Joins the `count` items of one token and query head, `stride` floats apart; without keys the output is zeros.
static void join_items(const float* results, int64_t count, int64_t stride, int64_t size, bf16* output) {
    float maximum = -INFINITY, sum = 0;
    for (int64_t i = 0; i < count; i++) {
        if (results[i * stride + 1] != 0) maximum = std::max(maximum, results[i * stride]);
    }
    float factors[64];
    for (int64_t at = 0; at < size; at += 32) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        sum = 0;
        for (int64_t i = 0; i < count; i++) {
            const float* item = results + i * stride;
            if (item[1] == 0) continue;  // no keys
            const float factor = at == 0 || i >= 64 ? std::exp(item[0] - maximum) : factors[i];
            if (i < 64) factors[i] = factor;
            sum += factor * item[1];
            even = _mm512_fmadd_ps(_mm512_set1_ps(factor), _mm512_loadu_ps(item + 2 + at), even);
            odd = _mm512_fmadd_ps(_mm512_set1_ps(factor), _mm512_loadu_ps(item + 2 + at + LANES), odd);
        }
        const __m512 inverse = _mm512_set1_ps(sum == 0 ? 0.0f : 1.0f / sum);
        const __m512i joined = join_halves(_mm512_mul_ps(even, inverse), _mm512_mul_ps(odd, inverse));
        _mm512_mask_storeu_epi16(output + at, first_words(size - at), joined);
    }
}

// The items of some tokens, and then their outputs. first_item: where each token's items begin, and where the last end.
static void attend_tokens(const Attention& a, int64_t first_token, const std::vector<Item>& items,
                          const std::vector<int64_t>& first_item) {
    thread_local std::vector<float> scratch;
    const int64_t group = a.query_heads / a.key_heads;
    const int64_t padded = (a.size + 31) / 32 * 32;
    const int64_t item_floats = group * (padded + 2);
    const int64_t count = static_cast<int64_t>(items.size()), tokens = static_cast<int64_t>(first_item.size()) - 1;
    if (static_cast<int64_t>(scratch.size()) < count * item_floats) scratch.resize(count * item_floats);
    float* results = scratch.data();
    const auto join_token = [&](int64_t token) {
        const int64_t chunks = (first_item[token + 1] - first_item[token]) / a.key_heads;
        for (int64_t head = 0; head < a.query_heads; head++) {
            const float* base = results + (first_item[token] + head / group) * item_floats + head % group * (padded + 2);
            join_items(base, chunks, a.key_heads * item_floats, a.size, a.output.at(first_token + token, head));
        }
    };
    if (count < 2) {
        attend_items(a, items.data(), 0, count, padded, item_floats, results);
        for (int64_t token = 0; token < tokens; token++) join_token(token);
        return;
    }
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        attend_items(a, items.data(), count * thread / threads, count * (thread + 1) / threads, padded, item_floats, results);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t token = 0; token < tokens; token++) join_token(token);
    }
}

static void attend(const Attention& a) {
    thread_local std::vector<Item> items;
    thread_local std::vector<int64_t> first_item;
    items.clear();
    first_item.assign(1, 0);
    int64_t first_token = a.requests ? a.query_start[0] : 0;
    for (int64_t request = 0; request < a.requests; request++) {
        const int64_t stop = a.query_start[request + 1];
        for (int64_t token = a.query_start[request]; token < stop; token++) {
            const int64_t after = a.length[request] - (stop - 1 - token);  // the token's place in the context, + 1
            const int64_t lowest = a.window > 0 ? std::max<int64_t>(0, after - a.window) : 0;
            const int64_t seen = a.causal ? after : a.length[request];
            for (int64_t first = lowest / CHUNK * CHUNK; first < seen; first += CHUNK) {
                for (int64_t head = 0; head < a.key_heads; head++) {
                    items.push_back({token, request, std::max(first, lowest), std::min(first + CHUNK, seen), head});
                }
            }
            first_item.push_back(static_cast<int64_t>(items.size()));
            if (static_cast<int64_t>(items.size()) * a.size * (a.query_heads / a.key_heads) > SCRATCH_FLOATS) {
                attend_tokens(a, first_token, items, first_item);
                first_token = token + 1;
                items.clear();
                first_item.assign(1, 0);
            }
        }
    }
    attend_tokens(a, first_token, items, first_item);
}
