// K and V of one block of keys, in the order in which tiles of many rows read them: keys [words][64], values
// [words of keys][D].
#pragma once

#include "attention_keys.h"
#include "attention_words.h"

namespace pdserve {

// 4 words of 16 rows, `stride` elements apart → word j of row i at lane i of to[j].
template <class T>
__attribute__((always_inline)) inline void load_transposed(const T* rows, int64_t stride, __m512i* to) {
  const auto at = [](const T* row) __attribute__((always_inline)) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row));
  };
  const T *first = rows, *second = rows + 4 * stride, *third = rows + 8 * stride, *fourth = second + 8 * stride;
  __m512i r[4];  // rows i, i+4, i+8, i+12
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int64_t row = i * stride;
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(at(first + row)), at(second + row), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(at(third + row)), at(fourth + row), 1);
    r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
  to[0] = _mm512_unpacklo_epi64(a, c);
  to[1] = _mm512_unpackhi_epi64(a, c);
  to[2] = _mm512_unpacklo_epi64(b, d);
  to[3] = _mm512_unpackhi_epi64(b, d);
}

// 16·C columns of the keys that share a word: one row, or two `stride` apart. Where a mask is 0 the key counts as zeros.
template <int C>
__attribute__((always_inline)) inline void load_values(const float* row, int64_t, __m512i* to) {
  static_assert(C == 1);
  to[0] = _mm512_loadu_si512(row);
}
template <int C>
__attribute__((always_inline)) inline void load_values(const float* row, int64_t stride, bool, bool, __m512i* to) {
  load_values<C>(row, stride, to);
}

#ifdef PDSERVE_HAS_BF16
template <int C>
__attribute__((always_inline)) inline void pair_values(__m512i a, __m512i b, __m512i* to) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  to[0] = _mm512_permutex2var_epi16(a, low, b);
  if (C == 2) to[1] = _mm512_permutex2var_epi16(a, _mm512_add_epi16(low, _mm512_set1_epi16(16)), b);
}
template <int C>
__attribute__((always_inline)) inline void load_values(const bf16* row, int64_t stride, __m512i* to) {
  if (C == 2)
    pair_values<C>(_mm512_loadu_si512(row), _mm512_loadu_si512(row + stride), to);
  else
    pair_values<C>(_mm512_maskz_loadu_epi32(0xff, row), _mm512_maskz_loadu_epi32(0xff, row + stride), to);
}
template <int C>
__attribute__((always_inline)) inline void load_values(const bf16* row, int64_t stride, bool has_first, bool has_second,
                                                       __m512i* to) {
  const __mmask16 mask = first_lanes(C * 8);
  pair_values<C>(_mm512_maskz_loadu_epi32(has_first ? mask : __mmask16(0), row),
                 _mm512_maskz_loadu_epi32(has_second ? mask : __mmask16(0), row + stride), to);
}
#endif

// Keys outside [begin, end) become anything.
template <class T>
void pack_keys(const KeyGroups<T>& keys, int64_t head_dim, Ahead& ahead, uint32_t* to) {
  const int64_t words = head_dim / Words<T>::kPer;
  for (int g = keys.first_group(); g < keys.last_group(); ++g)
    for (int64_t word = 0; word < words; word += 4) {
      __m512i turned[4];
      const char* lines = ahead.take<4>();
      load_transposed(keys.rows[g] + word * Words<T>::kPer, head_dim, turned);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        fetch_line(lines + 64 * j);
        _mm512_store_si512(to + (word + j) * kBlockKeys + g * kLanes, turned[j]);
      }
    }
}

// Only the words of keys in [begin, end) are written.
template <class T>
void pack_values(const KeyGroups<T>& values, int64_t head_dim, Ahead& ahead, uint32_t* to) {
  constexpr int P = Words<T>::kPer;
  for (int key = values.begin / P * P; key < values.end; key += P) {
    const T* row = values.rows[key / kLanes] + key % kLanes * head_dim;
    uint32_t* word = to + key / P * head_dim;
    const bool has_first = key >= values.begin, has_second = key + 1 < values.end;
    __m512i columns[P];
    int64_t d = 0;
    for (; d + P * kLanes <= head_dim; d += P * kLanes) {
      const char* lines = ahead.take<P>();
      for (int i = 0; i < P; ++i) fetch_line(lines + 64 * i);
      load_values<P>(row + d, head_dim, has_first, has_second, columns);
      for (int c = 0; c < P; ++c) _mm512_store_si512(word + d + c * kLanes, columns[c]);
    }
    if (d < head_dim) {
      load_values<1>(row + d, head_dim, has_first, has_second, columns);
      _mm512_store_si512(word + d, columns[0]);
    }
  }
}

}  // namespace pdserve
