// Derivatives of the operators.
//
// First order: `forward` leaves a Node that calls `backward`. Second order: `backward`, called where its own
// derivative may be wanted, leaves a Node too, which is made of differentiable aten operations; autograd
// takes it from there to any order. Forward-mode AD and torch.func see both operators as compositions of aten
// operations.
//
// With xhat = (x - mean) * rstd, g = dy * weight and the symmetric projection P(z) = z - mean(z) - xhat *
// mean(z * xhat):
//
//   dx = rstd * P(g)      dweight = sum over rows of dy * xhat      dbias = sum over rows of dy
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/rsqrt.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
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

// x - mean, with the rounding of the mean taken off as the kernels do.
Tensor centre(const Tensor& x, const Dims& dims) {
  const Tensor d = x - dims.mean(x);
  return d - dims.mean(d);
}

Outputs forward_composite(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& weight,
                          const optional<Tensor>& bias, double eps) {
  check_forward(input, normalized_shape, weight, bias);
  const Dims dims(input, normalized_shape.size());
  const auto acc = accumulate_type(input);
  const Tensor x = input.to(acc);
  const Tensor d = centre(x, dims);
  const Tensor rstd = at::rsqrt(dims.mean(d * d) + eps);
  Tensor y = d * rstd;
  if (present(weight)) y = y * weight->to(acc);
  if (present(bias)) y = y + bias->to(acc);
  return {y.to(input.scalar_type()), dims.mean(x).detach(), rstd.detach()};
}

// What the derivatives of one call are made of, in the accumulation type.
struct Terms {
  // `saved_rstd` is a constant to autograd; where derivatives of rstd are wanted, it is multiplied by a
  // factor of value one that has them: rstd = 1 / sqrt(var + eps) = saved / sqrt(1 + saved^2 * (var - value
  // of var)), which needs no eps.
  Terms(const Tensor& grad_output, const Tensor& input, const Tensor& saved_rstd, const Tensor& weight_, size_t count,
        bool differentiate_rstd)
      : dims(input, count), dy(grad_output.to(saved_rstd.scalar_type())), rstd(saved_rstd) {
    const auto acc = saved_rstd.scalar_type();
    const Tensor d = centre(input.to(acc), dims);
    if (differentiate_rstd) {
      const Tensor variance = dims.mean(d * d);
      rstd = rstd * at::rsqrt(rstd * rstd * (variance - variance.detach()) + 1);
    }
    xhat = d * rstd;
    if (weight_.defined()) weight = weight_.to(acc);
    g = times_weight(dy);
  }

  Tensor times_weight(const Tensor& t) const { return weight.defined() ? t * weight : t; }
  Tensor project(const Tensor& z) const { return z - dims.mean(z) - xhat * dims.mean(z * xhat); }

  Dims dims;
  Tensor dy, rstd, weight, xhat, g;
};

Outputs backward_composite(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape,
                           const Tensor& mean, const Tensor& rstd, const optional<Tensor>& weight,
                           const optional<Tensor>& bias, Mask output_mask) {
  check_backward(grad_output, input, normalized_shape, mean, rstd, weight, bias);
  const Terms t(grad_output, input, rstd, present(weight) ? *weight : Tensor(), normalized_shape.size(),
                /*differentiate_rstd=*/true);
  const auto param_type = parameter_type(input, weight, bias);
  Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) grad_input = (t.rstd * t.project(t.g)).to(input.scalar_type());
  if (output_mask[1]) grad_weight = t.dims.sum_rows(t.dy * t.xhat).to(param_type);
  if (output_mask[2]) grad_bias = t.dims.sum_rows(t.dy).to(param_type);
  return {grad_input, grad_weight, grad_bias};
}

// ---- nodes of the autograd graph ------------------------------------------------------------------------------------

// Node is counted by std::shared_ptr up to torch 2.12, by c10::intrusive_ptr later.
template <class N, class Pointer = decltype(torch::autograd::Edge::function)>
auto make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<N>(new N, [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<N>();
  }
}

SavedVariable save(const Tensor& t) { return SavedVariable(t, /*is_output=*/false); }

// A node of three inputs. N::derivative(gradients, wanted) is what it computes, from parts that it has saved and names
// in N::for_each_saved(node, f), so that compiled autograd can record a call of it and make that again elsewhere.
template <class N>
struct RecordableNode : torch::autograd::Node {
  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<N&>(*this).derivative(gradients, wanted());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    N::for_each_saved(static_cast<N&>(*this), [](auto& saved) {
      if constexpr (std::is_same_v<decltype(saved), SavedVariable&>) saved.reset_data();
    });
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    N::for_each_saved(static_cast<const N&>(*this), [&](const auto& saved) {
      if constexpr (std::is_same_v<decltype(saved), const SavedVariable&>) {
        args.collect(saved, /*is_output=*/false);
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
      tracing.before(saved);
      if constexpr (std::is_same_v<decltype(saved), SavedVariable&>) {
        pack(saved.unpack());
      } else {
        pack(saved);
      }
    });
    pack(wanted());
    const auto replay = [](const variable_list& gradients, const std::vector<at::IValue>& packed) {
      PackedArgs args(packed);
      const auto node = make_node<N>();
      N::for_each_saved(*node, [&](auto& saved) {
        if constexpr (std::is_same_v<decltype(saved), SavedVariable&>) {
          saved = save(args.unpack<Tensor>());
        } else {
          saved = args.unpack<std::decay_t<decltype(saved)>>();
        }
      });
      return node->derivative(gradients, args.unpack<Mask>());
    };
    const auto& compiler = getPyCompilerInterface();
    const auto name = compiler->bind_function(tracing.get_py_compiler(), node.name(), replay, types,
                                              /*is_custom_function=*/true, /*is_traceable=*/true);
    const auto output_metadata =
        IValuePacker<std::vector<optional<torch::autograd::InputMetadata>>>::pack(get_input_metadata(next_edges()));
    const auto outputs = compiler->call_function(tracing.get_py_compiler(), "apply_functional", name, gradients,
                                                 args.vec(), output_metadata);
    N::for_each_saved(node, [&](auto& saved) { tracing.after(saved); });
    return outputs;
  }

 private:
  Mask wanted() {
    return {task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
  }
};

optional<Tensor> as_optional(Tensor t) { return t.defined() ? optional<Tensor>(std::move(t)) : std::nullopt; }

// Derivative of `backward`, for the cotangents v of (grad_input, grad_weight, grad_bias).
struct LayerNormBackwardBackward : RecordableNode<LayerNormBackwardBackward> {
  variable_list derivative(const variable_list& v, Mask wanted) const {
    variable_list grads(3);  // of grad_output, input, weight
    const auto& [v_input, v_weight, v_bias] = std::tie(v[0], v[1], v[2]);
    if (!v_input.defined() && !v_weight.defined() && !v_bias.defined()) return grads;
    const Tensor dy = grad_output.unpack(), x = input.unpack(), w = weight.unpack();
    const Terms t(dy, x, rstd.unpack(), w, normalized_dims, at::GradMode::is_enabled());
    const auto acc = t.rstd.scalar_type();

    Tensor grad_dy, grad_xhat;  // grad_xhat is what reaches xhat other than through rstd
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
    return grads;
  }

  template <class Self, class F>
  static void for_each_saved(Self& self, const F& f) {
    f(self.grad_output), f(self.input), f(self.weight), f(self.rstd), f(self.normalized_dims);
  }

  std::string name() const override { return "LayerNormBackwardBackward"; }

  SavedVariable grad_output, input, weight, rstd;
  int64_t normalized_dims = 0;
};

// Derivative of `forward`.
struct LayerNormBackward : RecordableNode<LayerNormBackward> {
  variable_list derivative(const variable_list& grads, Mask wanted) const {
    if (!grads[0].defined()) return variable_list(3);
    auto [grad_input, grad_weight, grad_bias] =
        call_backward(grads[0], input.unpack(), normalized_shape, mean.unpack(), rstd.unpack(),
                      as_optional(weight.unpack()), as_optional(bias.unpack()), wanted);
    return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
  }

  template <class Self, class F>
  static void for_each_saved(Self& self, const F& f) {
    f(self.input), f(self.weight), f(self.bias), f(self.mean), f(self.rstd), f(self.normalized_shape);
  }

  std::string name() const override { return "LayerNormBackward"; }

  SavedVariable input, weight, mean, rstd;
  SavedVariable bias;  // only where there is no weight: for the dtype of its gradient
  std::vector<c10::SymInt> normalized_shape;
};

// ---- the Autograd key -----------------------------------------------------------------------------------------------

bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
bool has_tangent(const optional<Tensor>& t) { return t && has_tangent(*t); }
bool requires_grad(const Tensor& t) { return t.defined() && t.requires_grad(); }
bool requires_grad(const optional<Tensor>& t) { return t && requires_grad(*t); }

// Inside torch.func.grad, vjp, jvp and the like, whose tensors a C++ Node cannot save.
bool inside_transform() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

Outputs forward_autograd(const Tensor& input, SymIntArrayRef normalized_shape, const optional<Tensor>& weight,
                         const optional<Tensor>& bias, double eps) {
  if (has_tangent(input) || has_tangent(weight) || has_tangent(bias) || inside_transform()) {
    return forward_composite(input, normalized_shape, weight, bias, eps);
  }
  const auto call = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_forward(input, normalized_shape, weight, bias, eps);
  };
  if (!at::GradMode::is_enabled() || !(requires_grad(input) || requires_grad(weight) || requires_grad(bias))) {
    return call();
  }
  const Tensor w = weight.value_or(Tensor()), b = bias.value_or(Tensor());
  const auto node = make_node<LayerNormBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(input, w, b));
  node->normalized_shape.assign(normalized_shape.begin(), normalized_shape.end());
  Outputs outputs = call();
  auto& [output, mean, rstd] = outputs;
  torch::autograd::set_history(output, node);
  node->input = save(input);
  node->weight = save(w);
  if (!w.defined()) node->bias = save(b);
  node->mean = save(mean);
  node->rstd = save(rstd);
  return outputs;
}

Outputs backward_autograd(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape,
                          const Tensor& mean, const Tensor& rstd, const optional<Tensor>& weight,
                          const optional<Tensor>& bias, Mask output_mask) {
  if (has_tangent(grad_output) || has_tangent(input) || has_tangent(weight) || inside_transform()) {
    return backward_composite(grad_output, input, normalized_shape, mean, rstd, weight, bias, output_mask);
  }
  const auto call = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_backward(grad_output, input, normalized_shape, mean, rstd, weight, bias, output_mask);
  };
  if (!at::GradMode::is_enabled() || !(requires_grad(grad_output) || requires_grad(input) || requires_grad(weight))) {
    return call();
  }
  const Tensor w = weight.value_or(Tensor());
  const auto node = make_node<LayerNormBackwardBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(grad_output, input, w));
  node->normalized_dims = static_cast<int64_t>(normalized_shape.size());
  Outputs outputs = call();
  auto& [grad_input, grad_weight, grad_bias] = outputs;
  torch::autograd::set_history({grad_input, grad_weight, grad_bias}, node);
  node->grad_output = save(grad_output);
  node->input = save(input);
  node->weight = save(w);
  node->rstd = save(rstd);
  return outputs;
}

}  // namespace
}  // namespace layernorm

LAYERNORM_LIBRARY_IMPL(Autograd, m) {
  m.impl("forward", &layernorm::forward_autograd);
  m.impl("backward", &layernorm::backward_autograd);
}

// vmap: each aten operation of the composite has its batching rule.
LAYERNORM_LIBRARY_IMPL(FuncTorchBatchedDecomposition, m) {
  m.impl("forward", &layernorm::forward_composite);
  m.impl("backward", &layernorm::backward_composite);
}
