// The combinations of dtypes that have kernels. ParameterTypes (ops/shapes.h) chooses among them, and ops/call.h
// converts the parameters of other combinations.
#pragma once

#include <type_traits>

#include "kernel_params.h"

namespace layernorm {

// The C++ types of the elements of a call's arrays.
template <class T_, class X_, class W_>
struct Types {
  using T = T_;  // input, output and grad_output
  using X = X_;  // the input or, with a residual, the sum; and their gradients
  using W = W_;  // weight, bias and their gradients
};

// Throws an internal error, because the host code never selects a combination without a kernel.
[[noreturn]] void no_kernel_for(const Params& params);

// Calls f(Types<T, X, W>{}) for the dtypes of a call. `Elements` has the C++ types by which a backend represents them,
// Elements::Float64, Float32, Float16 and BFloat16. Float64 is void if the backend lacks it.
template <class Elements, class F>
void dispatch_dtypes(const Params& p, F&& f) {
  using E = Elements;
  using Float = typename E::Float32;
  const auto has_dtypes = [&](Dtype sum_dtype, Dtype param_dtype) {
    return p.sum_dtype == sum_dtype && p.param_dtype == param_dtype;
  };
  const auto with_16_bit = [&](auto element) {
    using T = decltype(element);
    if (has_dtypes(p.dtype, p.dtype)) return f(Types<T, T, T>{});
    if (has_dtypes(p.dtype, Dtype::kFloat32)) return f(Types<T, T, Float>{});
    if (has_dtypes(Dtype::kFloat32, Dtype::kFloat32)) return f(Types<T, Float, Float>{});
    no_kernel_for(p);
  };
  if (p.dtype == Dtype::kFloat16) return with_16_bit(typename E::Float16{});
  if (p.dtype == Dtype::kBFloat16) return with_16_bit(typename E::BFloat16{});
  if (!has_dtypes(p.dtype, p.dtype)) no_kernel_for(p);
  if (p.dtype == Dtype::kFloat32) return f(Types<Float, Float, Float>{});
  if constexpr (!std::is_void_v<typename E::Float64>) {
    f(Types<typename E::Float64, typename E::Float64, typename E::Float64>{});
  } else {
    no_kernel_for(p);
  }
}

// Like dispatch_dtypes(), but for images. They have no residual, so X is T, and f is not compiled for other types.
template <class Elements, class F>
void dispatch_dtypes_of_images(const Params& p, F&& f) {
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using Types = decltype(types);
    if constexpr (std::is_same_v<typename Types::T, typename Types::X>) {
      f(types);
    } else {
      no_kernel_for(p);
    }
  });
}

}  // namespace layernorm
