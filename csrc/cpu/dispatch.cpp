// Chooses among the kernels that were compiled once per instruction set, and lends them torch's threads.
#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include "kernels.h"

namespace layernorm::cpu {
namespace {

struct Kernels {
  const char* capability;
  void (*forward)(const ForwardParams&);
  void (*backward)(const BackwardParams&);
};

// PyTorch's own choice, so that ATEN_CPU_CAPABILITY=default|avx2 forces it down for both.
Kernels choose() {
#if defined(LAYERNORM_X86)
  const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") return {"AVX512", AVX512::forward, AVX512::backward};
  if (capability == "AVX2") return {"AVX2", AVX2::forward, AVX2::backward};
#endif
  return {"DEFAULT", DEFAULT::forward, DEFAULT::backward};
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

void forward(const ForwardParams& params) { kernels().forward(params); }
void backward(const BackwardParams& params) { kernels().backward(params); }

}  // namespace layernorm::cpu
