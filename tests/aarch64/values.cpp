// Runs the CPU kernels without torch and prints a hash of the results of each case.
//
// `make test-aarch64` compares the output of the builds for aarch64 and for the host. The baseline kernels have the
// same vectors, order of summation and roundings on both, so every bit must match. The Python tests compare the host's
// results with float64.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../../csrc/layer_norm.h"

namespace layernorm {

void no_kernel_for(const Params&) { std::abort(); }

namespace {

constexpr int kGuard = 64;  // bytes behind each array that a kernel must not write

struct Format {
  int bytes, mantissa_bits;
};
Format format_of(Dtype dtype) {
  return dtype == Dtype::kFloat64   ? Format{8, 52}
         : dtype == Dtype::kFloat32 ? Format{4, 23}
         : dtype == Dtype::kFloat16 ? Format{2, 10}
                                    : Format{2, 7};
}
Dtype accumulate_dtype(Dtype dtype) { return dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32; }

// An array [groups, rows, cols] of a dtype. The bytes that nothing has written are 0xff, a NaN.
struct Array {
  Array(Dtype dtype, int64_t groups, int64_t rows, int64_t cols, bool channels_first = false, int gap = 0)
      : format(format_of(dtype)), groups(groups), elements(groups * rows * cols) {
    view.row_stride = channels_first ? 1 : cols + gap;
    view.col_stride = channels_first ? rows + gap : 1;
    view.group_stride = channels_first ? cols * view.col_stride : rows * view.row_stride;
    memory.assign(groups * view.group_stride * format.bytes + kGuard, 0xff);
    view.data = memory.data();
  }

  Format format;
  int64_t groups, elements;
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

struct Case {
  int64_t groups, rows, cols;
  bool channels_first;
  Dtype dtype, sum_dtype, param_dtype;
  bool rms, grouped, weight, bias, residual, zero_centered, from_output;
  int exponent;  // of the input: a power of two
};

std::mt19937_64 generator;
int failures;

// Fills the memory of an array with random signs, mantissas, and exponents from exponent - 4 to exponent + 3.
void fill(Array& array, int exponent = 0) {
  const auto [bytes, mantissa_bits] = array.format;
  const int sign_bit = 8 * bytes - 1;
  const uint64_t bias = (uint64_t{1} << (sign_bit - mantissa_bits - 1)) - 1;
  for (size_t i = 0; i < array.memory.size(); i += bytes) {
    const uint64_t random = generator(), mantissa = (random >> 8) % (uint64_t{1} << mantissa_bits);
    const uint64_t bits = random >> 63 << sign_bit | (bias + exponent - 4 + random % 8) << mantissa_bits | mantissa;
    std::memcpy(&array.memory[i], &bits, bytes);  // both machines are little-endian
  }
}

// Adds all bytes of a result to a hash (FNV-1a). The bytes outside the rows, and no others, must still be NaN.
void add_to_hash(uint64_t& hash, const Array& result) {
  const auto [bytes, mantissa_bits] = result.format;
  const uint64_t magnitude = (uint64_t{1} << (8 * bytes - 1)) - 1,
                 infinity = magnitude >> mantissa_bits << mantissa_bits;
  int64_t numbers = 0;
  for (size_t i = 0; i < result.memory.size(); i += bytes) {
    uint64_t bits = 0;
    std::memcpy(&bits, &result.memory[i], bytes);
    numbers += (bits & magnitude) <= infinity;
    hash = (hash ^ bits) * 0x100000001b3;
  }
  failures += numbers != result.elements;
}

uint64_t hash_of_results(const Case& k) {
  const auto matrix = [&](Dtype dtype) { return Array(dtype, k.groups, k.rows, k.cols, k.channels_first, 3); };
  const auto parameter = [&] { return Array(k.param_dtype, k.grouped ? k.groups : 1, 1, k.cols); };
  const auto statistic = [&] { return Array(accumulate_dtype(k.dtype), k.groups, k.rows, 1); };
  Array input = matrix(k.dtype), residual = matrix(k.sum_dtype), dy = matrix(k.dtype), dsum = matrix(k.sum_dtype);
  Array output = matrix(k.dtype), sum = matrix(k.sum_dtype), dx = matrix(k.sum_dtype);
  Array mean = statistic(), rstd = statistic();
  Array weight = parameter(), bias = parameter(), dweight = parameter(), dbias = parameter();
  for (Array* array : {&input, &residual}) fill(*array, k.exponent);
  for (Array* array : {&dy, &dsum, &weight, &bias}) fill(*array);

  uint64_t hash = 0xcbf29ce484222325;
  std::vector<Array*> results{&output, &rstd, &dx};
  const auto view_if = [&](bool present, Array& array, bool is_result = false) {
    if (present && is_result) results.push_back(&array);
    View view = present ? array.view : View();
    if (array.groups < k.groups) view.group_stride = 0;
    return view;
  };
  ForwardParams forward{};
  forward.groups = k.groups, forward.rows = k.rows, forward.cols = k.cols, forward.channels_first = k.channels_first;
  forward.weight = view_if(k.weight, weight), forward.bias = view_if(k.bias, bias);
  forward.mean = view_if(!k.rms, mean, true), forward.rstd = rstd.view;
  forward.rms = k.rms, forward.zero_centered_weight = k.zero_centered;
  forward.dtype = k.dtype, forward.sum_dtype = k.sum_dtype, forward.param_dtype = k.param_dtype;
  forward.input = input.view, forward.residual = view_if(k.residual, residual);
  forward.sum = view_if(k.residual, sum, true), forward.output = output.view;
  forward.eps = 1e-5;
  cpu::forward(forward);

  BackwardParams backward{};
  static_cast<Params&>(backward) = forward;
  backward.input = k.from_output ? output.view : k.residual ? sum.view : input.view;
  backward.grad_output = dy.view, backward.grad_sum = view_if(k.residual, dsum), backward.from_output = k.from_output;
  backward.grad_input = dx.view, backward.grad_weight = view_if(k.weight, dweight, true);
  backward.grad_bias = view_if(k.bias, dbias, true);
  Workspace workspace;
  backward.allocator = &workspace;
  cpu::backward(backward);
  for (Array* result : results) add_to_hash(hash, *result);
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
  // Single elements, tails, groups of one row, many rows in slots, and long rows that threads share.
  const int64_t rows[][3] = {{1, 1, 1}, {2, 5, 7}, {5, 1, 33}, {3, 9, 64}, {1, 300, 40}, {2, 6, 300}, {1, 2, 5000}};
  const int64_t images[][3] = {{1, 1, 1}, {3, 5, 17}, {2, 70, 9}, {1, 300, 40}};
  for (const auto& types : dtypes) {
    const Dtype dtype = types[0], sum_dtype = types[1], param_dtype = types[2];
    const auto run_all = [&](const int64_t (&shape)[3], bool channels_first) {
      for (int flags = 0; flags < 32; ++flags) {
        Case k{shape[0], shape[1], shape[2], channels_first, dtype, sum_dtype, param_dtype};
        k.rms = flags & 1, k.grouped = flags & 2, k.weight = flags & 4, k.bias = flags & 8;
        k.residual = flags & 16 || dtype != sum_dtype;
        k.zero_centered = k.weight && flags & 16;
        const auto print = [&](const char* input) {
          std::printf("dtypes %d %d %d, [%d, %d, %d], channels_first %d, flags %d%s: %016llx\n", int(dtype),
                      int(sum_dtype), int(param_dtype), int(k.groups), int(k.rows), int(k.cols), channels_first, flags,
                      input, static_cast<unsigned long long>(hash_of_results(k)));
        };
        print("");
        if (dtype == param_dtype && accumulate_dtype(dtype) == dtype && k.weight) {
          k.from_output = !k.residual;
          if (k.from_output) print(", backward from the output");
          k.from_output = false, k.exponent = dtype == kF64 ? 600 : 100;
          print(", squares that overflow");
        }
      }
    };
    for (const auto& shape : rows) run_all(shape, false);
    for (const auto& shape : images) run_all(shape, true);
  }
  std::printf("%d results have elements that were not written, or were written outside the rows\n", failures);
  return failures != 0;
}
