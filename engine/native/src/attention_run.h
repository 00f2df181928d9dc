// What `attention.h` declares. Included once for each element type: it takes the compiler seconds.
#pragma once

#include "attention_unit.h"

namespace pdserve {

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
      T* to = layer_data + table[position / pool.block_size] * pool.stride() + position % pool.block_size * pool.head_dim;
      for (int64_t head = 0; head < pool.num_kv_heads; ++head, to += pool.head_size()) {
        std::memcpy(to, key + row * row_stride + head * pool.head_dim, bytes);
        std::memcpy(to + pool.side_size(), value + row * row_stride + head * pool.head_dim, bytes);
      }
    }
  }
}

template <class T>
void paged_attention(const PoolView& pool, int layer, const PagedRows& rows, const T* query, int64_t query_stride,
                     int num_query_heads, T* out, int64_t out_stride, const AttentionRules& rules) {
  const Asked<T> asked(pool, layer, rows, query, query_stride, num_query_heads, out, out_stride, rules);
  const std::vector<Unit> units = cut(asked, omp_get_max_threads());
  static thread_local Scratch halves;
  float* unfinished = halves.get<float>(units.empty() ? 0 : units.back().state_end);
#pragma omp parallel
  {
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < units.size(); ++i)
      UnitRun<T>(asked, units[i]).run(i + 1 < units.size() ? &units[i + 1] : nullptr, unfinished);
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < units.size(); ++i)
      if (units[i].is_first_of_many()) put_together(asked, &units[i], unfinished);
  }
}

}  // namespace pdserve
