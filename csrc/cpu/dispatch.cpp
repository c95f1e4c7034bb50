// Selects the kernels for the CPU's instruction set, and runs them on torch's threads.
#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include "kernels.h"

namespace layernorm::cpu {
namespace {

struct Kernels {
  const char* capability;
  void (*forward)(const ForwardParams&);
  void (*backward)(const BackwardParams&);
  void (*channels_first_forward)(const ChannelsFirstForwardParams&);
  void (*channels_first_backward)(const ChannelsFirstBackwardParams&);
};

#define LAYERNORM_KERNELS(capability)                                                           \
  Kernels {                                                                                     \
    #capability, capability::forward, capability::backward, capability::channels_first_forward, \
        capability::channels_first_backward                                                     \
  }

// torch's choice, so that ATEN_CPU_CAPABILITY=default|avx2 applies to these kernels, too.
Kernels choose() {
#if defined(LAYERNORM_X86)
  const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") return LAYERNORM_KERNELS(AVX512);
  if (capability == "AVX2") return LAYERNORM_KERNELS(AVX2);
#endif
  return LAYERNORM_KERNELS(DEFAULT);
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace

const char* capability() { return kernels().capability; }

int num_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

void run_on_threads(int64_t n, int64_t grain, Task task, const void* context) {
  if (n <= grain) {
    task(context, 0, n);  // at::parallel_for would first set up a parallel region
  } else {
    at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { task(context, begin, end); });
  }
}

int64_t backward_workspace(const BackwardParams& p) {
  if (fits_stack(p.rows, p.cols)) return 0;
  const int64_t acc_size = p.dtype == Dtype::kFloat64 ? 8 : 4;
  const int64_t padded_cols = (p.cols + kMaxPackSize - 1) / kMaxPackSize * kMaxPackSize;
  return (2 * num_slots(p.rows) * padded_cols + kCoefficients * p.rows) * acc_size;
}

int64_t channels_first_backward_workspace(const ChannelsFirstBackwardParams& p) {
  if (!p.grad_weight && !p.grad_bias) return 0;
  const bool is_16_bit = p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  const int64_t acc_size = p.dtype == Dtype::kFloat64 ? 8 : 4;
  const int64_t padded_channels = (p.channels + kMaxPackSize - 1) / kMaxPackSize * kMaxPackSize;
  return 2 * Blocks(p.images, p.channels, p.pixels, is_16_bit ? 2 : acc_size).slots * padded_channels * acc_size;
}

void forward(const ForwardParams& params) { kernels().forward(params); }
void backward(const BackwardParams& params) { kernels().backward(params); }
void channels_first_forward(const ChannelsFirstForwardParams& params) { kernels().channels_first_forward(params); }
void channels_first_backward(const ChannelsFirstBackwardParams& params) { kernels().channels_first_backward(params); }

}  // namespace layernorm::cpu
