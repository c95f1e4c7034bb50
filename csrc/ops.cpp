// The operators: schema; checks; forward and backward for any backend; shape functions; registrations.
#include "ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "cuda/platform.h"
#include "dtypes.h"
#include "layer_norm.h"

LAYERNORM_LIBRARY(m) {
  m.def(
      "forward(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float "
      "eps=1e-05) -> "
      "(Tensor output, Tensor mean, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd, "
      "Tensor? weight, "
      "Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

namespace layernorm {

using c10::SymIntArrayRef;
using std::optional;

// ---- checks ---------------------------------------------------------------------------------------------------------

namespace {

// torch's names of the dtypes.
const char* name_of(at::ScalarType type) { return c10::toString(type); }

// "4" or "2, 3": the inside of [*, 2, 3].
std::string join(SymIntArrayRef sizes) {
  std::ostringstream out;
  for (size_t i = 0; i < sizes.size(); ++i) out << (i ? ", " : "") << sizes[i];
  return out.str();
}

void check_parameter(const char* name, const Tensor& input, SymIntArrayRef normalized_shape,
                     const optional<Tensor>& parameter) {
  if (!present(parameter)) return;
  TORCH_CHECK(parameter->sym_sizes().equals(normalized_shape), "Expected ", name,
              " to be of same shape as normalized_shape, but got ", name, " of shape ", parameter->sym_sizes(),
              " and normalized_shape = ", normalized_shape);
}

void check_input_type(const Tensor& input) {
  const auto type = input.scalar_type();
  if (type == at::kDouble || type == at::kFloat || type == at::kHalf || type == at::kBFloat16) return;
  const auto message = c10::str(
      "Expected input of dtype Double, Float, Half or BFloat16 (with parameters of the same dtype; for Half "
      "and BFloat16 also Float), but got input of dtype ",
      name_of(type));
  // To a fake tensor, a NotImplementedError of the shape function would mean that there is none.
  TORCH_CHECK(!input.is_meta(), message);
  TORCH_CHECK_NOT_IMPLEMENTED(false, message);
}

void check_parameter_type(const char* name, const Tensor& input, const optional<Tensor>& parameter) {
  if (!present(parameter)) return;
  const auto type = input.scalar_type(), parameter_type = parameter->scalar_type();
  const bool reduced = type == at::kHalf || type == at::kBFloat16;
  TORCH_CHECK(parameter_type == type || (reduced && parameter_type == at::kFloat), "Expected ", name, " of dtype ",
              name_of(type), reduced ? " or Float" : "", " for input of dtype ", name_of(type), ", but got ", name,
              " of dtype ", name_of(parameter_type));
  TORCH_CHECK(parameter->device() == input.device(), "Expected ", name, " to be on the device of input, but got ", name,
              " on ", parameter->device(), " and input on ", input.device());
}

c10::SymDimVector statistics_shape(const Tensor& input, SymIntArrayRef normalized_shape) {
  const auto sizes = input.sym_sizes();
  c10::SymDimVector shape(sizes.begin(), sizes.end() - normalized_shape.size());
  shape.resize(sizes.size(), 1);
  return shape;
}

void check_statistic(const char* name, const Tensor& statistic, const Tensor& input, SymIntArrayRef shape) {
  TORCH_CHECK(statistic.sym_sizes().equals(shape), "Expected ", name, " of shape ", shape, ", but got ", name,
              " of shape ", statistic.sym_sizes());
  TORCH_CHECK(statistic.scalar_type() == accumulate_type(input), "Expected ", name, " of dtype ",
              name_of(accumulate_type(input)), " for input of dtype ", name_of(input.scalar_type()), ", but got ", name,
              " of dtype ", name_of(statistic.scalar_type()));
  TORCH_CHECK(statistic.device() == input.device(), "Expected ", name, " to be on the device of input, but got ", name,
              " on ", statistic.device(), " and input on ", input.device());
  TORCH_CHECK(statistic.is_contiguous(), "Expected ", name, " to be contiguous, but got ", name, " of shape ",
              statistic.sym_sizes(), " and strides ", statistic.sym_strides());
}

}  // namespace

void check_forward(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& weight,
                   const optional<Tensor>& bias) {
  TORCH_CHECK(!normalized_shape.empty(),
              "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one "
              "element, but got "
              "normalized_shape = ",
              normalized_shape);
  check_parameter("weight", input, normalized_shape, weight);
  check_parameter("bias", input, normalized_shape, bias);
  const auto sizes = input.sym_sizes();
  const size_t count = normalized_shape.size();
  TORCH_CHECK(sizes.size() >= count && sizes.slice(sizes.size() - count).equals(normalized_shape),
              "Given normalized_shape=", normalized_shape, ", expected input with shape [*, ", join(normalized_shape),
              "], but got input of size", sizes);
  check_input_type(input);
  check_parameter_type("weight", input, weight);
  check_parameter_type("bias", input, bias);
  TORCH_CHECK(!present(weight) || !present(bias) || weight->scalar_type() == bias->scalar_type(),
              "Expected weight and bias of the same dtype, but got weight of dtype ", name_of(weight->scalar_type()),
              " and bias of dtype ", name_of(bias->scalar_type()));
}

void check_backward(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape, const Tensor& mean,
                    const Tensor& rstd, const optional<Tensor>& weight, const optional<Tensor>& bias) {
  check_forward(input, normalized_shape, weight, bias);
  TORCH_CHECK(grad_output.sym_sizes().equals(input.sym_sizes()),
              "Expected grad_output to be of the shape of input, but got grad_output of shape ",
              grad_output.sym_sizes(), " and input of shape ", input.sym_sizes());
  TORCH_CHECK(grad_output.scalar_type() == input.scalar_type(),
              "Expected grad_output to be of the dtype of input, but got grad_output of dtype ",
              name_of(grad_output.scalar_type()), " and input of dtype ", name_of(input.scalar_type()));
  TORCH_CHECK(grad_output.device() == input.device(),
              "Expected grad_output to be on the device of input, but got grad_output on ", grad_output.device(),
              " and input on ", input.device());
  const auto shape = statistics_shape(input, normalized_shape);
  check_statistic("mean", mean, input, shape);
  check_statistic("rstd", rstd, input, shape);
}

// ---- forward and backward for any backend ---------------------------------------------------------------------------

void no_kernel_for(Dtype dtype, Dtype param_dtype) {
  TORCH_INTERNAL_ASSERT(false, "no kernel for input dtype ", static_cast<int>(dtype), " and parameter dtype ",
                        static_cast<int>(param_dtype), ", which the checks have let through");
}

namespace {

Dtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return Dtype::kFloat64;
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kHalf:
      return Dtype::kFloat16;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    default:
      TORCH_INTERNAL_ASSERT(false, "the checks have let through ", name_of(type));
  }
}

// The extents of a tensor [batch..., normalized...] seen as [rows, cols].
struct Extents {
  Extents(const Tensor& input, int64_t normalized_dims) : batch_dims(input.dim() - normalized_dims) {
    for (int64_t d = 0; d < input.dim(); ++d) (d < batch_dims ? rows : cols) *= input.size(d);
  }
  int64_t batch_dims, rows = 1, cols = 1;
};

// A tensor whose rows lie `stride` elements apart, each contiguous.
struct Rows {
  Tensor tensor;
  int64_t stride;
};

// The tensor in place if its layout allows, else a contiguous copy.
Rows rows_of(const Tensor& tensor, const Extents& extents) {
  int64_t expected = 1, d = tensor.dim() - 1;
  for (; d >= extents.batch_dims; --d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != expected) return {tensor.contiguous(), extents.cols};
    expected *= tensor.size(d);
  }
  for (; d >= 0 && tensor.size(d) == 1; --d) {
  }
  if (d < 0) return {tensor, extents.cols};
  const int64_t stride = tensor.stride(d);
  for (expected = stride; d >= 0; --d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != expected) return {tensor.contiguous(), extents.cols};
    expected *= tensor.size(d);
  }
  return {tensor, stride};
}

// A parameter of shape normalized_shape, contiguous; undefined if absent.
Tensor parameter(const optional<Tensor>& t) { return present(t) ? t->contiguous() : Tensor(); }

// On a CPU without the dispatcher, which costs a small call a hundredth of its time for each tensor.
Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return options.device().is_cpu() ? at::cpu::empty(sizes, options) : at::empty(sizes, options);
}

template <void (*kernel)(const ForwardParams&)>
Outputs forward(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& weight,
                const optional<Tensor>& bias, double eps) {
  check_forward(input, normalized_shape, weight, bias);
  const Launching on(input);
  const Extents extents(input, normalized_shape.size());
  const auto options = input.options().memory_format(at::MemoryFormat::Contiguous);
  const auto statistics_options = options.dtype(accumulate_type(input));
  Tensor output = allocate(input.sizes(), options);
  at::DimVector shape(input.sizes().slice(0, extents.batch_dims));
  shape.resize(input.dim(), 1);
  Tensor mean = allocate(shape, statistics_options), rstd = allocate(shape, statistics_options);
  if (extents.rows == 0) return {output, mean, rstd};
  if (extents.cols == 0) return {output, mean.zero_(), rstd.zero_()};

  const Rows x = rows_of(input, extents);
  const Tensor w = parameter(weight), b = parameter(bias);
  ForwardParams params;
  params.rows = extents.rows;
  params.cols = extents.cols;
  params.input = on.input(x.tensor, "input");
  params.input_stride = x.stride;
  params.weight = on.input(w, "weight");
  params.bias = on.input(b, "bias");
  params.eps = eps;
  params.output = on.output(output, "output");
  params.mean = on.output(mean, "mean");
  params.rstd = on.output(rstd, "rstd");
  params.dtype = dtype_of(input.scalar_type());
  params.param_dtype = dtype_of(parameter_type(input, weight, bias));
  params.stream = on.stream();
  kernel(params);
  return {output, mean, rstd};
}

template <void (*kernel)(const BackwardParams&), int64_t (*workspace_size)(const BackwardParams&)>
Outputs backward(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape, const Tensor& mean,
                 const Tensor& rstd, const optional<Tensor>& weight, const optional<Tensor>& bias, Mask output_mask) {
  check_backward(grad_output, input, normalized_shape, mean, rstd, weight, bias);
  const Launching on(input);
  const Extents extents(input, normalized_shape.size());
  const auto options = input.options().memory_format(at::MemoryFormat::Contiguous);
  const auto param_type = parameter_type(input, weight, bias);
  const auto param_shape = input.sizes().slice(extents.batch_dims);
  const bool empty = extents.rows == 0 || extents.cols == 0;
  auto parameter_gradient = [&] {
    return empty ? at::zeros(param_shape, options.dtype(param_type)) : allocate(param_shape, options.dtype(param_type));
  };
  Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) grad_input = allocate(input.sizes(), options);
  if (output_mask[1]) grad_weight = parameter_gradient();
  if (output_mask[2]) grad_bias = parameter_gradient();
  if (empty || output_mask == Mask{}) return {grad_input, grad_weight, grad_bias};

  const Rows dy = rows_of(grad_output, extents), x = rows_of(input, extents);
  const Tensor w = parameter(weight);
  BackwardParams params;
  params.rows = extents.rows;
  params.cols = extents.cols;
  params.grad_output = on.input(dy.tensor, "grad_output");
  params.grad_output_stride = dy.stride;
  params.input = on.input(x.tensor, "input");
  params.input_stride = x.stride;
  params.mean = on.input(mean, "mean");
  params.rstd = on.input(rstd, "rstd");
  params.weight = on.input(w, "weight");
  params.grad_input = on.output(grad_input, "grad_input");
  params.grad_weight = on.output(grad_weight, "grad_weight");
  params.grad_bias = on.output(grad_bias, "grad_bias");
  params.dtype = dtype_of(input.scalar_type());
  params.param_dtype = dtype_of(param_type);
  params.stream = on.stream();
  Tensor workspace;
  if (const int64_t bytes = workspace_size(params)) workspace = allocate({bytes}, options.dtype(at::kByte));
  params.workspace = on.output(workspace, "workspace");
  kernel(params);
  return {grad_input, grad_weight, grad_bias};
}

// ---- shape functions ------------------------------------------------------------------------------------------------

Outputs forward_meta(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& weight,
                     const optional<Tensor>& bias, double eps) {
  check_forward(input, normalized_shape, weight, bias);
  const auto statistics_options = input.options().dtype(accumulate_type(input));
  const auto shape = statistics_shape(input, normalized_shape);
  return {at::empty_symint(input.sym_sizes(), input.options()), at::empty_symint(shape, statistics_options),
          at::empty_symint(shape, statistics_options)};
}

Outputs backward_meta(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape,
                      const Tensor& mean, const Tensor& rstd, const optional<Tensor>& weight,
                      const optional<Tensor>& bias, Mask output_mask) {
  check_backward(grad_output, input, normalized_shape, mean, rstd, weight, bias);
  const auto param_options = input.options().dtype(parameter_type(input, weight, bias));
  Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) grad_input = at::empty_symint(input.sym_sizes(), input.options());
  if (output_mask[1]) grad_weight = at::empty_symint(normalized_shape, param_options);
  if (output_mask[2]) grad_bias = at::empty_symint(normalized_shape, param_options);
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

// ---- the dispatcher -------------------------------------------------------------------------------------------------

#define LAYERNORM_STRING_(name) #name
#define LAYERNORM_STRING(name) LAYERNORM_STRING_(name)

Outputs call_forward(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& weight,
                     const optional<Tensor>& bias, double eps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(LAYERNORM_STRING(LAYERNORM_NAMESPACE) "::forward", "")
                             .typed<decltype(call_forward)>();
  return op.call(input, normalized_shape, weight, bias, eps);
}

Outputs call_backward(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape,
                      const Tensor& mean, const Tensor& rstd, const optional<Tensor>& weight,
                      const optional<Tensor>& bias, Mask output_mask) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(LAYERNORM_STRING(LAYERNORM_NAMESPACE) "::backward", "")
                             .typed<decltype(call_backward)>();
  return op.call(grad_output, input, normalized_shape, mean, rstd, weight, bias, output_mask);
}

}  // namespace layernorm

#ifndef LAYERNORM_EMULATE
LAYERNORM_LIBRARY_IMPL(CPU, m) {
  m.impl("forward", &layernorm::forward<layernorm::cpu::forward>);
  m.impl("backward", &layernorm::backward<layernorm::cpu::backward, layernorm::cpu::backward_workspace>);
}
#endif

#if defined(WITH_CUDA) || defined(LAYERNORM_EMULATE)
LAYERNORM_LIBRARY_IMPL(LAYERNORM_CUDA_KEY, m) {
  m.impl("forward", &layernorm::forward<layernorm::cuda::forward>);
  m.impl("backward", &layernorm::backward<layernorm::cuda::backward, layernorm::cuda::backward_workspace>);
}
#else
namespace {
// Says more than the dispatcher's list of all backends.
void refuse(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK(false,
              "layernorm_ext was built without CUDA kernels, for a reason that `python -m layernorm_ext` prints");
}
}  // namespace

LAYERNORM_LIBRARY_IMPL(LAYERNORM_CUDA_KEY, m) {
  m.impl("forward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
  m.impl("backward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}
#endif

LAYERNORM_LIBRARY_IMPL(Meta, m) {
  m.impl("forward", &layernorm::forward_meta);
  m.impl("backward", &layernorm::backward_meta);
}
