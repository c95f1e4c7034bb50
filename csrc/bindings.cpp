// The Python module layernorm_ext._C. Loading it registers the operators.
//
// layernorm_ext.functional calls these functions in eager mode, because they cost a small call less than torch.ops
// does. The parser of torch's own functions parses the arguments, so types and errors are torch's.
#define FMT_HEADER_ONLY  // torch's header of the parser formats with fmt, whose functions torch does not export

#include <ATen/TracerMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_arg_parser.h>

#include <array>
#include <utility>

#include "checks.h"
#include "cpu/kernels.h"
#include "family.h"

namespace {

// A normalized_shape that is a tuple or list of Python integers, as in nearly every call.
struct PlainShape {
  c10::SymDimVector sizes;
};

}  // namespace

template <>
struct pybind11::detail::type_caster<PlainShape> {
  PYBIND11_TYPE_CASTER(PlainShape, const_name("Sequence[int]"));

  bool load(handle source, bool) {
    if (!PyTuple_Check(source.ptr()) && !PyList_Check(source.ptr())) return false;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(source.ptr());
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const item = PySequence_Fast_GET_ITEM(source.ptr(), i);
      int overflow = 0;
      if (!PyLong_CheckExact(item)) return false;
      value.sizes.emplace_back(PyLong_AsLongLongAndOverflow(item, &overflow));
      if (overflow) return false;
    }
    return true;
  }
};

namespace {

using at::Tensor;
using std::optional;
using torch::ParsedArgs;
using torch::PythonArgParser;

// Whether functional.py must handle a call: it normalizes nested tensors and chooses the operators that tracers record.
// torch.export and make_fx trace with dispatch modes.
bool needs_python(const Tensor& input) {
  return input.is_nested() || at::tracer::impl::is_dispatch_enabled() ||
         c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// The usual call of layer_norm. With torch's parser, a call of 8 x 64 would take 1.82 us instead of 1.65 us (torch 2.13
// on an AMD EPYC Zen 5, least of 3000 alternating samples).
optional<Tensor> plain_layer_norm(const Tensor& input, const PlainShape& normalized_shape,
                                  const optional<Tensor>& weight, const optional<Tensor>& bias, double eps) {
  if (needs_python(input)) return std::nullopt;
  layernorm::check_layouts(input, /*residual=*/std::nullopt, weight, bias, /*gate=*/std::nullopt);
  return layernorm::call_forward({input, normalized_shape.sizes, weight, bias, eps, {}}).output;
}

// Reads the arguments of a call from Python.
struct PythonReader {
  torch::PythonArgs& args;
  int next = 0;

  Tensor tensor() { return args.tensor(next++); }
  optional<Tensor> optional_tensor() { return args.optionalTensor(next++); }
  std::vector<c10::SymInt> shape() { return args.symintlist(next++); }
  double real() { return args.toDouble(next++); }
  optional<double> optional_real() { return args.toDoubleOptional(next++); }
  bool flag() { return args.toBool(next++); }
  int64_t integer() { return args.toInt64(next++); }
  std::string string() { return args.string(next++); }
};

// A function of the family. Returns the output, with a residual the output and the sum, or None if the call
// needs_python().
template <size_t kMember>
PyObject* evaluate(PyObject*, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  constexpr const layernorm::Member& member = layernorm::kFamily[kMember];
  static PythonArgParser parser({layernorm::signature(member, layernorm::kPythonSpelling)});
  ParsedArgs<10> parsed;
  auto parsed_args = parser.parse(args, kwargs, parsed);
  PythonReader next = {parsed_args};
  Tensor input = next.tensor();
  if (needs_python(input)) Py_RETURN_NONE;
  const auto member_args = layernorm::read_arguments(member, std::move(input), next);
  layernorm::ForwardOutputs outputs;
  {
    const pybind11::gil_scoped_release no_gil;
    outputs = layernorm::evaluate(member, member_args);
  }
  if (!member.adds) return THPVariable_Wrap(std::move(outputs.output));
  return pybind11::make_tuple(std::move(outputs.output), std::move(outputs.sum)).release().ptr();
  END_HANDLE_TH_ERRORS
}

// The functions, and an empty entry at the end.
template <size_t... kMembers>
auto family_methods(std::index_sequence<kMembers...>) {
  const auto method = [](const char* name, PyCFunctionWithKeywords function) -> PyMethodDef {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_VARARGS | METH_KEYWORDS,
            nullptr};
  };
  return std::array{method(layernorm::kFamily[kMembers].name, evaluate<kMembers>)..., PyMethodDef{}};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  static auto methods = family_methods(std::make_index_sequence<layernorm::kFamilySize>());
  // The first one, layer_norm, has two overloads.
  if (PyModule_AddFunctions(m.ptr(), methods.data() + 1) != 0) throw py::error_already_set();
  m.def("layer_norm", &plain_layer_norm, py::call_guard<py::gil_scoped_release>());
  m.def("layer_norm", [](const py::args& args, const py::kwargs& kwargs) {  // all other calls, and all errors
    PyObject* const result = evaluate<0>(nullptr, args.ptr(), kwargs.ptr());
    if (!result) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  });
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("check_forward", &layernorm::check_arguments, no_gil);
  m.def("check_images", &layernorm::check_images, no_gil);
  m.def("check_modulation", &layernorm::check_modulation, no_gil);
  m.def("cpu_capability", &layernorm::cpu::capability,
        "The instruction set of the CPU kernels in use: DEFAULT, AVX2 or AVX512.");
}
