// Registers the operators as torch.ops.layernorm.
#include <torch/library.h>

#include "ops.h"

namespace layernorm {

const char* const kOperatorNamespace = "layernorm";

namespace {

#if !defined(WITH_CUDA)
// Throws an error that says why there are no CUDA kernels, instead of the dispatcher's list of backends.
void refuse(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK(false,
              "layernorm_ext was built without CUDA kernels, for a reason that `python -m layernorm_ext` prints");
}
#endif

}  // namespace

TORCH_LIBRARY(layernorm, m) { Operators::define(m); }

TORCH_LIBRARY_IMPL(layernorm, CPU, m) { Operators::implement_cpu(m); }

TORCH_LIBRARY_IMPL(layernorm, CUDA, m) {
#if defined(WITH_CUDA)
  Operators::implement_cuda(m);
#else
  for (const char* name : {"forward", "forward.fused", "forward_.fused", "backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
#endif
}

TORCH_LIBRARY_IMPL(layernorm, Meta, m) { Operators::implement_meta(m); }

TORCH_LIBRARY_IMPL(layernorm, Negative, m) { Operators::implement_negative(m); }

TORCH_LIBRARY_IMPL(layernorm, Functionalize, m) { Operators::implement_functionalize(m); }

TORCH_LIBRARY_IMPL(layernorm, Autograd, m) { Operators::implement_autograd(m); }

TORCH_LIBRARY_IMPL(layernorm, FuncTorchBatchedDecomposition, m) { Operators::implement_vmap(m); }

TORCH_LIBRARY_IMPL(layernorm, FuncTorchBatched, m) { Operators::implement_batched(m); }

TORCH_LIBRARY_IMPL(layernorm, CompositeExplicitAutograd, m) { Operators::implement_any_backend(m); }

TORCH_LIBRARY_IMPL(layernorm, CompositeImplicitAutograd, m) { Operators::implement_composite(m); }

}  // namespace layernorm
