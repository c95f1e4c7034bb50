// The Python module layernorm_ext._C. Loading it registers the operators.
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/tensor_numpy.h>

#include "cpu/kernels.h"
#include "ops.h"

namespace {

struct Eps {
  double value;
};

}  // namespace

// Accepts what torch accepts as a float: numbers of Python and NumPy, and tensors without dimensions. pybind11's own
// conversion also accepts arrays with one element.
template <>
struct pybind11::detail::type_caster<Eps> {
  PYBIND11_TYPE_CASTER(Eps, const_name("float"));

  bool load(handle source, bool /*convert*/) {
    PyObject* object = source.ptr();
    if (!PyFloat_Check(object) && !PyLong_Check(object) && !torch::utils::is_numpy_scalar(object)) {
      if (!THPVariable_Check(object)) return false;
      const auto& tensor = THPVariable_Unpack(object);
      if (tensor.dim() != 0 || tensor.requires_grad()) return false;
    }
    value.value = PyFloat_AsDouble(object);
    if (value.value == -1.0 && PyErr_Occurred()) throw error_already_set();
    return true;
  }
};

namespace {

// What the functions of layernorm_ext call in eager mode: it costs a small call less than the way through torch.ops.
at::Tensor layer_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                      const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, Eps eps) {
  return std::get<0>(
      layernorm::call_norm_forward(input, {}, normalized_shape, weight, bias, eps.value, {}, /*in_place=*/false));
}

std::tuple<at::Tensor, at::Tensor> norm(const at::Tensor& input, const std::optional<at::Tensor>& residual,
                                        c10::SymIntArrayRef normalized_shape, const std::optional<at::Tensor>& weight,
                                        const std::optional<at::Tensor>& bias, Eps eps, bool rms,
                                        bool zero_centered_weight, bool memory_efficient, bool in_place) {
  auto [output, sum, mean, rstd] =
      layernorm::call_norm_forward(input, residual, normalized_shape, weight, bias, eps.value,
                                   {rms, zero_centered_weight, memory_efficient}, in_place);
  return {std::move(output), std::move(sum)};
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
  m.def("cpu_capability", &layernorm::cpu::capability,
        "The instruction set of the CPU kernels in use: DEFAULT, AVX2 or AVX512.");
}
