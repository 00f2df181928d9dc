// Arithmetic of attention on one block of keys: scores, softmax and weighted values of a few rows.
//
// K and V of the block are packed into words of 32 bits: a word holds one float, or two bf16 that one instruction
// multiplies together. A row is one query head of one token. Every sum runs over its words in one order, so a row's
// result does not depend, bit for bit, on the rows beside it.
#pragma once

#include <cmath>

#include "common.h"

namespace pdserve {

constexpr int kBlockKeys = 64;  // keys that are scored before the running maximum is looked at again
constexpr int kTileRows = 6;    // × 4 vectors of sums stay in registers
constexpr float kNothing = -std::numeric_limits<float>::infinity();

template <class T>
struct Words;

template <>
struct Words<float> {
  static constexpr int kPer = 1;  // elements a word
  static __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
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
  template <int V>
  static void store(uint32_t* to, const __m512* values) {
    for (int v = 0; v < V; v += 2)
      _mm512_storeu_si512(to + v / 2 * kLanes, (__m512i)_mm512_cvtne2ps_pbh(values[v + 1], values[v]));
  }
};
#endif

// 2^x for x ≤ 127, relative error below 3e-7; exactly 1 at 0, exactly 0 below -150, -inf included.
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

// Sums q·k become exponents of 2: sum · factor, or tanh(sum · inner) · factor where there is a cap.
struct Exponent {
  float factor;
  float inner;  // 0: no cap
};

// The running softmax of each row: the largest exponent yet, the 16 partial sums of powers, and the weighted values.
struct Running {
  float* max;     // [rows]
  float* sum;     // [rows][16]
  float* values;  // [rows][D]

  Running at(int64_t row, int64_t head_dim) const {
    return {max + row, sum + row * kLanes, values + row * head_dim};
  }
};

// Keys [begin, end) of the block are those that a row sees.
struct Seen {
  int32_t begin, end;
};

// query [M][words], keys [words][64], of which the first 16·C are looked at → weights [M][64] in words, and the factor
// that each row's earlier sums are to be multiplied with.
template <class T, int M, int C>
void score_tile(const uint32_t* query, const uint32_t* keys, int64_t words, const Seen* seen, bool is_masked,
                const Exponent& exponent, const Running& running, uint32_t* weights, float* rescale) {
  __m512 s[M][C];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) s[m][c] = _mm512_setzero_ps();
  for (int64_t w = 0; w < words; ++w) {
    __m512i key[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) key[c] = _mm512_load_si512(keys + w * kBlockKeys + c * kLanes);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const __m512i q = _mm512_set1_epi32(int32_t(query[m * words + w]));
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) s[m][c] = Words<T>::multiply_add(s[m][c], q, key[c]);
    }
  }
  if (exponent.inner != 0) {
    const __m512 inner = _mm512_set1_ps(exponent.inner);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) s[m][c] = tanh_16(_mm512_mul_ps(s[m][c], inner));
  }
  if (is_masked) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 nothing = _mm512_set1_ps(kNothing);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const __mmask16 is_late = _mm512_cmpge_epi32_mask(lanes, _mm512_set1_epi32(seen[m].end - c * kLanes));
        const __mmask16 is_early = _mm512_cmplt_epi32_mask(lanes, _mm512_set1_epi32(seen[m].begin - c * kLanes));
        s[m][c] = _mm512_mask_mov_ps(s[m][c], is_late | is_early, nothing);
      }
  }
  alignas(64) float before[kLanes], after[kLanes], scales[kLanes];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    __m512 most = s[m][0];
#pragma GCC unroll 4
    for (int c = 1; c < C; ++c) most = _mm512_max_ps(most, s[m][c]);
    const float largest = std::max(running.max[m], _mm512_reduce_max_ps(most) * exponent.factor);
    before[m] = running.max[m];
    running.max[m] = largest;
    after[m] = largest == kNothing ? 0.0f : largest;  // a row that saw no key yet has no weights, and no NaN
  }
  const __mmask16 rows = first_lanes(M);
  _mm512_store_ps(scales, exp2_16(_mm512_sub_ps(_mm512_maskz_load_ps(rows, before), _mm512_maskz_load_ps(rows, after))));
  const __m512 factor = _mm512_set1_ps(exponent.factor);
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    const __m512 largest = _mm512_set1_ps(after[m]);
    __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(running.sum + m * kLanes), _mm512_set1_ps(scales[m]));
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      s[m][c] = exp2_16(_mm512_fmsub_ps(s[m][c], factor, largest));
      sum = _mm512_add_ps(sum, s[m][c]);
    }
    _mm512_storeu_ps(running.sum + m * kLanes, sum);
    Words<T>::template store<C>(weights + m * kBlockKeys, s[m]);
    rescale[m] = scales[m];
  }
}

// values [M][D] = values · rescale + weights · packed, for 16·C columns; packed [words][D].
template <class T, int M, int C>
void value_tile(const uint32_t* weights, const uint32_t* packed, int64_t words, int64_t head_dim, const float* rescale,
                float* values) {
  __m512 sums[M][C];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      sums[m][c] =
          _mm512_mul_ps(_mm512_loadu_ps(values + m * head_dim + c * kLanes), _mm512_set1_ps(rescale[m]));
  for (int64_t w = 0; w < words; ++w) {
    __m512i v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) v[c] = _mm512_load_si512(packed + w * head_dim + c * kLanes);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const __m512i weight = _mm512_set1_epi32(int32_t(weights[m * kBlockKeys + w]));
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[m][c] = Words<T>::multiply_add(sums[m][c], weight, v[c]);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) _mm512_storeu_ps(values + m * head_dim + c * kLanes, sums[m][c]);
}

template <class T, int M>
void attend_tile(const uint32_t* query, const uint32_t* keys, const uint32_t* packed, int64_t head_dim,
                 const Seen* seen, int32_t num_seen, bool is_masked, const Exponent& exponent, const Running& running) {
  alignas(64) uint32_t weights[M * kBlockKeys];
  alignas(64) float rescale[kLanes];
  const int64_t words = head_dim / Words<T>::kPer;
  const int32_t num_keys = num_seen <= kBlockKeys / 2 ? kBlockKeys / 2 : kBlockKeys;
  if (num_keys == kBlockKeys / 2)
    score_tile<T, M, 2>(query, keys, words, seen, is_masked, exponent, running, weights, rescale);
  else
    score_tile<T, M, 4>(query, keys, words, seen, is_masked, exponent, running, weights, rescale);
  const int64_t pairs = ceil_div(num_seen, Words<T>::kPer);
  int64_t column = 0;
  for (; column + 4 * kLanes <= head_dim; column += 4 * kLanes)
    value_tile<T, M, 4>(weights, packed + column, pairs, head_dim, rescale, running.values + column);
  switch ((head_dim - column) / kLanes) {
    case 1: return value_tile<T, M, 1>(weights, packed + column, pairs, head_dim, rescale, running.values + column);
    case 2: return value_tile<T, M, 2>(weights, packed + column, pairs, head_dim, rescale, running.values + column);
    case 3: return value_tile<T, M, 3>(weights, packed + column, pairs, head_dim, rescale, running.values + column);
  }
}

// Adds one block of keys to the running softmax of `rows` ≤ 6 rows. The first `num_seen` keys of the block hold all
// that any of the rows sees; `is_masked` where some row does not see all of those, or they are not 32 or 64.
template <class T>
void attend_rows(int64_t rows, const uint32_t* query, const uint32_t* keys, const uint32_t* packed, int64_t head_dim,
                 const Seen* seen, int32_t num_seen, bool is_masked, const Exponent& exponent, const Running& running) {
  switch (rows) {
#define PDSERVE_ROWS(M) \
  case M:               \
    return attend_tile<T, M>(query, keys, packed, head_dim, seen, num_seen, is_masked, exponent, running);
    PDSERVE_ROWS(1) PDSERVE_ROWS(2) PDSERVE_ROWS(3) PDSERVE_ROWS(4) PDSERVE_ROWS(5) PDSERVE_ROWS(6)
#undef PDSERVE_ROWS
  }
}

}  // namespace pdserve
