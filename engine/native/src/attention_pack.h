// K and V of one block of keys, out of the pool and into the order in which the tiles read them.
#pragma once

#include "attention_tile.h"

namespace pdserve {

// The pool's blocks lie one after the other: [N, L, 2, H, B, D].
struct PoolView {
  void* data;
  int64_t num_layers, num_kv_heads, block_size, head_dim;

  // In elements.
  int64_t side_size() const { return num_kv_heads * block_size * head_dim; }  // K, or V, of one layer
  int64_t block_size_all() const { return num_layers * 2 * side_size(); }
};

// Turns a square of 16×16 words: word j of row i becomes word i of row j.
inline void transpose(__m512i* r) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// rows[i] is key i of the block → [words][64], for the first `num_keys` keys (a multiple of 16).
template <class T>
void pack_keys(const T* const* rows, int64_t offset, int32_t num_keys, int64_t head_dim, uint32_t* to) {
  const int64_t words = head_dim / Words<T>::kPer;
  for (int32_t first = 0; first < num_keys; first += kLanes)
    for (int64_t word = 0; word < words; word += kLanes) {
      __m512i square[kLanes];
      const __mmask16 mask = first_lanes(words - word);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        square[i] = _mm512_maskz_loadu_epi32(mask, rows[first + i] + offset + word * Words<T>::kPer);
      transpose(square);
      const int64_t count = std::min<int64_t>(kLanes, words - word);
      for (int64_t j = 0; j < count; ++j) _mm512_store_si512(to + (word + j) * kBlockKeys + first, square[j]);
    }
}

inline void pack_values(const float* const* rows, int64_t offset, int32_t num_keys, int64_t head_dim, uint32_t* to) {
  for (int32_t key = 0; key < num_keys; ++key)
    for (int64_t d = 0; d < head_dim; d += kLanes)
      _mm512_store_si512(to + key * head_dim + d, _mm512_loadu_si512(rows[key] + offset + d));
}

#ifdef PDSERVE_HAS_BF16
// [pairs of keys][D][2].
inline void pack_values(const bf16* const* rows, int64_t offset, int32_t num_keys, int64_t head_dim, uint32_t* to) {
  for (int32_t key = 0; key < num_keys; key += 2, to += head_dim)
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const auto load = [&](int32_t k) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[k] + offset + d)));
      };
      _mm512_store_si512(to + d, _mm512_or_si512(load(key), _mm512_slli_epi32(load(key + 1), 16)));
    }
}
#endif

}  // namespace pdserve
