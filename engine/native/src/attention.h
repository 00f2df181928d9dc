// Attention straight from the paged pool, for decoding rows and chunks alike (after FlashAttention-2, Dao 2023).
//
// A sequence's last n tokens ask; K and V of 64 keys at a time are read once for all rows of a KV head. Keys are
// summed up in parts of 512 at fixed positions, and the parts then put together in order: a row's result depends, bit
// for bit, on its own query and context only, not on the rows beside it, on how a prompt was cut into chunks, nor on
// the number of threads. Slots that were never written, and blocks of others, may hold NaN: no sum takes them in.
//
// T is float or bf16; head_dim a multiple of 16 up to 256; block_size any. Call from serial code: these open
// parallel regions.
#pragma once

#include "common.h"

namespace pdserve {

// The pool's blocks lie one after the other: [N, L, 2, H, B, D].
struct PoolView {
  void* data;
  int64_t num_layers, num_kv_heads, block_size, head_dim;

  // In elements.
  int64_t head_size() const { return block_size * head_dim; }       // K, or V, of one head in one block
  int64_t side_size() const { return num_kv_heads * head_size(); }  // K, or V, of one layer in one block
  int64_t stride() const { return num_layers * 2 * side_size(); }   // from one block to the next
};

struct PagedRows {
  int32_t num_seqs;
  const int32_t* first_row;     // [S+1]
  const int32_t* context_len;   // [S], new tokens included
  const int32_t* block_tables;  // [S][table_width], what lies behind a context's blocks is not read
  int32_t table_width;
};

struct AttentionRules {
  float scaling;           // > 0
  int32_t sliding_window;  // 0: none; a query sees so many keys, itself included
  float softcap;           // 0: none
  const float* sinks;      // null: none; [Hq]: a logit each that takes weight and gives nothing
};

constexpr int64_t kMaxHeadDim = 256;

// key and value [T][H·D], rows `row_stride` elements apart.
template <class T>
void write_kv(const PoolView& pool, int layer, const PagedRows& rows, const T* key, const T* value,
              int64_t row_stride);

// query [T][Hq·D] → out [T][Hq·D], rows so many elements apart. The rows' own K and V are in the pool already.
template <class T>
void paged_attention(const PoolView& pool, int layer, const PagedRows& rows, const T* query, int64_t query_stride,
                     int num_query_heads, T* out, int64_t out_stride, const AttentionRules& rules);

}  // namespace pdserve
