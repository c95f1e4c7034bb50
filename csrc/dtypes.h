// The combinations of dtypes that have kernels. host.cpp converts the parameters of other combinations.
#pragma once

#include "layer_norm.h"

namespace layernorm {

template <class T_, class X_, class W_>
struct Types {
  using T = T_;  // input, output and grad_output
  using X = X_;  // x: the input, or its sum with the residual; and its gradients
  using W = W_;  // weight, bias and their gradients
};

// Throws an internal error: the host code never selects such a combination.
[[noreturn]] void no_kernel_for(const Params& params);

// Calls f(Types<T, X, W>{}) with the element types of a backend. `Elements` names them:
// struct Elements { using Float64 = ...; using Float32 = ...; using Float16 = ...; using BFloat16 = ...; };
template <class Elements, class F>
void dispatch_dtypes(const Params& p, F&& f) {
  using E = Elements;
  const auto is = [&](Dtype dtype, Dtype sum_dtype, Dtype param_dtype) {
    return p.dtype == dtype && p.sum_dtype == sum_dtype && p.param_dtype == param_dtype;
  };
  const auto with_16_bit = [&](Dtype half, auto element) {
    using Half = decltype(element);
    if (is(half, half, half)) return f(Types<Half, Half, Half>{}), true;
    if (is(half, half, Dtype::kFloat32)) return f(Types<Half, Half, typename E::Float32>{}), true;
    if (is(half, Dtype::kFloat32, Dtype::kFloat32)) {
      return f(Types<Half, typename E::Float32, typename E::Float32>{}), true;
    }
    return false;
  };
  if (is(Dtype::kFloat64, Dtype::kFloat64, Dtype::kFloat64)) {
    f(Types<typename E::Float64, typename E::Float64, typename E::Float64>{});
  } else if (is(Dtype::kFloat32, Dtype::kFloat32, Dtype::kFloat32)) {
    f(Types<typename E::Float32, typename E::Float32, typename E::Float32>{});
  } else if (!with_16_bit(Dtype::kFloat16, typename E::Float16{}) &&
             !with_16_bit(Dtype::kBFloat16, typename E::BFloat16{})) {
    no_kernel_for(p);
  }
}

}  // namespace layernorm
