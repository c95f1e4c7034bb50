// The gradients of input_scale and x in s = residual + input_scale * x on a GPU. With ds the gradient of s, which
// backward() has stored as grad_input, for every row of x and ds [samples, rows, cols]:
//
//   dx = input_scale * ds      dinput_scale = sum of ds * x over the rows that share the input_scale
//
// x is BackwardParams::scaled_input, dx grad_scaled_input and dinput_scale grad_input_scale. This is a kernel of its
// own, after backward, because the backward kernel has no registers left for a third sum of its columns. It moves
// samples * rows * cols * (sizeof(X) + 2 * sizeof(T)) bytes, where X is the dtype of ds and T of x.
//
// blockIdx.x and threadIdx.x tell which vector of columns a thread owns. The threads of a block that own the same
// columns differ in threadIdx.y: they take the rows of a segment (GradientPlan) in turn, and their sums are added at
// its end. A block takes every gridDim.y-th segment, from blockIdx.y on. Products are added in float over kRowsInFlight
// rows and then in double. The workspace has the partial sums of dinput_scale [segments, cols], which add_partials
// adds.
//
// Source: Touvron et al., Going deeper with image transformers, 2021, arXiv:2103.17239.
#include <algorithm>

#include "../dtypes.h"
#include "row.cuh"

namespace layernorm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsInFlight = 4;  // rows that a thread loads before it uses them

// The values that the host computes from BackwardParams.
struct InputScalePlan : GradientPlan {
  bool whole_vectors;  // the number of columns is a multiple of the elements of x in 16 bytes
};

// The columns [begin, begin + count) that a thread owns of each row: kVec columns, or fewer at the end of the row.
template <int kVec>
struct ThreadVector {
  int64_t begin;
  int count;
  bool whole_vectors;

  // Loads these columns of a row. Elements beyond `count` are zeros, and all elements if the row does not exist.
  template <class E>
  __device__ __forceinline__ Vector<E, kVec> load(bool exists, const E* row) const {
    Vector<E, kVec> v;
    fill(v, E(0.0f));
    if (whole_vectors) {
      load_vector_if<false>(exists && count > 0, v, row + begin);
    } else if (exists) {
      for (int e = 0; e < kVec; ++e) {
        if (e < count) v.values[e] = row[begin + e];
      }
    }
    return v;
  }
  // Stores these columns of a row.
  template <class E>
  __device__ __forceinline__ void store(E* row, const Acc (&v)[kVec]) const {
    const Vector<E, kVec> rounded = round_to<E>(v);
    if (whole_vectors) {
      if (count > 0) *reinterpret_cast<Vector<E, kVec>*>(row + begin) = rounded;
      return;
    }
    for (int e = 0; e < kVec; ++e) {
      if (e < count) row[begin + e] = rounded.values[e];
    }
  }
};

// The kernel for x of T and ds of X. `thread_sums` is shared memory in which the block adds the sums of its threads.
template <class T, class X, int kVec>
__device__ __forceinline__ void compute_gradients(const BackwardParams& p, const InputScalePlan& plan,
                                                  double (&thread_sums)[kThreads][kVec]) {
  const int64_t begin = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kVec;
  const int count = static_cast<int>(max(min(p.cols - begin, int64_t{kVec}), int64_t{0}));
  const ThreadVector<kVec> columns{begin, count, plan.whole_vectors};
  const bool has_grad_input_scale = plan.flags.has(kGradInputScale), has_dx = plan.flags.has(kGradScaledInput);
  const int step = static_cast<int>(blockDim.y);
  for (int64_t s = blockIdx.y; s < plan.num_segments; s += gridDim.y) {
    const Segment<int64_t> segment(plan, s);
    Acc input_scale[kVec];  // zeros if dx is not computed
    with_weight_type<T>(plan.flags, [&](auto element) {
      widen(input_scale, columns.load(has_dx, address<const decltype(element)>(p.input_scale, {segment.sample, 0})));
    });
    double sums[kVec] = {};
#pragma unroll 1
    for (int first = threadIdx.y; first < segment.rows; first += kRowsInFlight * step) {
      Vector<X, kVec> ds[kRowsInFlight];
      Vector<T, kVec> x[kRowsInFlight];
      // The thread's next rows, i = 0 to kRowsInFlight - 1. A row that does not exist gets the index of row i = 0,
      // whose address is valid.
      const auto exists = [&](int i) { return first + i * step < segment.rows; };
      const auto index = [&](int i) {
        return split_row_number(segment.first_row + first + (exists(i) ? i * step : 0), plan.flags.has(kSeveralSamples),
                                plan.rows_per_sample);
      };
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        ds[i] = columns.load(exists(i), address<const X>(p.grad_input, index(i)));
        x[i] = columns.load(exists(i) && has_grad_input_scale, address<const T>(p.scaled_input, index(i)));
      }
      Acc float_sums[kVec] = {};
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        Acc wide_ds[kVec], wide_x[kVec];
        widen(wide_ds, ds[i]);
        widen(wide_x, x[i]);
        for (int e = 0; e < kVec; ++e) {
          float_sums[e] = fma(wide_ds[e], wide_x[e], float_sums[e]);
          wide_ds[e] *= input_scale[e];
        }
        if (has_dx && exists(i)) columns.store(address<T>(p.grad_scaled_input, index(i)), wide_ds);
      }
      for (int e = 0; e < kVec; ++e) sums[e] += float_sums[e];
    }
    if (!has_grad_input_scale) continue;
    if (step > 1) {  // add the sums of the threads with the same columns
      double (&own)[kVec] = thread_sums[threadIdx.y * blockDim.x + threadIdx.x];
      for (int e = 0; e < kVec; ++e) own[e] = sums[e];
      __syncthreads();
      for (int y = 1; threadIdx.y == 0 && y < step; ++y) {
        for (int e = 0; e < kVec; ++e) sums[e] += thread_sums[y * blockDim.x + threadIdx.x][e];
      }
      __syncthreads();  // before the next segment overwrites the sums
    }
    if (threadIdx.y > 0) continue;
    Acc rounded[kVec];
    for (int e = 0; e < kVec; ++e) rounded[e] = static_cast<Acc>(sums[e]);
    if (plan.stores_gradient_directly(kInputScalePerSample)) {
      with_weight_type<T>(plan.flags, [&](auto element) {
        columns.store(address<decltype(element)>(p.grad_input_scale, {segment.sample, 0}), rounded);
      });
    } else {
      columns.store(static_cast<Acc*>(plan.workspace) + s * p.cols, rounded);
    }
  }
}

// The kernel for elements T of kBytes: 4 is float, and 2 is float16 or bfloat16. It chooses between these, and between
// the types X, at run time: an instance for each type would be no faster, because memory bounds the kernel.
template <int kBytes>
__global__ void __launch_bounds__(kThreads) input_scale_gradients(const BackwardParams p, const InputScalePlan plan) {
  __shared__ double thread_sums[kThreads][16 / kBytes];
  const auto compute_16_bit = [&](auto element) {
    using T = decltype(element);
    p.sum_dtype == p.dtype ? compute_gradients<T, T>(p, plan, thread_sums)
                           : compute_gradients<T, float>(p, plan, thread_sums);
  };
  wait_for_previous_grid();
  if constexpr (kBytes == 4) {
    compute_gradients<float, float>(p, plan, thread_sums);
  } else {
    p.dtype == Dtype::kFloat16 ? compute_16_bit(__half()) : compute_16_bit(__nv_bfloat16());
  }
}

// ---- host code ------------------------------------------------------------------------------------------------------

// The allocator that backward() gets. A call may allocate only once, but backward() and input_scale_gradients both need
// a workspace: this allocates both, and puts the one for input_scale_gradients first.
class ReservingAllocator final : public Allocator {
 public:
  ReservingAllocator(Allocator& allocator, int64_t bytes) : allocator_(allocator), bytes_(round_up(bytes, 256)) {}

  void* allocate(int64_t bytes) override {
    reserved_ = allocator_.allocate(bytes_ + bytes);
    return static_cast<char*>(reserved_) + bytes_;
  }
  // The workspace for input_scale_gradients. Allocates it if backward() has allocated nothing.
  void* reserved() {
    if (!reserved_ && bytes_ > 0) allocate(0);
    return reserved_;
  }

 private:
  Allocator& allocator_;
  const int64_t bytes_;
  void* reserved_ = nullptr;
};

auto kernel_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? input_scale_gradients<4> : input_scale_gradients<2>; }

// Plans the launch, and sets the grid, the block and the stream of `config`.
InputScalePlan make_plan(const BackwardParams& p, LaunchConfig& config) {
  InputScalePlan plan = {};
  const bool per_sample = is_per_sample(p, p.grad_input_scale);
  const int64_t vector = 16 / bytes_of(p.dtype);
  plan.whole_vectors = p.cols % vector == 0;
  plan.flags.set(kFloatWeights, p.param_dtype != p.dtype);
  plan.flags.set(kSeveralSamples, p.samples > 1);
  plan.flags.set(kGradScaledInput, p.grad_scaled_input.data);
  plan.flags.set(kGradInputScale, p.grad_input_scale.data);
  plan.flags.set(kInputScalePerSample, per_sample);
  const int64_t vectors = ceil_div(p.cols, vector), threads = std::min<int64_t>(vectors, kThreads);
  const int64_t rows_per_iteration = std::min(kThreads / threads, per_sample ? p.rows : p.samples * p.rows);
  config.block = dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows_per_iteration));
  config.grid.x = static_cast<unsigned>(ceil_div(vectors, threads));
  const int64_t resident = std::max<int64_t>(resident_blocks(config, kernel_of(p.dtype)) / config.grid.x, 1);
  plan.set_segments(p, rows_per_iteration * kRowsInFlight, resident, /*min_iterations=*/4);
  config.grid.y = static_cast<unsigned>(std::min(plan.num_segments, kMaxGridY));
  config.stream = static_cast<Stream>(p.stream);
  config.overlaps_previous = true;
  return plan;
}

}  // namespace

void backward_with_input_scale(const BackwardParams& p) {
  LaunchConfig config;
  InputScalePlan plan = make_plan(p, config);
  const int64_t num_partials = plan.num_partials(kGradInputScale, kInputScalePerSample);
  ReservingAllocator allocator(*p.allocator, num_partials * p.cols * static_cast<int64_t>(sizeof(Acc)));
  BackwardParams without_input_scale = p;
  without_input_scale.input_scale = without_input_scale.grad_input_scale = without_input_scale.grad_scaled_input = {};
  without_input_scale.allocator = &allocator;
  backward(without_input_scale);

  plan.workspace = allocator.reserved();
  launch(config, kernel_of(p.dtype), p, plan);
  launch_add_partials(p, plan.workspace, /*is_double=*/false, p.cols,
                      plan.partial_sums(p, p.grad_input_scale, kInputScalePerSample, /*first_row=*/0, num_partials),
                      /*second=*/{}, config);
}

}  // namespace layernorm::cuda
