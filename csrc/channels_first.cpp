// The operators over the channels of images [N, C, *]: schema; checks; forward and backward for any backend; shape
// functions; derivatives; registrations.
//
// Images in channels_last, and images of a single pixel, already are rows: they go to the operators of ops.cpp, as do
// second derivatives, torch.func and forward-mode AD.
#include <ATen/ops/empty.h>
#include <ATen/ops/movedim.h>
#include <torch/csrc/autograd/custom_function.h>

#include "cuda/platform.h"
#include "layer_norm.h"
#include "ops.h"

namespace layernorm {

using std::optional;

Outputs call_forward_of_images(const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias,
                               double eps) {
  static const auto op = find<decltype(call_forward_of_images)>("channels_first_forward");
  return op.call(input, weight, bias, eps);
}

namespace {

Outputs call_backward_of_images(const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& rstd,
                                const optional<Tensor>& weight, const optional<Tensor>& bias, Mask output_mask) {
  static const auto op = find<decltype(call_backward_of_images)>("channels_first_backward");
  return op.call(grad_output, input, mean, rstd, weight, bias, output_mask);
}

// ---- checks ---------------------------------------------------------------------------------------------------------

void check_parameter(const char* name, const Tensor& input, const optional<Tensor>& parameter) {
  if (!present(parameter)) return;
  TORCH_CHECK(parameter->dim() == 1 && parameter->sym_size(0) == input.sym_size(1), "Expected ", name,
              " of one number for each channel, but got ", name, " of shape ", parameter->sym_sizes(), " and input of ",
              input.sym_size(1), " channels");
}

}  // namespace

void check_images(const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias) {
  TORCH_CHECK(input.dim() >= 2, "Expected input of shape [N, C, *], but got input of size", input.sym_sizes());
  check_parameter("weight", input, weight);
  check_parameter("bias", input, bias);
  check_types(input, weight, bias);
}

namespace {

c10::SymDimVector statistics_shape(const Tensor& input) {
  c10::SymDimVector shape(input.sym_sizes().begin(), input.sym_sizes().end());
  shape[1] = 1;
  return shape;
}

void check_backward(const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& rstd,
                    const optional<Tensor>& weight, const optional<Tensor>& bias) {
  check_images(input, weight, bias);
  check_like("grad_output", grad_output, input);
  check_statistic("mean", mean, input, statistics_shape(input));
  check_statistic("rstd", rstd, input, statistics_shape(input));
}

// ---- images as rows -------------------------------------------------------------------------------------------------

Tensor to_rows(const Tensor& images) { return images.movedim(1, -1); }
Tensor from_rows(const Tensor& rows) { return rows.defined() ? rows.movedim(-1, 1) : rows; }

Outputs forward_as_rows(const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias, double eps) {
  const auto [output, sum, mean, rstd] =
      call_norm_forward(to_rows(input), {}, {input.sym_size(1)}, weight, bias, eps, {}, /*in_place=*/false);
  return {from_rows(output), from_rows(mean), from_rows(rstd)};
}

Outputs backward_as_rows(const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& rstd,
                         const optional<Tensor>& weight, const optional<Tensor>& bias, Mask output_mask) {
  const auto [grad_input, grad_weight, grad_bias] =
      call_norm_backward(to_rows(grad_output), {}, to_rows(input), {input.sym_size(1)}, to_rows(mean), to_rows(rstd),
                         weight, bias, output_mask, {});
  return {from_rows(grad_input), grad_weight, grad_bias};
}

// ---- layouts --------------------------------------------------------------------------------------------------------

// Whether the input is channels_last. Then output and grad_input are, too; else they are contiguous.
bool is_channels_last(const Tensor& input) { return input.suggest_memory_format() != at::MemoryFormat::Contiguous; }

int64_t pixels_of(const Tensor& input) { return c10::multiply_integers(input.sizes().slice(2)); }

// A tensor [N, C, *] with contiguous pixels: the given one if its layout allows, else a contiguous copy.
Tensor with_contiguous_pixels(const Tensor& images) {
  int64_t expected = 1;
  for (int64_t d = images.dim() - 1; d >= 2; --d) {
    if (images.size(d) != 1 && images.stride(d) != expected) return images.contiguous();
    expected *= images.size(d);
  }
  return images;
}

// ---- forward and backward for any backend ---------------------------------------------------------------------------

template <void (*kernel)(const ChannelsFirstForwardParams&)>
Outputs forward(const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias, double eps) {
  check_images(input, weight, bias);
  if (is_channels_last(input)) return forward_as_rows(input, weight, bias, eps);
  const auto options = input.options().memory_format(at::MemoryFormat::Contiguous);
  const auto statistics_options = options.dtype(accumulate_type(input));
  at::DimVector shape(input.sizes());
  shape[1] = 1;
  if (input.numel() == 0 || pixels_of(input) == 1) {
    const auto [output, mean, rstd] = forward_as_rows(input, weight, bias, eps);
    return {to_rows(output).view(input.sizes()), mean.view(shape), rstd.view(shape)};
  }
  const LaunchScope on(input);
  Tensor output = at::empty(input.sizes(), options);
  Tensor mean = at::empty(shape, statistics_options), rstd = at::empty(shape, statistics_options);

  const auto param_type = ParameterTypes(input, weight, bias).kernel;
  const Tensor x = with_contiguous_pixels(input);
  const Tensor w = parameter(weight, param_type), b = parameter(bias, param_type);
  ChannelsFirstForwardParams params;
  params.images = x.size(0);
  params.channels = x.size(1);
  params.pixels = pixels_of(x);
  params.input = on.input(x, "input");
  params.input_image_stride = x.stride(0);
  params.input_channel_stride = x.stride(1);
  params.weight = on.input(w, "weight");
  params.bias = on.input(b, "bias");
  params.eps = eps;
  params.output = on.output(output, "output");
  params.mean = on.output(mean, "mean");
  params.rstd = on.output(rstd, "rstd");
  params.dtype = dtype_of(input.scalar_type());
  params.param_dtype = dtype_of(param_type);
  params.stream = on.stream();
  kernel(params);
  return {output, mean, rstd};
}

template <void (*kernel)(const ChannelsFirstBackwardParams&),
          int64_t (*workspace_size)(const ChannelsFirstBackwardParams&)>
Outputs backward(const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& rstd,
                 const optional<Tensor>& weight, const optional<Tensor>& bias, Mask output_mask) {
  check_backward(grad_output, input, mean, rstd, weight, bias);
  if (is_channels_last(input)) return backward_as_rows(grad_output, input, mean, rstd, weight, bias, output_mask);
  if (input.numel() == 0 || pixels_of(input) == 1) {
    auto gradients = backward_as_rows(grad_output, input, mean, rstd, weight, bias, output_mask);
    Tensor& grad_input = std::get<0>(gradients);
    if (output_mask[0]) grad_input = to_rows(grad_input).view(input.sizes());
    return gradients;
  }
  const LaunchScope on(input);
  const auto options = input.options().memory_format(at::MemoryFormat::Contiguous);
  const ParameterTypes types(input, weight, bias);
  Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) grad_input = at::empty(input.sizes(), options);
  if (output_mask[1]) grad_weight = at::empty({input.size(1)}, options.dtype(types.kernel));
  if (output_mask[2]) grad_bias = at::empty({input.size(1)}, options.dtype(types.kernel));
  if (output_mask == Mask{}) return {grad_input, grad_weight, grad_bias};

  const Tensor dy = with_contiguous_pixels(grad_output), x = with_contiguous_pixels(input);
  const Tensor w = parameter(weight, types.kernel);
  const Tensor m = mean.contiguous(), r = rstd.contiguous();
  ChannelsFirstBackwardParams params;
  params.images = x.size(0);
  params.channels = x.size(1);
  params.pixels = pixels_of(x);
  params.grad_output = on.input(dy, "grad_output");
  params.grad_output_image_stride = dy.stride(0);
  params.grad_output_channel_stride = dy.stride(1);
  params.input = on.input(x, "input");
  params.input_image_stride = x.stride(0);
  params.input_channel_stride = x.stride(1);
  params.mean = on.input(m, "mean");
  params.rstd = on.input(r, "rstd");
  params.weight = on.input(w, "weight");
  params.grad_input = on.output(grad_input, "grad_input");
  params.grad_weight = on.output(grad_weight, "grad_weight");
  params.grad_bias = on.output(grad_bias, "grad_bias");
  params.dtype = dtype_of(input.scalar_type());
  params.param_dtype = dtype_of(types.kernel);
  params.stream = on.stream();
  Tensor workspace;
  if (const int64_t bytes = workspace_size(params)) workspace = at::empty({bytes}, options.dtype(at::kByte));
  params.workspace = on.output(workspace, "workspace");
  kernel(params);
  return {grad_input, cast(std::move(grad_weight), types.weight), cast(std::move(grad_bias), types.bias)};
}

// ---- shape functions ------------------------------------------------------------------------------------------------

// An empty tensor with the strides of the output.
Tensor empty_like_input(const Tensor& input) {
  if (is_channels_last(input)) return from_rows(at::empty_symint(to_rows(input).sym_sizes(), input.options()));
  return at::empty_symint(input.sym_sizes(), input.options());
}

Outputs forward_meta(const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias, double eps) {
  check_images(input, weight, bias);
  const auto statistics_options = input.options().dtype(accumulate_type(input));
  const auto shape = statistics_shape(input);
  return {empty_like_input(input), at::empty_symint(shape, statistics_options),
          at::empty_symint(shape, statistics_options)};
}

Outputs backward_meta(const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& rstd,
                      const optional<Tensor>& weight, const optional<Tensor>& bias, Mask output_mask) {
  check_backward(grad_output, input, mean, rstd, weight, bias);
  const ParameterTypes types(input, weight, bias);
  Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) grad_input = empty_like_input(input);
  if (output_mask[1]) grad_weight = at::empty_symint({input.sym_size(1)}, input.options().dtype(types.weight));
  if (output_mask[2]) grad_bias = at::empty_symint({input.sym_size(1)}, input.options().dtype(types.bias));
  return {grad_input, grad_weight, grad_bias};
}

// ---- derivatives ----------------------------------------------------------------------------------------------------

// Returns the output. The statistics, which have no derivatives, are returned through a pointer.
struct ChannelsFirst : torch::autograd::Function<ChannelsFirst> {
  using Context = torch::autograd::AutogradContext;
  using Variables = torch::autograd::variable_list;
  static constexpr bool is_traceable = true;

  static Tensor forward(Context* context, const Tensor& input, const optional<Tensor>& weight,
                        const optional<Tensor>& bias, double eps, Outputs* outputs) {
    const at::AutoDispatchBelowADInplaceOrView below;
    *outputs = call_forward_of_images(input, weight, bias, eps);
    const auto& [output, mean, rstd] = *outputs;
    const Tensor w = weight.value_or(Tensor()), b = bias.value_or(Tensor());
    context->save_for_backward({input, w, has_own_type(b, w) ? b : Tensor(), mean, rstd});
    context->saved_data["has_bias"] = present(bias);
    context->set_materialize_grads(false);
    return output;
  }

  static Variables backward(Context* context, const Variables& gradients) {
    Variables result(5);
    if (!gradients[0].defined()) return result;
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1], &bias = saved[2], &mean = saved[3], &rstd = saved[4];
    // needs_input_grad() counts only the optional inputs that are present.
    const size_t has_weight = weight.defined();
    const Mask mask = {context->needs_input_grad(0), has_weight && context->needs_input_grad(1),
                       context->saved_data["has_bias"].toBool() && context->needs_input_grad(1 + has_weight)};
    std::tie(result[0], result[1], result[2]) =
        call_backward_of_images(gradients[0], input, mean, rstd, weight, bias, mask);
    return result;
  }
};

Outputs forward_autograd(const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias,
                         double eps) {
  if (is_transformed(input, weight, bias)) return forward_as_rows(input, weight, bias, eps);
  if (wants_graph(input, weight, bias)) {
    Outputs outputs;
    std::get<0>(outputs) = ChannelsFirst::apply(input, weight, bias, eps, &outputs);
    return outputs;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_forward_of_images(input, weight, bias, eps);
}

Outputs backward_autograd(const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& rstd,
                          const optional<Tensor>& weight, const optional<Tensor>& bias, Mask output_mask) {
  if (is_transformed(grad_output, input, weight) || wants_graph(grad_output, input, weight)) {
    return backward_as_rows(grad_output, input, mean, rstd, weight, bias, output_mask);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_backward_of_images(grad_output, input, mean, rstd, weight, bias, output_mask);
}

}  // namespace

// ---- registration
// -----------------------------------------------------------------------------------------------------

void ImageOperators::define(torch::Library& m) {
  m.def(
      "channels_first_forward(Tensor input, Tensor? weight=None, Tensor? bias=None, float eps=1e-06) "
      "-> (Tensor output, Tensor mean, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "channels_first_backward(Tensor grad_output, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, "
      "Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def("channels_first_check_forward(Tensor input, Tensor? weight, Tensor? bias) -> ()", {at::Tag::pt2_compliant_tag});
}

void ImageOperators::implement_cpu(torch::Library& m) {
  m.impl("channels_first_forward", &forward<cpu::channels_first_forward>);
  m.impl("channels_first_backward", &backward<cpu::channels_first_backward, cpu::channels_first_backward_workspace>);
}

#if defined(WITH_CUDA)
void ImageOperators::implement_cuda(torch::Library& m) {
  m.impl("channels_first_forward", &forward<cuda::channels_first_forward>);
  m.impl("channels_first_backward", &backward<cuda::channels_first_backward, cuda::channels_first_backward_workspace>);
}
#endif

void ImageOperators::implement_meta(torch::Library& m) {
  m.impl("channels_first_forward", &forward_meta);
  m.impl("channels_first_backward", &backward_meta);
}

void ImageOperators::implement_autograd(torch::Library& m) {
  m.impl("channels_first_forward", &forward_autograd);
  m.impl("channels_first_backward", &backward_autograd);
}

void ImageOperators::implement_vmap(torch::Library& m) {
  m.impl("channels_first_forward", &forward_as_rows);
  m.impl("channels_first_backward", &backward_as_rows);
}

void ImageOperators::implement_composite(torch::Library& m) { m.impl("channels_first_check_forward", &check_images); }

}  // namespace layernorm
