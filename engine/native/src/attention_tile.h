// Tiles of up to 6 rows against a packed block of 64 keys: what chunks are made of.
//
// A row is one query head of one token. Every sum runs over its words in one order, so a row's result does not depend,
// bit for bit, on the rows beside it. `attention_thin.h` sums in the same order.
#pragma once

#include "attention_softmax.h"

namespace pdserve {

constexpr int kTileRows = 6;  // × 4 vectors of sums stay in registers

// query [M][stride], keys [words][64], of which the first 16·C are looked at.
template <class T, int M, int C>
void score_tile(const uint32_t* query, int64_t stride, const uint32_t* keys, int64_t words, const Seen* seen,
                bool is_masked, const Exponent& exponent, const Running& running, uint32_t* weights, float* rescale) {
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
      const __m512i q = repeat(query[m * stride + w]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) s[m][c] = Words<T>::multiply_add(s[m][c], q, key[c]);
    }
  }
  soften<T, M, C>(s, seen, is_masked, exponent, running, weights, rescale);
}

// values [M][D] = values · rescale + weights · packed, for 16·C columns; packed [words][D], of which [begin, end) are read.
template <class T, int M, int C>
void value_tile(const uint32_t* weights, const uint32_t* packed, int64_t begin, int64_t end, int64_t head_dim,
                const float* rescale, float* values) {
  __m512 sums[M][C];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      sums[m][c] = _mm512_mul_ps(load16(values + m * head_dim + c * kLanes), _mm512_set1_ps(rescale[m]));
  for (int64_t w = begin; w < end; ++w) {
    __m512i v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) v[c] = _mm512_load_si512(packed + w * head_dim + c * kLanes);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const __m512i weight = repeat(weights[m * kBlockKeys + w]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[m][c] = Words<T>::multiply_add(sums[m][c], weight, v[c]);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store16(values + m * head_dim + c * kLanes, sums[m][c]);
}

// One block of keys for M rows; `any` holds all that any of the rows sees, `is_masked` where some row does not see each
// of the 64.
template <class T, int M>
void attend_tile(const uint32_t* query, int64_t stride, const uint32_t* keys, const uint32_t* packed, int64_t head_dim,
                 const Seen* seen, Seen any, bool is_masked, const Exponent& exponent, const Running& running) {
  alignas(64) uint32_t weights[M * kBlockKeys];
  alignas(64) float rescale[kLanes];
  const int64_t words = head_dim / Words<T>::kPer;
  if (any.end <= kBlockKeys / 2)
    score_tile<T, M, 2>(query, stride, keys, words, seen, is_masked, exponent, running, weights, rescale);
  else
    score_tile<T, M, 4>(query, stride, keys, words, seen, is_masked, exponent, running, weights, rescale);
  const int64_t begin = any.begin / Words<T>::kPer, end = ceil_div(any.end, Words<T>::kPer);
  int64_t d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes)
    value_tile<T, M, 4>(weights, packed + d, begin, end, head_dim, rescale, running.values + d);
  switch ((head_dim - d) / kLanes) {
    case 1: return value_tile<T, M, 1>(weights, packed + d, begin, end, head_dim, rescale, running.values + d);
    case 2: return value_tile<T, M, 2>(weights, packed + d, begin, end, head_dim, rescale, running.values + d);
    case 3: return value_tile<T, M, 3>(weights, packed + d, begin, end, head_dim, rescale, running.values + d);
  }
}

template <class T>
void attend_rows(int64_t rows, const uint32_t* query, int64_t stride, const uint32_t* keys, const uint32_t* packed,
                 int64_t head_dim, const Seen* seen, Seen any, bool is_masked, const Exponent& exponent,
                 const Running& running) {
  switch (rows) {
#define PDSERVE_ROWS(M) \
  case M:               \
    return attend_tile<T, M>(query, stride, keys, packed, head_dim, seen, any, is_masked, exponent, running);
    PDSERVE_ROWS(1) PDSERVE_ROWS(2) PDSERVE_ROWS(3) PDSERVE_ROWS(4) PDSERVE_ROWS(5) PDSERVE_ROWS(6)
#undef PDSERVE_ROWS
  }
}

}  // namespace pdserve
