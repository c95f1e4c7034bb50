// Compares the CPU kernels with the formulas of layer_norm.h in double, without torch, for `make test-aarch64`.
//
// Inputs are multiples of 1/64 with at most 8 significant bits, so every dtype represents them exactly. The tolerance
// of an element is half a unit in the last place of its dtype, plus the promised 5e-7 (float64: 1e-13, as the reference
// is double itself) times the sum of the absolute values of its terms.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "../../csrc/layer_norm.h"

namespace layernorm {

void no_kernel_for(const Params&) { std::abort(); }

namespace {

constexpr double kEps = 1e-5;
constexpr int kGuard = 64;  // bytes behind each array that a kernel must not write

int size_of(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2; }
Dtype accumulate_dtype(Dtype dtype) { return dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32; }

template <class To, class From>
To bit_cast(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

double decode_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double magnitude = exponent == 31 ? std::numeric_limits<double>::quiet_NaN()
                                          : std::ldexp(exponent ? 1024 + mantissa : mantissa, (exponent ?: 1) - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

// An array [groups, rows, cols] of a dtype. The bytes that nothing has written are 0xff, a NaN.
struct Array {
  Array() = default;
  Array(Dtype dtype, int64_t groups, int64_t rows, int64_t cols, bool channels_first = false, int gap = 0)
      : dtype(dtype), rows(rows), cols(cols) {
    view.row_stride = channels_first ? 1 : cols + gap;
    view.col_stride = channels_first ? rows + gap : 1;
    view.group_stride = channels_first ? cols * view.col_stride : rows * view.row_stride;
    bytes.assign(groups * view.group_stride * size_of(dtype) + kGuard, 0xff);
    used.assign(bytes.size(), false);
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) std::fill_n(used.begin() + offset(g, r, c), size_of(dtype), true);
      }
    }
  }
  int64_t offset(int64_t g, int64_t r, int64_t c) const {
    return (g * view.group_stride + r * view.row_stride + c * view.col_stride) * size_of(dtype);
  }
  double get(int64_t g, int64_t r, int64_t c) const {
    const uint8_t* const p = bytes.data() + offset(g, r, c);
    const auto as = [&](auto value) { return std::memcpy(&value, p, sizeof(value)), value; };
    switch (dtype) {
      case Dtype::kFloat64:
        return as(double());
      case Dtype::kFloat32:
        return as(float());
      case Dtype::kFloat16:
        return decode_half(as(uint16_t()));
      default:
        return bit_cast<float>(uint32_t{as(uint16_t())} << 16);
    }
  }
  // Stores a value that the dtype represents as a normal number or zero.
  void set(int64_t g, int64_t r, int64_t c, double value) {
    uint8_t* const p = bytes.data() + offset(g, r, c);
    const float single = static_cast<float>(value);
    const uint32_t bits = bit_cast<uint32_t>(single);
    const uint32_t half = single == 0 ? 0 : (bits >> 16 & 0x8000) | ((bits & 0x7fffffff) - (112u << 23)) >> 13;
    const uint16_t narrow = dtype == Dtype::kFloat16 ? half : bits >> 16;
    if (dtype == Dtype::kFloat64) std::memcpy(p, &value, 8);
    if (dtype == Dtype::kFloat32) std::memcpy(p, &single, 4);
    if (size_of(dtype) == 2) std::memcpy(p, &narrow, 2);
  }
  View operator*() {
    View result = view;
    result.data = bytes.empty() ? nullptr : bytes.data();
    return result;
  }
  bool is_intact() const {  // whether nothing was written outside the rows
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (!used[i] && bytes[i] != 0xff) return false;
    }
    return true;
  }

  Dtype dtype{};
  int64_t rows = 0, cols = 0;
  View view;
  std::vector<uint8_t> bytes;
  std::vector<bool> used;
};

struct Workspace final : Allocator {
  std::vector<double> memory;

  void* allocate(int64_t bytes) override {
    memory.assign(bytes / 8 + 1, std::nan(""));
    return memory.data();
  }
};

struct Case {
  int64_t groups, rows, cols;
  bool channels_first;
  Dtype dtype, sum_dtype, param_dtype;
  bool rms, residual, grouped, weight, bias, zero_centered, from_output;
  double scale;  // of the input
};

std::mt19937 generator;
double largest_share;  // of a tolerance
int failures;

void fill(Array& array, int64_t groups, double scale) {
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t r = 0; r < array.rows; ++r) {
      for (int64_t c = 0; c < array.cols; ++c) {
        array.set(g, r, c, (static_cast<int>(generator() % 511) - 255) / 64.0 * scale);
      }
    }
  }
}

void check(const char* name, const Case& k, const Array& array, int64_t g, int64_t r, int64_t c, double expected,
           double terms) {
  const double ulp = std::ldexp(1, array.dtype == Dtype::kFloat64   ? -53
                                   : array.dtype == Dtype::kFloat32 ? -24
                                   : array.dtype == Dtype::kFloat16 ? -11
                                                                    : -8);
  const double subnormal = array.dtype == Dtype::kFloat16 ? std::ldexp(1, -25) : 0;
  const double bound = ulp * std::fabs(expected) + subnormal + (k.dtype == Dtype::kFloat64 ? 1e-13 : 5e-7) * terms;
  const double error = std::fabs(array.get(g, r, c) - expected);
  if (!(error <= bound)) {
    std::printf("FAILED: %s[%d, %d, %d] is %.9g, expected %.9g: the tolerance is %.3g\n", name, int(g), int(r), int(c),
                array.get(g, r, c), expected, bound);
    std::printf(
        "  groups %d rows %d cols %d channels_first %d dtypes %d %d %d rms %d residual %d grouped %d weight %d "
        "bias %d zero_centered %d from_output %d scale %g\n",
        int(k.groups), int(k.rows), int(k.cols), k.channels_first, int(k.dtype), int(k.sum_dtype), int(k.param_dtype),
        k.rms, k.residual, k.grouped, k.weight, k.bias, k.zero_centered, k.from_output, k.scale);
    if (++failures > 10) std::exit(1);
  } else if (bound > 0) {
    largest_share = std::max(largest_share, error / bound);
  }
}

void run(const Case& k) {
  const auto image = [&](Dtype dtype) { return Array(dtype, k.groups, k.rows, k.cols, k.channels_first, 3); };
  const int64_t parameter_groups = k.grouped ? k.groups : 1;
  const auto parameter = [&](bool wanted) {
    if (!wanted) return Array();
    Array array(k.param_dtype, parameter_groups, 1, k.cols);
    if (!k.grouped) array.view.group_stride = 0;
    return array;
  };
  Array input = image(k.dtype), residual = k.residual ? image(k.sum_dtype) : Array(), output = image(k.dtype);
  Array sum = k.residual ? image(k.sum_dtype) : Array(), dy = image(k.dtype), dx = image(k.sum_dtype);
  Array dsum = k.residual ? image(k.sum_dtype) : Array();
  Array weight = parameter(k.weight), bias = parameter(k.bias);
  Array dweight = parameter(k.weight), dbias = parameter(k.bias);
  Array mean, rstd(accumulate_dtype(k.dtype), k.groups, k.rows, 1);
  if (!k.rms) mean = rstd;
  fill(input, k.groups, k.scale), fill(dy, k.groups, 1);
  if (k.residual) fill(residual, k.groups, k.scale), fill(dsum, k.groups, 1);
  if (k.weight) fill(weight, parameter_groups, 1);
  if (k.from_output) {  // backward divides by the weight
    for (int64_t g = 0; g < parameter_groups; ++g) {
      for (int64_t c = 0; c < k.cols; ++c) weight.set(g, 0, c, 0.5 + std::fabs(weight.get(g, 0, c)));
    }
  }
  if (k.bias) fill(bias, parameter_groups, 1);

  ForwardParams forward{};
  forward.groups = k.groups, forward.rows = k.rows, forward.cols = k.cols, forward.channels_first = k.channels_first;
  forward.weight = *weight, forward.bias = *bias, forward.mean = *mean, forward.rstd = *rstd;
  forward.rms = k.rms, forward.zero_centered_weight = k.zero_centered;
  forward.dtype = k.dtype, forward.sum_dtype = k.sum_dtype, forward.param_dtype = k.param_dtype;
  forward.input = *input, forward.residual = *residual, forward.sum = *sum, forward.output = *output;
  forward.eps = kEps;
  cpu::forward(forward);

  BackwardParams backward{};
  static_cast<Params&>(backward) = forward;
  Array& x = k.residual ? sum : input;
  backward.input = k.from_output ? *output : *x;
  backward.grad_output = *dy, backward.grad_sum = *dsum, backward.from_output = k.from_output;
  backward.grad_input = *dx, backward.grad_weight = *dweight, backward.grad_bias = *dbias;
  Workspace workspace;
  backward.allocator = &workspace;
  cpu::backward(backward);

  std::vector<double> dw(parameter_groups * k.cols), db(dw), dw_terms(dw), db_terms(dw), xhat(k.cols), gain(k.cols);
  for (int64_t g = 0; g < k.groups; ++g) {
    const int64_t parameter_group = k.grouped ? g : 0;
    for (int64_t r = 0; r < k.rows; ++r) {
      double exact_mean = 0, variance = 0, xhat_mean = 0, mean_g = 0, mean_g_xhat = 0, abs_g = 0, abs_g_xhat = 0;
      if (k.residual) {
        for (int64_t c = 0; c < k.cols; ++c) {
          const double exact = input.get(g, r, c) + residual.get(g, r, c);
          check("sum", k, sum, g, r, c, exact, 0);
        }
      }
      for (int64_t c = 0; c < k.cols; ++c) exact_mean += k.rms ? 0 : x.get(g, r, c) / k.cols;
      // Dividing by the scale, a power of two, is exact and keeps the squares finite.
      for (int64_t c = 0; c < k.cols; ++c) variance += std::pow((x.get(g, r, c) - exact_mean) / k.scale, 2) / k.cols;
      const double exact_rstd = 1 / std::hypot(std::sqrt(variance), std::sqrt(kEps) / k.scale) / k.scale;
      check("rstd", k, rstd, g, r, 0, exact_rstd, exact_rstd);
      if (!k.rms) check("mean", k, mean, g, r, 0, exact_mean, std::fabs(exact_mean) + std::sqrt(variance) * k.scale);
      for (int64_t c = 0; c < k.cols; ++c) {
        gain[c] = k.weight ? weight.get(parameter_group, 0, c) + k.zero_centered : 1;
        xhat[c] = (x.get(g, r, c) - exact_mean) * exact_rstd;
        const double b = k.bias ? bias.get(parameter_group, 0, c) : 0;
        check("output", k, output, g, r, c, xhat[c] * gain[c] + b, 1 + std::fabs(xhat[c] * gain[c]) + std::fabs(b));
        if (k.from_output) xhat[c] = (output.get(g, r, c) - b) / gain[c];
        xhat_mean += k.rms ? 0 : xhat[c] / k.cols;
      }
      for (int64_t c = 0; c < k.cols; ++c) {
        xhat[c] -= xhat_mean;
        const double upstream = dy.get(g, r, c), dgain = upstream * gain[c];
        mean_g += k.rms ? 0 : dgain / k.cols, mean_g_xhat += dgain * xhat[c] / k.cols;
        abs_g += std::fabs(dgain) / k.cols, abs_g_xhat += std::fabs(dgain * xhat[c]) / k.cols;
        const int64_t j = parameter_group * k.cols + c;
        dw[j] += upstream * xhat[c], dw_terms[j] += std::fabs(upstream) * (1 + std::fabs(xhat[c]));
        db[j] += upstream, db_terms[j] += std::fabs(upstream);
      }
      for (int64_t c = 0; c < k.cols; ++c) {
        const double upstream = k.residual ? dsum.get(g, r, c) : 0, dgain = dy.get(g, r, c) * gain[c];
        const double exact = exact_rstd * (dgain - mean_g - xhat[c] * mean_g_xhat) + upstream;
        const double terms = exact_rstd * (std::fabs(dgain) + abs_g + (1 + std::fabs(xhat[c])) * abs_g_xhat);
        check("grad_input", k, dx, g, r, c, exact, terms + std::fabs(upstream));
      }
    }
  }
  for (int64_t g = 0; g < parameter_groups; ++g) {
    for (int64_t c = 0; c < k.cols; ++c) {
      const int64_t j = g * k.cols + c;
      if (k.weight) check("grad_weight", k, dweight, g, 0, c, dw[j], dw_terms[j]);
      if (k.bias) check("grad_bias", k, dbias, g, 0, c, db[j], db_terms[j]);
    }
  }
  for (const Array* array : {&output, &sum, &mean, &rstd, &dx, &dweight, &dbias}) {
    if (!array->is_intact()) std::printf("FAILED: a kernel wrote outside its rows\n"), ++failures;
  }
}

}  // namespace
}  // namespace layernorm

int main() {
  using namespace layernorm;
  constexpr Dtype kF64 = Dtype::kFloat64, kF32 = Dtype::kFloat32, kF16 = Dtype::kFloat16, kBF16 = Dtype::kBFloat16;
  const struct {
    const char* name;
    Dtype dtype, sum_dtype, param_dtype;
  } dtypes[] = {
      {"float64", kF64, kF64, kF64},
      {"float32", kF32, kF32, kF32},
      {"float16", kF16, kF16, kF16},
      {"float16, float32 parameters", kF16, kF16, kF32},
      {"float16, float32 residual and parameters", kF16, kF32, kF32},
      {"bfloat16", kBF16, kBF16, kBF16},
      {"bfloat16, float32 parameters", kBF16, kBF16, kF32},
      {"bfloat16, float32 residual and parameters", kBF16, kF32, kF32},
  };
  // Single elements, tails, groups of one row, many rows in slots, and long rows that threads share.
  const int64_t rows[][3] = {{1, 1, 1}, {2, 5, 7}, {5, 1, 33}, {3, 9, 64}, {1, 300, 40}, {2, 6, 300}, {1, 2, 5000}};
  const int64_t images[][3] = {{1, 1, 1}, {3, 5, 17}, {2, 70, 9}, {1, 300, 40}};
  for (const auto& types : dtypes) {
    int cases = 0;
    largest_share = 0;
    const auto run_all = [&](const int64_t (&shape)[3], bool channels_first) {
      for (int flags = 0; flags < 32; ++flags) {
        Case k{shape[0], shape[1], shape[2], channels_first, types.dtype, types.sum_dtype, types.param_dtype};
        k.rms = flags & 1, k.grouped = flags & 2, k.weight = flags & 4, k.bias = flags & 8;
        k.residual = flags & 16 || types.dtype != types.sum_dtype;
        k.zero_centered = k.weight && flags & 16, k.scale = 1;
        run(k), ++cases;
        if (types.dtype == types.param_dtype && accumulate_dtype(types.dtype) == types.dtype && k.weight) {
          // Backward from the output, and numbers whose squares overflow.
          if (!k.residual) k.from_output = true, run(k), k.from_output = false, ++cases;
          k.scale = std::ldexp(1, types.dtype == kF64 ? 600 : 100), run(k), ++cases;
        }
      }
    };
    for (const auto& shape : rows) run_all(shape, false);
    for (const auto& shape : images) run_all(shape, true);
    std::printf("%-42s %4d cases, largest error %.2f of its tolerance\n", types.name, cases, largest_share);
  }
  return failures != 0;
}
