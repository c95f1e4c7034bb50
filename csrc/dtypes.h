// The pairs of (input, parameter) dtypes that have kernels. ops.h converts the parameters of other pairs.
#pragma once

#include "layer_norm.h"

namespace layernorm {

// Calls f(Pair<T, W>{}) with the element types of a backend. `Elements` names them:
// struct Elements { using Float64 = ...; using Float32 = ...; using Float16 = ...; using BFloat16 = ...; };
template <class T_, class W_>
struct Pair {
  using T = T_;  // input, output and their gradients
  using W = W_;  // weight, bias and their gradients
};

// Throws an internal error: ParameterTypes never selects such a pair.
[[noreturn]] void no_kernel_for(Dtype dtype, Dtype param_dtype);

template <class Elements, class F>
void dispatch_dtypes(Dtype dtype, Dtype param_dtype, F&& f) {
  using E = Elements;
  if (dtype == Dtype::kFloat64 && param_dtype == Dtype::kFloat64) {
    f(Pair<typename E::Float64, typename E::Float64>{});
  } else if (dtype == Dtype::kFloat32 && param_dtype == Dtype::kFloat32) {
    f(Pair<typename E::Float32, typename E::Float32>{});
  } else if (dtype == Dtype::kFloat16 && param_dtype == Dtype::kFloat16) {
    f(Pair<typename E::Float16, typename E::Float16>{});
  } else if (dtype == Dtype::kFloat16 && param_dtype == Dtype::kFloat32) {
    f(Pair<typename E::Float16, typename E::Float32>{});
  } else if (dtype == Dtype::kBFloat16 && param_dtype == Dtype::kBFloat16) {
    f(Pair<typename E::BFloat16, typename E::BFloat16>{});
  } else if (dtype == Dtype::kBFloat16 && param_dtype == Dtype::kFloat32) {
    f(Pair<typename E::BFloat16, typename E::Float32>{});
  } else {
    no_kernel_for(dtype, param_dtype);
  }
}

}  // namespace layernorm
