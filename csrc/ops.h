// The two operators as C++ functions, for everything that calls them or stands in for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <array>
#include <optional>
#include <tuple>

// The tests register the same sources under another namespace, and the CUDA kernels on another dispatch key, to
// run those on a CPU.
#ifndef LAYERNORM_NAMESPACE
#define LAYERNORM_NAMESPACE layernorm
#endif
#ifndef LAYERNORM_CUDA_KEY
#define LAYERNORM_CUDA_KEY CUDA
#endif

namespace layernorm {

using at::Tensor;
using Outputs = std::tuple<Tensor, Tensor, Tensor>;
using Mask = std::array<bool, 3>;

// Through the dispatcher. (output, mean, rstd) and (grad_input, grad_weight, grad_bias).
Outputs call_forward(const Tensor& input, c10::SymIntArrayRef normalized_shape, const std::optional<Tensor>& weight,
                     const std::optional<Tensor>& bias, double eps);
Outputs call_backward(const Tensor& grad_output, const Tensor& input, c10::SymIntArrayRef normalized_shape,
                      const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
                      const std::optional<Tensor>& bias, Mask output_mask);

// Throw, naming the argument and both values, unless the operators' kernels can use these arguments.
void check_forward(const Tensor& input, c10::SymIntArrayRef normalized_shape, const std::optional<Tensor>& weight,
                   const std::optional<Tensor>& bias);
void check_backward(const Tensor& grad_output, const Tensor& input, c10::SymIntArrayRef normalized_shape,
                    const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
                    const std::optional<Tensor>& bias);

inline bool present(const std::optional<Tensor>& t) { return t && t->defined(); }

// Statistics and sums are kept in float, for double input in double.
inline at::ScalarType accumulate_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The type of the parameters and their gradients; without parameters, that of the input.
inline at::ScalarType parameter_type(const Tensor& input, const std::optional<Tensor>& weight,
                                     const std::optional<Tensor>& bias) {
  return (present(weight) ? *weight : present(bias) ? *bias : input).scalar_type();
}

}  // namespace layernorm

// A macro as the name of TORCH_LIBRARY's namespace is expanded only on the way through another macro.
#define LAYERNORM_LIBRARY_(ns, m) TORCH_LIBRARY(ns, m)
#define LAYERNORM_LIBRARY(m) LAYERNORM_LIBRARY_(LAYERNORM_NAMESPACE, m)
#define LAYERNORM_LIBRARY_IMPL_(ns, key, m) TORCH_LIBRARY_IMPL(ns, key, m)
#define LAYERNORM_LIBRARY_IMPL(key, m) LAYERNORM_LIBRARY_IMPL_(LAYERNORM_NAMESPACE, key, m)
