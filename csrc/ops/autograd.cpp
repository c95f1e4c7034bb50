// Derivatives of the operators.
//
// A recorded `forward` calls the kernels, and adds a node to the graph that calls `backward`. A recorded `backward` is
// a composition of aten operations instead of a kernel, so that autograd can differentiate it to any order. In
// forward-mode AD and in torch.func, `forward` is a composition, too.
//
// With xhat = (x - mean) * rstd, g = dy * weight and the projection P(z) = z - mean(z) - xhat * mean(z * xhat):
//
//   dx = rstd * P(g)      dweight = sum over rows of dy * xhat      dbias = sum over rows of dy
//
// and P(z) = z - xhat * mean(z * xhat) for RMSNorm. With a residual, x is the sum of input and residual, and the
// gradient of the returned sum is added to dx. If x is input_scale * input + residual, dinput = input_scale * dx and
// dinput_scale = sum over rows of dx * input.
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include "composite.h"
#include "node.h"
#include "norm.h"
#include "shapes.h"

namespace layernorm {
namespace {

// Whether a call is part of forward-mode AD or of a torch.func transform (grad, vjp, jvp), whose tensors a C++ node
// cannot save.
template <class Args>
bool is_transformed(const Args& args) {
  bool result = c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
  for_each_tensor(args, [&](const char*, const Tensor& t) { result |= t._fw_grad(/*level=*/0).defined(); });
  return result;
}

bool requires_grad(const Tensor& t) { return t.requires_grad() && at::GradMode::is_enabled(); }
bool requires_grad(const OptionalTensorRef& t) { return t && requires_grad(*t); }
template <class... Tensors>
bool any_requires_grad(const Tensors&... tensors) {
  return (requires_grad(tensors) || ...);
}
// Whether autograd must record a call.
template <class Args>
bool needs_node(const Args& args) {
  bool result = false;
  for_each_tensor(args, [&](const char*, const Tensor& t) { result |= requires_grad(t); });
  return result;
}

// ---- the nodes ------------------------------------------------------------------------------------------------------

// The derivative of forward. A 16-bit input beside a float32 residual gets a float32 gradient, which autograd converts.
struct LayerNormBackward : RecordableNode<LayerNormBackward> {
  // `grads` has the upstream gradients of the node's outputs: first of the sum, if sum_is_output, then of the output.
  variable_list derivative(const variable_list& grads, NeedsInputGrad needs_input_grad) {
    const auto [needs_input, needs_weight, needs_bias, needs_residual, needs_gate, needs_input_scale] =
        needs_input_grad;
    const Tensor& grad_output = grads.back();
    const auto grad_sum = as_optional(sum_is_output ? grads[0] : Tensor());
    const auto input_scale = unpack(saved_input_scale), scaled_input = unpack(saved_scaled_input);
    BackwardOutputs outputs;
    if (grad_output.defined()) {
      Tensor input = saved_input.unpack(*this);
      if (!input.defined()) input = grad_output;  // dbias needs only the shape, dtype and device of the input
      const auto weight = unpack(saved_weight), bias = unpack(saved_bias), gate = unpack(saved_gate);
      const auto mean = unpack(saved_mean);
      const Tensor rstd = saved_rstd.unpack(*this);
      // With a residual, grad_input is the gradient of the sum, which is also the gradient of the residual.
      const bool needs_grad_input = needs_residual || (needs_input && !input_scale);
      const OutputMask mask = {needs_grad_input,           needs_weight,     needs_bias, needs_gate,
                               needs_input && input_scale, needs_input_scale};
      outputs = call_backward({grad_output, input, normalized_shape, mean, rstd, weight, bias, mask, grad_sum, gate,
                               input_scale, scaled_input, options});
    } else if (grad_sum) {
      outputs = derivative_of_sum(*grad_sum, input_scale, scaled_input, needs_input, needs_input_scale);
    }
    const Tensor& grad_input = input_scale ? outputs.grad_scaled_input : outputs.grad_input;
    return {needs_input ? grad_input : Tensor(),
            outputs.grad_weight,
            outputs.grad_bias,
            needs_residual ? outputs.grad_input : Tensor(),
            outputs.grad_gate,
            outputs.grad_input_scale};
  }

  // For compiled autograd (RecordableNode): all tensors and other values that derivative() uses.
  auto saved() {
    return std::tie(saved_input, saved_weight, saved_bias, saved_mean, saved_rstd, saved_gate, saved_input_scale,
                    saved_scaled_input);
  }
  auto values() { return std::tuple_cat(std::tie(normalized_shape, sum_is_output), options.fields()); }

  std::string name() const override { return "LayerNormBackward"; }

  // The input or, with a residual, the sum; if memory_efficient, the output; undefined if only dbias is needed.
  SavedTensor saved_input;
  SavedTensor saved_weight, saved_mean, saved_rstd;  // if they exist; the mean if needs_mean()
  SavedTensor saved_bias, saved_input_scale;  // for their values or their types, see sums_rows in forward_autograd()
  SavedTensor saved_gate;                     // even if only its presence matters, for the order of summation
  SavedTensor saved_scaled_input;             // the input, for the gradient of input_scale
  std::vector<c10::SymInt> normalized_shape;
  bool sum_is_output = false;  // whether the sum with a residual is an output of the node
  Options options;

 private:
  optional<Tensor> unpack(const SavedTensor& t) { return as_optional(t.unpack(*this)); }

  // The gradients of the sum residual + input_scale * input, if only the sum has an upstream gradient.
  BackwardOutputs derivative_of_sum(const Tensor& grad_sum, const optional<Tensor>& input_scale,
                                    const optional<Tensor>& scaled_input, bool needs_input, bool needs_input_scale) {
    BackwardOutputs outputs;
    outputs.grad_input = grad_sum;
    if (!input_scale || !(needs_input || needs_input_scale)) return outputs;
    const auto acc = saved_rstd.unpack(*this).scalar_type();
    const Tensor wide_grad_sum = grad_sum.to(acc);
    const auto normalized_dims = static_cast<int64_t>(normalized_shape.size());
    const Tensor wide_scale = with_all_dims(*input_scale, grad_sum.dim(), normalized_dims, options).to(acc);
    if (needs_input) outputs.grad_scaled_input = wide_scale * wide_grad_sum;
    if (needs_input_scale) {
      const Tensor gradient = at::sum_to(wide_grad_sum * scaled_input->to(acc), wide_scale.sym_sizes());
      outputs.grad_input_scale = gradient.to(input_scale->scalar_type()).reshape_symint(input_scale->sym_sizes());
    }
    return outputs;
  }
};

// Whether a bias has another shape or dtype than the weight. Sizes that are known only at run time count as different.
bool has_other_type(const Tensor& bias, const OptionalTensorRef& weight) {
  if (!weight || weight->scalar_type() != bias.scalar_type() || weight->dim() != bias.dim()) return true;
  for (int64_t d = 0; d < bias.dim(); ++d) {
    if (!TORCH_GUARD_OR_FALSE(weight->sym_size(d).sym_eq(bias.sym_size(d)))) return true;
  }
  return false;
}

// The node of a backward pass with memory_efficient, which has no derivative and throws an error.
struct NoDerivative : torch::autograd::Node {
  variable_list apply(variable_list&&) override { TORCH_CHECK_NOT_IMPLEMENTED(false, kNoDerivative); }
};

// ---- the keys Autograd and ADInplaceOrView --------------------------------------------------------------------------

// Calls the kernels, and increments the version of an overwritten residual. Autograd compares versions in backward, to
// detect that a saved tensor, which may share the residual's memory, was overwritten.
ForwardOutputs forward_below_autograd(const ForwardArgs& args) {
  ForwardOutputs outputs;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    outputs = call_forward(args);
  }
  if (args.inplace) torch::autograd::increment_version(*args.residual);
  return outputs;
}

ForwardOutputs forward_autograd(const ForwardArgs& args) {
  if (is_transformed(args)) return forward_composite(args);
  if (!needs_node(args)) return forward_below_autograd(args);
  const auto& [input, normalized_shape, weight, bias, eps, options, residual, gate, input_scale, inplace] = args;
  if (inplace) {
    TORCH_CHECK(!residual->is_view(),
                "Expected residual not to be a view of another tensor where it is changed in "
                "place and gradients are recorded, but got a view of a tensor of shape ",
                residual->_base().sym_sizes());
    torch::autograd::check_inplace(*residual, /*requires_grad=*/true);
  }
  const auto node = make_node<LayerNormBackward>();
  const auto edge = [](const auto& t) {
    return t ? torch::autograd::impl::gradient_edge(*t) : torch::autograd::Edge();
  };
  node->set_next_edges({edge(input), edge(weight), edge(bias), edge(residual), edge(gate), edge(input_scale)});
  node->normalized_shape.assign(normalized_shape.begin(), normalized_shape.end());
  node->options = options;
  // If no gradient flows through the sum, the node has only one output, and its backward is that of a norm whose input
  // is the sum.
  node->sum_is_output = residual && any_requires_grad(input, residual, input_scale);
  // dbias is the sum over the rows of grad_output or, with a gate that multiplies the output, of grad_output * f(gate).
  // It does not depend on the values of the input, so that grad_output can replace the input if it has the same dtype.
  const bool saves_input = any_requires_grad(input, residual, weight, gate, input_scale) ||
                           (residual && residual->scalar_type() != input->scalar_type());
  const bool needs_bias_values = options.memory_efficient ? saves_input : needs_bias(args) && requires_grad(gate);
  // The shapes of all parameters determine the order in which backward sums the rows. So if a gradient is such a sum,
  // all parameters are saved, except a bias with the shape and dtype of the weight. Otherwise the bits of the sum would
  // depend on which other gradients are needed.
  const bool sums_rows = any_requires_grad(weight, bias, input_scale);
  // Saved before the call, so that backward refuses arguments that share memory with an overwritten residual.
  if (weight) node->saved_weight = SavedTensor(*weight);
  if (bias && (needs_bias_values || (sums_rows && has_other_type(*bias, weight))))
    node->saved_bias = SavedTensor(*bias);
  if (input_scale && (sums_rows || requires_grad(input))) node->saved_input_scale = SavedTensor(*input_scale);
  if (gate) node->saved_gate = SavedTensor(*gate);
  if (node->sum_is_output && requires_grad(input_scale)) node->saved_scaled_input = SavedTensor(input);
  ForwardOutputs outputs = forward_below_autograd(args);
  auto& [output, sum, mean, rstd] = outputs;
  // The sum must be the first output of the node, because the hooks of an overwritten residual expect it there.
  if (inplace && node->sum_is_output) {
    torch::autograd::rebase_history(sum, node);
  } else if (node->sum_is_output) {
    torch::autograd::set_history(sum, node);
  }
  torch::autograd::set_history(output, node);
  const Tensor& x = options.memory_efficient ? output : sum.defined() ? sum : *input;
  if (saves_input) node->saved_input = SavedTensor(x, /*is_output=*/options.memory_efficient || node->sum_is_output);
  if (needs_mean(options)) node->saved_mean = SavedTensor(mean);
  node->saved_rstd = SavedTensor(rstd);
  return outputs;
}

BackwardOutputs backward_autograd(const BackwardArgs& args) {
  if (is_transformed(args)) return backward_composite(args);
  const bool records = needs_node(args);
  if (records && !args.options.memory_efficient) return backward_composite(args);
  BackwardOutputs outputs;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    outputs = call_backward(args);
  }
  if (records) {
    const auto node = make_node<NoDerivative>();
    for_each_tensor(
        args, [&](const char*, const Tensor& t) { node->add_next_edge(torch::autograd::impl::gradient_edge(t)); });
    std::apply([&](auto&... grads) { torch::autograd::set_history({grads...}, node); }, outputs.fields());
  }
  return outputs;
}

// Backward within vmap. There, no tensor says whether it requires a gradient, so the grad mode, which create_graph=True
// enables, decides whether autograd might differentiate the result.
BackwardOutputs backward_batched(const BackwardArgs& args) {
  if (!args.options.memory_efficient || at::GradMode::is_enabled()) return backward_composite(args);
  return backward_memory_efficient(args);
}

}  // namespace

TORCH_LIBRARY_IMPL(layernorm, Autograd, m) { implement<forward_autograd, backward_autograd>(m); }

// In inference mode, which excludes the key Autograd, a normal tensor's version must still be incremented.
TORCH_LIBRARY_IMPL(layernorm, ADInplaceOrView, m) {
  m.impl("forward_.fused", TORCH_FN(inplace_forward_operator<forward_below_autograd>));
}

// vmap uses the batching rules of the composite's aten operations, and so does
// torch.autograd.grad(is_grads_batched=True), whose fallback cannot return absent tensors.
TORCH_LIBRARY_IMPL(layernorm, FuncTorchBatchedDecomposition, m) { implement<forward_composite, backward_batched>(m); }
TORCH_LIBRARY_IMPL(layernorm, Batched, m) { implement<forward_composite, backward_batched>(m); }

}  // namespace layernorm
