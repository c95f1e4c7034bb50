// Runs the CPU kernels without torch and prints a hash of the results of each case.
//
// `make test-aarch64` compares the output of the builds for aarch64 and for the host (x86-64). The kernels of the
// default instruction set have the same vectors, order of summation and roundings on both, so every bit must match. The
// Python tests compare the host's results with float64.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

#include "../../csrc/kernel_params.h"

namespace layernorm {

void no_kernel_for(const Params&) { std::abort(); }

namespace {

constexpr int kGuard = 64;  // bytes behind each array, whose hash tells whether a kernel writes them

Dtype accumulate_dtype(Dtype dtype) { return dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32; }

// An array [samples, rows, cols] of a dtype. Bytes that have not been written are 0xff, which gives NaN.
struct Array {
  Array(Dtype dtype, int64_t samples, int64_t rows, int64_t cols, bool channels_first = false, int gap = 0) {
    bytes = dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
    mantissa_bits = bytes == 8 ? 52 : bytes == 4 ? 23 : dtype == Dtype::kFloat16 ? 10 : 7;
    view.row_stride = channels_first ? 1 : cols + gap;
    view.col_stride = channels_first ? rows + gap : 1;
    view.sample_stride = channels_first ? cols * view.col_stride : rows * view.row_stride;
    memory.assign(samples * view.sample_stride * bytes + kGuard, 0xff);
    view.data = memory.data();
    if (samples == 1) view.sample_stride = 0;  // all samples share a parameter
  }

  int bytes, mantissa_bits;  // of an element
  View view;
  std::vector<uint8_t> memory;
};

struct Workspace final : Allocator {
  std::vector<double> memory;

  void* allocate(int64_t bytes) override {
    memory.assign(bytes / 8 + 1, std::nan(""));
    return memory.data();
  }
};

std::mt19937_64 generator;

// Fills the memory of an array with random signs, mantissas, and exponents from exponent - 4 to exponent + 3.
void fill(Array& array, int exponent) {
  const int sign_bit = 8 * array.bytes - 1;
  const uint64_t bias = (uint64_t{1} << (sign_bit - array.mantissa_bits - 1)) - 1;
  for (size_t i = 0; i < array.memory.size(); i += array.bytes) {
    const uint64_t random = generator(), mantissa = (random >> 8) % (uint64_t{1} << array.mantissa_bits);
    const uint64_t biased = bias + exponent - 4 + random % 8;
    const uint64_t bits = random >> 63 << sign_bit | biased << array.mantissa_bits | mantissa;
    std::memcpy(&array.memory[i], &bits, array.bytes);  // both machines are little-endian
  }
}

struct Case : Params {
  bool per_sample, has_weight, has_bias, has_residual, has_gate, has_input_scale, memory_efficient;
  int exponent;  // the input's numbers have about the size 2^exponent
};

// Returns a hash of the results of forward and backward.
uint64_t hash_of_results(const Case& k) {
  std::deque<Array> inputs, results;
  const auto input = [&](bool exists, Array array, int exponent = 0) {
    if (!exists) return View();
    fill(array, exponent);
    return inputs.emplace_back(std::move(array)).view;
  };
  const auto result = [&](bool exists, Array array) {
    return exists ? results.emplace_back(std::move(array)).view : View();
  };
  const auto matrix = [&](Dtype dtype) { return Array(dtype, k.samples, k.rows, k.cols, k.channels_first, 3); };
  const auto parameter = [&] { return Array(k.param_dtype, k.per_sample ? k.samples : 1, 1, k.cols); };
  const auto statistic = [&] { return Array(accumulate_dtype(k.dtype), k.samples, k.rows, 1); };

  ForwardParams forward{};
  static_cast<Params&>(forward) = k;
  forward.input = input(true, matrix(k.dtype), k.exponent);
  forward.residual = input(k.has_residual, matrix(k.sum_dtype), k.exponent);
  forward.weight = input(k.has_weight, parameter());
  forward.bias = input(k.has_bias, parameter());
  forward.gate = input(k.has_gate, matrix(k.dtype));
  forward.input_scale = input(k.has_input_scale, parameter());
  forward.mean = result(!k.rms, statistic());
  forward.rstd = result(true, statistic());
  forward.sum = result(k.has_residual, matrix(k.sum_dtype));
  forward.output = result(true, matrix(k.dtype));
  forward.eps = 1e-5;
  Workspace workspace;
  forward.allocator = &workspace;
  cpu::forward(forward);

  BackwardParams backward{};
  static_cast<Params&>(backward) = forward;
  backward.memory_efficient = k.memory_efficient;
  backward.input = k.memory_efficient ? forward.output : k.has_residual ? forward.sum : forward.input;
  backward.grad_output = input(true, matrix(k.dtype));
  backward.grad_sum = input(k.has_residual, matrix(k.sum_dtype));
  backward.grad_input = result(true, matrix(k.sum_dtype));
  backward.grad_weight = result(k.has_weight, parameter());
  backward.grad_bias = result(k.has_bias, parameter());
  if (k.has_input_scale) backward.scaled_input = forward.input;
  backward.grad_scaled_input = result(k.has_input_scale, matrix(k.dtype));
  backward.grad_gate = result(k.has_gate, matrix(k.dtype));
  backward.grad_input_scale = result(k.has_input_scale, parameter());
  cpu::backward(backward);
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, of all bytes
  for (const Array& array : results) {
    for (const uint8_t byte : array.memory) hash = (hash ^ byte) * 0x100000001b3;
  }
  return hash;
}

}  // namespace
}  // namespace layernorm

int main() {
  using namespace layernorm;
  constexpr Dtype kF64 = Dtype::kFloat64, kF32 = Dtype::kFloat32, kF16 = Dtype::kFloat16, kBF16 = Dtype::kBFloat16;
  // The dtypes of the input, the sum and the parameters.
  const Dtype dtypes[][3] = {{kF64, kF64, kF64}, {kF32, kF32, kF32},    {kF16, kF16, kF16},   {kF16, kF16, kF32},
                             {kF16, kF32, kF32}, {kBF16, kBF16, kBF16}, {kBF16, kBF16, kF32}, {kBF16, kF32, kF32}};
  // [samples, rows, cols]: a single element, rows with a tail, samples of one row, whole vectors, many rows in
  // segments, rows of several vectors, and long rows that threads share; from kFirstImage on, [images, pixels,
  // channels].
  const int64_t shapes[][3] = {{1, 1, 1},    {2, 5, 7}, {5, 1, 33}, {3, 9, 64}, {1, 300, 40}, {2, 6, 300},
                               {1, 2, 5000}, {1, 1, 1}, {3, 5, 17}, {2, 70, 9}, {1, 300, 40}};
  constexpr int kFirstImage = 7;
  for (const auto& [dtype, sum_dtype, param_dtype] : dtypes) {
    for (int shape = 0; shape < (dtype == sum_dtype ? 11 : kFirstImage); ++shape) {
      const auto make_case = [&](int flags) {
        Case k{};
        k.samples = shapes[shape][0], k.rows = shapes[shape][1], k.cols = shapes[shape][2];
        k.channels_first = shape >= kFirstImage;
        k.dtype = dtype, k.sum_dtype = sum_dtype, k.param_dtype = param_dtype;
        k.rms = flags & 1, k.per_sample = flags & 2, k.has_weight = flags & 4, k.has_bias = flags & 8;
        k.zero_centered_weight = k.has_weight && flags & 16;
        return k;
      };
      const auto print = [&](const Case& k, int flags, const char* what) {
        std::printf("dtypes %d %d %d, shape %d, flags %d%s: %016llx\n", int(k.dtype), int(k.sum_dtype),
                    int(k.param_dtype), shape, flags, what, static_cast<unsigned long long>(hash_of_results(k)));
      };
      for (int flags = 0; flags < 32; ++flags) {
        Case k = make_case(flags);
        k.has_residual = !k.channels_first && (flags & 16 || dtype != sum_dtype);
        print(k, flags, "");
        if (dtype != param_dtype || accumulate_dtype(dtype) != dtype || !k.has_weight) continue;
        k.memory_efficient = !k.has_residual;
        if (k.memory_efficient) print(k, flags, ", backward from the output");
        k.memory_efficient = false, k.exponent = dtype == kF64 ? 600 : 100;
        print(k, flags, ", squares that overflow");
      }
      for (int flags = 0; flags < 16 && shape < kFirstImage; ++flags) {
        Case k = make_case(flags);
        k.has_residual = k.has_input_scale = true;
        print(k, flags, ", scaled input");
        if (dtype != sum_dtype || param_dtype != accumulate_dtype(dtype)) continue;
        k.has_residual = k.has_input_scale = false;
        k.has_gate = true;
        for (const bool gate_first : {false, true}) {
          for (const Activation activation : {Activation::kSilu, Activation::kSigmoid}) {
            k.gate_first = gate_first, k.activation = activation;
            print(k, flags, gate_first ? ", gated input" : ", gated output");
          }
        }
      }
    }
  }
}
