// The decoder stack. The residual stream is float32; what enters a product is T; sums are float32.
#include "decoder.h"

#include <cmath>

namespace pdserve {
namespace {

template <class T>
PackedWeight<T> packed(const void* data, int64_t num_outputs, int64_t depth) {
  return {static_cast<const T*>(data), num_outputs, depth};
}

float mean_square(const float* row, int64_t size) {
  __m512 sums = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512 x = load16(row + i, first_lanes(size - i));
    sums = _mm512_fmadd_ps(x, x, sums);
  }
  return _mm512_reduce_add_ps(sums) / float(size);
}

template <class T>
void rms_norm(const float* row, const float* weight, int64_t size, float epsilon, T* out) {
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean_square(row, size) + epsilon));
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 mask = first_lanes(size - i);
    const __m512 x = _mm512_mul_ps(load16(row + i, mask), scale);
    store16(out + i, _mm512_mul_ps(load16(weight + i, mask), x), mask);
  }
}

template <class T>
void embed(const ModelWeights& model, const Step& step, float* residual) {
  const T* table = static_cast<const T*>(model.embedding);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < step.num_rows; ++row) {
    const T* from = table + step.token_ids[row] * model.hidden;
    float* to = residual + row * model.hidden;
    for (int64_t i = 0; i < model.hidden; i += kLanes) {
      const __mmask16 mask = first_lanes(model.hidden - i);
      store16(to + i, load16(from + i, mask), mask);
    }
  }
}

template <class T>
void norm_rows(const float* rows, const float* weight, const ModelWeights& model, int64_t count, T* out) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < count; ++row)
    rms_norm(rows + row * model.hidden, weight, model.hidden, model.norm_epsilon, out + row * model.hidden);
}

constexpr int64_t kMaxHeadDim = 256;

// One head in place: its norm (null: none), then the rotation of the pairs (i, i + D/2).
template <class T>
void turn_head(T* head, int64_t head_dim, const float* norm, float epsilon, const float* cosines,
               const float* sines) {
  alignas(64) float values[kMaxHeadDim];
  for (int64_t i = 0; i < head_dim; i += kLanes) store16(values + i, load16(head + i));
  if (norm != nullptr) rms_norm(values, norm, head_dim, epsilon, values);
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const __mmask16 mask = first_lanes(half - i);
    const __m512 low = load16(values + i, mask), high = load16(values + half + i, mask);
    const __m512 c = load16(cosines + i, mask), s = load16(sines + i, mask);
    store16(head + i, _mm512_sub_ps(_mm512_mul_ps(low, c), _mm512_mul_ps(high, s)), mask);
    store16(head + half + i, _mm512_add_ps(_mm512_mul_ps(high, c), _mm512_mul_ps(low, s)), mask);
  }
}

template <class T>
void turn_rows(const ModelWeights& model, const LayerWeights& layer, const Step& step, T* qkv, int64_t stride) {
  const int64_t half = model.head_dim / 2;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < step.num_rows; ++row) {
    const float* cosines = model.cosines + step.positions[row] * half;
    const float* sines = model.sines + step.positions[row] * half;
    T* head = qkv + row * stride;
    for (int64_t i = 0; i < model.num_query_heads + model.num_kv_heads; ++i, head += model.head_dim) {
      const float* norm = i < model.num_query_heads ? layer.query_norm : layer.key_norm;
      turn_head(head, model.head_dim, norm, model.norm_epsilon, cosines, sines);
    }
  }
}

template <class T>
void run_layer(const ModelWeights& model, int64_t index, Workspace& workspace, const Step& step) {
  const LayerWeights& layer = model.layers[index];
  const int64_t rows = step.num_rows, hidden = model.hidden;
  const int64_t queries = model.num_query_heads * model.head_dim, keys = model.num_kv_heads * model.head_dim;
  const int64_t stride = queries + 2 * keys;
  float* residual = workspace.residual.get<float>(rows * hidden);
  T* normed = workspace.normed.get<T>(rows * hidden);
  T* qkv = workspace.qkv.get<T>(rows * stride);
  T* attended = workspace.attended.get<T>(rows * queries);
  T* gated = workspace.gated.get<T>(rows * model.intermediate);

  norm_rows(residual, layer.attention_norm, model, rows, normed);
  multiply(normed, hidden, rows, packed<T>(layer.qkv, stride, hidden), workspace.tiles,
           StoreTo<T>{qkv, stride, stride, layer.qkv_bias});
  turn_rows(model, layer, step, qkv, stride);
  write_kv<T>(step.pool, int(index), step.paged, qkv + queries, qkv + queries + keys, stride);
  const AttentionRules rules{model.attention_scaling, int32_t(layer.sliding_window), 0.0f, nullptr};
  paged_attention<T>(step.pool, int(index), step.paged, qkv, stride, int(model.num_query_heads), attended, queries,
                     rules);
  multiply(attended, queries, rows, packed<T>(layer.attention_out, hidden, queries), workspace.tiles,
           AddTo{residual, hidden, hidden, layer.attention_out_bias});

  norm_rows(residual, layer.mlp_norm, model, rows, normed);
  const int64_t gates = 2 * round_up(model.intermediate, kLanes);
  multiply(normed, hidden, rows, packed<T>(layer.gate_up, gates, hidden), workspace.tiles,
           StoreGated<T>{gated, model.intermediate, model.intermediate, layer.gate_up_bias});
  multiply(gated, model.intermediate, rows, packed<T>(layer.down, hidden, model.intermediate), workspace.tiles,
           AddTo{residual, hidden, hidden, layer.down_bias});
}

template <class T>
void write_logits(const ModelWeights& model, Workspace& workspace, const Step& step) {
  const float* residual = workspace.residual.get<float>(step.num_rows * model.hidden);
  T* normed = workspace.normed.get<T>(step.num_logits * model.hidden);
  for (int64_t i = 0; i < step.num_logits; ++i)
    rms_norm(residual + step.logit_rows[i] * model.hidden, model.final_norm, model.hidden, model.norm_epsilon,
             normed + i * model.hidden);
  multiply(normed, model.hidden, step.num_logits, packed<T>(model.head, model.vocab, model.hidden),
           workspace.tiles, StoreTo<float>{step.logits, model.vocab, model.vocab, nullptr});
}

}  // namespace

template <class T>
void run_layers(const ModelWeights& model, Workspace& workspace, const Step& step) {
  if (step.first_layer == 0)
    embed<T>(model, step, workspace.residual.get<float>(step.num_rows * model.hidden));
  for (int64_t layer = step.first_layer; layer < step.last_layer; ++layer) {
    run_layer<T>(model, layer, workspace, step);
    __atomic_fetch_add(step.progress, 1, __ATOMIC_RELAXED);
  }
  if (step.last_layer == model.num_layers) write_logits<T>(model, workspace, step);
}

template void run_layers<float>(const ModelWeights&, Workspace&, const Step&);
#ifdef PDSERVE_HAS_BF16
template void run_layers<bf16>(const ModelWeights&, Workspace&, const Step&);
#endif

}  // namespace pdserve
