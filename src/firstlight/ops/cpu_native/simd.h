// Vector helpers shared by the kernels: 512-bit registers, bfloat16 in and out, float32 in between.
//
// A register of 32 bfloat16 holds pairs: `dot_pairs` multiplies two registers pair by pair and adds both products of a
// pair to one of 16 float32 sums. CPUs with AVX512-BF16 do that in one instruction; on those with plain AVX-512 it is two
// fused multiply-adds on the halves, with the same meaning and about half the speed.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if !defined(__AVX512F__) || !defined(__AVX512BW__)
#error "these kernels need AVX-512 F and BW"
#endif

using bf16 = uint16_t;  // the bits of a bfloat16

constexpr int LANES = 16;  // float32 in a register

// Sixteen float32 from the even (low) or odd (high) elements of 32 bfloat16: a bfloat16 is the upper half of a float32.
static inline __m512 even_as_float(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
static inline __m512 odd_as_float(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

static inline __m512 dot_pairs(__m512 sum, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    sum = _mm512_fmadd_ps(odd_as_float(a), odd_as_float(b), sum);
    return _mm512_fmadd_ps(even_as_float(a), even_as_float(b), sum);
#endif
}

// Round sixteen float32 to bfloat16, to nearest with ties to even; NaN stays NaN.
static inline __m256i to_bf16(__m512 value) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(value);
#else
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i lowest = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lowest, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    rounded = _mm512_mask_blend_epi32(nan, rounded, _mm512_or_si512(bits, _mm512_set1_epi32(0x400000)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

static inline __m512 from_bf16(__m256i value) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(value), 16));
}

// What rounding to bfloat16 and back gives: the places where the contract rounds in the middle.
static inline __m512 round_to_bf16(__m512 value) { return from_bf16(to_bf16(value)); }

// The first `count` of a register's lanes; all of them if there are more.
static inline __mmask16 first_lanes(int64_t count) {
    return count >= 16 ? static_cast<__mmask16>(0xFFFF) : static_cast<__mmask16>((1u << count) - 1);
}
static inline __mmask32 first_words(int64_t count) {
    return count >= 32 ? 0xFFFFFFFFu : static_cast<__mmask32>((1u << count) - 1);
}

static inline __m512 load_bf16(const bf16* source, __mmask16 lanes) {
    return from_bf16(_mm256_maskz_loadu_epi16(lanes, source));
}
static inline void store_bf16(bf16* target, __mmask16 lanes, __m512 value) {
    _mm256_mask_storeu_epi16(target, lanes, to_bf16(value));
}

// A pair of neighbouring bfloat16, in every lane.
static inline __m512i broadcast_pair(const bf16* pair) {
    int32_t bits;
    std::memcpy(&bits, pair, sizeof(bits));
    return _mm512_set1_epi32(bits);
}

// e^x in float32, to about 1 ulp; 0 below -104, infinity above 89, and NaN stays NaN.
static inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // this order of operands keeps NaN
    x = _mm512_min_ps(_mm512_set1_ps(100.0f), x);
    const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    // ln 2 in two parts, so that the product with the first is exact.
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.0f / 5040);  // Taylor's series; |rest| <= ln 2 / 2
    for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(term));
    }
    return _mm512_scalef_ps(sum, whole);
}
