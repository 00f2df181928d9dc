// Vectors of 16 numbers over two element types, float and bf16: arithmetic is float32 for both.
//
// Compiled with -ffp-contract=off: a product and a sum become one instruction only where the code says so,
// so that every instance of a template rounds alike.
#pragma once

#include <immintrin.h>
#include <omp.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#ifndef __AVX512F__
#error "these kernels need AVX512F"
#endif
#ifdef __AVX512BF16__
#define PDSERVE_HAS_BF16 1
#endif

namespace pdserve {

struct bf16 {
  uint16_t bits;
};

constexpr int kLanes = 16;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// The mask of the first `count` lanes, for count ≤ 0 none and for count ≥ 16 all.
inline __mmask16 first_lanes(int64_t count) {
  return count >= kLanes ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

inline __m512 widen(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }

inline __m512 load16(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load16(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }
inline void store16(float* to, __m512 value) { _mm512_storeu_ps(to, value); }
inline void store16(float* to, __m512 value, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, value); }
inline float to_float(float value) { return value; }
inline void assign(float& to, float value) { to = value; }

inline __m512 load16(const bf16* from) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline float to_float(bf16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

#ifdef PDSERVE_HAS_BF16
// To the nearest, ties to even; what is too small for a normal number becomes 0.
inline __m256i narrow(__m512 value) { return (__m256i)_mm512_cvtneps_pbh(value); }

// Masked lanes of 16 bits need AVX512BW and VL, which every processor with AVX512-BF16 has.
inline __m512 load16(const bf16* from, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, from)); }
inline void store16(bf16* to, __m512 value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(value)); }
inline void store16(bf16* to, __m512 value, __mmask16 mask) { _mm256_mask_storeu_epi16(to, mask, narrow(value)); }
inline void assign(bf16& to, float value) { store16(&to, _mm512_set1_ps(value), __mmask16(1)); }
#endif

// e^x within 2 units in the last place (Cephes' expf); 0 below about -87.3, -inf included; at most e^88.
inline __m512 exp16(__m512 x) {
  const __mmask16 is_zero = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.33654f), _CMP_LT_OQ);
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.33654f)), _mm512_set1_ps(88.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
  x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  x = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), x);
  __m512 y = _mm512_set1_ps(1.9875691500e-4f);
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.3981999507e-3f));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(8.3334519073e-3f));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(4.1665795894e-2f));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.6666665459e-1f));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(5.0000001201e-1f));
  y = _mm512_fmadd_ps(y, _mm512_mul_ps(x, x), _mm512_add_ps(x, _mm512_set1_ps(1.0f)));
  y = _mm512_scalef_ps(y, n);
  return _mm512_mask_mov_ps(y, is_zero, _mm512_setzero_ps());
}

inline __m512 silu16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// Memory that only grows, on a cache line's border. What was in it is lost when it grows.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  template <class T>
  T* get(int64_t count) {
    const int64_t bytes = round_up(count * int64_t(sizeof(T)), 64);
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(64, size_t(bytes));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

// Part `index` of `count` even parts of [0, total).
struct Part {
  int64_t begin, end;
  Part(int64_t total, int64_t index, int64_t count)
      : begin(total * index / count), end(total * (index + 1) / count) {}
};

}  // namespace pdserve
