// The base class of the autograd nodes, with all that depends on torch's internal interfaces for nodes.
//
// torch::autograd::Function would need none of this, but with it, recording a call of 8 x 64 takes 3.1 us instead of
// 2.4 us (torch 2.13 on an AMD EPYC Zen 5 at 54797d0, lower quartiles of 60 alternating samples).
#pragma once

#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <mutex>
#include <tuple>

#include "norm.h"

namespace layernorm {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// torch counts the references to a Node by std::shared_ptr up to version 2.12, and by c10::intrusive_ptr later.
template <class N, class Pointer = decltype(torch::autograd::Edge::function)>
auto make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<N>(new N, [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<N>();
  }
}

// A tensor that a node saves. An output of the node itself is saved without its grad_fn, which is the node and would
// make a reference cycle.
struct SavedTensor {
  SavedTensor() = default;
  explicit SavedTensor(const Tensor& t, bool is_output = false) : variable(t, is_output), is_output(is_output) {}
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

// The base class of a node N for a function of six tensors, which compiled autograd can record. N defines
//   derivative(gradients, needs_input_grad): the gradients of the six tensors from the gradients of the outputs;
//   saved(), values(): tuples of references to all SavedTensors and to all other members that derivative() uses.
template <class N>
struct RecordableNode : torch::autograd::Node {
  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<N&>(*this).derivative(gradients, needs_input_grad());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for_each(static_cast<N&>(*this).saved(), [](SavedTensor& tensor) { tensor.variable.reset_data(); });
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    N& node = const_cast<N&>(static_cast<const N&>(*this));  // saved() and values() change nothing
    for_each(node.saved(), [&](const SavedTensor& tensor) { args.collect(tensor.variable, tensor.is_output); });
    for_each(node.values(), [&](const auto& value) { args.collect(value); });
  }

  // Records a call of derivative() in the graph of compiled autograd. Between before() and after(), the members have
  // the placeholders of that graph as values.
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
    for_each(node.saved(), [&](SavedTensor& tensor) {
      tracing.before(tensor.variable);
      pack(tensor.unpack(node));
    });
    for_each(node.values(), [&](auto& value) {
      tracing.before(value);
      pack(value);
    });
    pack(needs_input_grad());
    // The function that the graph calls: makes a node from the values that are packed above, and calls derivative().
    const auto call_derivative = [](const variable_list& gradients, const std::vector<at::IValue>& packed) {
      PackedArgs args(packed);
      const auto node = make_node<N>();
      for_each(node->saved(), [&](SavedTensor& tensor) { tensor = SavedTensor(args.unpack<Tensor>()); });
      for_each(node->values(), [&](auto& value) { value = args.unpack<std::decay_t<decltype(value)>>(); });
      return node->derivative(gradients, args.unpack<NeedsInputGrad>());
    };
    const auto& compiler = getPyCompilerInterface();
    const auto name = compiler->bind_function(tracing.get_py_compiler(), node.name(), call_derivative, types,
                                              /*is_custom_function=*/true, /*is_traceable=*/true);
    const auto output_metadata =
        IValuePacker<std::vector<optional<torch::autograd::InputMetadata>>>::pack(get_input_metadata(next_edges()));
    const auto outputs = compiler->call_function(tracing.get_py_compiler(), "apply_functional", name, gradients,
                                                 args.vec(), output_metadata);
    for_each(node.saved(), [&](SavedTensor& tensor) { tracing.after(tensor.variable); });
    for_each(node.values(), [&](auto& value) { tracing.after(value); });
    return outputs;
  }

 protected:
  using NeedsInputGrad = std::array<bool, 6>;  // as the ctx.needs_input_grad of a torch.autograd.Function

 private:
  // The outputs of a node are the gradients of its inputs.
  NeedsInputGrad needs_input_grad() {
    NeedsInputGrad result = {};
    for (size_t i = 0; i < num_outputs(); ++i) result[i] = task_should_compute_output(i);
    return result;
  }
};

}  // namespace layernorm
