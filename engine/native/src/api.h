// What every C function of the library shares: it gives null, or why it failed.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

#include "common.h"

namespace pdserve {

// The message lives until the same thread's next failure.
inline const char* failure(const std::string& reason) {
  thread_local std::string message;
  message = reason;
  return message.c_str();
}

template <class Body>
const char* guarded(int64_t num_threads, const Body& body) {
  omp_set_num_threads(int(num_threads));  // of this thread's parallel regions
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return failure(error.what());
  }
}

// Calls body(T{}) for the element type.
template <class Body>
void with_type(bool is_bf16, const Body& body) {
  if (!is_bf16) return body(float{});
#ifdef PDSERVE_HAS_BF16
  return body(bf16{});
#else
  throw std::runtime_error("this build has no bf16");
#endif
}

}  // namespace pdserve
