// The values that the host code computes for a kernel and passes beside Params: the flags of a call, the numbers with
// which kernels find rows, and the segments of rows over which weight gradients are summed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../kernel_params.h"
#include "launch_and_ptx.h"
#include "launch_limits.h"

namespace layernorm::cuda {

constexpr int kWarpSize = 32;
constexpr int kMaxClusterSize = 8;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// The two implementations of forward for rows: in registers (forward_registers.cu), which returns false and launches
// nothing if the strides are too large for ByteStride, and staged in shared memory (forward_staged.cu).
bool forward_registers(const ForwardParams& params);
void forward_staged(const ForwardParams& params);

// Forward and backward for Params::channels_first (channels_first.cu).
void channels_first_forward(const ForwardParams& params);
void channels_first_backward(const BackwardParams& params);

// Backward of s = residual + input_scale * input: calls backward() for the gradient of s, and then computes those of
// input_scale and input (input_scale.cu).
void backward_with_input_scale(const BackwardParams& params);

// ---- flags ----------------------------------------------------------------------------------------------------------

// The options of a call, packed for the kernels: testing a bit takes one instruction, testing a pointer three.
enum Flag : unsigned {
  kSeveralSamples = 1 << 0,
  kRms = 1 << 1,
  kWeight = 1 << 2,  // the call has a weight
  kBias = 1 << 3,
  kZeroCentered = 1 << 4,      // the weight is `weight` + 1
  kFloatWeights = 1 << 5,      // weight, bias and input_scale are float beside 16-bit input
  kClusterSharesRow = 1 << 6,  // the blocks of a cluster share a row
  kFirstLaunch = 1 << 7,       // blocks share rows without a cluster: this launch stores a partial result of each block
  kSecondLaunch = 1 << 8,      // this launch loads the partial results and stores the outputs (BlockExchange)
  kResidual = 1 << 9,          // forward only
  kGradInput = 1 << 10,        // backward only, like the next six: this gradient is computed
  kGradWeight = 1 << 11,
  kGradBias = 1 << 12,
  kGradSum = 1 << 13,  // grad_sum is added to grad_input
  kMemoryEfficient = 1 << 14,
  kWeightPerSample = 1 << 15,  // each sample has a dweight of its own
  kBiasPerSample = 1 << 16,
  kInputScale = 1 << 17,  // forward only
  kGatedNorm = 1 << 18,
  kGateFirst = 1 << 19,
  kSigmoid = 1 << 20,          // the activation of a gated norm is the sigmoid instead of SiLU
  kAlignedChannels = 1 << 21,  // images only: channels are staged in shared memory, and start at multiples of 16 bytes
  kGradScaledInput = 1 << 22,  // this and the following flags: input_scale.cu only
  kGradInputScale = 1 << 23,
  kInputScalePerSample = 1 << 24,
};

constexpr unsigned kTwoLaunches = kFirstLaunch | kSecondLaunch;
constexpr unsigned kBlocksShareRow = kClusterSharesRow | kTwoLaunches;

// The flags that code for this architecture does not support: clusters need compute capability 9.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr unsigned kUnsupportedByCode = kClusterSharesRow;
#else
constexpr unsigned kUnsupportedByCode = 0;
#endif

struct Flags {
  unsigned bits = 0;

  __host__ __device__ __forceinline__ bool has(unsigned flag) const { return (bits & flag) != 0; }
  void set(Flag flag, bool value) { bits = value ? bits | flag : bits & ~flag; }
};

// Whether each sample has a gradient of its own: the sample_stride of the gradient's view tells. A gradient that is not
// computed (null) has a sample_stride, too, so that the bits of the other gradients do not depend on which ones are
// computed.
inline bool is_per_sample(const Params& p, const View& gradient) {
  return gradient.sample_stride != 0 && p.samples > 1;
}

// The flags that forward and backward share.
inline Flags common_flags(const Params& p) {
  Flags flags;
  flags.set(kSeveralSamples, p.samples > 1);
  flags.set(kRms, p.rms);
  flags.set(kWeight, p.weight.data);
  flags.set(kBias, p.bias.data);
  flags.set(kZeroCentered, p.zero_centered_weight);
  flags.set(kFloatWeights, bytes_of(p.param_dtype) > bytes_of(p.dtype));
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

// ---- addresses of rows ----------------------------------------------------------------------------------------------

// Divides integers >= 0 by a divisor that the host knows, by a multiplication with the divisor's reciprocal,
// (2^64 - 1) / divisor rounded down. A division on the GPU would be a function call.
class IntegerDivisor {
 public:
  struct Result {
    int64_t quotient, remainder;
  };

  IntegerDivisor() = default;
  explicit IntegerDivisor(int64_t divisor)
      : divisor_(divisor), reciprocal_(std::numeric_limits<uint64_t>::max() / static_cast<uint64_t>(divisor)) {}

  __host__ __device__ __forceinline__ int64_t divisor() const { return divisor_; }

  // The upper half of the product is the quotient or, because the reciprocal is rounded down, one less.
  __device__ __forceinline__ Result divide(int64_t n) const {
    const auto product = static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(n), reciprocal_));
    const int64_t remainder = n - product * divisor_;
    return remainder >= divisor_ ? Result{product + 1, remainder - divisor_} : Result{product, remainder};
  }
  // The quotient, if n and the divisor fit into an int. Takes fewer instructions.
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
  int64_t sample, row;  // `row` is the index among the rows of the sample
};

// Converts the number of a row among all samples * rows to a RowIndex.
__device__ __forceinline__ RowIndex split_row_number(int64_t row, bool several_samples,
                                                     const IntegerDivisor& rows_per_sample) {
  if (!several_samples) return {0, row};
  const auto [sample, row_in_sample] = rows_per_sample.divide(row);
  return {sample, row_in_sample};
}

// The address of the first element of a row in an array whose elements have type E.
template <class E>
__device__ __forceinline__ E* address(const View& view, const RowIndex& index) {
  return static_cast<E*>(view.data) + index.sample * view.sample_stride + index.row * view.row_stride;
}

// The row stride of an array in bytes, in 32 bits: with it, one instruction computes the address of a row if there is
// one sample. Otherwise, and if a stride needs more bits, the staged kernels call address().
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

// The most rows that kernels number in an int: half the largest int, because the last block also numbers rows after the
// last one.
constexpr int64_t kMaxRowNumber = std::numeric_limits<int>::max() / 2;

// Calls f(address_in) for the row with this number among all samples * rows. address_in(view, E(), byte_stride) returns
// the row's address in an array of E. It calls address() if kIsGeneral or there are several samples, and else uses
// the ByteStride. This condition is outside f, so that it is tested once and not for each array.
template <bool kIsGeneral, class Index, class F>
__device__ __forceinline__ void with_row_addresses(Index number, bool several_samples,
                                                   const IntegerDivisor& rows_per_sample, const F& f) {
  if (kIsGeneral || several_samples) {
    const RowIndex index = split_row_number(number, several_samples, rows_per_sample);
    f([&](const View& view, auto element, const ByteStride&) { return address<decltype(element)>(view, index); });
  } else {
    f([&](const View& view, auto element, const ByteStride& stride) {
      return stride.template address<decltype(element)>(view, static_cast<unsigned>(number));
    });
  }
}

// ---- weight gradients -----------------------------------------------------------------------------------------------

// The iterations after which a thread of backward adds its column sums, which are in registers, to the column sums in
// the workspace and starts again from 0: longer sums in float would round too much.
constexpr int kIterationsPerSum = 256;

// The partial sums [samples, segments, pitch] of one gradient [samples, cols], for add_partials.
struct PartialSums {
  int64_t first_row;          // in the workspace, whose rows have `pitch` elements
  int64_t samples, segments;  // 0 samples without partial sums; 1 if all samples share the gradient
  View gradient;
};

// The segments over which dweight and dbias are summed. A gradient is a sum over the rows of its sample or, if all
// samples share it, over all rows. These rows are divided into segments of successive rows. A block sums a segment,
// rows_per_iteration rows in each iteration of its loop, and stores the partial sums in the workspace; add_partials
// adds the partial sums of all segments. Example: with 1000 rows that share a gradient, 8 rows per iteration and 25
// blocks that are resident on the GPU at once, there are 25 segments of 5 iterations, so of 40 rows.
struct GradientPlan {
  Flags flags;
  IntegerDivisor rows_per_sample, segments_per_gradient;
  int64_t num_segments;  // of all gradients together
  int64_t rows_per_gradient, rows_per_segment;
  int iterations;                                  // per segment
  int64_t num_weight_partials, num_bias_partials;  // rows of partial sums in the workspace: num_segments, or 0
  void* workspace;

  // Chooses the number of segments. If all rows share a gradient, each of the `resident` blocks has a segment. If each
  // sample has a gradient, the gradient has up to 64 segments, which keep the GPU busy with few samples. Such a segment
  // has at least min_iterations iterations, so that partial sums cause little traffic, and at most kIterationsPerSum,
  // even if a gradient then has more than 64 segments.
  void set_segments(const BackwardParams& p, int64_t rows_per_iteration, int64_t resident, int64_t min_iterations) {
    const bool per_sample = has_gradients_per_sample();
    const int64_t gradients = per_sample ? p.samples : 1;
    rows_per_gradient = p.samples * p.rows / gradients;
    const int64_t iterations_per_gradient = ceil_div(rows_per_gradient, rows_per_iteration);
    int64_t max_iterations = ceil_div(iterations_per_gradient, per_sample ? 64 : resident);
    if (per_sample) max_iterations = std::clamp(max_iterations, min_iterations, int64_t{kIterationsPerSum});
    const int64_t segments = ceil_div(iterations_per_gradient, max_iterations);
    rows_per_sample = IntegerDivisor(p.rows);
    iterations = static_cast<int>(ceil_div(iterations_per_gradient, segments));
    segments_per_gradient = IntegerDivisor(segments);
    rows_per_segment = iterations * rows_per_iteration;
    num_segments = gradients * segments;
    num_weight_partials = num_partials(kGradWeight, kWeightPerSample);
    num_bias_partials = num_partials(kGradBias, kBiasPerSample);
  }
  __host__ __device__ __forceinline__ bool has_gradients_per_sample() const {
    return flags.has(kWeightPerSample | kBiasPerSample | kInputScalePerSample);
  }
  // Whether a segment has all rows of a gradient, so that its block stores the gradient instead of partial sums. A
  // segment of more than kIterationsPerSum iterations needs the workspace in any case.
  __host__ __device__ __forceinline__ bool stores_gradient_directly(Flag per_sample) const {
    return segments_per_gradient.divisor() == 1 && (flags.has(per_sample) || num_segments == 1) &&
           iterations <= kIterationsPerSum;
  }
  // The number of rows of partial sums of a gradient in the workspace. `gradient` and `per_sample` are its flags, such
  // as kGradWeight and kWeightPerSample.
  int64_t num_partials(Flag gradient, Flag per_sample) const {
    return flags.has(gradient) && !stores_gradient_directly(per_sample) ? num_segments : 0;
  }
  // Describes the partial sums of a gradient, `num` rows of the workspace from first_row on. The result has the number
  // of segments even if `num` is 0. So the warps of add_partials, and the order in which they add up the other
  // gradient, do not depend on which gradients are computed.
  PartialSums partial_sums(const BackwardParams& p, const View& gradient, Flag per_sample, int64_t first_row,
                           int64_t num) const {
    const int64_t samples = flags.has(per_sample) ? p.samples : 1;
    return {first_row, num > 0 ? samples : 0, num_segments / samples, gradient};
  }
  PartialSums weight_sums(const BackwardParams& p) const {
    return partial_sums(p, p.grad_weight, kWeightPerSample, 0, num_weight_partials);
  }
  PartialSums bias_sums(const BackwardParams& p) const {
    return partial_sums(p, p.grad_bias, kBiasPerSample, num_weight_partials, num_bias_partials);
  }
};

// The rows of one of the GradientPlan::num_segments segments.
template <class Index>
struct Segment {
  Index sample = 0;  // the sample whose weights the rows use; 0 if all samples share the weights
  Index first_row;   // among all samples * rows
  int rows;          // may be 0 in the last segment of a gradient

  __device__ __forceinline__ Segment(const GradientPlan& plan, Index number) {
    if (plan.has_gradients_per_sample()) {
      const auto [quotient, remainder] = plan.segments_per_gradient.divide(number);
      sample = static_cast<Index>(quotient);
      number = static_cast<Index>(remainder);
    }
    const Index rows_per_gradient = static_cast<Index>(plan.rows_per_gradient);
    const Index row = number * static_cast<Index>(plan.rows_per_segment);
    first_row = sample * rows_per_gradient + row;
    rows = static_cast<int>(max(min(static_cast<Index>(plan.rows_per_segment), rows_per_gradient - row), Index{0}));
  }
};

// Launches the kernel that adds the partial sums of two gradients, which are floats or doubles (partials.cu). A
// gradient without partial sums remains as it is. `config` is the configuration of the kernel that stored them.
void launch_add_partials(const BackwardParams& p, const void* workspace, bool is_double, int64_t pitch,
                         const PartialSums& first, const PartialSums& second, LaunchConfig config);

}  // namespace layernorm::cuda
