// Registers the operators as torch.ops.layernorm.
#include <torch/library.h>

#include "checks.h"
#include "ops.h"

namespace layernorm {

const char* const kOperatorNamespace = "layernorm";

namespace {

constexpr const char* kOperators[] = {"forward", "forward.fused", "forward_.fused", "backward", "backward.fused"};

// Throws an error that names the argument for which the dispatcher has chosen a key without kernels.
void refuse_layout(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (values[i].isTensor() && values[i].toTensor().defined()) {
      check_layout(arguments[i].name().c_str(), values[i].toTensor());
    }
  }
  TORCH_INTERNAL_ASSERT(false, "no argument of ", op.schema(), " is sparse, nested, quantized or in MKL-DNN's layout");
}

#if !defined(WITH_CUDA)
// Throws an error that says why there are no CUDA kernels, instead of the dispatcher's list of backends.
void refuse(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK(false,
              "layernorm_ext was built without CUDA kernels, for a reason that `python -m layernorm_ext` prints");
}
#endif

}  // namespace

TORCH_LIBRARY(layernorm, m) {
  Operators::define(m);
  using c10::DispatchKey;
  for (const auto key :
       {DispatchKey::SparseCPU, DispatchKey::SparseCUDA, DispatchKey::SparseCsrCPU, DispatchKey::SparseCsrCUDA,
        DispatchKey::SparseCsrMeta, DispatchKey::SparseMeta, DispatchKey::MkldnnCPU, DispatchKey::QuantizedCPU,
        DispatchKey::QuantizedCUDA, DispatchKey::QuantizedMeta, DispatchKey::NestedTensorCPU,
        DispatchKey::NestedTensorCUDA, DispatchKey::NestedTensorMeta, DispatchKey::AutogradNestedTensor}) {
    const auto refuse = [&](const char* name) {
      m.impl(name, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&refuse_layout>()));
    };
    for (const char* name : kOperators) refuse(name);
    refuse("check_allocated");
  }
}

TORCH_LIBRARY_IMPL(layernorm, CPU, m) { Operators::implement_cpu(m); }

TORCH_LIBRARY_IMPL(layernorm, CUDA, m) {
#if defined(WITH_CUDA)
  Operators::implement_cuda(m);
#else
  for (const char* name : kOperators) {
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
