// The Python module layernorm_ext._C. Loading it registers the operators.
#include <ATen/TracerMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include "cpu/kernels.h"
#include "ops.h"

namespace {

// Whether functional.py has to look at a call: it handles nested tensors, and decides which operators a tracer records.
// torch.export and make_fx trace by dispatch modes.
bool needs_python(const at::Tensor& input) {
  return input.is_nested() || at::tracer::impl::is_dispatch_enabled() ||
         c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// What the functions of layernorm_ext call in eager mode: it costs a small call less than the way through torch.ops.
// All return None for a call that needs_python().
std::optional<at::Tensor> layer_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                                     const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                                     double eps) {
  if (needs_python(input)) return std::nullopt;
  return std::get<0>(
      layernorm::call_norm_forward(input, {}, normalized_shape, weight, bias, eps, {}, /*in_place=*/false));
}

std::optional<std::tuple<at::Tensor, at::Tensor>> norm(
    const at::Tensor& input, const std::optional<at::Tensor>& residual, c10::SymIntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps, bool rms,
    bool zero_centered_weight, bool memory_efficient, bool in_place) {
  if (needs_python(input)) return std::nullopt;
  auto [output, sum, mean, rstd] = layernorm::call_norm_forward(
      input, residual, normalized_shape, weight, bias, eps, {rms, zero_centered_weight, memory_efficient}, in_place);
  return std::make_tuple(std::move(output), std::move(sum));
}

std::optional<at::Tensor> layer_norm_2d(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                                        const std::optional<at::Tensor>& bias, double eps) {
  if (needs_python(input)) return std::nullopt;
  using Operator =
      layernorm::Outputs(const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, double);
  static const auto op = layernorm::find<Operator>(LAYERNORM_OPERATOR("channels_first_forward"));
  return std::get<0>(op.call(input, weight, bias, eps));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  m.def("layer_norm", &layer_norm, py::arg("input"), py::arg("normalized_shape"), py::arg("weight") = py::none(),
        py::arg("bias") = py::none(), py::arg("eps") = 1e-5, py::call_guard<py::gil_scoped_release>());
  m.def("norm", &norm, py::arg("input"), py::arg("residual"), py::arg("normalized_shape"), py::arg("weight"),
        py::arg("bias"), py::arg("eps"), py::kw_only(), py::arg("rms"), py::arg("zero_centered_weight"),
        py::arg("memory_efficient"), py::arg("in_place"), py::call_guard<py::gil_scoped_release>(),
        "(output, sum) of the whole family.");
  m.def("layer_norm_2d", &layer_norm_2d, py::arg("input"), py::arg("weight"), py::arg("bias"), py::arg("eps"),
        py::call_guard<py::gil_scoped_release>());
  m.def("check_forward", &layernorm::check_forward, py::call_guard<py::gil_scoped_release>());
  m.def("check_images", &layernorm::check_images, py::call_guard<py::gil_scoped_release>());
  m.def("cpu_capability", &layernorm::cpu::capability,
        "The instruction set of the CPU kernels in use: DEFAULT, AVX2 or AVX512.");
}
