// A stack of llama-like decoder layers: what it is made of, what one step is, and what it keeps between calls.
//
// The structs cross the C interface: engine/native/library.py has the same fields in the same order. Pointers to
// weights are packed as gemm.h says; norms, biases and rotary tables are float32. `void*` is float or bf16,
// as `is_bf16` says.
#pragma once

#include "attention.h"
#include "common.h"
#include "gemm.h"

namespace pdserve {

struct LayerWeights {
  const float* attention_norm;  // [hidden]
  const void* qkv;              // [(Hq + 2·H)·D, hidden]
  const float* qkv_bias;        // null: none, like every bias and the two norms that follow
  const float* query_norm;      // [D], for each head
  const float* key_norm;
  const void* attention_out;  // [hidden, Hq·D]
  const float* attention_out_bias;
  const float* mlp_norm;  // [hidden]
  const void* gate_up;    // 16 rows of gate, then 16 rows of up, and so on
  const float* gate_up_bias;
  const void* down;  // [hidden, intermediate]
  const float* down_bias;
  int64_t sliding_window;  // 0: none
};

struct ModelWeights {
  int64_t is_bf16, num_layers, hidden, intermediate, num_query_heads, num_kv_heads, head_dim, vocab;
  float norm_epsilon, attention_scaling;
  const LayerWeights* layers;
  const void* embedding;  // [vocab][hidden], not packed
  const float* cosines;   // [positions][D/2]
  const float* sines;
  const float* final_norm;
  const void* head;  // [vocab, hidden]
};

// Layers [first_layer, last_layer) of one step. Layer 0 begins with the embedding, the last ends with the logits;
// between two calls the rows wait in the workspace. `progress` goes up by one with every layer.
struct Step {
  int64_t num_threads, first_layer, last_layer, num_rows;
  const int64_t* token_ids;  // [T]
  const int64_t* positions;  // [T]
  int64_t num_logits;
  const int64_t* logit_rows;  // [R]
  float* logits;              // [R][vocab]
  PoolView pool;
  PagedRows paged;
  int64_t* progress;  // read by other threads
};

// One for each engine: two steps at once need two.
struct Workspace {
  Scratch residual, normed, qkv, attended, gated, tiles;
};

template <class T>
void run_layers(const ModelWeights& model, Workspace& workspace, const Step& step);

}  // namespace pdserve
