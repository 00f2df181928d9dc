// rows · weightᵀ with the weights packed in the order in which they are read.
//
// A weight [N, K] is kept as panels of 32 outputs: bf16 [N/32][K/2][32][2] (pairs of k for dpbf16), float
// [N/32][K][32]; N and K are padded with zeros. A tile of up to 14 rows × 32 outputs is summed in registers over the
// whole of K, one k (bf16: one pair) after the other. So every output is one sum in one order, whatever else is in
// the step: a row's result does not depend, bit for bit, on how many rows share the product.
//
// Rows are first copied into tiles [K/kLineK][rows][kLineK], a cache line of each row after the other: one stream
// to read, padded with zeros, and no two rows of a wide matrix meet in one set of the cache.
#pragma once

#include <algorithm>

#include "common.h"

namespace pdserve {

constexpr int kPanel = 32;
constexpr int kMaxTileRows = 14;  // × 2 vectors of sums, and 3 registers for what is read

template <class T>
struct Traits;

template <>
struct Traits<float> {
  static constexpr int kGroup = 1;  // neighbours in k that one instruction takes
  static constexpr int kLineK = 16;
};

template <>
struct Traits<bf16> {
  static constexpr int kGroup = 2;
  static constexpr int kLineK = 32;
};

template <class T>
struct PackedWeight {
  const T* data = nullptr;
  int64_t num_outputs = 0;
  int64_t depth = 0;

  int64_t groups() const { return ceil_div(depth, Traits<T>::kGroup); }
  int64_t panels() const { return ceil_div(num_outputs, kPanel); }
  int64_t panel_size() const { return groups() * Traits<T>::kGroup * kPanel; }
  int64_t size() const { return panels() * panel_size(); }
};

// weight [N, K] with rows `stride` apart → packed, size() elements at `to`.
template <class T>
void pack_weight(const T* weight, int64_t stride, const PackedWeight<T>& shape, T* to) {
  constexpr int G = Traits<T>::kGroup;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < shape.panels(); ++panel) {
    T* out = to + panel * shape.panel_size();
    for (int64_t group = 0; group < shape.groups(); ++group)
      for (int64_t column = 0; column < kPanel; ++column)
        for (int64_t g = 0; g < G; ++g) {
          const int64_t n = panel * kPanel + column, k = group * G + g;
          *out++ = n < shape.num_outputs && k < shape.depth ? weight[n * stride + k] : T{};
        }
  }
}

// How M rows are cut into tiles: as few as can be, of even size.
struct Tiles {
  int64_t num_rows, count;
  explicit Tiles(int64_t rows) : num_rows(rows), count(ceil_div(rows, kMaxTileRows)) {}
  int64_t first(int64_t tile) const { return num_rows * tile / count; }
  int64_t rows(int64_t tile) const { return first(tile + 1) - first(tile); }
};

template <class T>
constexpr int64_t padded_depth(int64_t depth) {
  return (depth + Traits<T>::kLineK - 1) / Traits<T>::kLineK * Traits<T>::kLineK;
}

inline void copy_line(float* to, const float* from, int64_t count) { store16(to, load16(from, first_lanes(count))); }

inline void copy_line(bf16* to, const bf16* from, int64_t count) {
  if (count >= 32) {
    _mm512_storeu_si512(to, _mm512_loadu_si512(from));
  } else {
    std::memset(to, 0, 64);
    std::memcpy(to, from, size_t(count) * sizeof(bf16));
  }
}

// Rows [first, first + count), `stride` apart → one tile.
template <class T>
void pack_tile(const T* rows, int64_t stride, int64_t count, int64_t depth, T* to) {
  constexpr int L = Traits<T>::kLineK;
  for (int64_t k = 0; k < depth; k += L)
    for (int64_t row = 0; row < count; ++row, to += L) copy_line(to, rows + row * stride + k, depth - k);
}

#ifdef PDSERVE_HAS_BF16
inline __m512 multiply_add(__m512 sum, const bf16* pair, __m512i weights) {
  int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)weights);
}
#endif
inline __m512 multiply_add(__m512 sum, const float* value, __m512i weights) {
  return _mm512_fmadd_ps(_mm512_set1_ps(*value), _mm512_castsi512_ps(weights), sum);
}

// One tile of M rows against one panel → sums [M][32]. Meanwhile `ahead` is fetched into the second-level cache,
// kAhead lines for every group of k.
template <class T, int M, int kAhead>
void multiply_tile(const T* tile, const T* panel, int64_t groups, const char* ahead, float* out) {
  constexpr int G = Traits<T>::kGroup, L = Traits<T>::kLineK;
  __m512 sums[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
  while (groups > 0) {
    const int64_t count = std::min<int64_t>(groups, L / G);
    for (int64_t i = 0; i < count; ++i) {
      const __m512i low = _mm512_loadu_si512(panel), high = _mm512_loadu_si512(panel + 16 * G);
      panel += kPanel * G;
      if (kAhead >= 1) _mm_prefetch(ahead, _MM_HINT_T1);
      if (kAhead >= 2) _mm_prefetch(ahead + 64, _MM_HINT_T1);
      ahead += 64 * kAhead;
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        sums[m][0] = multiply_add(sums[m][0], tile + m * L, low);
        sums[m][1] = multiply_add(sums[m][1], tile + m * L, high);
      }
      tile += G;
    }
    tile += M * L - count * G;
    groups -= count;
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    store16(out + m * kPanel, sums[m][0]);
    store16(out + m * kPanel + kLanes, sums[m][1]);
  }
}

template <class T, int kAhead>
void multiply_rows(int64_t rows, const T* tile, const T* panel, int64_t groups, const char* ahead, float* out) {
  switch (rows) {
#define PDSERVE_TILE(M) \
  case M:               \
    return multiply_tile<T, M, kAhead>(tile, panel, groups, ahead, out);
    PDSERVE_TILE(1) PDSERVE_TILE(2) PDSERVE_TILE(3) PDSERVE_TILE(4) PDSERVE_TILE(5) PDSERVE_TILE(6) PDSERVE_TILE(7)
    PDSERVE_TILE(8) PDSERVE_TILE(9) PDSERVE_TILE(10) PDSERVE_TILE(11) PDSERVE_TILE(12) PDSERVE_TILE(13) PDSERVE_TILE(14)
#undef PDSERVE_TILE
  }
}

// Rows whose tiles stay in the second-level cache while all panels pass by.
constexpr int64_t kBlockBytes = 384 * 1024;
// A single tile reads every weight once: the next bytes to fetch lie so far ahead in the same stream.
constexpr int64_t kStreamAhead = 512;

// All panels against `tiles` [T][row tiles]; store(row, panel, low, high) gets every sum once.
template <class T, class Store>
void multiply_panels(const T* packed, const Tiles& tiles, int64_t first_tile, int64_t last_tile,
                     const PackedWeight<T>& weight, Part panels, const Store& store) {
  const int64_t depth = padded_depth<T>(weight.depth), groups = weight.groups();
  alignas(64) float sums[kMaxTileRows * kPanel];
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const T* weights = weight.data + panel * weight.panel_size();
    const char* next = reinterpret_cast<const char*>(weights + weight.panel_size());
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      const int64_t row = tiles.first(tile), count = tiles.rows(tile), part = tile - first_tile;
      const T* rows = packed + row * depth;
      if (last_tile - first_tile == 1)
        multiply_rows<T, 2>(count, rows, weights, groups, reinterpret_cast<const char*>(weights) + kStreamAhead, sums);
      else if (part < 2)  // each fetches one half of the next panel
        multiply_rows<T, 1>(count, rows, weights, groups, next + part * groups * 64, sums);
      else
        multiply_rows<T, 0>(count, rows, weights, groups, next, sums);
      for (int64_t m = 0; m < count; ++m)
        store(row + m, panel, load16(sums + m * kPanel), load16(sums + m * kPanel + kLanes));
    }
  }
}

// rows [M, K], `stride` apart; store(row, panel, low, high) may run on any thread, for any order of rows and panels.
template <class T, class Store>
void multiply(const T* rows, int64_t stride, int64_t num_rows, const PackedWeight<T>& weight, Scratch& scratch,
              const Store& store) {
  if (num_rows == 0) return;
  const Tiles tiles(num_rows);
  const int64_t depth = padded_depth<T>(weight.depth);
  T* packed = scratch.get<T>(num_rows * depth);
  const int64_t block_tiles =
      std::max<int64_t>(1, kBlockBytes / (kMaxTileRows * depth * int64_t(sizeof(T))));
  const int64_t num_blocks = ceil_div(tiles.count, block_tiles), num_panels = weight.panels();
#pragma omp parallel
  {
    const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
    const Part mine(tiles.count, thread, num_threads);
    for (int64_t tile = mine.begin; tile < mine.end; ++tile)
      pack_tile(rows + tiles.first(tile) * stride, stride, tiles.rows(tile), weight.depth,
                packed + tiles.first(tile) * depth);
#pragma omp barrier
    // Blocks of rows × panels, block after block, cut evenly.
    Part work(num_blocks * num_panels, thread, num_threads);
    while (work.begin < work.end) {
      const int64_t block = work.begin / num_panels, begin = work.begin % num_panels;
      const int64_t end = std::min(num_panels, begin + work.end - work.begin);
      Part panels = work;
      panels.begin = begin;
      panels.end = end;
      multiply_panels(packed, tiles, block * block_tiles, std::min(tiles.count, (block + 1) * block_tiles), weight,
                      panels, store);
      work.begin += end - begin;
    }
  }
}

// ---- what becomes of the sums ----

// out [M, N], rows `stride` apart; `bias` [N] in float32 or null.
template <class Out>
struct StoreTo {
  Out* out;
  int64_t stride;
  int64_t num_outputs;
  const float* bias;

  void operator()(int64_t row, int64_t panel, __m512 low, __m512 high) const {
    const int64_t first = panel * kPanel;
    put(row, first, low);
    put(row, first + kLanes, high);
  }
  void put(int64_t row, int64_t first, __m512 sum) const {
    const __mmask16 mask = first_lanes(num_outputs - first);
    if (bias != nullptr) sum = _mm512_add_ps(sum, load16(bias + first, mask));
    store16(out + row * stride + first, sum, mask);
  }
};

// residual [M, N] += sums; a bias is rounded in with the sum, before the addition.
struct AddTo {
  float* residual;
  int64_t stride;
  int64_t num_outputs;
  const float* bias;

  void operator()(int64_t row, int64_t panel, __m512 low, __m512 high) const {
    const int64_t first = panel * kPanel;
    put(row, first, low);
    put(row, first + kLanes, high);
  }
  void put(int64_t row, int64_t first, __m512 sum) const {
    const __mmask16 mask = first_lanes(num_outputs - first);
    float* to = residual + row * stride + first;
    if (bias != nullptr) sum = _mm512_add_ps(sum, load16(bias + first, mask));
    store16(to, _mm512_add_ps(load16(to, mask), sum), mask);
  }
};

// out [M, N/2] = silu(gate) · up. The panel's first 16 outputs are gates, its last 16 the ups of the same columns.
// `bias` [N] lies in the same order.
template <class T>
struct StoreGated {
  T* out;
  int64_t stride;
  int64_t num_outputs;  // N/2
  const float* bias;

  void operator()(int64_t row, int64_t panel, __m512 gate, __m512 up) const {
    const int64_t first = panel * kLanes;
    if (bias != nullptr) {
      gate = _mm512_add_ps(gate, load16(bias + panel * kPanel));
      up = _mm512_add_ps(up, load16(bias + panel * kPanel + kLanes));
    }
    store16(out + row * stride + first, _mm512_mul_ps(silu16(gate), up), first_lanes(num_outputs - first));
  }
};

}  // namespace pdserve
