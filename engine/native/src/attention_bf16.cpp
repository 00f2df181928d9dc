#include "attention_run.h"

#ifdef PDSERVE_HAS_BF16
namespace pdserve {

template void write_kv<bf16>(const PoolView&, int, const PagedRows&, const bf16*, const bf16*, int64_t);
template void paged_attention<bf16>(const PoolView&, int, const PagedRows&, const bf16*, int64_t, int, bf16*, int64_t,
                                    const AttentionRules&);

}  // namespace pdserve
#endif
