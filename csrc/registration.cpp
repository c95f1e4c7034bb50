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

TORCH_LIBRARY(layernorm, m) {
  RowOperators::define(m);
  ImageOperators::define(m);
}

TORCH_LIBRARY_IMPL(layernorm, CPU, m) {
  RowOperators::implement_cpu(m);
  ImageOperators::implement_cpu(m);
}

TORCH_LIBRARY_IMPL(layernorm, CUDA, m) {
#if defined(WITH_CUDA)
  RowOperators::implement_cuda(m);
  ImageOperators::implement_cuda(m);
#else
  for (const char* name : {"forward", "norm_forward", "norm_forward_", "backward", "norm_backward",
                           "channels_first_forward", "channels_first_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
#endif
}

TORCH_LIBRARY_IMPL(layernorm, Meta, m) {
  RowOperators::implement_meta(m);
  ImageOperators::implement_meta(m);
}

TORCH_LIBRARY_IMPL(layernorm, Autograd, m) {
  RowOperators::implement_autograd(m);
  ImageOperators::implement_autograd(m);
}

TORCH_LIBRARY_IMPL(layernorm, FuncTorchBatchedDecomposition, m) {
  RowOperators::implement_vmap(m);
  ImageOperators::implement_vmap(m);
}

TORCH_LIBRARY_IMPL(layernorm, CompositeImplicitAutograd, m) {
  RowOperators::implement_composite(m);
  ImageOperators::implement_composite(m);
}

}  // namespace layernorm
