// Reads memory as fast as the cores can: what a memory-bound step is measured against.
#include <cstdint>

namespace {

typedef uint64_t Line __attribute__((vector_size(64)));  // one cache line

// So many pieces are read side by side: with fewer the prefetchers leave the memory idle now and then.
constexpr int64_t kStreams = 12;
constexpr int64_t kUnroll = 4;

uint64_t read_lines(const Line* lines, int64_t num_lines) {
  const int64_t length = num_lines / kStreams;
  Line sums[kUnroll] = {};
  for (int64_t i = 0; i + kUnroll <= length; i += kUnroll)
    for (int64_t stream = 0; stream < kStreams; ++stream) {
      const Line* here = lines + stream * length + i;
      for (int64_t k = 0; k < kUnroll; ++k) {
        __builtin_prefetch(here + kUnroll + k);
        sums[k] ^= here[k];
      }
    }
  uint64_t sum = 0;
  for (const Line& each : sums)
    for (int k = 0; k < 8; ++k) sum ^= each[k];
  return sum;
}

}  // namespace

// `data` is aligned to 64 bytes. The sum is given back so that no compiler leaves the reading out.
extern "C" uint64_t pdserve_read(const void* data, int64_t num_bytes, int64_t num_threads) {
  const Line* lines = static_cast<const Line*>(data);
  const int64_t share = num_bytes / static_cast<int64_t>(sizeof(Line)) / num_threads;
  uint64_t sum = 0;
#pragma omp parallel for num_threads(num_threads) reduction(^ : sum)
  for (int64_t thread = 0; thread < num_threads; ++thread) sum ^= read_lines(lines + thread * share, share);
  return sum;
}
