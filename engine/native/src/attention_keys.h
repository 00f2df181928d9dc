// Where K and V lie in the paged pool.
#pragma once

#include <algorithm>

#include "attention.h"

namespace pdserve {

constexpr int kBlockKeys = 64;  // keys that are looked at together, at positions that are a multiple of it
constexpr int kGroups = kBlockKeys / kLanes;

// Into the second-level cache. (The compiler takes a function of nothing but prefetches for one without effect.)
__attribute__((always_inline)) inline void fetch_line(const char* at) { asm volatile("prefetcht1 %0" : : "m"(*at)); }

// What is to be fetched into the second-level cache, line by line, while something else is computed. Evenly spread
// and in the order of the addresses: so the processor keeps the most lines on their way.
class Ahead {
 public:
  void add(const void* data, int64_t bytes) {
    if (count_ == kMaxPieces || bytes == 0) return;
    const char* first = static_cast<const char*>(data);
    pieces_[count_++] = {first, first + bytes};
  }
  // The next N lines, and up to N-1 behind the end of a piece; where nothing is left, lines that are at hand already.
  template <int N>
  __attribute__((always_inline)) const char* take() {
    if (index_ == count_) return reinterpret_cast<const char*>(this);
    Piece& piece = pieces_[index_];
    const char* first = piece.at;
    piece.at += 64 * N;
    if (piece.at >= piece.end) ++index_;
    return first;
  }

 private:
  struct Piece {
    const char *at, *end;
  };
  static constexpr int kMaxPieces = 64;
  Piece pieces_[kMaxPieces];
  int count_ = 0, index_ = 0;
};

// The keys of one sequence in one layer.
template <class T>
class Context {
 public:
  Context(const PoolView& pool, int layer, const PagedRows& rows, int32_t seq)
      : pool_(pool), data_(static_cast<const T*>(pool.data) + layer * 2 * pool.side_size()),
        table_(rows.block_tables + int64_t(seq) * rows.table_width) {}

  const T* key(int64_t position) const {
    return data_ + table_[position / pool_.block_size] * pool_.stride() + position % pool_.block_size * pool_.head_dim;
  }

  // What is read of heads [head, head_end) at the positions [begin, end), in the order in which it lies.
  void list(int64_t begin, int64_t end, int64_t head, int64_t head_end, Ahead& ahead) const {
    const int64_t heads_size = (head_end - head) * pool_.head_size() * int64_t(sizeof(T));
    while (begin < end) {
      const int64_t slot = begin % pool_.block_size, count = std::min(pool_.block_size - slot, end - begin);
      const T* from = key(begin) + head * pool_.head_size();
      begin += count;
      if (count == pool_.block_size && head_end - head == pool_.num_kv_heads) {
        ahead.add(from, 2 * heads_size);
        continue;
      }
      for (int64_t side = 0; side < 2; ++side, from += pool_.side_size())
        if (count == pool_.block_size)
          ahead.add(from, heads_size);
        else
          for (int64_t h = 0; h < head_end - head; ++h)
            ahead.add(from + h * pool_.head_size(), count * pool_.head_dim * int64_t(sizeof(T)));
    }
  }

 private:
  PoolView pool_;
  const T* data_;
  const int32_t* table_;
};

// K or V of one head for 64 keys: groups of 16 rows of D, one row after the other. Where the pool has them so, they are
// read in place, else from a copy. Rows outside [begin, end) may hold anything.
template <class T>
struct KeyGroups {
  const T* rows[kGroups];
  int32_t begin, end;

  // The 64 keys from `first` on, of which those at the positions [from, to) are asked for; `copies` [64][D].
  KeyGroups(const Context<T>& context, const PoolView& pool, int64_t offset, int64_t first, int64_t from, int64_t to,
            T* copies)
      : begin(int32_t(std::max<int64_t>(0, from - first))), end(int32_t(std::min<int64_t>(kBlockKeys, to - first))) {
    const bool are_rows_joined = pool.block_size % kLanes == 0;
    for (int32_t g = begin / kLanes; g * kLanes < end; ++g) {
      rows[g] = are_rows_joined ? context.key(first + g * kLanes) + offset : copies + g * kLanes * pool.head_dim;
      if (are_rows_joined) continue;
      for (int32_t i = std::max(begin, g * kLanes); i < std::min(end, (g + 1) * kLanes); ++i)
        std::memcpy(copies + i * pool.head_dim, context.key(first + i) + offset, size_t(pool.head_dim) * sizeof(T));
    }
  }

  int first_group() const { return begin / kLanes; }
  int last_group() const { return int(ceil_div(end, kLanes)); }
};

}  // namespace pdserve
