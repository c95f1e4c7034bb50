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

#include <limits>

#include "checks.h"
#include "cpu/kernels.h"
#include "ops.h"
#include "views.h"

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

// Calls a function without the GIL. Returns the output, or with a residual the output and the sum.
PyObject* call(layernorm::Forward function, const layernorm::ForwardArgs& args) {
  layernorm::ForwardOutputs outputs;
  {
    const pybind11::gil_scoped_release no_gil;
    outputs = function(args);
  }
  if (!args.residual) return THPVariable_Wrap(std::move(outputs.output));
  return pybind11::make_tuple(std::move(outputs.output), std::move(outputs.sum)).release().ptr();
}

// The eps of RMSNorm; by default the machine epsilon of the accumulation type.
double rms_eps(const optional<double>& eps, const Tensor& input) {
  if (eps) return *eps;
  return input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                            : std::numeric_limits<float>::epsilon();
}

// The usual call of layer_norm. It takes 2.3 us for 8 x 64 on an AMD EPYC; with torch's parser it would take 2.55 us.
optional<Tensor> plain_layer_norm(const Tensor& input, const PlainShape& normalized_shape,
                                  const optional<Tensor>& weight, const optional<Tensor>& bias, double eps) {
  if (needs_python(input)) return std::nullopt;
  return layernorm::call_forward({input, normalized_shape.sizes, weight, bias, eps, {}}).output;
}

// The signatures by whether the function adds a residual, and whether it is an RMSNorm.
constexpr const char* kSignatures[2][2] = {
    {"layer_norm(Tensor input, SymIntArrayRef normalized_shape, Tensor? weight=None, Tensor? bias=None, "
     "double eps=1e-05, *, bool zero_centered_weight=False, bool memory_efficient=False)",
     "rms_norm(Tensor input, SymIntArrayRef normalized_shape, Tensor? weight=None, double? eps=None, *, "
     "bool zero_centered_weight=False)"},
    {"add_layer_norm(Tensor input, Tensor residual, SymIntArrayRef normalized_shape, Tensor? weight=None, "
     "Tensor? bias=None, double eps=1e-05, *, bool zero_centered_weight=False, bool inplace=False)",
     "add_rms_norm(Tensor input, Tensor residual, SymIntArrayRef normalized_shape, Tensor? weight=None, "
     "double? eps=None, *, bool zero_centered_weight=False, bool inplace=False)"},
};

// layer_norm, rms_norm, add_layer_norm or add_rms_norm. None if the call needs_python().
template <bool kAdd, bool kRms>
PyObject* norm(PyObject*, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static PythonArgParser parser({kSignatures[kAdd][kRms]});
  ParsedArgs<8> parsed;
  auto a = parser.parse(args, kwargs, parsed);
  int next = 0;  // the arguments are read in the order of the signature
  const Tensor input = a.tensor(next++);
  if (needs_python(input)) Py_RETURN_NONE;
  const optional<Tensor> residual = kAdd ? optional(a.tensor(next++)) : std::nullopt;
  const auto normalized_shape = a.symintlist(next++);
  const optional<Tensor> weight = a.optionalTensor(next++);
  const optional<Tensor> bias = kRms ? std::nullopt : a.optionalTensor(next++);
  const double eps = kRms ? rms_eps(a.toDoubleOptional(next++), input) : a.toDouble(next++);
  const bool zero_centered_weight = a.toBool(next++);
  const bool in_place = kAdd && a.toBool(next++), memory_efficient = !kAdd && !kRms && a.toBool(next++);
  const layernorm::Options options = {kRms, zero_centered_weight, memory_efficient};
  return call(layernorm::call_forward, {input, normalized_shape, weight, bias, eps, options, residual, in_place});
  END_HANDLE_TH_ERRORS
}

PyObject* ada_norm(PyObject*, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static PythonArgParser parser(
      {"ada_norm(Tensor input, SymIntArrayRef normalized_shape, Tensor? scale, Tensor? shift, double eps, bool rms)"});
  ParsedArgs<6> parsed;
  auto a = parser.parse(args, kwargs, parsed);
  const Tensor input = a.tensor(0);
  if (needs_python(input)) Py_RETURN_NONE;
  const auto normalized_shape = a.symintlist(1);
  const optional<Tensor> scale = a.optionalTensor(2), shift = a.optionalTensor(3);
  layernorm::check_modulation(input, normalized_shape, scale, shift);
  const auto weight = layernorm::insert_batch_dims(scale, input, normalized_shape);
  const auto bias = layernorm::insert_batch_dims(shift, input, normalized_shape);
  const layernorm::Options options = {/*rms=*/a.toBool(5), /*zero_centered_weight=*/true};
  return call(layernorm::call_forward, {input, normalized_shape, weight, bias, a.toDouble(4), options});
  END_HANDLE_TH_ERRORS
}

// All functions for images; those without a residual return the output alone. None if the call needs_python().
PyObject* norm_2d(PyObject*, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static PythonArgParser parser(
      {"norm_2d(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, double? eps, bool rms, "
       "bool zero_centered_weight, bool memory_efficient, bool inplace, bool adaptive)"});
  ParsedArgs<10> parsed;
  auto a = parser.parse(args, kwargs, parsed);
  const Tensor input = a.tensor(0);
  if (needs_python(input)) Py_RETURN_NONE;
  const optional<Tensor> residual = a.optionalTensor(1), weight = a.optionalTensor(2), bias = a.optionalTensor(3);
  const bool rms = a.toBool(5), in_place = a.toBool(8), adaptive = a.toBool(9);
  layernorm::check_images(input, residual, weight, bias, adaptive);
  const bool has_default = rms && !adaptive;
  TORCH_CHECK_TYPE(has_default || !a.isNone(4),
                   adaptive   ? "ada_"
                   : residual ? "add_"
                              : "",
                   rms ? "rms" : "layer", "_norm_2d(): argument 'eps' must be float, not NoneType");
  const double eps = rms_eps(a.toDoubleOptional(4), input);
  const layernorm::Options options = {rms, a.toBool(6), a.toBool(7), /*preserve_layout=*/true};
  return call(layernorm::forward_images, {input, {input.sym_size(1)}, weight, bias, eps, options, residual, in_place});
  END_HANDLE_TH_ERRORS
}

template <PyCFunctionWithKeywords function>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_VARARGS | METH_KEYWORDS,
          nullptr};
}

PyMethodDef methods[] = {
    method<norm<false, true>>("rms_norm"),  // layer_norm has two overloads, see below
    method<norm<true, false>>("add_layer_norm"),
    method<norm<true, true>>("add_rms_norm"),
    method<ada_norm>("ada_norm"),
    method<norm_2d>("norm_2d"),
    {},
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
  m.def("layer_norm", &plain_layer_norm, py::call_guard<py::gil_scoped_release>());
  m.def("layer_norm", [](const py::args& args, const py::kwargs& kwargs) {  // all other calls, and all errors
    PyObject* const result = norm<false, false>(nullptr, args.ptr(), kwargs.ptr());
    if (!result) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  });
  m.def("check_forward", &layernorm::check_forward, py::call_guard<py::gil_scoped_release>());
  m.def("check_images", &layernorm::check_images, py::call_guard<py::gil_scoped_release>());
  m.def("check_modulation", &layernorm::check_modulation, py::call_guard<py::gil_scoped_release>());
  m.def("cpu_capability", &layernorm::cpu::capability,
        "The instruction set of the CPU kernels in use: DEFAULT, AVX2 or AVX512.");
}
