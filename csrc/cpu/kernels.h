// The interface between dispatch.cpp, which is compiled once and uses torch, and the kernels (forward.cpp,
// backward.cpp, channels_first.cpp), which are compiled once per instruction set and include no torch header.
#pragma once

#include <cstdint>

#include "../layer_norm.h"

namespace layernorm::cpu {

#define LAYERNORM_DECLARE_KERNELS(capability)                 \
  namespace capability {                                      \
  void forward(const ForwardParams& params);                  \
  void backward(const BackwardParams& params);                \
  void channels_first_forward(const ForwardParams& params);   \
  void channels_first_backward(const BackwardParams& params); \
  }
LAYERNORM_DECLARE_KERNELS(DEFAULT)
#if defined(LAYERNORM_X86)
LAYERNORM_DECLARE_KERNELS(AVX2)
LAYERNORM_DECLARE_KERNELS(AVX512)
#endif
#undef LAYERNORM_DECLARE_KERNELS

// The instruction set in use: "DEFAULT", "AVX2" or "AVX512".
const char* capability();

int num_threads();

// Calls task(context, begin, end) on torch's threads, for ranges of at least `grain` that cover [0, n).
using Task = void (*)(const void* context, int64_t begin, int64_t end);
void run_on_threads(int64_t n, int64_t grain, Task task, const void* context);

constexpr int64_t kMaxPackSize = 32;  // of all instruction sets

namespace {

template <class F>
inline void parallel_for(int64_t n, int64_t grain, const F& f) {
  const Task call = [](const void* context, int64_t begin, int64_t end) {
    (*static_cast<const F*>(context))(begin, end);
  };
  run_on_threads(n, grain, call, &f);
}

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline bool wants_parameters(const BackwardParams& p) { return p.grad_weight.data || p.grad_bias.data; }
inline bool has_gradient_per_group(const BackwardParams& p) {
  return p.grad_weight.group_stride || p.grad_bias.group_stride;
}

inline int64_t padded_cols(const Params& p) { return ceil_div(p.cols, kMaxPackSize) * kMaxPackSize; }

}  // namespace
}  // namespace layernorm::cpu
