// Derivatives of the operators.
//
// First order: `forward` records a node that calls `backward`. Second order: `backward` records a node made of
// differentiable aten operations, which autograd differentiates to any order. For forward-mode AD and torch.func both
// operators are compositions of aten operations.
//
// With xhat = (x - mean) * rstd, g = dy * weight and the symmetric projection P(z) = z - mean(z) - xhat *
// mean(z * xhat):
//
//   dx = rstd * P(g)      dweight = sum over rows of dy * xhat      dbias = sum over rows of dy
//
// and P(z) = z - xhat * mean(z * xhat) for RMSNorm. With a residual, x is the sum of input and residual, and the
// gradient of the returned sum is added to dx.
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/exp2.h>
#include <ATen/ops/log2.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/round.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include <cmath>

#include "ops.h"

namespace layernorm {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// ---- the operators as compositions of differentiable operations -----------------------------------------------------

// Whether a call is part of forward-mode AD or of a torch.func transform (grad, vjp, jvp), whose tensors a C++ node
// cannot save.
template <class... Tensors>
bool is_transformed(const Tensors&... tensors) {
  return (has_tangent(tensors) || ...) ||
         c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

at::DimVector last_dims(int64_t count) {
  at::DimVector dims(count);
  for (int64_t d = 0; d < count; ++d) dims[d] = d - count;
  return dims;
}

// The mean over the last `count` dimensions.
Tensor mean_of(const Tensor& t, int64_t count) { return t.mean(last_dims(count), /*keepdim=*/true); }

// The differences x - mean, or x for RMSNorm, times the scale of their row, which is a power of two and a constant for
// autograd. As in the kernels, the mean is corrected for its rounding, and a constant row has differences of zero.
struct Differences {
  // magnitude(first_scale, largest) returns an estimate of the standard deviation times first_scale, of which it is
  // enough to know the order of magnitude; `largest` is the largest absolute difference times first_scale.
  template <class F>
  Differences(const Tensor& x, int64_t count, const Options& options, const F& magnitude) {
    // The products of up to three numbers between 2^-step and 2^step are far from overflow.
    const double step = x.scalar_type() == at::kDouble ? 320 : 40;
    const auto dims = last_dims(count);
    const Tensor constant = x.detach();
    const bool empty = TORCH_GUARD_OR_FALSE(x.sym_numel().sym_eq(0));  // amin() refuses empty rows
    const Tensor low = empty ? mean_of(constant, count) : constant.amin(dims, /*keepdim=*/true);
    const Tensor high = empty ? low : constant.amax(dims, /*keepdim=*/true);
    // Numbers whose sums or differences might overflow are scaled before the subtraction.
    const Tensor one = at::ones_like(low);
    const Tensor first_scale = at::where(at::maximum(high, -low) > std::exp2(2.2 * step), one * std::exp2(-step), one);
    values = x * first_scale;
    Tensor center = at::zeros_like(low);
    if (!options.rms) {
      const Tensor rounded = mean_of(constant * first_scale, count);
      center = at::minimum(at::maximum(rounded, low * first_scale), high * first_scale);  // exact for a constant row
      values = values - center;
      const Tensor correction = mean_of(values, count);
      values = values - correction;
      mean = (center + correction.detach()) / first_scale;
    }
    // Squares that might overflow or underflow are avoided by a second scale. Its product with the first one is finite.
    const Tensor largest = at::maximum(high * first_scale - center, center - low * first_scale);
    const Tensor exponent = at::clamp(at::round(at::log2(magnitude(first_scale, largest)) / step), -3, 2);
    const Tensor second_scale = at::exp2(exponent * -step);
    values = values * second_scale;
    scale = first_scale * second_scale;
  }

  Tensor values, scale;
  Tensor mean;  // undefined for RMSNorm
};

// The factor on xhat, in the accumulation type: weight or weight + 1.
Tensor factor(const Tensor& weight, at::ScalarType acc, const Options& options) {
  const Tensor w = weight.to(acc);
  return options.zero_centered_weight ? w + 1 : w;
}

ForwardOutputs forward_composite(const ForwardArgs& args) {
  const auto& [input, residual, normalized_shape, weight, bias, eps, options, in_place] = args;
  check_forward(input, residual, normalized_shape, weight, bias);
  const auto count = static_cast<int64_t>(normalized_shape.size());
  const auto acc = accumulate_type(input);
  Tensor sum;
  if (present(residual)) sum = in_place ? residual->add_(input) : input + *residual;
  const Tensor x = (sum.defined() ? sum : input).to(acc);
  const double root = std::sqrt(std::fabs(eps));
  const Differences d(x, count, options, [&](const Tensor& first_scale, const Tensor& largest) {
    return at::maximum(largest, first_scale * root);
  });
  const Tensor scaled_root = d.scale * root, scaled_eps = scaled_root * scaled_root;
  const Tensor variance = mean_of(d.values * d.values, count);
  const Tensor rstd = at::rsqrt(eps < 0 ? variance - scaled_eps : variance + scaled_eps);
  Tensor y = d.values * rstd;
  if (present(weight)) y = y * factor(*weight, acc, options);
  if (present(bias)) y = y + bias->to(acc);
  return {y.to(input.scalar_type()), sum, d.mean, rstd.detach() * d.scale};
}

// The terms of the derivatives of one call, in the accumulation type.
struct Terms {
  // `saved_rstd` is a constant for autograd. To differentiate rstd, it is multiplied by a factor of value one that has
  // the derivatives of rstd but needs no eps:
  //   rstd = 1 / sqrt(var + eps) = saved / sqrt(1 + saved^2 * (var - detach(var)))
  Terms(const Tensor& grad_output, const Tensor& input, const Tensor& saved_rstd, const Tensor& weight_, int64_t count,
        bool differentiate_rstd, const Options& options)
      : options(options), count(count), dy(grad_output.to(saved_rstd.scalar_type())) {
    const auto acc = saved_rstd.scalar_type();
    const Differences d(input.to(acc), count, options,
                        [&](const Tensor& first_scale, const Tensor&) { return first_scale / saved_rstd.detach(); });
    Tensor scaled_rstd = saved_rstd / d.scale;
    if (differentiate_rstd) {
      const Tensor variance = mean(d.values * d.values);
      scaled_rstd = scaled_rstd * at::rsqrt(scaled_rstd * scaled_rstd * (variance - variance.detach()) + 1);
    }
    rstd = scaled_rstd * d.scale;
    xhat = d.values * scaled_rstd;
    if (weight_.defined()) weight = factor(weight_, acc, options);
    g = times_weight(dy);
  }

  Tensor mean(const Tensor& t) const { return mean_of(t, count); }
  Tensor times_weight(const Tensor& t) const { return weight.defined() ? t * weight : t; }
  Tensor project(const Tensor& z) const { return (options.rms ? z : z - mean(z)) - xhat * mean(z * xhat); }

  Options options;
  int64_t count;
  Tensor dy, rstd, weight, xhat, g;
};

// rstd is not a function of the output, so it cannot be differentiated in a backward from the output.
constexpr const char* kNoDerivative =
    "The derivative of a backward pass needs the input, which memory_efficient=True does not keep; use "
    "memory_efficient=False";

BackwardOutputs backward_composite(const BackwardArgs& args) {
  check_backward(args);
  TORCH_CHECK_NOT_IMPLEMENTED(!args.options.memory_efficient, kNoDerivative);
  const auto [wants_input, wants_weight, wants_bias] = args.output_mask;
  const Terms t(args.grad_output, args.input, args.rstd, args.weight.value_or(Tensor()),
                static_cast<int64_t>(args.normalized_shape.size()), /*differentiate_rstd=*/true, args.options);
  const ParameterTypes types(args.input, args.weight, args.bias);
  Tensor grad_input, grad_weight, grad_bias;
  if (wants_input) {
    Tensor dx = t.rstd * t.project(t.g);
    if (present(args.grad_sum)) dx = dx + args.grad_sum->to(dx.scalar_type());
    grad_input = dx.to(args.input.scalar_type());
  }
  const auto sum_rows = [&](const Tensor& gradient, const GradientType& type) {
    return at::sum_to(gradient, type.sizes(args.normalized_shape)).to(type.dtype);
  };
  if (wants_weight) grad_weight = sum_rows(t.dy * t.xhat, types.weight);
  if (wants_bias) grad_bias = sum_rows(t.dy, types.bias);
  return {grad_input, grad_weight, grad_bias};
}

// ---- images ---------------------------------------------------------------------------------------------------------

// Images [N, C, *], or a parameter of them, as rows: the channels are the last of `dims` dimensions. Parameters [N, C]
// lack the last dimensions, and parameters [C] have nothing to move.
Tensor channels_last(Tensor t, int64_t dims) {
  if (!t.defined() || t.dim() == 1) return t;
  while (t.dim() < dims) t = t.unsqueeze(-1);
  return t.movedim(1, -1);
}
optional<Tensor> channels_last(const optional<Tensor>& t, int64_t dims) {
  return present(t) ? optional(channels_last(*t, dims)) : std::nullopt;
}

// The same as an alias that autograd does not know, which takes a tenth of the time.
optional<Tensor> alias_channels_last(const optional<Tensor>& t, int64_t dims) {
  if (!present(t) || t->dim() == 1) return t;
  at::DimVector sizes(t->sizes()), strides(t->strides());
  sizes.resize(dims, 1);
  strides.resize(dims, 1);
  std::rotate(sizes.begin() + 1, sizes.begin() + 2, sizes.end());
  std::rotate(strides.begin() + 1, strides.begin() + 2, strides.end());
  auto alias = t->unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
  alias->set_sizes_and_strides(sizes, strides);
  return Tensor(std::move(alias));
}

// Moves the channels of a new tensor back.
void channels_second(const Tensor& t) {
  if (!t.defined()) return;
  at::DimVector sizes(t.sizes()), strides(t.strides());
  std::rotate(sizes.begin() + 1, sizes.end() - 1, sizes.end());
  std::rotate(strides.begin() + 1, strides.end() - 1, strides.end());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

// Whether no kernel but those of autograd and of a backend takes part in a call, so that it may use aliases. Autocast
// has no kernel for these operators.
bool is_plain(const ForwardArgs& args) {
  using c10::DispatchKey;
  constexpr auto allowed =
      c10::DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
                           DispatchKey::ADInplaceOrView, DispatchKey::BackendSelect}) |
      c10::autocast_dispatch_keyset;
  c10::DispatchKeySet keys = args.input.key_set();
  for (const auto* t : {&args.residual, &args.weight, &args.bias}) {
    if (present(*t)) keys = keys | (*t)->key_set();
  }
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return allowed.has_all((keys | local.included_) - local.excluded_);
}

ForwardOutputs call_forward_on_images(const ForwardArgs& args) {
  const int64_t dims = args.input.dim();
  auto outputs = call_forward({*alias_channels_last(args.input, dims), alias_channels_last(args.residual, dims),
                               args.normalized_shape, alias_channels_last(args.weight, dims),
                               alias_channels_last(args.bias, dims), args.eps, args.options, args.in_place});
  channels_second(outputs.output);
  if (args.in_place) {
    outputs.sum = *args.residual;
  } else {
    channels_second(outputs.sum);
  }
  return outputs;
}

// ---- nodes of the autograd graph ------------------------------------------------------------------------------------

// torch counts the references to a Node by std::shared_ptr up to version 2.12, and by c10::intrusive_ptr later.
template <class N, class Pointer = decltype(torch::autograd::Edge::function)>
auto make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<N>(new N, [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<N>();
  }
}

// A tensor that a node saves. Saving an output of the node itself must not create a reference cycle.
struct Saved {
  Saved() = default;
  explicit Saved(const Tensor& t, bool is_output = false) : variable(t, is_output), is_output(is_output) {}
  template <class N>
  Tensor unpack(N& node) const {
    return is_output ? variable.unpack(node.getptr()) : variable.unpack();
  }

  SavedVariable variable;
  bool is_output = false;
};

// Calls f with each element of a tuple.
template <class Tuple, class F>
void for_each(const Tuple& tuple, const F& f) {
  std::apply([&](auto&... elements) { (f(elements), ...); }, tuple);
}

// A node with up to four inputs. N::derivative(gradients, wanted) computes its gradients. The references of N::saved()
// and N::values() are to its tensors and to what else it needs, so that compiled autograd can record a call and replay
// it.
template <class N>
struct RecordableNode : torch::autograd::Node {
  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<N&>(*this).derivative(gradients, wanted());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for_each(static_cast<N&>(*this).saved(), [](Saved& tensor) { tensor.variable.reset_data(); });
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    N& node = const_cast<N&>(static_cast<const N&>(*this));  // it is only read
    for_each(node.saved(), [&](const Saved& tensor) { args.collect(tensor.variable, tensor.is_output); });
    for_each(node.values(), [&](const auto& value) { args.collect(value); });
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 torch::dynamo::autograd::SwapSavedVariables& tracing) override {
    using namespace torch::dynamo::autograd;
    N& node = static_cast<N&>(*this);
    PackedArgs args;
    std::vector<at::TypePtr> types;
    const auto pack = [&](const auto& value) {
      args.pack(value);
      types.push_back(IValuePacker<std::decay_t<decltype(value)>>::packed_type());
    };
    for_each(node.saved(), [&](Saved& tensor) {
      tracing.before(tensor.variable);
      pack(tensor.unpack(node));
    });
    for_each(node.values(), [&](auto& value) {
      tracing.before(value);
      pack(value);
    });
    pack(wanted());
    const auto replay = [](const variable_list& gradients, const std::vector<at::IValue>& packed) {
      PackedArgs args(packed);
      const auto node = make_node<N>();
      for_each(node->saved(), [&](Saved& tensor) { tensor = Saved(args.unpack<Tensor>()); });
      for_each(node->values(), [&](auto& value) { value = args.unpack<std::decay_t<decltype(value)>>(); });
      return node->derivative(gradients, args.unpack<Wanted>());
    };
    const auto& compiler = getPyCompilerInterface();
    const auto name = compiler->bind_function(tracing.get_py_compiler(), node.name(), replay, types,
                                              /*is_custom_function=*/true, /*is_traceable=*/true);
    const auto output_metadata =
        IValuePacker<std::vector<optional<torch::autograd::InputMetadata>>>::pack(get_input_metadata(next_edges()));
    const auto outputs = compiler->call_function(tracing.get_py_compiler(), "apply_functional", name, gradients,
                                                 args.vec(), output_metadata);
    for_each(node.saved(), [&](Saved& tensor) { tracing.after(tensor.variable); });
    for_each(node.values(), [&](auto& value) { tracing.after(value); });
    return outputs;
  }

 protected:
  using Wanted = std::array<bool, 4>;

 private:
  Wanted wanted() {
    Wanted result = {};
    for (size_t i = 0; i < num_outputs(); ++i) result[i] = task_should_compute_output(i);
    return result;
  }
};

optional<Tensor> as_optional(Tensor t) { return t.defined() ? optional<Tensor>(std::move(t)) : std::nullopt; }

// The options as values of a RecordableNode.
auto values_of(Options& options) {
  return std::tie(options.rms, options.zero_centered_weight, options.memory_efficient, options.preserve_layout);
}

// The derivative of backward, given the upstream gradients v of (grad_input, grad_weight, grad_bias).
struct LayerNormBackwardBackward : RecordableNode<LayerNormBackwardBackward> {
  variable_list derivative(const variable_list& v, Wanted wanted) {
    variable_list grads(4);  // of grad_output, input, weight, grad_sum
    const auto& [v_input, v_weight, v_bias] = std::tie(v[0], v[1], v[2]);
    if (!v_input.defined() && !v_weight.defined() && !v_bias.defined()) return grads;
    TORCH_CHECK_NOT_IMPLEMENTED(!options.memory_efficient, kNoDerivative);
    const Tensor dy = grad_output.unpack(*this), x = input.unpack(*this), w = weight.unpack(*this);
    const Terms t(dy, x, rstd.unpack(*this), w, normalized_dims, at::GradMode::is_enabled(), options);
    const auto acc = t.rstd.scalar_type();

    Tensor grad_dy, grad_xhat;  // grad_xhat leaves out the dependence through rstd
    const auto add = [](Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum + term : term; };
    const Tensor vx = v_input.defined() ? v_input.to(acc) : Tensor();
    const Tensor u = vx.defined() ? t.rstd * t.project(vx) : Tensor();
    if (u.defined()) {
      add(grad_dy, t.times_weight(u));
      add(grad_xhat, -t.rstd * (vx * t.mean(t.g * t.xhat) + t.g * t.mean(vx * t.xhat)));
    }
    if (v_weight.defined()) {
      add(grad_dy, v_weight.to(acc) * t.xhat);
      add(grad_xhat, v_weight.to(acc) * t.dy);
    }
    if (v_bias.defined()) add(grad_dy, v_bias.to(acc).expand_as(t.dy));

    if (wanted[0]) grads[0] = grad_dy.to(dy.scalar_type());
    if (wanted[1] && grad_xhat.defined()) {
      Tensor grad_x = t.project(grad_xhat);
      if (vx.defined()) grad_x = grad_x - t.rstd * t.xhat * t.mean(vx * t.project(t.g));
      grads[1] = (t.rstd * grad_x).to(x.scalar_type());
    }
    if (wanted[2] && u.defined()) grads[2] = at::sum_to(t.dy * u, w.sym_sizes()).to(w.scalar_type());
    if (wanted[3]) grads[3] = v_input;
    return grads;
  }

  auto saved() { return std::tie(grad_output, input, weight, rstd); }
  auto values() { return std::tuple_cat(std::tie(normalized_dims), values_of(options)); }

  std::string name() const override { return "LayerNormBackwardBackward"; }

  Saved grad_output, input, weight, rstd;
  int64_t normalized_dims = 0;
  Options options;
};

// The derivative of forward.
struct LayerNormBackward : RecordableNode<LayerNormBackward> {
  variable_list derivative(const variable_list& grads, Wanted wanted) {
    const Tensor grad_sum = has_residual ? grads[1] : Tensor();
    variable_list result(4);  // of input, weight, bias, residual
    const bool wants_x = wanted[0] || wanted[3];
    if (grads[0].defined()) {
      const Tensor w = weight.unpack(*this), b = bias.unpack(*this);
      const auto rows = [&](const Tensor& t) { return as_optional(images ? channels_last(t, grads[0].dim()) : t); };
      const auto dy = rows(grads[0]), x = rows(input.unpack(*this)), dsum = rows(grad_sum);
      const std::array<bool, 3> mask = {wants_x, wanted[1], wanted[2]};
      auto [grad_input, grad_weight, grad_bias] =
          call_backward({*dy, *x, normalized_shape, as_optional(mean.unpack(*this)), rstd.unpack(*this), rows(w),
                         rows(b), mask, dsum, options});
      result = {std::move(grad_input), std::move(grad_weight), std::move(grad_bias), Tensor()};
      if (images) {
        if (wants_x) result[0] = result[0].movedim(-1, 1);
        const Tensor& like_bias = b.defined() ? b : w;  // see is_unlike()
        if (wanted[1] && w.dim() > 1) result[1] = result[1].movedim(-1, 1).reshape_symint(w.sym_sizes());
        if (wanted[2] && like_bias.dim() > 1) {
          result[2] = result[2].movedim(-1, 1).reshape_symint(like_bias.sym_sizes());
        }
      }
    } else if (wants_x) {
      result[0] = grad_sum;
    }
    if (wanted[3]) result[3] = result[0];
    if (!wanted[0]) result[0] = Tensor();
    // With a residual, the gradient of the sum has the residual's dtype.
    const auto type = static_cast<at::ScalarType>(input_type);
    if (result[0].defined() && result[0].scalar_type() != type) result[0] = result[0].to(type);
    result.resize(has_residual ? 4 : 3);
    return result;
  }

  auto saved() { return std::tie(input, weight, bias, mean, rstd); }
  auto values() {
    return std::tuple_cat(std::tie(normalized_shape, has_residual, images, input_type), values_of(options));
  }

  std::string name() const override { return "LayerNormBackward"; }

  Saved input;  // the sum if there is a residual; the output if memory_efficient
  Saved weight, mean, rstd;
  Saved bias;  // only if memory_efficient, or for the dtype or shape of its gradient
  std::vector<c10::SymInt> normalized_shape;
  bool has_residual = false;
  bool images = false;     // the tensors are [N, C, *], but mean and rstd are those of the rows
  int64_t input_type = 0;  // an at::ScalarType
  Options options;
};

// Whether backward needs the bias for the dtype and the shape of its gradient.
bool is_unlike(const Tensor& bias, const Tensor& weight) {
  return bias.defined() && !(weight.defined() && weight.scalar_type() == bias.scalar_type() &&
                             weight.sym_sizes().equals(bias.sym_sizes()));
}

// ---- the Autograd key -----------------------------------------------------------------------------------------------

// Calls forward and records its derivative. The tensors may be `images` if they are plain.
ForwardOutputs forward_and_record(const ForwardArgs& args, bool images) {
  const auto& [input, residual, normalized_shape, weight, bias, eps, options, in_place] = args;
  const bool records = torch::autograd::compute_requires_grad(input, residual, weight, bias);
  const auto call = [&] {
    if (args.in_place && records) {
      TORCH_CHECK(!args.residual->is_view(),
                  "Expected residual not to be a view of another tensor where it is changed in "
                  "place and gradients are recorded, but got a view of a tensor of shape ",
                  args.residual->_base().sym_sizes());
      torch::autograd::check_inplace(*args.residual, records);
    }
    ForwardArgs below = args;
    // Without a graph there is no backward, so memory_efficient makes no difference.
    if (!records) below.options.memory_efficient = false;
    ForwardOutputs outputs;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      outputs = images ? call_forward_on_images(below) : call_forward(below);
    }
    if (args.in_place && !args.residual->is_inference()) torch::autograd::increment_version(*args.residual);
    return outputs;
  };
  if (!records) return call();
  const Tensor w = weight.value_or(Tensor()), b = bias.value_or(Tensor());
  const auto node = make_node<LayerNormBackward>();
  node->has_residual = present(residual);
  node->set_next_edges(node->has_residual ? torch::autograd::collect_next_edges(input, w, b, *residual)
                                          : torch::autograd::collect_next_edges(input, w, b));
  node->normalized_shape.assign(normalized_shape.begin(), normalized_shape.end());
  node->input_type = static_cast<int64_t>(input.scalar_type());
  node->options = options;
  node->images = images;
  ForwardOutputs outputs = call();
  auto& [output, sum, mean, rstd] = outputs;
  if (in_place) {
    torch::autograd::rebase_history({output, sum}, node);
  } else {
    torch::autograd::set_history(output, node);
    if (sum.defined()) torch::autograd::set_history(sum, node);
  }
  const Tensor& x = options.memory_efficient ? output : sum.defined() ? sum : input;
  node->input = Saved(x, /*is_output=*/!x.is_same(input));
  node->weight = Saved(w);
  if (options.memory_efficient || is_unlike(b, w)) node->bias = Saved(b);
  if (needs_mean(options)) node->mean = Saved(mean);
  node->rstd = Saved(rstd);
  return outputs;
}

ForwardOutputs forward_autograd(const ForwardArgs& args) {
  if (is_transformed(args.input, args.residual, args.weight, args.bias)) return forward_composite(args);
  return forward_and_record(args, /*images=*/false);
}

BackwardOutputs backward_autograd(const BackwardArgs& args) {
  const auto& [grad_output, input, normalized_shape, mean, rstd, weight, bias, output_mask, grad_sum, options] = args;
  if (is_transformed(grad_output, grad_sum, input, weight)) return backward_composite(args);
  const auto call = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_backward(args);
  };
  if (!torch::autograd::compute_requires_grad(grad_output, grad_sum, input, weight)) return call();
  const Tensor w = weight.value_or(Tensor());
  const auto node = make_node<LayerNormBackwardBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(grad_output, input, w, grad_sum.value_or(Tensor())));
  node->normalized_dims = static_cast<int64_t>(normalized_shape.size());
  node->options = options;
  BackwardOutputs outputs = call();
  auto& [grad_input, grad_weight, grad_bias] = outputs;
  torch::autograd::set_history({grad_input, grad_weight, grad_bias}, node);
  node->grad_output = Saved(grad_output);
  node->input = Saved(input);
  node->weight = Saved(w);
  node->rstd = Saved(rstd);
  return outputs;
}

}  // namespace

ForwardOutputs forward_images(const ForwardArgs& args) {
  const auto& [input, residual, normalized_shape, weight, bias, eps, options, in_place] = args;
  if (is_plain(args) && !is_transformed(input, residual, weight, bias)) {
    return forward_and_record(args, /*images=*/true);
  }
  const int64_t dims = input.dim();
  auto outputs = call_forward({channels_last(input, dims), channels_last(residual, dims), normalized_shape,
                               channels_last(weight, dims), channels_last(bias, dims), eps, options});
  outputs.output = outputs.output.movedim(-1, 1);
  if (present(residual)) outputs.sum = outputs.sum.movedim(-1, 1);
  if (in_place) outputs.sum = residual->copy_(outputs.sum);  // the operator refuses to change a view
  return outputs;
}

void Operators::implement_autograd(torch::Library& m) { implement<forward_autograd, backward_autograd>(m); }

// vmap uses the batching rules of the composite's aten operations.
void Operators::implement_vmap(torch::Library& m) { implement<forward_composite, backward_composite>(m); }

}  // namespace layernorm
