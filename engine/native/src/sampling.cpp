// From scores to tokens: temperature, top-k, top-p of what is left, min-p, and the best of what is left with its
// noise. engine/draw.py says the same slowly, and engine/noise.py the noise.
//
// A row is read once, into scores and the best of each block of them; later passes look only into blocks whose best
// can matter. Noise costs two logarithms, so it is worked out only where it could win: a token wins only if its
// noise is at least d = (best so far) - (its score), and that needs a uniform number of at most e^-d, so a hash that
// begins with floor(d · log2 e) zero bits. The hash alone is a few instructions for eight tokens.
#include <algorithm>
#include <cmath>
#include <functional>

#include "api.h"

using namespace pdserve;

namespace {

constexpr int64_t kBlock = 64;
constexpr uint64_t kGamma = 0x9E3779B97F4A7C15;
constexpr uint64_t kMix1 = 0xBF58476D1CE4E5B9, kMix2 = 0x94D049BB133111EB;
constexpr float kNothing = -std::numeric_limits<float>::infinity();
// Nearly all nuclei lie among the tokens at most so far behind the best (log p).
constexpr float kNear = 12.0f;
// A token so far behind has no mass in float32.
constexpr float kNoMass = 88.0f;
constexpr int64_t kFew = 64;

struct Wishes {
  int64_t num;
  const int64_t* rows;
  const float* temperatures;  // 0: greedy
  const int64_t* top_k;       // 0: no cut
  const double* top_p;        // 1: no cut
  const float* min_p;         // 0: no cut
  const int64_t* keys;
  int64_t* token_ids;
  uint8_t* is_finite;
};

// What one thread works with: scores of one row, padded with what nobody draws.
struct Row {
  int64_t num_blocks;
  float* scores;      // [num_blocks · kBlock]
  float* block_best;  // [num_blocks]
  float* some;        // [num_blocks · kBlock]: scores picked out of it
  float* masses;      // [num_blocks · kBlock]: of those, where a nucleus is asked for
};

int64_t row_bytes(int64_t num_blocks) { return round_up(num_blocks * (3 * kBlock + 1) * int64_t(sizeof(float)), 64); }

Row row_in(char* memory, int64_t num_blocks) {
  const int64_t size = num_blocks * kBlock;
  float* scores = reinterpret_cast<float*>(memory);
  return {num_blocks, scores, scores + 3 * size, scores + size, scores + 2 * size};
}

template <class T>
__m512 load_scores(const T* scores, int64_t left) {
  if (left >= kLanes) return load16(scores);
  float some[kLanes];
  std::fill_n(some, kLanes, kNothing);
  for (int64_t i = 0; i < left; ++i) some[i] = to_float(scores[i]);
  return load16(some);
}

struct Best {
  float score;
  int64_t token_id;
};

// NaN, if there is one, and its place; otherwise the first of the best.
template <class T>
Best best_of(const T* scores, int64_t vocab) {
  constexpr int64_t kPart = 16 * kBlock;
  Best best{kNothing, 0};
  for (int64_t part = 0; part < vocab; part += kPart) {
    const int64_t end = std::min(vocab, part + kPart);
    __m512 most = _mm512_set1_ps(kNothing);
    __mmask16 is_nan = 0;
    for (int64_t i = part; i < end; i += kLanes) {
      const __m512 x = load_scores(scores + i, end - i);
      is_nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      most = _mm512_max_ps(most, x);
    }
    if (is_nan) return {std::numeric_limits<float>::quiet_NaN(), 0};
    const float score = _mm512_reduce_max_ps(most);
    if (score > best.score) best = {score, part};
  }
  for (const T* at = scores + best.token_id; best.token_id < vocab && to_float(*at) != best.score; ++at) ++best.token_id;
  return best;
}

// Fills the row with scores over temperature; false if one is NaN.
template <class T>
bool read_row(const T* scores, int64_t vocab, float temperature, const Row& row) {
  const __m512 divisor = _mm512_set1_ps(temperature);
  __mmask16 is_nan = 0;
  for (int64_t block = 0; block < row.num_blocks; ++block) {
    __m512 most = _mm512_set1_ps(kNothing);
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kLanes) {
      const __m512 x = _mm512_div_ps(load_scores(scores + i, vocab - i), divisor);
      is_nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      most = _mm512_max_ps(most, x);
      store16(row.scores + i, x);
    }
    row.block_best[block] = _mm512_reduce_max_ps(most);
  }
  return !is_nan;
}

// Calls use(scores, which of the 16) for all vectors with a score of at least `border`.
template <class Use>
void for_each_from(const Row& row, float border, const Use& use) {
  const __m512 least = _mm512_set1_ps(border);
  for (int64_t block = 0; block < row.num_blocks; ++block) {
    if (row.block_best[block] < border) continue;
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kLanes) {
      const __m512 x = load16(row.scores + i);
      const __mmask16 is_left = _mm512_cmp_ps_mask(x, least, _CMP_GE_OQ);
      if (is_left) use(x, is_left);
    }
  }
}

// Collects the scores from `border` on in row.some; gives their end.
float* pick_from(const Row& row, float border) {
  float* end = row.some;
  for_each_from(row, border, [&](__m512 x, __mmask16 is_left) {
    store16(end, _mm512_maskz_compress_ps(is_left, x));
    end += __builtin_popcount(is_left);
  });
  return end;
}

// The k-th best score. Blocks whose best is among the k best of blocks hold at least k scores from there on.
float top_k_border(const Row& row, int64_t k) {
  float least = kNothing;
  if (k <= row.num_blocks) {
    std::copy_n(row.block_best, row.num_blocks, row.some);
    std::nth_element(row.some, row.some + k - 1, row.some + row.num_blocks, std::greater<float>());
    least = row.some[k - 1];
  }
  float* end = pick_from(row, least);
  std::nth_element(row.some, row.some + k - 1, end, std::greater<float>());
  return row.some[k - 1];
}

// Sums in float64, so that their order hardly matters.
class Sum {
 public:
  void add(__m512 values) {
    const __m512d bits = _mm512_castps_pd(values);
    low_ = _mm512_add_pd(low_, _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_castpd512_pd256(bits))));
    high_ = _mm512_add_pd(high_, _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(bits, 1))));
  }
  double get() const { return _mm512_reduce_add_pd(_mm512_add_pd(low_, high_)); }

 private:
  __m512d low_ = _mm512_setzero_pd(), high_ = _mm512_setzero_pd();
};

// Scores picked out of a row, and e^(score - best) of each.
struct Picks {
  float* scores;
  float* masses;
  int64_t count;

  void add(__m512 some_scores, __m512 some_masses, __mmask16 which) {
    store16(scores + count, _mm512_maskz_compress_ps(which, some_scores));
    store16(masses + count, _mm512_maskz_compress_ps(which, some_masses));
    count += __builtin_popcount(which);
  }

  double mass_from(float least) const {
    Sum sum;
    for (int64_t i = 0; i < count; i += kLanes) {
      const __mmask16 is_left = _mm512_mask_cmp_ps_mask(first_lanes(count - i), load16(scores + i),
                                                        _mm512_set1_ps(least), _CMP_GE_OQ);
      sum.add(load16(masses + i, is_left));
    }
    return sum.get();
  }

  // Drops all but those in [low, high).
  void keep(float low, float high) {
    const int64_t num = count;
    count = 0;
    for (int64_t i = 0; i < num; i += kLanes) {
      const __m512 x = load16(scores + i);
      const __mmask16 is_low = _mm512_mask_cmp_ps_mask(first_lanes(num - i), x, _mm512_set1_ps(low), _CMP_GE_OQ);
      add(x, load16(masses + i), _mm512_mask_cmp_ps_mask(is_low, x, _mm512_set1_ps(high), _CMP_LT_OQ));
    }
  }
};

// Picks the scores from `near` on; gives the mass of all from `low` on.
double pick_near(const Row& row, float best, float low, float near, Picks& picks) {
  const __m512 one = _mm512_set1_ps(best), least = _mm512_set1_ps(near);
  Sum sum;
  picks.count = 0;
  for_each_from(row, low, [&](__m512 x, __mmask16 is_left) {
    const __m512 masses = _mm512_maskz_mov_ps(is_left, exp16(_mm512_sub_ps(x, one)));
    sum.add(masses);
    const __mmask16 is_near = _mm512_mask_cmp_ps_mask(is_left, x, least, _CMP_GE_OQ);
    if (is_near) picks.add(x, masses, is_near);
  });
  return sum.get();
}

// The least score inside the smallest set of best tokens that holds `top_p` of the mass of those from `border` on.
// It is closed in between `low`, which is inside, and `high`, which is not enough, until few are left to sort.
float nucleus_border(const Row& row, float best, float border, double top_p) {
  const float last = std::max(border, best - kNoMass);
  float low = std::max(border, best - kNear), high = std::nextafter(best, -kNothing);
  Picks picks{row.some, row.masses, 0};
  const double wanted = top_p * pick_near(row, best, last, low, picks);
  if (picks.mass_from(low) < wanted) {
    low = last;
    pick_near(row, best, last, low, picks);
  }
  double above = 0;  // the mass from `high` on
  while (picks.count > kFew) {
    const float middle = low + (high - low) / 2;
    if (!(low < middle && middle < high)) break;
    const double mass = above + picks.mass_from(middle);
    if (mass >= wanted) {
      low = middle;
    } else {
      high = middle;
      above = mass;
    }
    picks.keep(low, high);
  }
  float* end = picks.scores + picks.count;
  std::sort(picks.scores, end, std::greater<float>());
  for (float* at = picks.scores; at < end; ++at) {
    above += _mm512_cvtss_f32(exp16(_mm512_set1_ps(*at - best)));
    if (above >= wanted) return *at;
  }
  return low;
}

uint64_t last_mix(uint64_t z) { return z ^ (z >> 31); }

// All but the last step of SplitMix64's finalizer, which leaves the upper 31 bits as they are.
uint64_t mix_half(uint64_t z) {
  z = (z ^ (z >> 30)) * kMix1;
  return (z ^ (z >> 27)) * kMix2;
}

__m512i multiply64(__m512i x, uint64_t by) {
  const __m512i factor = _mm512_set1_epi64(int64_t(by));
#ifdef __AVX512DQ__
  return _mm512_mullo_epi64(x, factor);
#else
  return _mm512_mullox_epi64(x, factor);
#endif
}

__m512i mix_half(__m512i z) {
  z = multiply64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 30)), kMix1);
  return multiply64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 27)), kMix2);
}

double gumbel(uint64_t hash) {
  const double uniform = std::min((double(hash >> 11) + 0.5) * 0x1p-53, 1 - 0x1p-24);
  return -std::log(-std::log1p(-uniform));
}

// The most a half mixed hash can be, for noise of at least `distance`; 0 if no noise is so large.
uint64_t most_for(double distance) {
  const double bits = std::floor(distance * 1.4426950408889634 - 1e-6);
  if (bits > 54) return 0;
  return bits <= 0 ? ~uint64_t(0) : ~uint64_t(0) >> int(std::min(bits, 31.0));
}

// The token with the best score and noise of those from `border` on, the first of equal ones.
int64_t perturbed_best(const Row& row, float best, float border, uint64_t key) {
  int64_t winner = 0;
  while (row.scores[winner] != best) ++winner;
  double most = double(best) + gumbel(last_mix(mix_half(key + uint64_t(winner + 1) * kGamma)));
  alignas(64) uint64_t steps[8], hashes[8];
  for (int lane = 0; lane < 8; ++lane) steps[lane] = uint64_t(lane + 1) * kGamma;
  const __m512i first = _mm512_add_epi64(_mm512_set1_epi64(int64_t(key)), _mm512_load_si512(steps));
  for (int64_t block = 0; block < row.num_blocks; ++block) {
    const uint64_t limit = row.block_best[block] < border ? 0 : most_for(most - double(row.block_best[block]));
    if (limit == 0) continue;
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += 8) {
      const __m512i z = mix_half(_mm512_add_epi64(first, _mm512_set1_epi64(int64_t(uint64_t(i) * kGamma))));
      unsigned could_win = _mm512_cmple_epu64_mask(z, _mm512_set1_epi64(int64_t(limit)));
      if (could_win) _mm512_store_si512(hashes, z);
      for (; could_win; could_win &= could_win - 1) {
        const int lane = __builtin_ctz(could_win);
        if (row.scores[i + lane] < border) continue;
        const double perturbed = double(row.scores[i + lane]) + gumbel(last_mix(hashes[lane]));
        if (perturbed > most || (perturbed == most && i + lane < winner)) {
          most = perturbed;
          winner = i + lane;
        }
      }
    }
  }
  return winner;
}

Best best_of_row(const Row& row) {
  Best best{kNothing, 0};
  for (int64_t block = 0; block < row.num_blocks; ++block) best.score = std::max(best.score, row.block_best[block]);
  return best;
}

template <class T>
void draw_one(const T* scores, int64_t vocab, const Wishes& wishes, int64_t index, const Row& row) {
  Best best;
  if (wishes.temperatures[index] == 0) {
    best = best_of(scores, vocab);
  } else if (!read_row(scores, vocab, wishes.temperatures[index], row)) {
    best = {std::numeric_limits<float>::quiet_NaN(), 0};
  } else {
    best = best_of_row(row);
    if (std::isfinite(best.score)) {
      float border = kNothing;
      const int64_t k = wishes.top_k[index];
      if (k > 0 && k < vocab) border = top_k_border(row, k);
      if (wishes.top_p[index] < 1) border = nucleus_border(row, best.score, border, wishes.top_p[index]);
      if (wishes.min_p[index] > 0) border = std::max(border, best.score + std::log(wishes.min_p[index]));
      best.token_id = perturbed_best(row, best.score, border, uint64_t(wishes.keys[index]));
    }
  }
  wishes.token_ids[index] = best.token_id;
  wishes.is_finite[index] = std::isfinite(best.score);
}

template <class T>
void draw_all(const T* scores, int64_t stride, int64_t vocab, const Wishes& wishes, Scratch& scratch) {
  const int64_t num_blocks = ceil_div(vocab, kBlock), bytes = row_bytes(num_blocks);
  char* memory = scratch.get<char>(bytes * omp_get_max_threads());
#pragma omp parallel for schedule(dynamic)
  for (int64_t i = 0; i < wishes.num; ++i) {
    const Row row = row_in(memory + bytes * omp_get_thread_num(), num_blocks);
    draw_one(scores + wishes.rows[i] * stride, vocab, wishes, i, row);
  }
}

}  // namespace

// scores [N, V], rows `stride` apart → the tokens that the wishes ask for.
extern "C" const char* pdserve_draw(int64_t num_threads, int64_t is_bf16, const void* scores, int64_t stride,
                                    int64_t vocab, const Wishes* wishes) {
  return guarded(num_threads, [&] {
    thread_local Scratch scratch;
    if (is_bf16)
      draw_all(static_cast<const bf16*>(scores), stride, vocab, *wishes, scratch);
    else
      draw_all(static_cast<const float*>(scores), stride, vocab, *wishes, scratch);
  });
}
