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
#include <ATen/TensorOperators.h>
#include <ATen/ops/rsqrt.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include "ops.h"

namespace layernorm {
namespace {

using c10::SymIntArrayRef;
using std::optional;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// ---- the operators as compositions of differentiable operations -----------------------------------------------------

// Sums and means over the parts of a tensor [batch..., normalized...].
struct Dims {
  Dims(const Tensor& input, size_t count) {
    const int64_t batch = input.dim() - static_cast<int64_t>(count);
    for (int64_t d = 0; d < input.dim(); ++d) (d < batch ? batch_dims : normalized_dims).push_back(d);
  }
  Tensor mean(const Tensor& t) const { return t.mean(normalized_dims, /*keepdim=*/true); }
  Tensor sum_rows(const Tensor& t) const { return batch_dims.empty() ? t : t.sum(batch_dims); }

  std::vector<int64_t> batch_dims, normalized_dims;
};

// x - mean, corrected for the rounding of the mean as in the kernels; x for RMSNorm.
Tensor subtract_mean(const Tensor& x, const Dims& dims, Variant variant) {
  if (variant.rms) return x;
  const Tensor d = x - dims.mean(x);
  return d - dims.mean(d);
}

// The factor on xhat, in the accumulation type: weight or weight + 1.
Tensor factor(const Tensor& weight, at::ScalarType acc, Variant variant) {
  const Tensor w = weight.to(acc);
  return variant.zero_centered_weight ? w + 1 : w;
}

NormOutputs forward_composite(const Tensor& input, const optional<Tensor>& residual, SymIntArrayRef normalized_shape,
                              const optional<Tensor>& weight, const optional<Tensor>& bias, double eps, Variant variant,
                              bool in_place) {
  check_forward(input, residual, normalized_shape, weight, bias);
  const Dims dims(input, normalized_shape.size());
  const auto acc = accumulate_type(input);
  Tensor sum, mean;
  if (present(residual)) sum = in_place ? residual->add_(input) : input + *residual;
  const Tensor x = (sum.defined() ? sum : input).to(acc);
  const Tensor d = subtract_mean(x, dims, variant);
  if (!variant.rms) mean = dims.mean(x).detach();
  const Tensor rstd = at::rsqrt(dims.mean(d * d) + eps);
  Tensor y = d * rstd;
  if (present(weight)) y = y * factor(*weight, acc, variant);
  if (present(bias)) y = y + bias->to(acc);
  return {y.to(input.scalar_type()), sum, mean, rstd.detach()};
}

// The terms of the derivatives of one call, in the accumulation type.
struct Terms {
  // `saved_rstd` is a constant for autograd. To differentiate rstd, it is multiplied by a factor of value one that has
  // the derivatives of rstd but needs no eps:
  //   rstd = 1 / sqrt(var + eps) = saved / sqrt(1 + saved^2 * (var - detach(var)))
  Terms(const Tensor& grad_output, const Tensor& input, const Tensor& saved_rstd, const Tensor& weight_, size_t count,
        bool differentiate_rstd, Variant variant)
      : variant(variant), dims(input, count), dy(grad_output.to(saved_rstd.scalar_type())), rstd(saved_rstd) {
    const auto acc = saved_rstd.scalar_type();
    const Tensor d = subtract_mean(input.to(acc), dims, variant);
    if (differentiate_rstd) {
      const Tensor variance = dims.mean(d * d);
      rstd = rstd * at::rsqrt(rstd * rstd * (variance - variance.detach()) + 1);
    }
    xhat = d * rstd;
    if (weight_.defined()) weight = factor(weight_, acc, variant);
    g = times_weight(dy);
  }

  Tensor times_weight(const Tensor& t) const { return weight.defined() ? t * weight : t; }
  Tensor project(const Tensor& z) const { return (variant.rms ? z : z - dims.mean(z)) - xhat * dims.mean(z * xhat); }

  Variant variant;
  Dims dims;
  Tensor dy, rstd, weight, xhat, g;
};

// rstd is not a function of the output, so it cannot be differentiated in a backward from the output.
constexpr const char* kNoDerivative =
    "The derivative of a backward pass needs the input, which memory_efficient=True does not keep; use "
    "memory_efficient=False";

Outputs backward_composite(const Tensor& grad_output, const optional<Tensor>& grad_sum, const Tensor& input,
                           SymIntArrayRef normalized_shape, const optional<Tensor>& mean, const Tensor& rstd,
                           const optional<Tensor>& weight, const optional<Tensor>& bias, Mask output_mask,
                           Variant variant) {
  check_backward(grad_output, grad_sum, input, normalized_shape, mean, rstd, weight, bias, variant);
  TORCH_CHECK_NOT_IMPLEMENTED(!variant.memory_efficient, kNoDerivative);
  const Terms t(grad_output, input, rstd, weight.value_or(Tensor()), normalized_shape.size(),
                /*differentiate_rstd=*/true, variant);
  const ParameterTypes types(input, weight, bias);
  Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) {
    grad_input = t.rstd * t.project(t.g);
    if (present(grad_sum)) grad_input = grad_input + grad_sum->to(grad_input.scalar_type());
    grad_input = grad_input.to(input.scalar_type());
  }
  if (output_mask[1]) grad_weight = t.dims.sum_rows(t.dy * t.xhat).to(types.weight);
  if (output_mask[2]) grad_bias = t.dims.sum_rows(t.dy).to(types.bias);
  return {grad_input, grad_weight, grad_bias};
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

// A node with up to four inputs. N::derivative(gradients, wanted) computes its gradients, and N::for_each_saved(node,
// f) enumerates what it has saved, so that compiled autograd can record a call and replay it.
template <class N>
struct RecordableNode : torch::autograd::Node {
  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<N&>(*this).derivative(gradients, wanted());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    N::for_each_saved(static_cast<N&>(*this), [](auto& saved) {
      if constexpr (is_tensor<decltype(saved)>) saved.variable.reset_data();
    });
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    N::for_each_saved(static_cast<const N&>(*this), [&](const auto& saved) {
      if constexpr (is_tensor<decltype(saved)>) {
        args.collect(saved.variable, saved.is_output);
      } else {
        args.collect(saved);
      }
    });
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
    N::for_each_saved(node, [&](auto& saved) {
      if constexpr (is_tensor<decltype(saved)>) {
        tracing.before(saved.variable);
        pack(saved.unpack(node));
      } else {
        tracing.before(saved);
        pack(saved);
      }
    });
    pack(wanted());
    const auto replay = [](const variable_list& gradients, const std::vector<at::IValue>& packed) {
      PackedArgs args(packed);
      const auto node = make_node<N>();
      N::for_each_saved(*node, [&](auto& saved) {
        if constexpr (is_tensor<decltype(saved)>) {
          saved = Saved(args.unpack<Tensor>());
        } else {
          saved = args.unpack<std::decay_t<decltype(saved)>>();
        }
      });
      return node->derivative(gradients, args.unpack<Wanted>());
    };
    const auto& compiler = getPyCompilerInterface();
    const auto name = compiler->bind_function(tracing.get_py_compiler(), node.name(), replay, types,
                                              /*is_custom_function=*/true, /*is_traceable=*/true);
    const auto output_metadata =
        IValuePacker<std::vector<optional<torch::autograd::InputMetadata>>>::pack(get_input_metadata(next_edges()));
    const auto outputs = compiler->call_function(tracing.get_py_compiler(), "apply_functional", name, gradients,
                                                 args.vec(), output_metadata);
    N::for_each_saved(node, [&](auto& saved) {
      if constexpr (is_tensor<decltype(saved)>) {
        tracing.after(saved.variable);
      } else {
        tracing.after(saved);
      }
    });
    return outputs;
  }

 protected:
  using Wanted = std::array<bool, 4>;

 private:
  template <class T>
  static constexpr bool is_tensor = std::is_same_v<std::decay_t<T>, Saved>;

  Wanted wanted() {
    Wanted result = {};
    for (size_t i = 0; i < num_outputs(); ++i) result[i] = task_should_compute_output(i);
    return result;
  }
};

optional<Tensor> as_optional(Tensor t) { return t.defined() ? optional<Tensor>(std::move(t)) : std::nullopt; }

// The derivative of norm_backward, given the upstream gradients v of (grad_input, grad_weight, grad_bias).
struct LayerNormBackwardBackward : RecordableNode<LayerNormBackwardBackward> {
  variable_list derivative(const variable_list& v, Wanted wanted) {
    variable_list grads(4);  // of grad_output, input, weight, grad_sum
    const auto& [v_input, v_weight, v_bias] = std::tie(v[0], v[1], v[2]);
    if (!v_input.defined() && !v_weight.defined() && !v_bias.defined()) return grads;
    TORCH_CHECK_NOT_IMPLEMENTED(!variant.memory_efficient, kNoDerivative);
    const Tensor dy = grad_output.unpack(*this), x = input.unpack(*this), w = weight.unpack(*this);
    const Terms t(dy, x, rstd.unpack(*this), w, normalized_dims, at::GradMode::is_enabled(), variant);
    const auto acc = t.rstd.scalar_type();

    Tensor grad_dy, grad_xhat;  // grad_xhat leaves out the dependence through rstd
    const auto add = [](Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum + term : term; };
    const Tensor vx = v_input.defined() ? v_input.to(acc) : Tensor();
    const Tensor u = vx.defined() ? t.rstd * t.project(vx) : Tensor();
    if (u.defined()) {
      add(grad_dy, t.times_weight(u));
      add(grad_xhat, -t.rstd * (vx * t.dims.mean(t.g * t.xhat) + t.g * t.dims.mean(vx * t.xhat)));
    }
    if (v_weight.defined()) {
      add(grad_dy, v_weight.to(acc) * t.xhat);
      add(grad_xhat, v_weight.to(acc) * t.dy);
    }
    if (v_bias.defined()) add(grad_dy, v_bias.to(acc).expand_as(t.dy));

    if (wanted[0]) grads[0] = grad_dy.to(dy.scalar_type());
    if (wanted[1] && grad_xhat.defined()) {
      Tensor grad_x = t.project(grad_xhat);
      if (vx.defined()) grad_x = grad_x - t.rstd * t.xhat * t.dims.mean(vx * t.project(t.g));
      grads[1] = (t.rstd * grad_x).to(x.scalar_type());
    }
    if (wanted[2] && u.defined()) grads[2] = t.dims.sum_rows(t.dy * u).to(w.scalar_type());
    if (wanted[3]) grads[3] = v_input;
    return grads;
  }

  template <class Self, class F>
  static void for_each_saved(Self& self, const F& f) {
    f(self.grad_output), f(self.input), f(self.weight), f(self.rstd), f(self.normalized_dims);
    f(self.variant.rms), f(self.variant.zero_centered_weight), f(self.variant.memory_efficient);
  }

  std::string name() const override { return "LayerNormBackwardBackward"; }

  Saved grad_output, input, weight, rstd;
  int64_t normalized_dims = 0;
  Variant variant;
};

// The derivative of norm_forward.
struct LayerNormBackward : RecordableNode<LayerNormBackward> {
  variable_list derivative(const variable_list& grads, Wanted wanted) {
    const Tensor grad_sum = has_residual ? grads[1] : Tensor();
    variable_list result(4);  // of input, weight, bias, residual
    const bool wants_x = wanted[0] || wanted[3];
    if (grads[0].defined()) {
      std::tie(result[0], result[1], result[2]) =
          call_norm_backward(grads[0], as_optional(grad_sum), input.unpack(*this), normalized_shape,
                             as_optional(mean.unpack(*this)), rstd.unpack(*this), as_optional(weight.unpack(*this)),
                             as_optional(bias.unpack(*this)), {wants_x, wanted[1], wanted[2]}, variant);
    } else if (wants_x) {
      result[0] = grad_sum;
    }
    if (wanted[3]) result[3] = result[0];
    if (!wanted[0]) result[0] = Tensor();
    result.resize(has_residual ? 4 : 3);
    return result;
  }

  template <class Self, class F>
  static void for_each_saved(Self& self, const F& f) {
    f(self.input), f(self.weight), f(self.bias), f(self.mean), f(self.rstd), f(self.normalized_shape);
    f(self.has_residual), f(self.variant.rms), f(self.variant.zero_centered_weight), f(self.variant.memory_efficient);
  }

  std::string name() const override { return "LayerNormBackward"; }

  Saved input;  // the sum if there is a residual; the output if memory_efficient
  Saved weight, mean, rstd;
  Saved bias;  // only if memory_efficient, or for the dtype of its gradient
  std::vector<c10::SymInt> normalized_shape;
  bool has_residual = false;
  Variant variant;
};

// ---- the Autograd key -----------------------------------------------------------------------------------------------

NormOutputs forward_autograd(const Tensor& input, const optional<Tensor>& residual, SymIntArrayRef normalized_shape,
                             const optional<Tensor>& weight, const optional<Tensor>& bias, double eps, Variant variant,
                             bool in_place) {
  if (is_transformed(input, residual, weight, bias)) {
    return forward_composite(input, residual, normalized_shape, weight, bias, eps, variant, in_place);
  }
  const bool records = wants_graph(input, residual, weight, bias);
  const auto call = [&] {
    // Without a graph there is no backward, so memory_efficient makes no difference.
    if (!records) variant.memory_efficient = false;
    if (in_place && records) {
      TORCH_CHECK(!residual->is_view(),
                  "Expected residual not to be a view of another tensor where it is changed in "
                  "place and gradients are recorded, but got a view of a tensor of shape ",
                  residual->_base().sym_sizes());
      torch::autograd::check_inplace(*residual, records);
    }
    NormOutputs outputs;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      outputs = call_norm_forward(input, residual, normalized_shape, weight, bias, eps, variant, in_place);
    }
    if (in_place && !residual->is_inference()) torch::autograd::increment_version(*residual);
    return outputs;
  };
  if (!records) return call();
  const Tensor w = weight.value_or(Tensor()), b = bias.value_or(Tensor());
  const auto node = make_node<LayerNormBackward>();
  node->has_residual = present(residual);
  node->set_next_edges(node->has_residual ? torch::autograd::collect_next_edges(input, w, b, *residual)
                                          : torch::autograd::collect_next_edges(input, w, b));
  node->normalized_shape.assign(normalized_shape.begin(), normalized_shape.end());
  node->variant = variant;
  NormOutputs outputs = call();
  auto& [output, sum, mean, rstd] = outputs;
  if (in_place) {
    torch::autograd::rebase_history({output, sum}, node);
  } else {
    torch::autograd::set_history(output, node);
    if (sum.defined()) torch::autograd::set_history(sum, node);
  }
  const Tensor& x = variant.memory_efficient ? output : sum.defined() ? sum : input;
  node->input = Saved(x, /*is_output=*/!x.is_same(input));
  node->weight = Saved(w);
  if (variant.memory_efficient || has_own_type(b, w)) node->bias = Saved(b);
  if (needs_mean(variant)) node->mean = Saved(mean);
  node->rstd = Saved(rstd);
  return outputs;
}

Outputs backward_autograd(const Tensor& grad_output, const optional<Tensor>& grad_sum, const Tensor& input,
                          SymIntArrayRef normalized_shape, const optional<Tensor>& mean, const Tensor& rstd,
                          const optional<Tensor>& weight, const optional<Tensor>& bias, Mask output_mask,
                          Variant variant) {
  if (is_transformed(grad_output, grad_sum, input, weight)) {
    return backward_composite(grad_output, grad_sum, input, normalized_shape, mean, rstd, weight, bias, output_mask,
                              variant);
  }
  const auto call = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_norm_backward(grad_output, grad_sum, input, normalized_shape, mean, rstd, weight, bias, output_mask,
                              variant);
  };
  if (!wants_graph(grad_output, grad_sum, input, weight)) return call();
  const Tensor w = weight.value_or(Tensor());
  const auto node = make_node<LayerNormBackwardBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(grad_output, input, w, grad_sum.value_or(Tensor())));
  node->normalized_dims = static_cast<int64_t>(normalized_shape.size());
  node->variant = variant;
  Outputs outputs = call();
  auto& [grad_input, grad_weight, grad_bias] = outputs;
  torch::autograd::set_history({grad_input, grad_weight, grad_bias}, node);
  node->grad_output = Saved(grad_output);
  node->input = Saved(input);
  node->weight = Saved(w);
  node->rstd = Saved(rstd);
  return outputs;
}

}  // namespace

void RowOperators::implement_autograd(torch::Library& m) { Family<forward_autograd, backward_autograd>::implement(m); }

// vmap uses the batching rules of the composite's aten operations.
void RowOperators::implement_vmap(torch::Library& m) { Family<forward_composite, backward_composite>::implement(m); }

}  // namespace layernorm
