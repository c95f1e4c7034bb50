// Registers the operators with the CUDA kernels on the CPU key of another namespace, EMULATOR_NAMESPACE.
#include <torch/library.h>

#include "kernel_params.h"
#include "ops/ops.h"

namespace layernorm {

const char* const kOperatorNamespace = EMULATOR_NAMESPACE;

namespace cpu {  // the emulated library is linked without the CPU kernels
void forward(const ForwardParams&) {}
void backward(const BackwardParams&) {}
}  // namespace cpu

namespace {

using c10::DispatchKey;
using torch::Library;

template <class... Functions>
Library library(Library::Kind kind, std::optional<DispatchKey> key, Functions... functions) {
  Library result(kind, EMULATOR_NAMESPACE, key, __FILE__, __LINE__);
  (functions(result), ...);
  return result;
}

const Library libraries[] = {
    library(Library::DEF, std::nullopt, Operators::define),
    library(Library::IMPL, DispatchKey::CPU, Operators::implement_cuda),
    library(Library::IMPL, DispatchKey::Meta, Operators::implement_meta),
    library(Library::IMPL, DispatchKey::Negative, Operators::implement_negative),
    library(Library::IMPL, DispatchKey::Functionalize, Operators::implement_functionalize),
    library(Library::IMPL, DispatchKey::Autograd, Operators::implement_autograd),
    library(Library::IMPL, DispatchKey::FuncTorchBatchedDecomposition, Operators::implement_vmap),
    library(Library::IMPL, DispatchKey::FuncTorchBatched, Operators::implement_batched),
    library(Library::IMPL, DispatchKey::CompositeExplicitAutograd, Operators::implement_any_backend),
    library(Library::IMPL, DispatchKey::CompositeImplicitAutograd, Operators::implement_composite),
};

}  // namespace
}  // namespace layernorm
