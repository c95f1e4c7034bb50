// The Python module layernorm_ext._C. Loading it registers the operators.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TracerMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "cpu/kernels.h"
#include "ops/norm.h"

namespace {

using at::Tensor;
using std::optional;

// Whether an argument is a tensor without an override (__torch_function__).
bool is_tensor(PyObject* object) { return THPVariable_CheckExact(object); }

// Reads a normalized_shape, which is a tuple or list of Python integers in nearly every call; returns whether it is
// one.
bool read_sizes(PyObject* object, c10::SymDimVector& sizes) {
  if (!PyTuple_Check(object) && !PyList_Check(object)) return false;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const item = PySequence_Fast_GET_ITEM(object, i);
    int overflow = 0;
    if (!PyLong_CheckExact(item)) return false;
    sizes.emplace_back(PyLong_AsLongLongAndOverflow(item, &overflow));
    if (overflow) return false;
  }
  return true;
}

// The arguments of norm(), in the order of the function of this name in layernorm_ext/_calls.py. kResidual and the
// arguments after it have defaults.
enum Argument {
  kName,
  kInput,
  kNormalizedShape,
  kWeight,
  kBias,
  kEps,
  kResidual,
  kGate,
  kInputScale,
  kInplace,
  kFirstOption,
};
#define NAME(name) #name
constexpr const char* kNames[] = {
    "name",        "input",   "normalized_shape",         "weight", "bias", "eps", "residual", "gate",
    "input_scale", "inplace", LAYERNORM_EACH_OPTION(NAME)};
#undef NAME
constexpr Py_ssize_t kArguments = std::size(kNames);
PyObject* names[kArguments];  // as interned Python strings

// These functions read the value of an option, for which a null pointer means the default. They return whether the
// value has the right type: a bool, or an integer of at most 64 bits.
bool read_option(PyObject* object, bool& option) {
  if (!object) return true;
  option = object == Py_True;
  return PyBool_Check(object);
}
bool read_option(PyObject* object, optional<c10::SymInt>& option) {
  if (!object) return true;
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (value != 1) option = value;  // 1 is the default
  return overflow == 0;
}

// Reads the arguments of a vectorcall: `count` by position, the others by the names of the tuple `keywords`. Absent
// arguments are null. Returns whether the names are known.
bool read_arguments(PyObject* const* args, Py_ssize_t count, PyObject* keywords, PyObject* (&values)[kArguments]) {
  if (count > kArguments) return false;
  std::copy_n(args, count, values);
  for (Py_ssize_t i = 0; keywords && i < PyTuple_GET_SIZE(keywords); ++i) {
    const auto name = std::find(std::begin(names), std::end(names), PyTuple_GET_ITEM(keywords, i));
    if (name == std::end(names)) return false;
    values[name - names] = args[count + i];
  }
  return true;
}

// A faster norm() than that of layernorm_ext/_calls.py: calls the operator without torch.ops, which takes 3 us longer
// (8 x 64, AMD EPYC Zen 4). It passes a call to the function in Python if an argument has another type or is a nested
// tensor, if a mode overrides functions (__torch_function__), or if torch.jit.trace or a dispatch mode (torch.export,
// make_fx) records operators.
PyObject* norm(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  HANDLE_TH_ERRORS
  PyObject* values[kArguments] = {};
  c10::SymDimVector normalized_shape;
  layernorm::Options options;
  bool inplace = false;
  const auto has = [&](Argument a) { return values[a] && values[a] != Py_None; };
  const auto is_tensor_or_none = [&](Argument a) { return !has(a) || is_tensor(values[a]); };
  const auto has_required = [&] { return std::find(values, values + kResidual, nullptr) == values + kResidual; };
  const auto read_options = [&] {
    PyObject* const* value = values + kFirstOption;
    return std::apply([&](auto&... option) { return (read_option(*value++, option) && ...); }, options.fields());
  };
  // The function in Python refuses a residual of None, because functions that add none leave this argument out.
  const auto is_tensor_or_absent = [&](Argument a) { return !values[a] || is_tensor(values[a]); };
  const bool is_usual = read_arguments(args, count, keywords, values) && has_required() && is_tensor(values[kInput]) &&
                        read_sizes(values[kNormalizedShape], normalized_shape) && PyFloat_CheckExact(values[kEps]) &&
                        is_tensor_or_none(kWeight) && is_tensor_or_none(kBias) && is_tensor_or_absent(kResidual) &&
                        is_tensor_or_none(kGate) && is_tensor_or_none(kInputScale) && read_options() &&
                        read_option(values[kInplace], inplace) && !at::impl::torch_function_mode_enabled() &&
                        !at::tracer::impl::is_dispatch_enabled() && !c10::impl::TorchDispatchModeTLS::any_modes_set();
  if (!is_usual || THPVariable_Unpack(values[kInput]).is_nested()) {
    const pybind11::object in_python = pybind11::module_::import("layernorm_ext._calls").attr("norm");
    return PyObject_Vectorcall(in_python.ptr(), args, count, keywords);
  }
  const Tensor input = THPVariable_Unpack(values[kInput]);
  const auto tensor = [&](Argument a) {
    return has(a) ? optional<Tensor>(THPVariable_Unpack(values[a])) : std::nullopt;
  };
  const auto weight = tensor(kWeight), bias = tensor(kBias), residual = tensor(kResidual), gate = tensor(kGate);
  const auto input_scale = tensor(kInputScale);
  if (options.images && input.dim() > 1) normalized_shape.assign(1, input.sym_size(1));
  const double eps = PyFloat_AS_DOUBLE(values[kEps]);
  layernorm::ForwardOutputs outputs;
  {
    const pybind11::gil_scoped_release no_gil;
    outputs = layernorm::call_forward(
        {input, normalized_shape, weight, bias, eps, options, residual, gate, input_scale, inplace});
  }
  if (!residual) return THPVariable_Wrap(std::move(outputs.output));
  return pybind11::make_tuple(std::move(outputs.output), std::move(outputs.sum)).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(norm)), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {}};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  std::transform(std::begin(kNames), std::end(kNames), names, PyUnicode_InternFromString);
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
  m.def("check", &layernorm::fused_forward_operator<layernorm::check>, py::call_guard<py::gil_scoped_release>());
  m.def("cpu_capability", &layernorm::cpu::capability,
        "The instruction set of the CPU kernels in use: DEFAULT, AVX2 or AVX512.");
}
