// Attention straight from the paged pool, for decoding rows and chunks alike (after FlashAttention-2, Dao 2023).
//
// A sequence's last n tokens ask; K and V of 64 keys at a time are read once for all rows of a KV head. Keys are
// summed up in parts of 512 at fixed positions, and the parts then put together in order: a row's result depends, bit
// for bit, on its own query and context only, not on the rows beside it, on how a prompt was cut into chunks, nor on
// the number of threads. Keys that no row of a sequence sees are never read: they may hold NaN.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_pack.h"

namespace pdserve {

struct PagedRows {
  int32_t num_seqs;
  const int32_t* first_row;     // [S+1]
  const int32_t* context_len;   // [S], new tokens included
  const int32_t* block_tables;  // [S][table_width]
  int32_t table_width;
};

struct AttentionRules {
  float scaling;           // > 0
  int32_t sliding_window;  // 0: none
  float softcap;           // 0: none
  const float* sinks;      // null: none; [Hq]
};

// key and value [T][H·D], rows `row_stride` apart.
template <class T>
void write_kv(const PoolView& pool, int layer, const PagedRows& rows, const T* key, const T* value,
              int64_t row_stride) {
  T* layer_data = static_cast<T*>(pool.data) + layer * 2 * pool.side_size();
  const size_t bytes = size_t(pool.head_dim) * sizeof(T);
  for (int32_t seq = 0; seq < rows.num_seqs; ++seq) {
    const int32_t* table = rows.block_tables + int64_t(seq) * rows.table_width;
    const int64_t start = rows.context_len[seq] - rows.first_row[seq + 1];
#pragma omp parallel for schedule(static) if (rows.first_row[seq + 1] - rows.first_row[seq] > 64)
    for (int64_t row = rows.first_row[seq]; row < rows.first_row[seq + 1]; ++row) {
      const int64_t position = start + row;
      T* to = layer_data + table[position / pool.block_size] * pool.block_size_all() +
              position % pool.block_size * pool.head_dim;
      for (int64_t head = 0; head < pool.num_kv_heads; ++head, to += pool.block_size * pool.head_dim) {
        std::memcpy(to, key + row * row_stride + head * pool.head_dim, bytes);
        std::memcpy(to + pool.side_size(), value + row * row_stride + head * pool.head_dim, bytes);
      }
    }
  }
}

constexpr int64_t kPartKeys = 512;
constexpr int64_t kUnitRows = 384;  // rows of one KV head that share a reading of K and V

// Tokens [first, last) of one sequence's rows for one KV head.
struct Unit {
  int32_t seq, head, first, last;
};

template <class T>
class Attention {
 public:
  Attention(const PoolView& pool, int layer, const PagedRows& rows, const T* query, int64_t query_stride,
            int num_query_heads, T* out, int64_t out_stride, const AttentionRules& rules)
      : pool_(pool), rows_(rows), query_(query), query_stride_(query_stride), out_(out), out_stride_(out_stride),
        rules_(rules), group_(num_query_heads / pool.num_kv_heads), dim_(pool.head_dim),
        words_(pool.head_dim / Words<T>::kPer),
        layer_data_(static_cast<const T*>(pool.data) + layer * 2 * pool.side_size()) {
    constexpr float kLog2E = 1.4426950408889634f;
    exponent_ = rules.softcap == 0 ? Exponent{rules.scaling * kLog2E, 0}
                                   : Exponent{rules.softcap * kLog2E, rules.scaling / rules.softcap};
  }

  void run() {
    const std::vector<Unit> units = cut();
#pragma omp parallel for schedule(dynamic, 1)
    for (size_t i = 0; i < units.size(); ++i) run_unit(units[i]);
  }

 private:
  std::vector<Unit> cut() const {
    std::vector<Unit> units;
    const int32_t tokens = int32_t(std::max<int64_t>(1, kUnitRows / group_));
    for (int32_t seq = rows_.num_seqs - 1; seq >= 0; --seq) {
      const int32_t n = rows_.first_row[seq + 1] - rows_.first_row[seq];
      for (int32_t last = n; last > 0; last -= tokens)
        for (int32_t head = 0; head < pool_.num_kv_heads; ++head)
          units.push_back({seq, head, std::max(0, last - tokens), last});
    }
    return units;
  }

  void run_unit(const Unit& unit) {
    static thread_local Scratch scratch;
    const int64_t num_rows = (unit.last - unit.first) * group_;
    const int64_t padded_words = round_up(words_, kLanes);
    float* memory = scratch.template get<float>(num_rows * (padded_words + 2 * (dim_ + kLanes + 1) + 2 + 16) +
                                                kBlockKeys * 2 * dim_ + 256);
    uint32_t* keys = reinterpret_cast<uint32_t*>(memory);
    uint32_t* values = keys + kBlockKeys * words_;
    uint32_t* query = values + kBlockKeys / Words<T>::kPer * dim_;
    float* state = reinterpret_cast<float*>(query + num_rows * words_);
    const auto running_at = [&](float* from) {
      return Running{from + num_rows * (kLanes + dim_), from, from + num_rows * kLanes};
    };
    const int64_t state_size = num_rows * (kLanes + dim_ + 1);
    const Running part = running_at(state), total = running_at(state + state_size);
    Seen* seen = reinterpret_cast<Seen*>(state + 2 * state_size);
    load_query(unit, query);
    // Positions: the first token's first key, and behind the last token.
    const int64_t context = rows_.context_len[unit.seq];
    const int64_t n = rows_.first_row[unit.seq + 1] - rows_.first_row[unit.seq];
    const int64_t first_position = context - n + unit.first, end = context - n + unit.last;
    const int64_t begin = window_begin(first_position);
    clear(total, num_rows);
    for (int64_t at = begin / kPartKeys * kPartKeys; at < end; at += kPartKeys) {
      clear(part, num_rows);
      const int64_t part_end = std::min(at + kPartKeys, end);
      for (int64_t block = std::max(at, begin / kBlockKeys * kBlockKeys); block < part_end; block += kBlockKeys)
        run_block(unit, block, begin, end, first_position, query, keys, values, seen, part);
      merge(part, total, num_rows);
    }
    finish(unit, total);
  }

  int64_t window_begin(int64_t position) const {
    return rules_.sliding_window == 0 ? 0 : std::max<int64_t>(0, position + 1 - rules_.sliding_window);
  }

  // The unit's rows are its tokens, one after the other, each with the query heads of the KV head.
  void load_query(const Unit& unit, uint32_t* to) const {
    for (int64_t token = unit.first; token < unit.last; ++token, to += group_ * words_)
      std::memcpy(to, query_ + (rows_.first_row[unit.seq] + token) * query_stride_ + unit.head * group_ * dim_,
                  size_t(group_ * words_) * sizeof(uint32_t));
  }

  void clear(const Running& running, int64_t num_rows) const {
    std::fill(running.max, running.max + num_rows, kNothing);
    std::fill(running.sum, running.sum + num_rows * (kLanes + dim_), 0.0f);  // the values lie behind the sums
  }

  void run_block(const Unit& unit, int64_t block, int64_t begin, int64_t end, int64_t first_position,
                 const uint32_t* query, uint32_t* keys, uint32_t* values, Seen* seen, const Running& part) const {
    alignas(64) static const T zeros[256] = {};
    const T* rows[kBlockKeys];
    const int32_t* table = rows_.block_tables + int64_t(unit.seq) * rows_.table_width;
    const int64_t head_offset = unit.head * pool_.block_size * dim_, value_offset = head_offset + pool_.side_size();
    const int32_t num_keys = int32_t(std::min<int64_t>(kBlockKeys, round_up(end - block, 32)));
    bool is_seen[kBlockKeys];
    for (int32_t i = 0; i < num_keys; ++i) {
      const int64_t position = block + i;
      is_seen[i] = position >= begin && position < end;
      rows[i] = is_seen[i] ? layer_data_ + table[position / pool_.block_size] * pool_.block_size_all() +
                                 position % pool_.block_size * dim_ + head_offset
                           : zeros;
    }
    pack_keys<T>(rows, 0, num_keys, dim_, keys);
    for (int32_t i = 0; i < num_keys; ++i)
      if (is_seen[i]) rows[i] += value_offset - head_offset;
    pack_values(rows, 0, num_keys, dim_, values);
    const int64_t num_rows = (unit.last - unit.first) * group_;
    const int64_t first_row = std::max<int64_t>(0, block - first_position) * group_;
    const int64_t num_tiles = ceil_div(num_rows - first_row, kTileRows);
    for (int64_t row = first_row; row < num_rows; ++row) {
      const int64_t position = first_position + row / group_;
      seen[row].begin = int32_t(std::max<int64_t>(0, window_begin(position) - block));
      seen[row].end = int32_t(std::min<int64_t>(kBlockKeys, position + 1 - block));
    }
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t row = first_row + (num_rows - first_row) * tile / num_tiles;
      const int64_t count = first_row + (num_rows - first_row) * (tile + 1) / num_tiles - row;
      const int32_t num_seen = seen[row + count - 1].end;
      if (seen[row].begin >= kBlockKeys) break;
      const bool is_masked = seen[row].end < kBlockKeys || seen[row + count - 1].begin > 0;
      attend_rows<T>(count, query + row * words_, keys, values, dim_, seen + row, num_seen, is_masked, exponent_,
                     part.at(row, dim_));
    }
  }

  void merge(const Running& part, const Running& total, int64_t num_rows) const {
    for (int64_t row = 0; row < num_rows; ++row) {
      const float largest = std::max(part.max[row], total.max[row]);
      if (largest == kNothing) continue;
      const __m512 of_part = exp2_16(_mm512_set1_ps(part.max[row] - largest));
      const __m512 of_total = exp2_16(_mm512_set1_ps(total.max[row] - largest));
      total.max[row] = largest;
      mix(part.sum + row * kLanes, of_part, total.sum + row * kLanes, of_total, kLanes);
      mix(part.values + row * dim_, of_part, total.values + row * dim_, of_total, dim_);
    }
  }

  static void mix(const float* from, __m512 of_from, float* to, __m512 of_to, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(from + i), of_from);
      _mm512_storeu_ps(to + i, _mm512_fmadd_ps(_mm512_loadu_ps(to + i), of_to, scaled));
    }
  }

  void finish(const Unit& unit, const Running& total) const {
    constexpr float kLog2E = 1.4426950408889634f;
    int64_t row = 0;
    for (int64_t token = unit.first; token < unit.last; ++token)
      for (int64_t g = 0; g < group_; ++g, ++row) {
        const int64_t head = unit.head * group_ + g;
        float sum = _mm512_reduce_add_ps(_mm512_loadu_ps(total.sum + row * kLanes)), factor = 1;
        if (rules_.sinks != nullptr) {
          const float sink = rules_.sinks[head] * kLog2E, largest = std::max(sink, total.max[row]);
          factor = exp2_1(total.max[row] - largest);
          sum = sum * factor + exp2_1(sink - largest);
        }
        const __m512 scale = _mm512_set1_ps(factor / sum);
        T* to = out_ + (rows_.first_row[unit.seq] + token) * out_stride_ + head * dim_;
        for (int64_t d = 0; d < dim_; d += kLanes)
          store16(to + d, _mm512_mul_ps(_mm512_loadu_ps(total.values + row * dim_ + d), scale));
      }
  }

  const PoolView pool_;
  const PagedRows rows_;
  const T* query_;
  const int64_t query_stride_;
  T* out_;
  const int64_t out_stride_;
  const AttentionRules rules_;
  const int64_t group_, dim_, words_;
  const T* layer_data_;
  Exponent exponent_;
};

// query [T][Hq·D] → out [T][Hq·D], rows so many elements apart. The rows' own K and V are in the pool already.
template <class T>
void paged_attention(const PoolView& pool, int layer, const PagedRows& rows, const T* query, int64_t query_stride,
                     int num_query_heads, T* out, int64_t out_stride, const AttentionRules& rules) {
  Attention<T>(pool, layer, rows, query, query_stride, num_query_heads, out, out_stride, rules).run();
}

}  // namespace pdserve
