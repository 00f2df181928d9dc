// The C interface: engine/native/library.py gives each function its types.
#include "api.h"
#include "decoder.h"

using namespace pdserve;

extern "C" {

// 1: float32 alone; 2: bf16 too.
int64_t pdserve_element_types() {
#ifdef PDSERVE_HAS_BF16
  return 2;
#else
  return 1;
#endif
}

// Elements of a packed weight.
int64_t pdserve_packed_size(int64_t is_bf16, int64_t num_outputs, int64_t depth) {
  return is_bf16 ? PackedWeight<bf16>{nullptr, num_outputs, depth}.size()
                 : PackedWeight<float>{nullptr, num_outputs, depth}.size();
}

const char* pdserve_pack_weight(int64_t num_threads, int64_t is_bf16, const void* weight, int64_t stride,
                                int64_t num_outputs, int64_t depth, void* packed) {
  return guarded(num_threads, [&] {
    with_type(is_bf16, [&](auto element) {
      using T = decltype(element);
      pack_weight(static_cast<const T*>(weight), stride, PackedWeight<T>{nullptr, num_outputs, depth},
                  static_cast<T*>(packed));
    });
  });
}

// rows [M, K] · weight [N, K]ᵀ + bias → out [M, N] in float32.
const char* pdserve_multiply(int64_t num_threads, int64_t is_bf16, const void* rows, int64_t num_rows,
                             const void* packed, int64_t num_outputs, int64_t depth, const float* bias, float* out) {
  return guarded(num_threads, [&] {
    with_type(is_bf16, [&](auto element) {
      using T = decltype(element);
      Scratch tiles;
      multiply(static_cast<const T*>(rows), depth, num_rows,
               PackedWeight<T>{static_cast<const T*>(packed), num_outputs, depth}, tiles,
               StoreTo<float>{out, num_outputs, num_outputs, bias});
    });
  });
}

void* pdserve_new_workspace() { return new (std::nothrow) Workspace; }

void pdserve_free_workspace(void* workspace) { delete static_cast<Workspace*>(workspace); }

const char* pdserve_run_layers(const ModelWeights* model, void* workspace, const Step* step) {
  return guarded(step->num_threads, [&] {
    with_type(model->is_bf16, [&](auto element) {
      run_layers<decltype(element)>(*model, *static_cast<Workspace*>(workspace), *step);
    });
  });
}

}  // extern "C"
