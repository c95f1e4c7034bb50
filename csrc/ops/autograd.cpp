// Derivatives of the operators.
//
// First order: `forward` records a node that calls `backward`. A `backward` that is recorded is a composition of aten
// operations, which autograd differentiates to any order. For forward-mode AD and torch.func, so is `forward`.
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
#include "geometry.h"
#include "node.h"
#include "norm.h"

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

bool wants_gradient(const Tensor& t) { return t.requires_grad() && at::GradMode::is_enabled(); }
bool wants_gradient(const OptionalTensorRef& t) { return t && wants_gradient(*t); }
template <class Args>
bool wants_any_gradient(const Args& args) {
  bool result = false;
  for_each_tensor(args, [&](const char*, const Tensor& t) { result |= wants_gradient(t); });
  return result;
}

// ---- the nodes ------------------------------------------------------------------------------------------------------

// The derivative of forward. The gradient of an input beside a float32 residual is float32; autograd converts it.
struct LayerNormBackward : RecordableNode<LayerNormBackward> {
  variable_list derivative(const variable_list& grads, Wanted wanted) {
    const auto [wants_input, wants_weight, wants_bias, wants_residual, wants_gate, wants_input_scale] = wanted;
    const auto grad_sum = as_optional(has_residual ? grads[0] : Tensor());  // the sum is the first output
    const Tensor& grad_output = grads.back();
    const auto s = as_optional(input_scale.unpack(*this)), scaled = as_optional(scaled_input.unpack(*this));
    const auto z = as_optional(gate.unpack(*this));
    BackwardOutputs g;
    if (grad_output.defined()) {
      Tensor x = input.unpack(*this);
      if (!x.defined()) x = grad_output;  // only its shape, dtype and device matter
      const auto m = as_optional(mean.unpack(*this)), w = as_optional(weight.unpack(*this));
      const auto b = as_optional(bias.unpack(*this));
      const Tensor r = rstd.unpack(*this);
      const WantedGradients wants = {s ? wants_residual : wants_input || wants_residual,
                                     wants_weight,
                                     wants_bias,
                                     wants_gate,
                                     wants_input && s,
                                     wants_input_scale};
      g = call_backward({grad_output, x, normalized_shape, m, r, w, b, wants, grad_sum, z, s, scaled, options});
    } else if (grad_sum) {  // the gradients of the sum alone
      const auto acc = rstd.unpack(*this).scalar_type();
      g.grad_input = *grad_sum;
      if (s) {
        const auto normalized_dims = static_cast<int64_t>(normalized_shape.size());
        const Tensor rows = with_all_dims(*s, grad_sum->dim(), normalized_dims, options);
        if (wants_input) g.grad_scaled_input = rows.to(acc) * grad_sum->to(acc);
        if (wants_input_scale) {
          const Tensor sum = at::sum_to(grad_sum->to(acc) * scaled->to(acc), rows.sym_sizes());
          g.grad_input_scale = sum.to(s->scalar_type()).reshape_symint(s->sym_sizes());
        }
      }
    }
    variable_list result = {s ? g.grad_scaled_input : g.grad_input,
                            g.grad_weight,
                            g.grad_bias,
                            g.grad_input,
                            g.grad_gate,
                            g.grad_input_scale};
    if (!wants_input) result[0] = Tensor();
    if (!wants_residual) result[3] = Tensor();
    return result;
  }

  auto saved() { return std::tie(input, weight, bias, mean, rstd, gate, input_scale, scaled_input); }
  auto values() { return std::tuple_cat(std::tie(normalized_shape, has_residual), options.fields()); }

  std::string name() const override { return "LayerNormBackward"; }

  // Tensors that the wanted gradients do not need are absent.
  Saved input;  // the sum if there is a residual; the output if memory_efficient; absent if only the bias is wanted
  Saved weight, mean, rstd;
  Saved bias;  // only if memory_efficient, for the gradient of a gate, or if its shape or dtype is not the weight's
  Saved gate, input_scale;
  Saved scaled_input;  // only if the gradient of input_scale is wanted
  std::vector<c10::SymInt> normalized_shape;
  bool has_residual = false;
  Options options;
};

// Whether backward needs the bias for the dtype and the shape of its gradient. A size that is known only at run time
// may differ.
bool is_unlike(const Tensor& bias, const Tensor& weight) {
  if (!bias.defined()) return false;
  if (!weight.defined() || weight.scalar_type() != bias.scalar_type() || weight.dim() != bias.dim()) return true;
  for (int64_t d = 0; d < bias.dim(); ++d) {
    if (!TORCH_GUARD_OR_FALSE(weight.sym_size(d).sym_eq(bias.sym_size(d)))) return true;
  }
  return false;
}

// The derivative of a backward pass from the output.
struct NoDerivative : torch::autograd::Node {
  variable_list apply(variable_list&&) override { TORCH_CHECK_NOT_IMPLEMENTED(false, kNoDerivative); }
};

// ---- the keys Autograd and ADInplaceOrView --------------------------------------------------------------------------

// Calls the kernels, and tells the tensors that were saved of a residual that is overwritten.
ForwardOutputs forward_below(const ForwardArgs& args) {
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
  const auto& [input, normalized_shape, weight, bias, eps, options, residual, gate, input_scale, inplace] = args;
  const bool records = wants_any_gradient(args);
  const auto call = [&] {
    if (args.inplace && records) {
      TORCH_CHECK(!args.residual->is_view(),
                  "Expected residual not to be a view of another tensor where it is changed in "
                  "place and gradients are recorded, but got a view of a tensor of shape ",
                  args.residual->_base().sym_sizes());
      torch::autograd::check_inplace(*args.residual, records);
    }
    return forward_below(args);
  };
  if (!records) return call();
  const auto wants = [](const auto&... tensors) { return (wants_gradient(tensors) || ...); };
  const Tensor w = weight ? *weight : Tensor(), b = bias ? *bias : Tensor();
  const auto node = make_node<LayerNormBackward>();
  const auto edge = [](const auto& t) {
    return t ? torch::autograd::impl::gradient_edge(*t) : torch::autograd::Edge();
  };
  node->set_next_edges({edge(input), edge(weight), edge(bias), edge(residual), edge(gate), edge(input_scale)});
  // Otherwise the sum is a constant, and the node is that of a norm whose input is the sum.
  node->has_residual = residual && wants(input, residual, input_scale);
  const bool keeps_input = wants(input, residual, weight, gate, input_scale) ||
                           (residual && residual->scalar_type() != input->scalar_type());
  const bool keeps_gate = gate && (keeps_input || !options.gate_first);
  const bool keeps_input_scale = input_scale && node->has_residual && wants(input, input_scale);
  const bool keeps_bias = options.memory_efficient ? keeps_input : needs_bias(args) && wants(gate);
  if (keeps_gate) node->gate = Saved(*gate);
  if (keeps_input_scale) node->input_scale = Saved(*input_scale);
  if (keeps_input_scale && wants(input_scale)) node->scaled_input = Saved(input);
  node->normalized_shape.assign(normalized_shape.begin(), normalized_shape.end());
  node->options = options;
  ForwardOutputs outputs = call();
  auto& [output, sum, mean, rstd] = outputs;
  // The sum is the first output, as hooks of a residual that is overwritten require.
  if (inplace && node->has_residual) {
    torch::autograd::rebase_history(sum, node);
  } else if (node->has_residual) {
    torch::autograd::set_history(sum, node);
  }
  torch::autograd::set_history(output, node);
  const Tensor& x = options.memory_efficient ? output : sum.defined() ? sum : *input;
  if (keeps_input) node->input = Saved(x, /*is_output=*/options.memory_efficient || node->has_residual);
  node->weight = Saved(w);
  if (keeps_bias || (wants(bias) && is_unlike(b, w))) node->bias = Saved(b);
  if (needs_mean(options)) node->mean = Saved(mean);
  node->rstd = Saved(rstd);
  return outputs;
}

BackwardOutputs backward_autograd(const BackwardArgs& args) {
  if (is_transformed(args)) return backward_composite(args);
  const bool records = wants_any_gradient(args);
  if (records && !args.options.memory_efficient) return backward_composite(args);
  BackwardOutputs outputs;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    outputs = call_backward(args);
  }
  if (records) {
    const auto node = make_node<NoDerivative>();
    node->set_next_edges(torch::autograd::collect_next_edges(
        *args.grad_output, *args.input, args.weight ? *args.weight : Tensor(), args.bias ? *args.bias : Tensor()));
    torch::autograd::set_history({outputs.grad_input, outputs.grad_weight, outputs.grad_bias}, node);
  }
  return outputs;
}

BackwardOutputs backward_batched(const BackwardArgs& args) {
  return args.options.memory_efficient ? backward_memory_efficient(args) : backward_composite(args);
}

}  // namespace

TORCH_LIBRARY_IMPL(layernorm, Autograd, m) { implement<forward_autograd, backward_autograd>(m); }

// Inference mode excludes the key Autograd.
TORCH_LIBRARY_IMPL(layernorm, ADInplaceOrView, m) {
  m.impl("forward_.fused", TORCH_FN(inplace_forward_operator<forward_below>));
}

// vmap uses the batching rules of the composite's aten operations.
TORCH_LIBRARY_IMPL(layernorm, FuncTorchBatchedDecomposition, m) { implement<forward_composite, backward_composite>(m); }

// So does torch.autograd.grad(is_grads_batched=True), whose fallback cannot return absent tensors.
TORCH_LIBRARY_IMPL(layernorm, Batched, m) { implement<forward_composite, backward_batched>(m); }

}  // namespace layernorm
