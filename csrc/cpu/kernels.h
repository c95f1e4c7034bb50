// The interface between dispatch.cpp, which is compiled once and uses torch, and the kernels (forward.cpp,
// backward.cpp, channels_first.cpp), which are compiled once per instruction set and include no torch header.
#pragma once

#include <cstdint>

#include "../kernel_params.h"

namespace layernorm::cpu {

#define LAYERNORM_DECLARE_KERNELS(capability, vector_bytes)   \
  namespace capability {                                      \
  constexpr int kLeastVectorBytes = vector_bytes;             \
  void forward(const ForwardParams& params);                  \
  void backward(const BackwardParams& params);                \
  void channels_first_forward(const ForwardParams& params);   \
  void channels_first_backward(const BackwardParams& params); \
  }
LAYERNORM_DECLARE_KERNELS(DEFAULT, 16)
LAYERNORM_DECLARE_KERNELS(AVX2, 32)
LAYERNORM_DECLARE_KERNELS(AVX512, 64)
#undef LAYERNORM_DECLARE_KERNELS

// The instruction set in use: "DEFAULT", "AVX2" or "AVX512".
const char* capability();

int num_threads();

// Calls task(context, begin, end) on torch's threads, for ranges of at least `grain` that cover [0, n).
using Task = void (*)(const void* context, int64_t begin, int64_t end);
void run_on_threads(int64_t n, int64_t grain, Task task, const void* context);

constexpr int64_t kMaxPackSize = 32;  // the most elements of a pack (simd.h) in all instruction sets

namespace {

template <class F>
inline void parallel_for(int64_t n, int64_t grain, const F& f) {
  const Task call = [](const void* context, int64_t begin, int64_t end) {
    (*static_cast<const F*>(context))(begin, end);
  };
  run_on_threads(n, grain, call, &f);
}

constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The gradients of the parameters, in the order of their partial sums. A gradient that is not computed has no data, but
// the sample_stride that it would have, so that the order of the other sums does not depend on which are computed.
struct ParameterGradients {
  explicit ParameterGradients(const BackwardParams& p)
      : weight(p.grad_weight), bias(p.grad_bias), input_scale(p.grad_input_scale), count(input_scale.data ? 3 : 2) {}

  bool any() const { return weight.data || bias.data || input_scale.data; }
  bool any_per_sample() const { return weight.sample_stride || bias.sample_stride || input_scale.sample_stride; }
  bool all_per_sample() const { return is_per_sample(weight) && is_per_sample(bias) && is_per_sample(input_scale); }

  const View weight, bias, input_scale;
  const int64_t count;  // of the arrays of partial sums of a segment; the third is for an input_scale

 private:
  static bool is_per_sample(const View& gradient) { return !gradient.data || gradient.sample_stride; }
};

// Whether input_scale, or the input that it multiplies, has gradients.
inline bool has_input_scale_gradients(const BackwardParams& p) {
  return p.grad_scaled_input.data || p.grad_input_scale.data;
}

// The columns rounded up to whole packs of any instruction set: the elements of an array of partial sums.
inline int64_t padded_cols(const Params& p) { return ceil_div(p.cols, kMaxPackSize) * kMaxPackSize; }

}  // namespace
}  // namespace layernorm::cpu
