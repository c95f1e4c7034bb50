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

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "ops/checks.h"
#include "ops/ops.h"

namespace {

using at::Tensor;
using layernorm::ForwardArgs;
using layernorm::ForwardOutputs;
using std::optional;
using torch::ParsedArgs;
using torch::PythonArgParser;

// A public function, and the call of forward that it means.
struct Member {
  const char* name;
  bool rms = false;
  bool adds = false;      // a residual
  bool adaptive = false;  // the parameters are scale and shift
  bool images = false;    // the channels are the second dimension
  bool gated = false;     // a gated norm; the gate of a function that adds is an input_scale

  constexpr bool has_bias() const { return adaptive || !rms; }
  constexpr bool has_default_eps() const { return rms && !adaptive; }  // the epsilon of the dtype
  constexpr bool has_memory_efficient() const { return !rms && !adds && !adaptive && !gated; }
};

constexpr Member kFamily[] = {
    {"layer_norm"},
    {"rms_norm", /*rms=*/true},
    {"add_layer_norm", false, /*adds=*/true},
    {"add_rms_norm", true, true},
    {"ada_layer_norm", false, false, /*adaptive=*/true},
    {"ada_rms_norm", true, false, true},
    {"add_ada_layer_norm", false, true, true},
    {"add_ada_rms_norm", true, true, true},
    {"gated_layer_norm", false, false, false, false, /*gated=*/true},
    {"gated_rms_norm", true, false, false, false, true},
    {"layer_norm_2d", false, false, false, /*images=*/true},
    {"rms_norm_2d", true, false, false, true},
};

// Whether norm() of _calls.py must handle a call: it normalizes nested tensors and chooses the operators that tracers
// record. torch.export and make_fx trace with dispatch modes.
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

// layer_norm(input, normalized_shape, weight, bias, eps). Returns None for arguments of other types, and if the call
// needs_python(). With torch's parser, a call of 8 x 64 takes 2.33 us instead of 1.93 us (torch 2.13 on an AMD EPYC
// Zen 4 at cd3ae53, least of 300 alternating samples).
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
  const ForwardArgs call = {input, normalized_shape, weight, bias, PyFloat_AS_DOUBLE(args[4]), {}};
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

// The arguments of a call of any member.
struct Arguments {
  // Reads the arguments after the input in the order of the signature.
  Arguments(const Member& member, Tensor first, torch::PythonArgs& parsed) : input(std::move(first)) {
    int next = 1;
    const auto optional_tensor = [&] { return parsed.optionalTensor(next++); };
    const auto flag = [&] { return parsed.toBool(next++); };
    options.rms = member.rms;
    options.images = member.images;
    if (member.adds) residual = parsed.tensor(next++);
    if (member.gated) gate = optional_tensor();
    if (!member.images) normalized_shape = parsed.symintlist(next++);
    weight = optional_tensor();
    if (member.has_bias()) bias = optional_tensor();
    eps = member.has_default_eps() ? parsed.toDoubleOptional(next++).value_or(default_eps(input))
                                   : parsed.toDouble(next++);
    if (member.adds) gate = optional_tensor();
    if (member.gated) {
      activation = parsed.string(next++);
      options.gate_first = flag();
      options.num_groups = parsed.toInt64(next++);
    }
    options.zero_centered_weight = member.adaptive || flag();
    if (member.adds) inplace = flag();
    if (member.has_memory_efficient()) options.memory_efficient = flag();
  }

  Tensor input;
  optional<Tensor> residual, weight, bias, gate;
  std::vector<c10::SymInt> normalized_shape;
  double eps = 0;
  std::string activation;
  layernorm::Options options;
  bool inplace = false;
};

ForwardOutputs call_member(const Member& member, const Arguments& arguments) {
  const auto& [input, residual, weight, bias, gate, normalized_shape, eps, activation, options, inplace] = arguments;
  ForwardArgs args = {input, normalized_shape, weight, bias, eps, options, residual};
  if (member.gated) {
    const int64_t kind = layernorm::parse_activation(activation, input);
    if (layernorm::present(gate)) {
      args.gate = gate;
      args.options.activation = kind;
    } else {
      args.options.gate_first = false;
    }
  } else {
    args.input_scale = gate;
    args.inplace = inplace;
  }
  if (member.adaptive || args.input_scale) {  // the public names differ from the operator's
    check_call(args, member.adaptive);
  } else {
    check_layouts(args);
  }
  if (member.images) {
    const auto sizes = input.sym_sizes();
    args.normalized_shape = sizes.slice(std::min<size_t>(sizes.size(), 1), sizes.size() > 1 ? 1 : 0);
  }
  return layernorm::call_forward(args);
}

// A function of the family. Returns the output, with a residual the output and the sum, or None if an argument has an
// override or the call needs_python().
template <size_t kMember>
PyObject* evaluate(PyObject*, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  constexpr const Member& member = kFamily[kMember];
  static PythonArgParser parser({signature(member)});
  ParsedArgs<10> parsed;
  auto parsed_args = parser.parse(args, kwargs, parsed);
  if (parsed_args.has_torch_function()) Py_RETURN_NONE;
  Tensor input = parsed_args.tensor(0);
  if (needs_python(input)) Py_RETURN_NONE;
  const Arguments arguments(member, std::move(input), parsed_args);
  ForwardOutputs outputs;
  {
    const pybind11::gil_scoped_release no_gil;
    outputs = call_member(member, arguments);
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
  return std::array{method(kFamily[kMembers].name, evaluate<kMembers>, METH_VARARGS | METH_KEYWORDS)...,
                    method("plain_layer_norm", plain_layer_norm, METH_FASTCALL), PyMethodDef{}};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  static auto methods = family_methods(std::make_index_sequence<std::size(kFamily)>());
  if (PyModule_AddFunctions(m.ptr(), methods.data()) != 0) throw py::error_already_set();
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("check", &layernorm::CheckOperator<>::call, no_gil);
  m.def("cpu_capability", &layernorm::cpu::capability,
        "The instruction set of the CPU kernels in use: DEFAULT, AVX2 or AVX512.");
}
