// The gradients of input_scale on a GPU. With s = residual + input_scale * x and ds the gradient of s, for every
// row of x and ds [samples, rows, cols]:
//
//   dx = input_scale * ds      dinput_scale = sum of ds * x over the rows that share the input_scale
//
// ds is grad_input, as the kernels of backward have stored it. This kernel runs after them, because none of them has
// registers left for a third sum of its columns. It moves samples * rows * cols * (sizeof(X) + 2 * sizeof(T)) bytes.
//
// A thread owns a vector of columns, and the threads of a block that own the same columns take the rows of a segment in
// turn. Products are added in float over kBatch rows and then in double. The workspace holds the partial sums of
// dinput_scale [weight_partials, cols], a row for each segment, which add_partials adds. If a sample has one segment,
// its sums are the gradient.
//
// Source: Touvron et al., Going deeper with image transformers, 2021, arXiv:2103.17239.
#include <algorithm>

#include "../dtypes.h"
#include "row.cuh"

namespace layernorm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 4;  // rows of a thread that are loaded together

struct InputScalePlan : GradientPlan {
  bool whole_vectors;  // of rows
};

// The vector of columns [begin, begin + count) that a thread holds of each row. Elements beyond `count` are zeros.
template <int kVec>
struct Columns {
  int64_t begin;
  int count;
  bool whole_vectors;

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

// Computes the gradients for rows of ds of X.
template <class T, class X, int kVec>
__device__ __forceinline__ void compute_gradients(const BackwardParams& p, const InputScalePlan& plan,
                                                  double (&thread_sums)[kThreads][kVec]) {
  const int64_t begin = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kVec;
  const int count = static_cast<int>(max(min(p.cols - begin, int64_t{kVec}), int64_t{0}));
  const Columns<kVec> columns{begin, count, plan.whole_vectors};
  const bool sums_input_scale = plan.flags.has(kGradWeight), stores_input = plan.flags.has(kGradInput);
  const int step = static_cast<int>(blockDim.y);
  for (int64_t number = blockIdx.y; number < plan.num_segments; number += gridDim.y) {
    const Segment<int64_t> segment(plan, number);
    Acc input_scale[kVec];
    with_parameter_type<T>(plan.flags, [&](auto element) {
      widen(input_scale,
            columns.load(stores_input, address<const decltype(element)>(p.input_scale, {segment.gradient, 0})));
    });
    double sums[kVec] = {};
#pragma unroll 1
    for (int first = threadIdx.y; first < segment.rows; first += kBatch * step) {
      Vector<X, kVec> ds[kBatch];
      Vector<T, kVec> x[kBatch];
      const auto exists = [&](int i) { return first + i * step < segment.rows; };
      const auto index = [&](int i) {
        return find_sample(segment.first + first + (exists(i) ? i * step : 0), plan.flags.has(kHasSamples), plan.rows);
      };
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        ds[i] = columns.load(exists(i), address<const X>(p.grad_input, index(i)));
        x[i] = columns.load(exists(i) && sums_input_scale, address<const T>(p.scaled_input, index(i)));
      }
      Acc batch_sums[kVec] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        Acc wide_ds[kVec], wide_x[kVec];
        widen(wide_ds, ds[i]);
        widen(wide_x, x[i]);
        for (int e = 0; e < kVec; ++e) {
          batch_sums[e] = fma(wide_ds[e], wide_x[e], batch_sums[e]);
          wide_ds[e] *= input_scale[e];
        }
        if (stores_input && exists(i)) columns.store(address<T>(p.grad_scaled_input, index(i)), wide_ds);
      }
      for (int e = 0; e < kVec; ++e) sums[e] += batch_sums[e];
    }
    if (!sums_input_scale) continue;
    if (step > 1) {
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
    if (plan.stores_gradient(kWeightPerSample)) {
      with_parameter_type<T>(plan.flags, [&](auto element) {
        columns.store(address<decltype(element)>(p.grad_input_scale, {segment.gradient, 0}), rounded);
      });
    } else {
      columns.store(static_cast<Acc*>(plan.workspace) + number * p.cols, rounded);
    }
  }
}

// The types of one size share an instance, which chooses at run time, also between T and float as the type of ds. An
// instance for each of them would be no faster, because the kernel waits for memory.
template <int kBytes>
__global__ void __launch_bounds__(kThreads) scale_gradients(const BackwardParams p, const InputScalePlan plan) {
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

// Reserves the first bytes of a call's only allocation, and gives its caller the bytes that follow.
class ReservingAllocator final : public Allocator {
 public:
  ReservingAllocator(Allocator& allocator, int64_t bytes) : allocator_(allocator), bytes_(round_up(bytes, 256)) {}

  void* allocate(int64_t bytes) override {
    reserved_ = allocator_.allocate(bytes_ + bytes);
    return static_cast<char*>(reserved_) + bytes_;
  }
  void* reserved() {
    if (!reserved_ && bytes_ > 0) allocate(0);
    return reserved_;
  }

 private:
  Allocator& allocator_;
  const int64_t bytes_;
  void* reserved_ = nullptr;
};

auto kernel_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? scale_gradients<4> : scale_gradients<2>; }

// Plans the launch. The plan's fields for the weight describe the input_scale.
InputScalePlan make_plan(const BackwardParams& p, LaunchConfig& config) {
  InputScalePlan plan = {};
  const bool per_sample = is_per_sample(p, p.input_scale);
  const int64_t vector = 16 / bytes_of(p.dtype);
  plan.whole_vectors = p.cols % vector == 0;
  plan.flags.set(kWideParameters, p.param_dtype != p.dtype);
  plan.flags.set(kHasSamples, p.samples > 1);
  plan.flags.set(kGradInput, p.grad_scaled_input.data);
  plan.flags.set(kGradWeight, p.grad_input_scale.data);
  plan.flags.set(kWeightPerSample, per_sample);
  const int64_t vectors = ceil_div(p.cols, vector), threads = std::min<int64_t>(vectors, kThreads);
  const int64_t rows_of_block = std::min(kThreads / threads, per_sample ? p.rows : p.samples * p.rows);
  config.block = dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows_of_block));
  config.grid.x = static_cast<unsigned>(ceil_div(vectors, threads));
  const int64_t resident = std::max<int64_t>(resident_blocks(config, kernel_of(p.dtype)) / config.grid.x, 1);
  plan.set_segments(p, rows_of_block * kBatch, resident, 4);
  config.grid.y = static_cast<unsigned>(std::min(plan.num_segments, kMaxGridY));
  config.stream = static_cast<Stream>(p.stream);
  config.overlaps_previous = true;
  return plan;
}

}  // namespace

void backward_with_input_scale(const BackwardParams& p) {
  LaunchConfig config;
  InputScalePlan plan = make_plan(p, config);
  ReservingAllocator allocator(*p.allocator, plan.weight_partials * p.cols * static_cast<int64_t>(sizeof(Acc)));
  BackwardParams norm = p;
  norm.input_scale = norm.grad_input_scale = norm.grad_scaled_input = {};
  norm.allocator = &allocator;
  backward(norm);

  plan.workspace = allocator.reserved();
  launch(config, kernel_of(p.dtype), p, plan);
  BackwardParams sums = p;
  sums.grad_weight = p.grad_input_scale;
  launch_add_partials(sums, plan, /*is_double=*/false, p.cols, config);
}

}  // namespace layernorm::cuda
