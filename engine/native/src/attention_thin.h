// Up to 12 rows of one KV head against 64 keys, straight from the pool: decoding, and a few speculated tokens.
//
// Nothing is packed: K is turned, and V paired, in registers, and each is used at once. Sums run in the order of
// `attention_tile.h`.
#pragma once

#include <type_traits>

#include "attention_pack.h"
#include "attention_softmax.h"

namespace pdserve {

constexpr int kThinRows = 12;

// query [M][stride] → s [M][64], of G groups from `group` on.
template <class T, int M, int G>
__attribute__((always_inline)) inline void score_groups(const uint32_t* query, int64_t stride,
                                                        const KeyGroups<T>& keys, int group, int64_t head_dim,
                                                        Ahead& ahead, float* s) {
  const int64_t words = head_dim / Words<T>::kPer;
  __m512 sums[G][M];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) sums[g][m] = _mm512_setzero_ps();
  for (int64_t word = 0; word < words; word += 4)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      __m512i turned[4];
      const char* lines = ahead.take<4>();
      load_transposed(keys.rows[group + g] + word * Words<T>::kPer, head_dim, turned);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        fetch_line(lines + 64 * j);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m)
          Words<T>::multiply_add_at(sums[g][m], query + m * stride + word + j, turned[j]);
      }
    }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) store16(s + m * kBlockKeys + (group + g) * kLanes, sums[g][m]);
}

template <class T, int M>
void score_thin(const uint32_t* query, int64_t stride, const KeyGroups<T>& keys, int64_t head_dim, Ahead& ahead,
                float* s) {
  constexpr int G = M <= 3 ? 4 : M <= 6 ? 2 : 1;  // side by side: sums enough to hide an instruction's latency
  int group = keys.first_group();
  for (; group + G <= keys.last_group(); group += G) score_groups<T, M, G>(query, stride, keys, group, head_dim, ahead, s);
  if (G > 1)
    for (; group < keys.last_group(); ++group) score_groups<T, M, 1>(query, stride, keys, group, head_dim, ahead, s);
}

template <class T, int M, int V>
__attribute__((always_inline)) inline void add_values(__m512 (&sums)[M][V], const __m512i (&v)[V],
                                                      const uint32_t* weights) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const __m512i w = repeat(weights[m * kBlockKeys]);
#pragma GCC unroll 4
    for (int c = 0; c < V; ++c) sums[m][c] = Words<T>::multiply_add(sums[m][c], w, v[c]);
  }
}

// values [M][D] = values · rescale + weights · V, for N times 16·C columns from `column` on.
template <class T, int M, int C, int N>
void value_thin(const uint32_t* weights, const KeyGroups<T>& keys, int64_t column, int64_t head_dim,
                const float* rescale, Ahead& ahead, float* values) {
  constexpr int P = Words<T>::kPer;
  __m512 sums[M][N * C];
  values += column;
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < N * C; ++c)
      sums[m][c] = _mm512_mul_ps(load16(values + m * head_dim + c * kLanes), _mm512_set1_ps(rescale[m]));
  const auto add_part = [&](int key, bool has_first, bool has_second) __attribute__((always_inline)) {
    __m512i v[N * C];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      load_values<C>(keys.rows[key / kLanes] + key % kLanes * head_dim + column + n * C * kLanes, head_dim, has_first,
                     has_second, v + n * C);
    add_values<T>(sums, v, weights + key / P);
  };
  int key = keys.begin;
  if (key % P != 0) add_part(key - 1, false, key + 1 <= keys.end), ++key;
  const int whole_end = keys.end / P * P;
  while (key < whole_end) {
    const T* row = keys.rows[key / kLanes] + key % kLanes * head_dim + column;
    const int end = std::min(whole_end, (key / kLanes + 1) * kLanes);
    const char* lines = ahead.take<N * kLanes>();
    for (; key < end; key += P, row += P * head_dim, lines += 64 * N * P) {
#pragma GCC unroll 4
      for (int i = 0; i < N * P; ++i) fetch_line(lines + 64 * i);
      __m512i v[N * C];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) load_values<C>(row + n * C * kLanes, head_dim, v + n * C);
      add_values<T>(sums, v, weights + key / P);
    }
  }
  if (key < keys.end) add_part(key, true, false);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < N * C; ++c) store16(values + m * head_dim + c * kLanes, sums[m][c]);
}

template <class T, int M>
void values_thin(const uint32_t* weights, const KeyGroups<T>& keys, int64_t head_dim, const float* rescale,
                 Ahead& ahead, float* values) {
  constexpr int P = Words<T>::kPer, N = M <= 5 ? 4 / P : 2 / P;
  int64_t d = 0;
  for (; d + N * P * kLanes <= head_dim; d += N * P * kLanes)
    value_thin<T, M, P, N>(weights, keys, d, head_dim, rescale, ahead, values);
  for (; d + P * kLanes <= head_dim; d += P * kLanes)
    value_thin<T, M, P, 1>(weights, keys, d, head_dim, rescale, ahead, values);
  if (d < head_dim) value_thin<T, M, 1, 1>(weights, keys, d, head_dim, rescale, ahead, values);
}

// Rows of s [rows][64], some at a time.
template <class T, int C>
void soften_thin(int64_t rows, const float* s, const Seen* seen, bool is_masked, const Exponent& exponent,
                 const Running& running, int64_t head_dim, uint32_t* weights, float* rescale) {
  int64_t row = 0;
  const auto some = [&](auto count) {
    constexpr int M = decltype(count)::value;
    for (; row + M <= rows; row += M) {
      __m512 sums[M][C];
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[m][c] = load16(s + (row + m) * kBlockKeys + c * kLanes);
      soften<T, M, C>(sums, seen + row, is_masked, exponent, running.at(row, head_dim), weights + row * kBlockKeys,
                      rescale + row);
    }
  };
  some(std::integral_constant<int, 6>());
  some(std::integral_constant<int, 3>());
  some(std::integral_constant<int, 1>());
}

#define PDSERVE_EACH_THIN(CALL) \
  CALL(1) CALL(2) CALL(3) CALL(4) CALL(5) CALL(6) CALL(7) CALL(8) CALL(9) CALL(10) CALL(11) CALL(12)

template <class T>
void score_few(int64_t rows, const uint32_t* query, int64_t stride, const KeyGroups<T>& keys, int64_t head_dim,
               Ahead& ahead, float* s) {
  switch (rows) {
#define PDSERVE_ROWS(M) \
  case M:               \
    return score_thin<T, M>(query, stride, keys, head_dim, ahead, s);
    PDSERVE_EACH_THIN(PDSERVE_ROWS)
#undef PDSERVE_ROWS
  }
}

template <class T>
void soften_few(int64_t rows, const float* s, const Seen* seen, int32_t num_seen, bool is_masked,
                const Exponent& exponent, const Running& running, int64_t head_dim, uint32_t* weights, float* rescale) {
  if (num_seen <= kBlockKeys / 2)
    soften_thin<T, 2>(rows, s, seen, is_masked, exponent, running, head_dim, weights, rescale);
  else
    soften_thin<T, 4>(rows, s, seen, is_masked, exponent, running, head_dim, weights, rescale);
}

template <class T>
void value_few(int64_t rows, const uint32_t* weights, const KeyGroups<T>& values, int64_t head_dim,
               const float* rescale, Ahead& ahead, float* to) {
  switch (rows) {
#define PDSERVE_ROWS(M) \
  case M:               \
    return values_thin<T, M>(weights, values, head_dim, rescale, ahead, to);
    PDSERVE_EACH_THIN(PDSERVE_ROWS)
#undef PDSERVE_ROWS
  }
}

}  // namespace pdserve
