// Attention alone, for models whose other layers are not run here: engine/native/attention.py.
#include "api.h"
#include "attention.h"

using namespace pdserve;

extern "C" {

// query [T][Hq·D] → out [T][Hq·D]; key and value [T][H·D] are written to the pool first. Strides of rows, in elements.
const char* pdserve_attend(int64_t num_threads, int64_t is_bf16, const PoolView* pool, int64_t layer,
                           const PagedRows* rows, const void* query, int64_t query_stride, const void* key,
                           const void* value, int64_t key_stride, int64_t num_query_heads, void* out,
                           int64_t out_stride, const AttentionRules* rules) {
  return guarded(num_threads, [&] {
    with_type(is_bf16, [&](auto element) {
      using T = decltype(element);
      write_kv(*pool, int(layer), *rows, static_cast<const T*>(key), static_cast<const T*>(value), key_stride);
      paged_attention(*pool, int(layer), *rows, static_cast<const T*>(query), query_stride, int(num_query_heads),
                      static_cast<T*>(out), out_stride, *rules);
    });
  });
}

}  // extern "C"
