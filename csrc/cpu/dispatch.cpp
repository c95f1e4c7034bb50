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
};

// The kernels follow torch's choice of an instruction set (CPU capability), so that ATEN_CPU_CAPABILITY=default|avx2
// applies to them, too. A build has all capabilities or one; with another one, importing the package fails
// (_compatibility.py).
Kernels choose() {
#if defined(WITH_AVX512)
  if (at::get_cpu_capability() == "AVX512") return {"AVX512", AVX512::forward, AVX512::backward};
#endif
#if defined(WITH_AVX2)
  if (at::get_cpu_capability() == "AVX2") return {"AVX2", AVX2::forward, AVX2::backward};
#endif
#if defined(WITH_DEFAULT)
  return {"DEFAULT", DEFAULT::forward, DEFAULT::backward};
#else
  return {};
#endif
}

const Kernels kernels = choose();

}  // namespace

const char* capability() { return kernels.capability; }

int num_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

void run_on_threads(int64_t n, int64_t grain, Task task, const void* context) {
  if (n <= grain) {
    task(context, 0, n);  // at::parallel_for would first set up a parallel region
  } else {
    at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { task(context, begin, end); });
  }
}

void forward(const ForwardParams& p) { kernels.forward(p); }
void backward(const BackwardParams& p) { kernels.backward(p); }

}  // namespace layernorm::cpu
