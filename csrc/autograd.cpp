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
// gradient of the returned sum is added to dx.
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include "composite.h"
#include "images.h"
#include "node.h"
#include "ops.h"

namespace layernorm {
namespace {

bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
bool has_tangent(const optional<Tensor>& t) { return t && has_tangent(*t); }

// Whether a call is part of forward-mode AD or of a torch.func transform (grad, vjp, jvp), whose tensors a C++ node
// cannot save.
template <class... Tensors>
bool is_transformed(const Tensors&... tensors) {
  return (has_tangent(tensors) || ...) ||
         c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

// ---- the nodes ------------------------------------------------------------------------------------------------------

optional<Tensor> as_optional(Tensor t) { return t.defined() ? optional<Tensor>(std::move(t)) : std::nullopt; }

// The derivative of forward.
struct LayerNormBackward : RecordableNode<LayerNormBackward> {
  variable_list derivative(const variable_list& grads, Wanted wanted) {
    const Tensor grad_sum = has_residual ? grads[0] : Tensor();
    const Tensor& grad_output = grads.back();
    variable_list result(5);  // of input, weight, bias, residual, gate
    const Tensor w = weight.unpack(*this), b = bias.unpack(*this), z = gate.unpack(*this);
    const bool gates_input = has_residual && z.defined();
    if (grad_output.defined() || gates_input) {
      Tensor x_saved = input.unpack(*this);
      if (!x_saved.defined()) x_saved = grad_output;  // only its shape, dtype and device matter
      const auto rows = [&](const Tensor& t) { return as_optional(images ? channels_last(t, x_saved.dim()) : t); };
      const auto dsum = as_optional(grad_sum), factor = as_optional(z), gated = as_optional(gated_input.unpack(*this));
      BackwardOutputs g;
      if (grad_output.defined()) {
        const auto dy = rows(grad_output), x = rows(x_saved);
        const std::array<bool, 5> mask = {gates_input ? wanted[3] : wanted[0] || wanted[3], wanted[1], wanted[2],
                                          gates_input && wanted[0], wanted[4]};
        g = call_backward({*dy, *x, normalized_shape, as_optional(mean.unpack(*this)), rstd.unpack(*this), rows(w),
                           rows(b), mask, dsum, options, factor, gated});
      } else if (dsum) {
        const auto acc = rstd.unpack(*this).scalar_type();
        g.grad_input = *dsum;
        if (wanted[0]) g.grad_gated_input = z.to(acc) * dsum->to(acc);
        if (wanted[4]) {
          g.grad_gate = at::sum_to(dsum->to(acc) * gated->to(acc), z.sym_sizes()).to(z.scalar_type());
        }
      }
      if (images) {
        if (g.grad_input.defined()) g.grad_input = g.grad_input.movedim(-1, 1);
        const Tensor& like_bias = b.defined() ? b : w;  // see is_unlike()
        // Flattened first, because a reshape to the same sizes would keep the strides of dimensions of size 1.
        const auto to_images = [](Tensor& gradient, const Tensor& parameter) {
          if (!gradient.defined() || parameter.dim() <= 1) return;
          gradient = gradient.movedim(-1, 1).reshape(-1).reshape_symint(parameter.sym_sizes());
        };
        if (w.defined()) to_images(g.grad_weight, w);
        if (like_bias.defined()) to_images(g.grad_bias, like_bias);
      }
      result = {gates_input ? std::move(g.grad_gated_input) : g.grad_input, std::move(g.grad_weight),
                std::move(g.grad_bias), std::move(g.grad_input), std::move(g.grad_gate)};
    } else {
      result[0] = result[3] = grad_sum;
    }
    if (!wanted[0]) result[0] = Tensor();
    if (!wanted[3]) result[3] = Tensor();
    // With a residual, the gradient of the sum has the residual's dtype.
    const auto type = static_cast<at::ScalarType>(input_type);
    if (result[0].defined() && result[0].scalar_type() != type) result[0] = result[0].to(type);
    result.resize(z.defined() ? 5 : has_residual ? 4 : 3);
    return result;
  }

  auto saved() { return std::tie(input, weight, bias, mean, rstd, gate, gated_input); }
  auto values() {
    return std::tie(normalized_shape, has_residual, images, input_type, options.rms, options.zero_centered_weight,
                    options.memory_efficient, options.preserve_layout, options.activation, options.gate_first);
  }

  std::string name() const override { return "LayerNormBackward"; }

  // Tensors that the wanted gradients do not need are absent.
  Saved input;  // the sum if there is a residual; the output if memory_efficient; absent if only the bias is wanted
  Saved weight, mean, rstd;
  Saved bias;         // only if memory_efficient, for the dtype or shape of its gradient, or for that of a gate
  Saved gate;         // beside a residual, only if it or the input is wanted
  Saved gated_input;  // beside a residual, only if the gate is wanted
  std::vector<c10::SymInt> normalized_shape;
  bool has_residual = false;
  bool images = false;     // the tensors are [N, C, *], but mean and rstd are those of the rows
  int64_t input_type = 0;  // an at::ScalarType
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

// ---- the Autograd key -----------------------------------------------------------------------------------------------

// Calls forward and records its derivative. The tensors may be `images` if they are plain; these have no residual.
ForwardOutputs forward_and_record(const ForwardArgs& args, bool images) {
  const auto& [input, normalized_shape, weight, bias, eps, options, residual, gate, in_place] = args;
  const bool records = torch::autograd::compute_requires_grad(input, residual, weight, bias, gate);
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
    if (args.in_place) torch::autograd::increment_version(*args.residual);
    return outputs;
  };
  if (!records) return call();
  const auto wants = [](const auto&... tensors) { return torch::autograd::compute_requires_grad(tensors...); };
  const Tensor w = weight.value_or(Tensor()), b = bias.value_or(Tensor());
  const auto node = make_node<LayerNormBackward>();
  // Otherwise the sum is a constant, and the node is that of a norm whose input is the sum.
  node->has_residual = present(residual) && wants(input, residual, gate);
  const bool keeps_input =
      wants(input, residual, weight, gate) || (present(residual) && residual->scalar_type() != input.scalar_type());
  const bool keeps_gate =
      node->has_residual ? wants(input, gate) : options.is_gated_norm() && (keeps_input || !options.gate_first);
  const bool keeps_bias = options.memory_efficient ? keeps_input : needs_bias(options) && wants(gate);
  if (present(gate) && keeps_gate) {
    node->set_next_edges(torch::autograd::collect_next_edges(input, w, b, residual.value_or(Tensor()), *gate));
    node->gate = Saved(*gate);
    if (node->has_residual && wants(gate)) node->gated_input = Saved(input);
  } else {
    node->set_next_edges(node->has_residual ? torch::autograd::collect_next_edges(input, w, b, *residual)
                                            : torch::autograd::collect_next_edges(input, w, b));
  }
  node->normalized_shape.assign(normalized_shape.begin(), normalized_shape.end());
  node->input_type = static_cast<int64_t>(input.scalar_type());
  node->options = options;
  if (options.is_gated_norm() && !keeps_gate) {  // the gradient of the bias is that of the plain norm
    node->options.activation = static_cast<int64_t>(Activation::kNone);
    node->options.gate_first = false;
  }
  node->images = images;
  ForwardOutputs outputs = call();
  auto& [output, sum, mean, rstd] = outputs;
  // The sum is the first output, as hooks of a residual that is overwritten require.
  if (in_place && node->has_residual) {
    torch::autograd::rebase_history(sum, node);
  } else if (node->has_residual) {
    torch::autograd::set_history(sum, node);
  }
  torch::autograd::set_history(output, node);
  const Tensor& x = options.memory_efficient ? output : sum.defined() ? sum : input;
  if (keeps_input) node->input = Saved(x, /*is_output=*/options.memory_efficient || node->has_residual);
  node->weight = Saved(w);
  if (keeps_bias || (wants(b) && is_unlike(b, w))) node->bias = Saved(b);
  if (needs_mean(options)) node->mean = Saved(mean);
  node->rstd = Saved(rstd);
  return outputs;
}

ForwardOutputs forward_autograd(const ForwardArgs& args) {
  if (is_transformed(args.input, args.residual, args.weight, args.bias, args.gate)) return forward_composite(args);
  return forward_and_record(args, /*images=*/false);
}

BackwardOutputs backward_autograd(const BackwardArgs& args) {
  const auto& [grad_output, input, shape, mean, rstd, weight, bias, mask, grad_sum, options, gate, gated_input] = args;
  if (is_transformed(grad_output, grad_sum, input, weight, bias, gate, gated_input)) return backward_composite(args);
  const bool records =
      torch::autograd::compute_requires_grad(grad_output, grad_sum, input, weight, bias, gate, gated_input);
  if (records && !options.memory_efficient) return backward_composite(args);
  BackwardOutputs outputs;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    outputs = call_backward(args);
  }
  if (records) {
    const auto node = make_node<NoDerivative>();
    node->set_next_edges(torch::autograd::collect_next_edges(grad_output, input, weight.value_or(Tensor())));
    torch::autograd::set_history({outputs.grad_input, outputs.grad_weight, outputs.grad_bias}, node);
  }
  return outputs;
}

}  // namespace

ForwardOutputs forward_images(const ForwardArgs& args) {
  if (is_plain(args) && !is_transformed(args.input, args.weight, args.bias)) {
    return forward_and_record(args, /*images=*/true);
  }
  auto outputs = call_with(call_forward, args, [&](const Tensor& t) { return channels_last(t, args.input.dim()); });
  outputs.output = outputs.output.movedim(-1, 1);
  return outputs;
}

void Operators::implement_autograd(torch::Library& m) {
  implement<forward_autograd, backward_autograd>(m);
  m.impl("check_allocated", torch::CppFunction::makeFallthrough());
}

// vmap uses the batching rules of the composite's aten operations.
void Operators::implement_vmap(torch::Library& m) { implement<forward_composite, backward_composite>(m); }

}  // namespace layernorm
