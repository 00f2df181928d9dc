// The running softmax of attention's rows, a block of 64 keys at a time.
#pragma once

#include "attention_keys.h"
#include "attention_words.h"

namespace pdserve {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.4426950408889634f;

// Sums q·k become exponents of 2: sum · factor, or tanh(sum · inner) · factor where there is a cap. factor > 0.
struct Exponent {
  float factor;
  float inner;  // 0: no cap
};

// Of each row: the largest exponent yet, the powers' sum in 16 parts, and the sum of the values weighted by them.
struct Running {
  float* max;     // [rows]
  float* sum;     // [rows][16]
  float* values;  // [rows][D], behind the sums

  static int64_t size(int64_t rows, int64_t head_dim) { return rows * (1 + kLanes + head_dim); }
  Running() = default;
  Running(float* memory, int64_t rows, int64_t head_dim)
      : max(memory + rows * (kLanes + head_dim)), sum(memory), values(memory + rows * kLanes) {}

  Running at(int64_t row, int64_t head_dim) const {
    Running other;
    other.max = max + row;
    other.sum = sum + row * kLanes;
    other.values = values + row * head_dim;
    return other;
  }
  void clear(int64_t rows, int64_t head_dim) const {
    std::fill(max, max + rows, kNothing);
    std::fill(sum, sum + rows * (kLanes + head_dim), 0.0f);
  }
  // Takes in the sums of keys that lie behind those taken in yet.
  void add(const Running& later, int64_t rows, int64_t head_dim) const {
    for (int64_t row = 0; row < rows; ++row) {
      const float largest = std::max(max[row], later.max[row]);
      if (largest == kNothing) continue;
      const __m512 mine = exp2_16(_mm512_set1_ps(max[row] - largest));
      const __m512 others = exp2_16(_mm512_set1_ps(later.max[row] - largest));
      max[row] = largest;
      mix(sum + row * kLanes, mine, later.sum + row * kLanes, others, kLanes);
      mix(values + row * head_dim, mine, later.values + row * head_dim, others, head_dim);
    }
  }

 private:
  static void mix(float* to, __m512 of_to, const float* from, __m512 of_from, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const __m512 scaled = _mm512_mul_ps(load16(from + i), of_from);
      store16(to + i, _mm512_fmadd_ps(load16(to + i), of_to, scaled));
    }
  }
};

// Keys [begin, end) of a block are those that a row sees.
struct Seen {
  int32_t begin, end;
};

template <int M, int C>
__attribute__((always_inline)) inline void hide_unseen(__m512 (*s)[C], const Seen* seen) {
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

// s [M][16·C]: sums q·k of M rows → weights [M][64] in words, and the factor that each row's earlier values are to be
// multiplied with. `seen` is looked at where `is_masked`.
template <class T, int M, int C>
__attribute__((always_inline)) inline void soften(__m512 (*s)[C], const Seen* seen, bool is_masked,
                                                  const Exponent& exponent, const Running& running, uint32_t* weights,
                                                  float* rescale) {
  if (exponent.inner != 0) {
    const __m512 inner = _mm512_set1_ps(exponent.inner);
    for (int m = 0; m < M; ++m)
      for (int c = 0; c < C; ++c) s[m][c] = tanh_16(_mm512_mul_ps(s[m][c], inner));
  }
  if (is_masked) hide_unseen<M, C>(s, seen);
  alignas(64) float before[kLanes], after[kLanes];
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
  const __m512 scales = exp2_16(_mm512_sub_ps(load16(before, rows), load16(after, rows)));
  store16(rescale, scales, rows);
  const __m512 factor = _mm512_set1_ps(exponent.factor);
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    const __m512 largest = _mm512_set1_ps(after[m]);
    __m512 sum = _mm512_mul_ps(load16(running.sum + m * kLanes), _mm512_set1_ps(rescale[m]));
    __m512 powers[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      powers[c] = exp2_16(_mm512_fmsub_ps(s[m][c], factor, largest));
      sum = _mm512_add_ps(sum, powers[c]);
    }
    store16(running.sum + m * kLanes, sum);
    Words<T>::template store<C>(weights + m * kBlockKeys, powers);
  }
}

}  // namespace pdserve
