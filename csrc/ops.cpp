// The operators on rows: checks, forward and backward for any backend, shape functions, schema.
#include "ops.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <ATen/ops/zeros.h>

#include "cuda/platform.h"
#include "dtypes.h"
#include "layer_norm.h"

namespace layernorm {

using c10::SymIntArrayRef;
using std::optional;

// ---- checks ---------------------------------------------------------------------------------------------------------

namespace {

// torch's name of a dtype.
const char* name_of(at::ScalarType type) { return c10::toString(type); }

// Joins sizes as in "2, 3", for [*, 2, 3].
std::string join(SymIntArrayRef sizes) {
  std::ostringstream out;
  for (size_t i = 0; i < sizes.size(); ++i) out << (i ? ", " : "") << sizes[i];
  return out.str();
}

// Whether sizes are equal. While torch.compile traces, a size may be known only at run time, for example one from a
// numpy integer; then the compiled program checks it.
bool are_equal(SymIntArrayRef a, SymIntArrayRef b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].sym_eq(b[i]).expect_true(__FILE__, __LINE__)) return false;
  }
  return true;
}

void check_parameter(const char* name, const Tensor& input, SymIntArrayRef normalized_shape,
                     const optional<Tensor>& parameter) {
  if (!present(parameter)) return;
  TORCH_CHECK(are_equal(parameter->sym_sizes(), normalized_shape), "Expected ", name,
              " to be of same shape as normalized_shape, but got ", name, " of shape ", parameter->sym_sizes(),
              " and normalized_shape = ", normalized_shape);
}

bool is_supported(at::ScalarType type) {
  return type == at::kDouble || type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

void check_input_type(const Tensor& input) {
  if (is_supported(input.scalar_type())) return;
  const auto message = c10::str("Expected input of dtype Double, Float, Half or BFloat16, but got input of dtype ",
                                name_of(input.scalar_type()));
  // A NotImplementedError would tell a fake tensor that the operator has no meta function.
  TORCH_CHECK(!input.is_meta(), message);
  TORCH_CHECK_NOT_IMPLEMENTED(false, message);
}

void check_parameter_type(const char* name, const Tensor& input, const optional<Tensor>& parameter) {
  if (!present(parameter)) return;
  TORCH_CHECK(is_supported(parameter->scalar_type()), "Expected ", name,
              " of dtype Double, Float, Half or BFloat16, but got ", name, " of dtype ",
              name_of(parameter->scalar_type()));
  TORCH_CHECK(parameter->device() == input.device(), "Expected ", name, " to be on the device of input, but got ", name,
              " on ", parameter->device(), " and input on ", input.device());
}

c10::SymDimVector statistics_shape(const Tensor& input, SymIntArrayRef normalized_shape) {
  const auto sizes = input.sym_sizes();
  c10::SymDimVector shape(sizes.begin(), sizes.end() - normalized_shape.size());
  shape.resize(sizes.size(), 1);
  return shape;
}

// RMSNorm keeps the memory format channels_last, as in torch. All other outputs are contiguous.
at::MemoryFormat output_format(const Tensor& input, const optional<Tensor>& residual, Variant variant) {
  return variant.rms && !present(residual) ? input.suggest_memory_format() : at::MemoryFormat::Contiguous;
}

}  // namespace

void check_like(const char* name, const Tensor& tensor, const Tensor& input) {
  TORCH_CHECK(tensor.sym_sizes().equals(input.sym_sizes()), "Expected ", name, " to be of the shape of input, but got ",
              name, " of shape ", tensor.sym_sizes(), " and input of shape ", input.sym_sizes());
  TORCH_CHECK(tensor.scalar_type() == input.scalar_type(), "Expected ", name, " to be of the dtype of input, but got ",
              name, " of dtype ", name_of(tensor.scalar_type()), " and input of dtype ", name_of(input.scalar_type()));
  TORCH_CHECK(tensor.device() == input.device(), "Expected ", name, " to be on the device of input, but got ", name,
              " on ", tensor.device(), " and input on ", input.device());
}

void check_statistic(const char* name, const Tensor& statistic, const Tensor& input, SymIntArrayRef shape) {
  TORCH_CHECK(statistic.sym_sizes().equals(shape), "Expected ", name, " of shape ", shape, ", but got ", name,
              " of shape ", statistic.sym_sizes());
  TORCH_CHECK(statistic.scalar_type() == accumulate_type(input), "Expected ", name, " of dtype ",
              name_of(accumulate_type(input)), " for input of dtype ", name_of(input.scalar_type()), ", but got ", name,
              " of dtype ", name_of(statistic.scalar_type()));
  TORCH_CHECK(statistic.device() == input.device(), "Expected ", name, " to be on the device of input, but got ", name,
              " on ", statistic.device(), " and input on ", input.device());
}

void check_types(const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias) {
  check_input_type(input);
  check_parameter_type("weight", input, weight);
  check_parameter_type("bias", input, bias);
}

void check_forward(const Tensor& input, const optional<Tensor>& residual, SymIntArrayRef normalized_shape,
                   const optional<Tensor>& weight, const optional<Tensor>& bias) {
  TORCH_CHECK(!normalized_shape.empty(),
              "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one "
              "element, but got "
              "normalized_shape = ",
              normalized_shape);
  check_parameter("weight", input, normalized_shape, weight);
  check_parameter("bias", input, normalized_shape, bias);
  const auto sizes = input.sym_sizes();
  const size_t count = normalized_shape.size();
  TORCH_CHECK(sizes.size() >= count && are_equal(sizes.slice(sizes.size() - count), normalized_shape),
              "Given normalized_shape=", normalized_shape, ", expected input with shape [*, ", join(normalized_shape),
              "], but got input of size", sizes);
  check_types(input, weight, bias);
  if (present(residual)) check_like("residual", *residual, input);
}

void check_backward(const Tensor& grad_output, const optional<Tensor>& grad_sum, const Tensor& input,
                    SymIntArrayRef normalized_shape, const optional<Tensor>& mean, const Tensor& rstd,
                    const optional<Tensor>& weight, const optional<Tensor>& bias, Variant variant) {
  check_forward(input, std::nullopt, normalized_shape, weight, bias);
  check_like("grad_output", grad_output, input);
  if (present(grad_sum)) check_like("grad_sum", *grad_sum, input);
  const auto shape = statistics_shape(input, normalized_shape);
  if (needs_mean(variant)) {
    TORCH_CHECK(present(mean),
                "Expected mean to be a tensor, but got None; only RMSNorm has none, and a backward from "
                "the output");
    check_statistic("mean", *mean, input, shape);
  }
  check_statistic("rstd", rstd, input, shape);
}

// ---- forward and backward for any backend ---------------------------------------------------------------------------

void no_kernel_for(Dtype dtype, Dtype param_dtype) {
  TORCH_INTERNAL_ASSERT(false, "no kernel for input dtype ", static_cast<int>(dtype), " and parameter dtype ",
                        static_cast<int>(param_dtype));
}

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

namespace {

// The extents of a tensor [batch..., normalized...] seen as [rows, cols].
struct Extents {
  Extents(const Tensor& input, int64_t normalized_dims) : batch_dims(input.dim() - normalized_dims) {
    for (int64_t d = 0; d < input.dim(); ++d) (d < batch_dims ? rows : cols) *= input.size(d);
  }
  int64_t batch_dims, rows = 1, cols = 1;
};

// A tensor with contiguous rows, `stride` elements apart.
struct Rows {
  Tensor tensor;
  int64_t stride = 0;
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

// Allocates CPU tensors without the dispatcher, which costs a small call one percent of its time per tensor.
Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return options.device().is_cpu() ? at::cpu::empty(sizes, options) : at::empty(sizes, options);
}

int64_t no_workspace(const ForwardParams&) { return 0; }

template <void (*kernel)(const ForwardParams&), int64_t (*workspace_size)(const ForwardParams&) = no_workspace>
NormOutputs norm_forward(const Tensor& input, const optional<Tensor>& residual, SymIntArrayRef normalized_shape,
                         const optional<Tensor>& weight, const optional<Tensor>& bias, double eps, Variant variant,
                         bool in_place) {
  check_forward(input, residual, normalized_shape, weight, bias);
  if (in_place) {
    at::assert_no_internal_overlap(*residual);
    at::assert_no_overlap(*residual, input);
  }
  const LaunchScope on(input);
  const Extents extents(input, normalized_shape.size());
  const auto options = input.options().memory_format(at::MemoryFormat::Contiguous);
  const auto statistics_options = options.dtype(accumulate_type(input));
  Tensor output = allocate(input.sizes(), options), sum, mean;
  if (present(residual)) sum = in_place && residual->is_contiguous() ? *residual : allocate(input.sizes(), options);
  at::DimVector shape(input.sizes().slice(0, extents.batch_dims));
  shape.resize(input.dim(), 1);
  if (!variant.rms) mean = allocate(shape, statistics_options);
  Tensor rstd = allocate(shape, statistics_options);
  const auto formatted = [&] {
    const auto format = output_format(input, residual, variant);
    return format == at::MemoryFormat::Contiguous ? output : output.clone(format);
  };
  if (extents.rows == 0 || extents.cols == 0) {
    if (mean.defined()) mean.zero_();
    return {formatted(), sum, mean, rstd.zero_()};
  }

  const Rows x = rows_of(input, extents);
  const Rows added = present(residual) ? rows_of(*residual, extents) : Rows{};
  const auto param_type = ParameterTypes(input, weight, bias).kernel;
  const Tensor w = parameter(weight, param_type), b = parameter(bias, param_type);
  ForwardParams params;
  params.rows = extents.rows;
  params.cols = extents.cols;
  params.input = on.input(x.tensor, "input");
  params.input_stride = x.stride;
  params.sum = sum.is_same(added.tensor) ? on.in_out(sum, "residual") : on.output(sum, "sum");
  params.residual = sum.is_same(added.tensor) ? params.sum : on.input(added.tensor, "residual");
  params.residual_stride = added.stride;
  params.weight = on.input(w, "weight");
  params.bias = on.input(b, "bias");
  params.eps = eps;
  params.output = on.output(output, "output");
  params.mean = on.output(mean, "mean");
  params.rstd = on.output(rstd, "rstd");
  params.rms = variant.rms;
  params.zero_centered_weight = w.defined() && variant.zero_centered_weight;
  params.dtype = dtype_of(input.scalar_type());
  params.param_dtype = dtype_of(param_type);
  params.stream = on.stream();
  Tensor workspace;
  if (const int64_t bytes = workspace_size(params)) workspace = allocate({bytes}, options.dtype(at::kByte));
  params.workspace = on.output(workspace, "workspace");
  kernel(params);
  if (in_place && !sum.is_same(*residual)) residual->copy_(sum);
  return {formatted(), sum, mean, rstd};
}

template <void (*kernel)(const BackwardParams&), int64_t (*workspace_size)(const BackwardParams&)>
Outputs norm_backward(const Tensor& grad_output, const optional<Tensor>& grad_sum, const Tensor& input,
                      SymIntArrayRef normalized_shape, const optional<Tensor>& mean, const Tensor& rstd,
                      const optional<Tensor>& weight, const optional<Tensor>& bias, Mask output_mask, Variant variant) {
  check_backward(grad_output, grad_sum, input, normalized_shape, mean, rstd, weight, bias, variant);
  const LaunchScope on(input);
  const Extents extents(input, normalized_shape.size());
  const auto options = input.options().memory_format(at::MemoryFormat::Contiguous);
  const ParameterTypes types(input, weight, bias);
  const auto param_shape = input.sizes().slice(extents.batch_dims);
  const bool empty = extents.rows == 0 || extents.cols == 0;
  const auto parameter_gradient = [&](at::ScalarType type) {
    return empty ? at::zeros(param_shape, options.dtype(type)) : allocate(param_shape, options.dtype(types.kernel));
  };
  Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) grad_input = allocate(input.sizes(), options);
  if (output_mask[1]) grad_weight = parameter_gradient(types.weight);
  if (output_mask[2]) grad_bias = parameter_gradient(types.bias);
  if (empty || output_mask == Mask{}) return {grad_input, grad_weight, grad_bias};

  const Rows dy = rows_of(grad_output, extents), x = rows_of(input, extents);
  const Rows dsum = output_mask[0] && present(grad_sum) ? rows_of(*grad_sum, extents) : Rows{};
  const Tensor w = parameter(weight, types.kernel);
  const Tensor b = variant.memory_efficient ? parameter(bias, types.kernel) : Tensor();
  // The statistics are contiguous, unless torch.compile has given those of images another layout.
  const Tensor m = needs_mean(variant) ? mean->contiguous() : Tensor(), r = rstd.contiguous();
  BackwardParams params;
  params.rows = extents.rows;
  params.cols = extents.cols;
  params.grad_output = on.input(dy.tensor, "grad_output");
  params.grad_output_stride = dy.stride;
  params.input = on.input(x.tensor, "input");
  params.input_stride = x.stride;
  params.grad_sum = on.input(dsum.tensor, "grad_sum");
  params.grad_sum_stride = dsum.stride;
  params.mean = on.input(m, "mean");
  params.rstd = on.input(r, "rstd");
  params.weight = on.input(w, "weight");
  params.bias = on.input(b, "bias");
  params.grad_input = on.output(grad_input, "grad_input");
  params.grad_weight = on.output(grad_weight, "grad_weight");
  params.grad_bias = on.output(grad_bias, "grad_bias");
  params.rms = variant.rms;
  params.zero_centered_weight = w.defined() && variant.zero_centered_weight;
  params.from_output = variant.memory_efficient;
  params.dtype = dtype_of(input.scalar_type());
  params.param_dtype = dtype_of(types.kernel);
  params.stream = on.stream();
  Tensor workspace;
  if (const int64_t bytes = workspace_size(params)) workspace = allocate({bytes}, options.dtype(at::kByte));
  params.workspace = on.output(workspace, "workspace");
  kernel(params);
  return {grad_input, cast(std::move(grad_weight), types.weight), cast(std::move(grad_bias), types.bias)};
}

// ---- shape functions ------------------------------------------------------------------------------------------------

NormOutputs norm_forward_meta(const Tensor& input, const optional<Tensor>& residual, SymIntArrayRef normalized_shape,
                              const optional<Tensor>& weight, const optional<Tensor>& bias, double eps, Variant variant,
                              bool in_place) {
  check_forward(input, residual, normalized_shape, weight, bias);
  const auto statistics_options = input.options().dtype(accumulate_type(input));
  const auto shape = statistics_shape(input, normalized_shape);
  Tensor sum, mean;
  if (present(residual)) sum = in_place ? *residual : at::empty_symint(input.sym_sizes(), input.options());
  if (!variant.rms) mean = at::empty_symint(shape, statistics_options);
  const auto format = output_format(input, residual, variant);
  return {at::empty_symint(input.sym_sizes(), input.options().memory_format(format)), sum, mean,
          at::empty_symint(shape, statistics_options)};
}

Outputs norm_backward_meta(const Tensor& grad_output, const optional<Tensor>& grad_sum, const Tensor& input,
                           SymIntArrayRef normalized_shape, const optional<Tensor>& mean, const Tensor& rstd,
                           const optional<Tensor>& weight, const optional<Tensor>& bias, Mask output_mask,
                           Variant variant) {
  check_backward(grad_output, grad_sum, input, normalized_shape, mean, rstd, weight, bias, variant);
  const ParameterTypes types(input, weight, bias);
  Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) grad_input = at::empty_symint(input.sym_sizes(), input.options());
  const auto param_shape = input.sym_sizes().slice(input.dim() - normalized_shape.size());
  if (output_mask[1]) grad_weight = at::empty_symint(param_shape, input.options().dtype(types.weight));
  if (output_mask[2]) grad_bias = at::empty_symint(param_shape, input.options().dtype(types.bias));
  return {grad_input, grad_weight, grad_bias};
}

// ---- names ----------------------------------------------------------------------------------------------------------

NormOutputs add_forward(const Tensor& input, const Tensor& residual, SymIntArrayRef normalized_shape,
                        const optional<Tensor>& weight, const optional<Tensor>& bias, double eps) {
  return call_norm_forward(input, residual, normalized_shape, weight, bias, eps, {}, /*in_place=*/false);
}

Outputs add_backward(const Tensor& grad_output, const optional<Tensor>& grad_sum, const Tensor& sum,
                     SymIntArrayRef normalized_shape, const Tensor& mean, const Tensor& rstd,
                     const optional<Tensor>& weight, const optional<Tensor>& bias, Mask output_mask) {
  return call_norm_backward(grad_output, grad_sum, sum, normalized_shape, mean, rstd, weight, bias, output_mask, {});
}

}  // namespace

// ---- the dispatcher -------------------------------------------------------------------------------------------------

NormOutputs call_norm_forward(const Tensor& input, const optional<Tensor>& residual, SymIntArrayRef normalized_shape,
                              const optional<Tensor>& weight, const optional<Tensor>& bias, double eps, Variant variant,
                              bool in_place) {
  using Ops = Family<norm_forward_meta, norm_backward_meta>;
  const auto& [rms, zero_centered_weight, memory_efficient] = variant;
  if (in_place) {
    static const auto op = find<decltype(Ops::norm_forward_in_place)>("norm_forward_");
    auto [output, mean, rstd] =
        op.call(input, *residual, normalized_shape, weight, bias, eps, rms, zero_centered_weight);
    return {std::move(output), *residual, std::move(mean), std::move(rstd)};
  }
  if (present(residual) || rms || zero_centered_weight || memory_efficient) {
    static const auto op = find<decltype(Ops::norm_forward)>("norm_forward");
    return op.call(input, residual, normalized_shape, weight, bias, eps, rms, zero_centered_weight, memory_efficient);
  }
  static const auto op = find<decltype(Ops::forward)>("forward");
  auto [output, mean, rstd] = op.call(input, normalized_shape, weight, bias, eps);
  return {std::move(output), Tensor(), std::move(mean), std::move(rstd)};
}

Outputs call_norm_backward(const Tensor& grad_output, const optional<Tensor>& grad_sum, const Tensor& input,
                           SymIntArrayRef normalized_shape, const optional<Tensor>& mean, const Tensor& rstd,
                           const optional<Tensor>& weight, const optional<Tensor>& bias, Mask output_mask,
                           Variant variant) {
  using Ops = Family<norm_forward_meta, norm_backward_meta>;
  const auto& [rms, zero_centered_weight, memory_efficient] = variant;
  if (present(grad_sum) || !present(mean) || rms || zero_centered_weight || memory_efficient) {
    static const auto op = find<decltype(Ops::norm_backward)>("norm_backward");
    return op.call(grad_output, grad_sum, input, normalized_shape, mean, rstd, weight, bias, output_mask, rms,
                   zero_centered_weight, memory_efficient);
  }
  static const auto op = find<decltype(Ops::backward)>("backward");
  return op.call(grad_output, input, normalized_shape, *mean, rstd, weight, bias, output_mask);
}

// ---- registration
// -----------------------------------------------------------------------------------------------------

// forward and backward have the signatures of torch's operators. norm_* cover the whole family; add_* are shorthands.
void RowOperators::define(torch::Library& m) {
  const auto define = [&](const char* schema) { m.def(schema, {at::Tag::pt2_compliant_tag}); };
  define(
      "forward(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) "
      "-> (Tensor output, Tensor mean, Tensor rstd)");
  define(
      "backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd, "
      "Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
  define(
      "norm_forward(Tensor input, Tensor? residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05, *, bool rms=False, bool zero_centered_weight=False, "
      "bool memory_efficient=False) -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
  define(
      "norm_forward_(Tensor input, Tensor(a!) residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05, *, bool rms=False, bool zero_centered_weight=False) "
      "-> (Tensor output, Tensor mean, Tensor rstd)");
  define(
      "norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor input, SymInt[] normalized_shape, Tensor? mean, "
      "Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask, *, bool rms=False, "
      "bool zero_centered_weight=False, bool memory_efficient=False) -> (Tensor, Tensor, Tensor)");
  define(
      "add_forward(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05) -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
  define(
      "add_backward(Tensor grad_output, Tensor? grad_sum, Tensor sum, SymInt[] normalized_shape, Tensor mean, "
      "Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
  // The checks of forward, for graphs of aten operators. Compilers decompose it into nothing.
  define(
      "check_forward(Tensor input, Tensor? residual, SymInt[] normalized_shape, Tensor? weight, Tensor? bias) -> ()");
}

void RowOperators::implement_cpu(torch::Library& m) {
  Family<norm_forward<cpu::forward>, norm_backward<cpu::backward, cpu::backward_workspace>>::implement(m);
}

#if defined(WITH_CUDA)
void RowOperators::implement_cuda(torch::Library& m) {
  Family<norm_forward<cuda::forward, cuda::forward_workspace>,
         norm_backward<cuda::backward, cuda::backward_workspace>>::implement(m);
}
#endif

void RowOperators::implement_meta(torch::Library& m) { Family<norm_forward_meta, norm_backward_meta>::implement(m); }

void RowOperators::implement_composite(torch::Library& m) {
  m.impl("add_forward", &add_forward);
  m.impl("add_backward", &add_backward);
  m.impl("check_forward", &check_forward);
}

}  // namespace layernorm
