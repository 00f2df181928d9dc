// What the tiles of attention compute with, for both element types.
//
// Elements are taken by words of 32 bits: a word holds one float, or two bf16 that one instruction multiplies
// together.
#pragma once

#include "common.h"

namespace pdserve {

template <class T>
struct Words;

template <>
struct Words<float> {
  static constexpr int kPer = 1;  // elements a word
  static __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
  static void multiply_add_at(__m512& sum, const uint32_t* word, __m512i b) {
    sum = multiply_add(sum, _mm512_set1_epi32(int32_t(*word)), b);
  }
  // 16·V numbers, V even.
  template <int V>
  static void store(uint32_t* to, const __m512* values) {
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(to + v * kLanes, values[v]);
  }
};

#ifdef PDSERVE_HAS_BF16
template <>
struct Words<bf16> {
  static constexpr int kPer = 2;
  static __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  // The compiler does not know that this instruction can repeat a word in memory by itself.
  static void multiply_add_at(__m512& sum, const uint32_t* word, __m512i b) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(b), "m"(*word));
  }
  template <int V>
  static void store(uint32_t* to, const __m512* values) {
    for (int v = 0; v < V; v += 2)
      _mm512_storeu_si512(to + v / 2 * kLanes, (__m512i)_mm512_cvtne2ps_pbh(values[v + 1], values[v]));
  }
};
#endif

inline __m512i repeat(uint32_t word) { return _mm512_set1_epi32(int32_t(word)); }

// 2^x for x ≤ 127, relative error below 2e-7; exactly 1 at 0, exactly 0 below -150, -inf included.
inline __m512 exp2_16(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-160.0f));
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(1.326472725e-3f);
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.671512688e-3f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.550733744e-2f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.402224208e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.931469776e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, whole);
}

inline float exp2_1(float x) { return _mm512_cvtss_f32(exp2_16(_mm512_set1_ps(x))); }

// tanh within 2e-7: 1 - 2 / (e^2x + 1).
inline __m512 tanh_16(__m512 x) {
  constexpr float kTwoLog2E = 2.8853900817779268f;
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 power = exp2_16(_mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(kTwoLog2E)), _mm512_set1_ps(60.0f)));
  return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(power, one)));
}

}  // namespace pdserve
