// Attention's work, cut into units that share nothing.
#pragma once

#include <vector>

#include "attention_thin.h"
#include "attention_tile.h"

namespace pdserve {

// One call: what is asked of one layer.
template <class T>
struct Asked {
  Asked(const PoolView& pool, int layer, const PagedRows& rows, const T* query, int64_t query_stride,
        int num_query_heads, T* out, int64_t out_stride, const AttentionRules& rules)
      : pool(pool), layer(layer), rows(rows), query(query), query_stride(query_stride), out(out),
        out_stride(out_stride), rules(rules), group(num_query_heads / pool.num_kv_heads), dim(pool.head_dim),
        exponent(rules.softcap == 0 ? Exponent{rules.scaling * kLog2E, 0}
                                    : Exponent{rules.softcap * kLog2E, rules.scaling / rules.softcap}) {}

  const PoolView pool;
  const int layer;
  const PagedRows rows;
  const T* const query;
  const int64_t query_stride;
  T* const out;
  const int64_t out_stride;
  const AttentionRules rules;
  const int64_t group;  // query heads that share a KV head
  const int64_t dim;
  const Exponent exponent;

  int64_t num_tokens(int32_t seq) const { return rows.first_row[seq + 1] - rows.first_row[seq]; }
  int64_t position(int32_t seq, int64_t token) const { return rows.context_len[seq] - num_tokens(seq) + token; }
  int64_t window_begin(int64_t position) const {
    return rules.sliding_window == 0 ? 0 : std::max<int64_t>(0, position + 1 - rules.sliding_window);
  }
};

constexpr int64_t kPartKeys = 512;  // a multiple of kBlockKeys
constexpr int64_t kUnitRows = 384;  // rows of one KV head that share one reading of K and V
constexpr int64_t kMaxJoinedRows = 48;  // of several KV heads that are read side by side

// Tokens [first, last) of a sequence's rows, for KV heads [head, head_end), and keys at the positions [begin, end).
struct Unit {
  int32_t seq, head, head_end, first, last;
  int64_t begin, end;
  int32_t part, num_parts;  // of the units that differ in their keys only
  int64_t state, state_end;  // where the sums of one part of several are kept, in floats

  bool is_first_of_many() const { return part == 0 && num_parts > 1; }
  int64_t rows(int64_t group) const { return (last - first) * group; }  // of each KV head
};

// Long contexts are split over threads by keys, if there are too few sequences to keep them busy.
template <class T>
std::vector<Unit> cut(const Asked<T>& asked, int num_threads) {
  std::vector<Unit> units;
  int64_t state = 0, work = 0;
  for (int32_t seq = 0; seq < asked.rows.num_seqs; ++seq) work += asked.num_tokens(seq) * asked.rows.context_len[seq];
  const int64_t fair_share = num_threads == 1 ? work : work / (2 * num_threads);
  for (int32_t seq = asked.rows.num_seqs - 1; seq >= 0; --seq) {
    const int64_t n = asked.num_tokens(seq), tokens = std::max<int64_t>(1, std::min(n, kUnitRows / asked.group));
    const bool is_split = n <= tokens && n * asked.rows.context_len[seq] > fair_share;
    const int32_t num_heads = int32_t(asked.pool.num_kv_heads);
    const int64_t rows = n * asked.group;
    const int32_t heads = rows > kThinRows || is_split ? 1 : int32_t(std::min<int64_t>(num_heads, kMaxJoinedRows / rows));
    for (int64_t last = n; last > 0; last -= tokens)
      for (int32_t head = 0; head < num_heads; head += heads) {
        const int64_t first = std::max<int64_t>(0, last - tokens);
        const int64_t begin = asked.window_begin(asked.position(seq, first)), end = asked.position(seq, last);
        const int64_t first_part = begin / kPartKeys;
        const int32_t num_parts = is_split ? int32_t(ceil_div(end, kPartKeys) - first_part) : 1;
        for (int32_t part = 0; part < num_parts; ++part) {
          Unit unit{seq, head, std::min(head + heads, num_heads), int32_t(first), int32_t(last), begin, end, part, num_parts, state, state};
          if (num_parts > 1) {
            unit.begin = std::max(begin, (first_part + part) * kPartKeys);
            unit.end = std::min(end, (first_part + part + 1) * kPartKeys);
            unit.state_end = state += Running::size(heads * unit.rows(asked.group), asked.dim);
          }
          units.push_back(unit);
        }
      }
  }
  return units;
}

template <class T>
void finish(const Asked<T>& asked, const Unit& unit, const Running& total) {
  int64_t row = 0;
  for (int64_t kv_head = unit.head; kv_head < unit.head_end; ++kv_head)
    for (int64_t token = unit.first; token < unit.last; ++token)
      for (int64_t g = 0; g < asked.group; ++g, ++row) {
        const int64_t head = kv_head * asked.group + g;
        float sum = _mm512_reduce_add_ps(load16(total.sum + row * kLanes)), factor = 1;
        if (asked.rules.sinks != nullptr) {
          const float sink = asked.rules.sinks[head] * kLog2E, largest = std::max(sink, total.max[row]);
          factor = exp2_1(total.max[row] - largest);
          sum = sum * factor + exp2_1(sink - largest);
        }
        const __m512 scale = _mm512_set1_ps(factor / sum);
        T* to = asked.out + (asked.rows.first_row[unit.seq] + token) * asked.out_stride + head * asked.dim;
        for (int64_t d = 0; d < asked.dim; d += kLanes)
          store16(to + d, _mm512_mul_ps(load16(total.values + row * asked.dim + d), scale));
      }
}

// units[0] is the first of several that differ in their keys only.
template <class T>
void put_together(const Asked<T>& asked, const Unit* units, float* unfinished) {
  const int64_t rows = (units[0].head_end - units[0].head) * units[0].rows(asked.group);
  const Running total(unfinished + units[0].state, rows, asked.dim);
  for (int32_t part = 1; part < units[0].num_parts; ++part)
    total.add(Running(unfinished + units[part].state, rows, asked.dim), rows, asked.dim);
  finish(asked, units[0], total);
}

template <class T>
class UnitRun {
 public:
  UnitRun(const Asked<T>& asked, const Unit& unit)
      : asked_(asked), unit_(unit), context_(asked.pool, asked.layer, asked.rows, unit.seq),
        head_rows_(unit.rows(asked.group)), num_rows_((unit.head_end - unit.head) * head_rows_),
        words_(asked.dim / Words<T>::kPer) {
    static thread_local Scratch scratch;
    const int64_t packed = kBlockKeys * asked.dim, queries = num_rows_ * words_;
    const int64_t state = Running::size(num_rows_, asked.dim), scores = kMaxJoinedRows * kBlockKeys;
    float* memory = scratch.get<float>(4 * packed + queries + 2 * state + 2 * scores);
    keys_ = reinterpret_cast<uint32_t*>(memory);
    values_ = keys_ + packed;
    key_copies_ = reinterpret_cast<T*>(values_ + packed);
    value_copies_ = key_copies_ + packed;
    scores_ = memory + 4 * packed;
    weights_ = reinterpret_cast<uint32_t*>(scores_ + scores);
    query_ = weights_ + scores;
    total_ = Running(scores_ + 2 * scores + queries, num_rows_, asked.dim);
    part_ = Running(scores_ + 2 * scores + queries + state, num_rows_, asked.dim);
  }

  // While the last keys are seen to, the first ones of `next` are fetched.
  void run(const Unit* next, float* unfinished) {
    load_query();
    total_.clear(num_rows_, asked_.dim);
    for (int64_t block = unit_.begin / kBlockKeys * kBlockKeys; block < unit_.end;) {
      const int64_t part_end = std::min(unit_.end, (block / kPartKeys + 1) * kPartKeys);
      const bool is_first = block <= unit_.begin;
      const Running& part = is_first ? total_ : part_;
      if (!is_first) part.clear(num_rows_, asked_.dim);
      for (; block < part_end; block += kBlockKeys) {
        Ahead ahead = behind(block, next);
        if (head_rows_ <= kThinRows)
          run_thin(block, part, ahead);
        else
          run_packed(block, part, ahead);
      }
      if (!is_first) total_.add(part, num_rows_, asked_.dim);
    }
    if (unit_.num_parts == 1)
      finish(asked_, unit_, total_);
    else
      std::memcpy(unfinished + unit_.state, total_.sum, size_t(Running::size(num_rows_, asked_.dim)) * sizeof(float));
  }

 private:
  // Rows are those of one KV head after the other: the unit's tokens, each with the query heads of the KV head.
  void load_query() const {
    uint32_t* to = query_;
    for (int32_t head = unit_.head; head < unit_.head_end; ++head)
      for (int64_t token = unit_.first; token < unit_.last; ++token) {
        const T* from = asked_.query + (asked_.rows.first_row[unit_.seq] + token) * asked_.query_stride +
                        head * asked_.group * asked_.dim;
        std::memcpy(to, from, size_t(asked_.group * words_) * sizeof(uint32_t));
        to += asked_.group * words_;
      }
  }

  // What is read after the keys from `block` on.
  Ahead behind(int64_t block, const Unit* next) const {
    Ahead ahead;
    block += kBlockKeys;
    if (block < unit_.end)
      context_.list(block, std::min(block + kBlockKeys, unit_.end), unit_.head, unit_.head_end, ahead);
    else if (next != nullptr)
      Context<T>(asked_.pool, asked_.layer, asked_.rows, next->seq)
          .list(next->begin, std::min(round_up(next->begin + 1, kBlockKeys), next->end), next->head, next->head_end,
                ahead);
    return ahead;
  }

  KeyGroups<T> keys(int64_t block, int32_t head) const {
    return {context_, asked_.pool, head * asked_.pool.head_size(), block, unit_.begin, unit_.end, key_copies_};
  }
  KeyGroups<T> values(int64_t block, int32_t head) const {
    const int64_t offset = head * asked_.pool.head_size() + asked_.pool.side_size();
    return {context_, asked_.pool, offset, block, unit_.begin, unit_.end, value_copies_};
  }

  void run_thin(int64_t block, const Running& part, Ahead& ahead) const {
    for (int32_t head = unit_.head; head < unit_.head_end; ++head) {
      const int64_t row = (head - unit_.head) * head_rows_;
      score_few<T>(head_rows_, query_ + row * words_, words_, keys(block, head), asked_.dim, ahead,
                   scores_ + row * kBlockKeys);
    }
    const Seen last = sees(head_rows_ - 1, block);
    const bool is_masked = sees(0, block).end < kBlockKeys || last.begin > 0;
    Seen seen[kMaxJoinedRows];
    float rescale[kMaxJoinedRows];
    if (is_masked)
      for (int64_t row = 0; row < num_rows_; ++row) seen[row] = sees(row % head_rows_, block);
    soften_few<T>(num_rows_, scores_, seen, last.end, is_masked, asked_.exponent, part, asked_.dim, weights_, rescale);
    for (int32_t head = unit_.head; head < unit_.head_end; ++head) {
      const int64_t row = (head - unit_.head) * head_rows_;
      value_few<T>(head_rows_, weights_ + row * kBlockKeys, values(block, head), asked_.dim, rescale + row, ahead,
                   part.values + row * asked_.dim);
    }
  }

  void run_packed(int64_t block, const Running& part, Ahead& ahead) const {
    pack_keys(keys(block, unit_.head), asked_.dim, ahead, keys_);
    const KeyGroups<T> rows = values(block, unit_.head);
    pack_values(rows, asked_.dim, ahead, values_);
    const int64_t num_tiles = ceil_div(num_rows_, kTileRows);
    Seen seen[kTileRows];
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t row = num_rows_ * tile / num_tiles, row_end = num_rows_ * (tile + 1) / num_tiles;
      const Seen first = sees(row, block), last = sees(row_end - 1, block);
      if (last.end <= 0) continue;
      if (first.begin >= kBlockKeys) break;
      const bool is_masked = first.end < kBlockKeys || last.begin > 0;
      if (is_masked)
        for (int64_t r = row; r < row_end; ++r) seen[r - row] = sees(r, block);
      attend_rows<T>(row_end - row, query_ + row * words_, words_, keys_, values_, asked_.dim, seen,
                     Seen{rows.begin, last.end}, is_masked, asked_.exponent, part.at(row, asked_.dim));
    }
  }

  // Which of the 64 keys from `block` on a row of a KV head sees.
  Seen sees(int64_t row, int64_t block) const {
    const int64_t position = asked_.position(unit_.seq, unit_.first + row / asked_.group);
    return {int32_t(std::max<int64_t>(0, asked_.window_begin(position) - block)),
            int32_t(std::max<int64_t>(0, std::min<int64_t>(kBlockKeys, std::min(position + 1, unit_.end) - block)))};
  }

  const Asked<T>& asked_;
  const Unit unit_;
  const Context<T> context_;
  const int64_t head_rows_, num_rows_;
  const int64_t words_;  // of a head
  uint32_t *keys_, *values_, *query_, *weights_;
  T *key_copies_, *value_copies_;
  float* scores_;
  Running total_, part_;
};

}  // namespace pdserve
