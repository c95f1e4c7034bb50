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
#include <limits>
#include <string>
#include <utility>

#include "cpu/kernels.h"
#include "family.h"
#include "ops/checks.h"

namespace {

using at::Tensor;
using layernorm::Member;
using layernorm::MemberArgs;
using std::optional;
using torch::ParsedArgs;
using torch::PythonArgParser;

// Whether functional.py must handle a call: it normalizes nested tensors and chooses the operators that tracers record.
// torch.export and make_fx trace with dispatch modes.
bool needs_python(const Tensor& input) {
  return input.is_nested() || at::tracer::impl::is_dispatch_enabled() ||
         c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// A tensor without an override (__torch_function__) or, if it may be absent, None.
bool is_plain(PyObject* object, bool may_be_absent) {
  return THPVariable_CheckExact(object) || (may_be_absent && object == Py_None);
}
optional<Tensor> as_optional_tensor(PyObject* object) {
  return object == Py_None ? std::nullopt : optional<Tensor>(THPVariable_Unpack(object));
}

// Reads a tuple or list of Python integers, as normalized_shape is in nearly every call; returns whether it is one.
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

// layer_norm(input, normalized_shape, weight, bias, eps) without torch's parser, which takes a seventh of the time of a
// call of 8 x 64. Returns None for arguments of other types, and if the call needs_python().
PyObject* plain_layer_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  c10::SymDimVector normalized_shape;
  const bool plain = count == 5 && is_plain(args[0], false) && read_sizes(args[1], normalized_shape) &&
                     is_plain(args[2], true) && is_plain(args[3], true) && PyFloat_CheckExact(args[4]) &&
                     !at::impl::torch_function_mode_enabled();
  if (!plain) Py_RETURN_NONE;
  const Tensor input = THPVariable_Unpack(args[0]);
  if (needs_python(input)) Py_RETURN_NONE;
  const auto weight = as_optional_tensor(args[2]), bias = as_optional_tensor(args[3]);
  const layernorm::ForwardArgs call = {input, normalized_shape, weight, bias, PyFloat_AS_DOUBLE(args[4]), {}};
  Tensor output;
  {
    const pybind11::gil_scoped_release no_gil;
    layernorm::check_layouts(call);
    output = layernorm::call_forward(call).output;
  }
  return THPVariable_Wrap(std::move(output));
  END_HANDLE_TH_ERRORS
}

// The signature of a function, as torch's parser reads it.
std::string signature(const Member& m) {
  std::string s = std::string(m.name) + "(Tensor input";
  if (m.adds) s += ", Tensor residual";
  if (m.gated) s += ", Tensor? gate";
  if (!m.images) s += ", SymIntArrayRef normalized_shape";
  s += m.adaptive ? ", Tensor? scale=None, Tensor? shift=None" : ", Tensor? weight=None";
  if (!m.adaptive && m.has_bias()) s += ", Tensor? bias=None";
  s += m.has_default_eps()      ? ", double? eps=None"
       : m.adaptive || m.images ? ", double eps=1e-06"
                                : ", double eps=1e-05";
  if (m.adds || !m.adaptive) s += ", *";
  if (m.adds) s += ", Tensor? gate=None";
  if (m.gated) s += ", c10::string_view activation=\"silu\", bool gate_first=False, int64_t num_groups=1";
  if (!m.adaptive) s += ", bool zero_centered_weight=False";
  if (m.adds) s += ", bool inplace=False";
  if (m.has_memory_efficient()) s += ", bool memory_efficient=False";
  return s + ")";
}

// The eps of RMSNorm if it is absent: the machine epsilon of the accumulation type.
double default_eps(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                            : std::numeric_limits<float>::epsilon();
}

// Reads the arguments of a signature, from the second one on.
MemberArgs read_arguments(const Member& member, Tensor input, torch::PythonArgs& parsed) {
  int next = 1;
  const auto optional_tensor = [&] { return parsed.optionalTensor(next++); };
  const auto flag = [&] { return parsed.toBool(next++); };
  MemberArgs args;
  args.input = std::move(input);
  if (member.adds) args.residual = parsed.tensor(next++);
  if (member.gated) args.gate = optional_tensor();
  if (!member.images) args.normalized_shape = parsed.symintlist(next++);
  args.weight = optional_tensor();
  if (member.has_bias()) args.bias = optional_tensor();
  args.eps = member.has_default_eps() ? parsed.toDoubleOptional(next++).value_or(default_eps(args.input))
                                      : parsed.toDouble(next++);
  if (member.adds) args.gate = optional_tensor();
  if (member.gated) {
    args.activation = parsed.string(next++);
    args.gate_first = flag();
    args.num_groups = parsed.toInt64(next++);
  }
  if (!member.adaptive) args.zero_centered_weight = flag();
  if (member.adds) args.inplace = flag();
  if (member.has_memory_efficient()) args.memory_efficient = flag();
  return args;
}

// A function of the family. Returns the output, with a residual the output and the sum, or None if an argument has an
// override or the call needs_python().
template <size_t kMember>
PyObject* evaluate(PyObject*, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  constexpr const Member& member = layernorm::kFamily[kMember];
  static PythonArgParser parser({signature(member)});
  ParsedArgs<10> parsed;
  auto parsed_args = parser.parse(args, kwargs, parsed);
  if (parsed_args.has_torch_function()) Py_RETURN_NONE;
  Tensor input = parsed_args.tensor(0);
  if (needs_python(input)) Py_RETURN_NONE;
  const auto member_args = read_arguments(member, std::move(input), parsed_args);
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
  const auto method = [](const char* name, auto function, int flags) -> PyMethodDef {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), flags, nullptr};
  };
  return std::array{method(layernorm::kFamily[kMembers].name, evaluate<kMembers>, METH_VARARGS | METH_KEYWORDS)...,
                    method("plain_layer_norm", plain_layer_norm, METH_FASTCALL), PyMethodDef{}};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  static auto methods = family_methods(std::make_index_sequence<layernorm::kFamilySize>());
  if (PyModule_AddFunctions(m.ptr(), methods.data()) != 0) throw py::error_already_set();
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("check", &layernorm::CheckOperator<>::call, no_gil);
  m.def("cpu_capability", &layernorm::cpu::capability,
        "The instruction set of the CPU kernels in use: DEFAULT, AVX2 or AVX512.");
}
