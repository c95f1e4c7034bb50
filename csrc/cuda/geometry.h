// Types that host code and kernels share: the options of a call, the rows of samples, and the division
// of rows among blocks for the sums of gradients.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../kernel_params.h"
#include "device.h"
#include "launch_limits.h"

namespace layernorm::cuda {

constexpr int kWarpSize = 32;
constexpr int kMaxClusterSize = 8;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// Forward of short and of other rows (forward_rows.cu, forward_slices.cu). The first returns whether it can.
bool forward_rows(const ForwardParams& params);
void forward_slices(const ForwardParams& params);

// Forward and backward for Params::channels_first (channels_first.cu).
void channels_first_forward(const ForwardParams& params);
void channels_first_backward(const BackwardParams& params);

// Backward of a norm and of input_scale (input_scale.cu).
void backward_with_input_scale(const BackwardParams& params);

// ---- flags ----------------------------------------------------------------------------------------------------------

// The options of a call. A kernel tests a bit in one instruction, and a pointer in three.
enum Flag : unsigned {
  kHasSamples = 1 << 0,
  kRms = 1 << 1,
  kWeight = 1 << 2,
  kBias = 1 << 3,
  kZeroCentered = 1 << 4,
  kWideParameters = 1 << 5,  // weight, bias and input_scale are float beside 16-bit input
  kInCluster = 1 << 6,       // a cluster shares a row
  kStoresSums = 1 << 7,      // the first of two launches whose blocks share a row
  kLoadsSums = 1 << 8,       // the second of them
  kResidual = 1 << 9,        // of forward only
  kGradInput = 1 << 10,      // this and the following flags: of backward only
  kGradWeight = 1 << 11,
  kGradBias = 1 << 12,
  kGradSum = 1 << 13,
  kMemoryEfficient = 1 << 14,
  kWeightPerSample = 1 << 15,  // each sample has a gradient of its own
  kBiasPerSample = 1 << 16,
  kInputScale = 1 << 17,  // of forward only
  kGatedNorm = 1 << 18,
  kGateFirst = 1 << 19,
  kSigmoid = 1 << 20,          // the activation of a gated norm, or else silu
  kAlignedChannels = 1 << 21,  // of images: staged channels of whole vectors that start at multiples of 16 bytes
};

constexpr unsigned kTwoLaunches = kStoresSums | kLoadsSums;
constexpr unsigned kHasParts = kInCluster | kTwoLaunches;  // several blocks share a row

// The flags of launches that code without clusters does not run.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr unsigned kNotSupported = kInCluster;
#else
constexpr unsigned kNotSupported = 0;
#endif

struct Flags {
  unsigned bits = 0;

  __host__ __device__ __forceinline__ bool has(unsigned flag) const { return (bits & flag) != 0; }
  void set(Flag flag, bool value) { bits = value ? bits | flag : bits & ~flag; }
};

// Also for a gradient that is not wanted, so that the other gradient does not depend on that.
inline bool is_per_sample(const Params& p, const View& gradient) {
  return gradient.sample_stride != 0 && p.samples > 1;
}

// The flags of both passes.
inline Flags common_flags(const Params& p) {
  Flags flags;
  flags.set(kHasSamples, p.samples > 1);
  flags.set(kRms, p.rms);
  flags.set(kWeight, p.weight.data);
  flags.set(kBias, p.bias.data);
  flags.set(kZeroCentered, p.zero_centered_weight);
  flags.set(kWideParameters, bytes_of(p.param_dtype) > bytes_of(p.dtype));
  flags.set(kGatedNorm, p.activation != Activation::kNone);
  flags.set(kGateFirst, p.gate_first);
  flags.set(kSigmoid, p.activation == Activation::kSigmoid);
  return flags;
}

inline Flags make_flags(const ForwardParams& p) {
  Flags flags = common_flags(p);
  flags.set(kResidual, p.residual.data);
  flags.set(kInputScale, p.input_scale.data);
  return flags;
}

inline Flags make_flags(const BackwardParams& p) {
  Flags flags = common_flags(p);
  flags.set(kGradInput, p.grad_input.data);
  flags.set(kGradWeight, p.grad_weight.data);
  flags.set(kGradBias, p.grad_bias.data);
  flags.set(kGradSum, p.grad_sum.data);
  flags.set(kMemoryEfficient, p.memory_efficient);
  flags.set(kWeightPerSample, is_per_sample(p, p.grad_weight));
  flags.set(kBiasPerSample, is_per_sample(p, p.grad_bias));
  return flags;
}

// ---- rows of samples ------------------------------------------------------------------------------------------------

// Divides numbers that are not negative without a division instruction, which would be a function call.
class FastDivisor {
 public:
  struct Result {
    int64_t quotient, remainder;
  };

  FastDivisor() = default;
  explicit FastDivisor(int64_t divisor)
      : divisor_(divisor), reciprocal_(std::numeric_limits<uint64_t>::max() / static_cast<uint64_t>(divisor)) {}

  __host__ __device__ __forceinline__ int64_t divisor() const { return divisor_; }

  // The product is the quotient or, because the reciprocal is rounded down, one less.
  __device__ __forceinline__ Result divide(int64_t n) const {
    const auto product = static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(n), reciprocal_));
    const int64_t rest = n - product * divisor_;
    return rest >= divisor_ ? Result{product + 1, rest - divisor_} : Result{product, rest};
  }
  // The quotient, if both numbers fit into an int. Takes fewer instructions.
  __device__ __forceinline__ unsigned divide_short(unsigned n) const {
    const unsigned divisor = static_cast<unsigned>(divisor_);
    const auto product = static_cast<unsigned>(n * (reciprocal_ >> 32) >> 32);
    return n - product * divisor >= divisor ? product + 1 : product;
  }

 private:
  int64_t divisor_;
  uint64_t reciprocal_;
};

struct RowIndex {
  int64_t sample, row;  // row: in the sample
};

// The sample of a row of [samples * rows].
__device__ __forceinline__ RowIndex find_sample(int64_t row, bool has_samples, const FastDivisor& rows) {
  if (!has_samples) return {0, row};
  const auto [sample, row_in_sample] = rows.divide(row);
  return {sample, row_in_sample};
}

template <class E>
__device__ __forceinline__ E* address(const View& view, const RowIndex& index) {
  return static_cast<E*>(view.data) + index.sample * view.sample_stride + index.row * view.row_stride;
}

// The distance of the rows of an array in bytes, if the product with the number of a row fits: one instruction then
// computes an address. Rows of samples are found by address().
class ByteStride {
 public:
  // Returns whether the stride fits.
  bool set(const View& view, size_t element_size) {
    const int64_t bytes = view.row_stride * static_cast<int64_t>(element_size);
    bytes_ = static_cast<unsigned>(bytes);
    return bytes <= std::numeric_limits<int>::max();
  }
  template <class E>
  __device__ __forceinline__ E* address(const View& view, unsigned row) const {
    return reinterpret_cast<E*>(static_cast<char*>(view.data) + uint64_t{row} * bytes_);
  }

 private:
  unsigned bytes_;
};
constexpr int64_t kMaxRowNumber = std::numeric_limits<int>::max() / 2;  // also of rows that do not exist

// Calls f(address_in): address_in(view, E(), stride) is the address of row `number` in an array of E. Only rows without
// samples, and not those of kIsGeneral, have strides.
template <bool kIsGeneral, class Index, class F>
__device__ __forceinline__ void with_addresses_of_row(Index number, bool has_samples, const FastDivisor& rows,
                                                      const F& f) {
  if (kIsGeneral || has_samples) {
    const RowIndex index = find_sample(number, has_samples, rows);
    f([&](const View& view, auto element, const ByteStride&) { return address<decltype(element)>(view, index); });
  } else {
    f([&](const View& view, auto element, const ByteStride& stride) {
      return stride.template address<decltype(element)>(view, static_cast<unsigned>(number));
    });
  }
}

// ---- gradients of parameters ----------------------------------------------------------------------------------------

// The division of rows among blocks for the sums of dweight and dbias. A gradient belongs to the rows of a sample or,
// if the samples share it, to all rows. Its rows are divided into segments, and a block sums the gradient over a
// segment, taking some rows in each round.
struct GradientPlan {
  Flags flags;
  FastDivisor rows, segments_of_gradient;  // rows of a sample
  int64_t num_segments, gradient_rows, segment_rows;
  int rounds;                              // of a segment
  int64_t weight_partials, bias_partials;  // rows of the workspace
  void* workspace;

  // If all rows share a gradient, each resident block has a segment. Else 64 segments of a gradient keep the GPU busy
  // with few samples; a segment has at least `min_rounds` rounds, which limits the memory traffic of its sums, and at
  // most 256, which limits their rounding errors.
  void set_segments(const BackwardParams& p, int64_t rows_per_round, int64_t resident, int64_t min_rounds) {
    const bool per_sample = has_gradients_per_sample();
    const int64_t gradients = per_sample ? p.samples : 1;
    gradient_rows = p.samples * p.rows / gradients;
    const int64_t rounds_of_gradient = ceil_div(gradient_rows, rows_per_round);
    int64_t most_rounds = ceil_div(rounds_of_gradient, per_sample ? 64 : resident);
    if (per_sample) most_rounds = std::clamp(most_rounds, min_rounds, int64_t{256});
    const int64_t segments = ceil_div(rounds_of_gradient, most_rounds);
    rows = FastDivisor(p.rows);
    rounds = static_cast<int>(ceil_div(rounds_of_gradient, segments));
    segments_of_gradient = FastDivisor(segments);
    segment_rows = rounds * rows_per_round;
    num_segments = gradients * segments;
    weight_partials = flags.has(kGradWeight) && !stores_gradient(kWeightPerSample) ? num_segments : 0;
    bias_partials = flags.has(kGradBias) && !stores_gradient(kBiasPerSample) ? num_segments : 0;
  }
  __host__ __device__ __forceinline__ bool has_gradients_per_sample() const {
    return flags.has(kWeightPerSample | kBiasPerSample);
  }
  // Whether the sums of a segment are a gradient, and go there instead of the workspace.
  __host__ __device__ __forceinline__ bool stores_gradient(Flag per_sample) const {
    return segments_of_gradient.divisor() == 1 && (flags.has(per_sample) || num_segments == 1);
  }
};

// Successive rows of a gradient.
template <class Index>
struct Segment {
  Index gradient = 0;  // the sample that has the gradient; 0 if all samples share it
  Index first;         // row among all rows
  int rows;            // may be 0

  __device__ __forceinline__ Segment(const GradientPlan& plan, Index number) {
    if (plan.has_gradients_per_sample()) {
      const auto [quotient, remainder] = plan.segments_of_gradient.divide(number);
      gradient = static_cast<Index>(quotient);
      number = static_cast<Index>(remainder);
    }
    const Index gradient_rows = static_cast<Index>(plan.gradient_rows);
    const Index row = number * static_cast<Index>(plan.segment_rows);
    first = gradient * gradient_rows + row;
    rows = static_cast<int>(max(min(static_cast<Index>(plan.segment_rows), gradient_rows - row), Index{0}));
  }
};

// Adds the partial sums, of float or double, of dweight [plan.weight_partials, pitch] and dbias [plan.bias_partials,
// pitch] in the workspace (partials.cu). `config` launched the kernel that computes them.
void launch_add_partials(const BackwardParams& p, const GradientPlan& plan, bool is_double, int64_t pitch,
                         LaunchConfig config);

}  // namespace layernorm::cuda
