// What the kernels share: registers of sixteen float32, and bfloat16 that becomes them.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

constexpr int LANES = 16;  // float32 in a register
constexpr float LOG2_E = 1.44269504f;

using bf16 = uint16_t;

// 2^x to 2e-7 of it; 0 below 2^-126, as denormal numbers are slow; infinite for what is too large; not a number where x
// is none.
inline __m512 exp2(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);  // in [-0.5, 0.5]; coefficients: ln(2)^n / n!
  __m512 sum = _mm512_set1_ps(1.5403530e-4f);
  for (float coefficient : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(coefficient));
  return _mm512_maskz_scalef_ps(normal, sum, whole);
}

// Of the first sixteen of so many that are left.
inline __mmask16 mask_of(int64_t left) { return left < LANES ? (__mmask16)((1u << left) - 1) : (__mmask16)0xffff; }

inline __m512 load(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }
inline __m512 load(const bf16* from, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}
inline void store(float* to, __mmask16 mask, __m512 x) { _mm512_mask_storeu_ps(to, mask, x); }
inline void store(bf16* to, __mmask16 mask, __m512 x) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

// 32 bf16: those of `first`, then those of `second`.
inline __m512i round_two(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

// The bf16 of the first half and of the second in turn: a, b, c ... A, B, C ... -> a, A, b, B, c, C ...
inline __m512i interleave(__m512i halves) {
  struct Order {
    alignas(64) uint16_t of[32];
    constexpr Order() : of() {
      for (int i = 0; i < 32; i++) of[i] = (uint16_t)((i & 1) * LANES + i / 2);
    }
  };
  static constexpr Order order;
  return _mm512_permutexvar_epi16(_mm512_load_si512(order.of), halves);
}

// A square of sixteen by sixteen values of four bytes, in place.
inline void transpose(__m512i rows[LANES]) {
  __m512i pairs[LANES];
  for (int i = 0; i < LANES; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; j++) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
    }
  for (int i = 0; i < LANES; i += 8)  // now whole lanes of four: the first and third of two rows, the second and fourth
    for (int j = 0; j < 4; j++) {
      pairs[i + j] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0x88);
      pairs[i + j + 4] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    rows[j] = _mm512_shuffle_i32x4(pairs[j], pairs[j + 8], 0x88);
    rows[j + 8] = _mm512_shuffle_i32x4(pairs[j], pairs[j + 8], 0xdd);
  }
}
