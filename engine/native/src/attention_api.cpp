// The C entry points of attention, for models whose other layers are not run here.
#include "attention.h"

using namespace pdserve;

namespace {

template <class T>
void attend(const PoolView& pool, int32_t layer, const PagedRows& rows, const void* query, int64_t query_stride,
            int32_t num_query_heads, void* out, int64_t out_stride, const AttentionRules& rules) {
  paged_attention<T>(pool, layer, rows, static_cast<const T*>(query), query_stride, num_query_heads,
                     static_cast<T*>(out), out_stride, rules);
}

template <class T>
void write(const PoolView& pool, int32_t layer, const PagedRows& rows, const void* key, const void* value,
           int64_t row_stride) {
  write_kv<T>(pool, layer, rows, static_cast<const T*>(key), static_cast<const T*>(value), row_stride);
}

}  // namespace

extern "C" {

void pdserve_write_kv_float(const PoolView* pool, int32_t layer, const PagedRows* rows, const void* key,
                            const void* value, int64_t row_stride) {
  write<float>(*pool, layer, *rows, key, value, row_stride);
}

void pdserve_attention_float(const PoolView* pool, int32_t layer, const PagedRows* rows, const void* query,
                             int64_t query_stride, int32_t num_query_heads, void* out, int64_t out_stride,
                             const AttentionRules* rules) {
  attend<float>(*pool, layer, *rows, query, query_stride, num_query_heads, out, out_stride, *rules);
}

#ifdef PDSERVE_HAS_BF16
void pdserve_write_kv_bf16(const PoolView* pool, int32_t layer, const PagedRows* rows, const void* key,
                           const void* value, int64_t row_stride) {
  write<bf16>(*pool, layer, *rows, key, value, row_stride);
}

void pdserve_attention_bf16(const PoolView* pool, int32_t layer, const PagedRows* rows, const void* query,
                            int64_t query_stride, int32_t num_query_heads, void* out, int64_t out_stride,
                            const AttentionRules* rules) {
  attend<bf16>(*pool, layer, *rows, query, query_stride, num_query_heads, out, out_stride, *rules);
}
#endif

}  // extern "C"
