#include "attention_run.h"

namespace pdserve {

template void write_kv<float>(const PoolView&, int, const PagedRows&, const float*, const float*, int64_t);
template void paged_attention<float>(const PoolView&, int, const PagedRows&, const float*, int64_t, int, float*, int64_t,
                                     const AttentionRules&);

}  // namespace pdserve
