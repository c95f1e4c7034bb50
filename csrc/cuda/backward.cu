// With xhat = (x - mean) * rstd and g = dy * weight, for every row of x and dy [rows, cols] on a GPU:
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))      dweight = sum of dy * xhat over rows      dbias = sum of dy
//
// and dx = rstd * (g - xhat * mean(g * xhat)) for RMSNorm, whose mean is 0. If forward also returned x as a sum, the
// gradient of that sum is added to dx.
//
// Blocks are persistent: they take rows in turn and fetch the next rows to shared memory while they work. A thread
// reads its vectors of a row twice, for the row's sums and for dx. It keeps the sums of dweight and dbias for its
// columns in registers over its rows, and then writes them to the workspace. A second kernel adds the rows of the
// workspace in order, so that no atomic operation makes the result random: 3 * rows * cols * sizeof(T) bytes are moved.
//
// Longer rows are divided into chunks, one for each block. From compute capability 9.0 on, a cluster of up to 8
// blocks exchanges its sums once per row. Still longer rows, and those on older GPUs, are read twice, first by a kernel
// that computes the sums. This happens in groups of rows that stay in the L2 cache until the second read. Few rows with
// few columns take a single launch: some blocks compute dx, the others dweight and dbias.
//
// The numerical method is that of the CPU kernels (cpu/backward.cpp): the saved mean is rounded, so that the mean of
// xhat is not 0. A third sum finds it, and it is subtracted before xhat is used. The division of a row depends only on
// the device, the dtype and the number of columns, and so does dx.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include <algorithm>
#include <cstdint>

#include "../dtypes.h"
#include "partials.cuh"
#include "pipeline.cuh"

namespace layernorm::cuda {

// The division of the work among blocks and launches. The host fills the plan, and the kernels read it.
struct LaunchPlan {
  int64_t first_row, end_row;  // the rows of this launch
  int64_t num_slots;           // slots take rows in turn; a slot is a block, or all blocks that share a row
  int64_t pitch;               // elements from row to row of the workspace
  double reciprocal_cols;
  unsigned num_chunks;  // of a row; each has a block
  int chunk_cols;
  unsigned num_parts;  // of a row in backward_sums; each has a block
  int chunks_per_part;
  int log2_lanes;  // the number of lanes that share a row of a WarpTile, as a logarithm
  int rows_per_block;
  int stages;
  bool in_cluster;
  bool separate_sums;  // backward_sums computes the row sums before backward_rows
  bool accumulates;    // dweight and dbias are added to the workspace instead of overwriting it
  bool aligned;        // every row starts at a multiple of 16 bytes
  bool aligned_parameters;
  bool fast_path;                 // all gradients of an aligned LayerNorm with a weight and without options
  void *grad_weight, *grad_bias;  // of a single launch, for which p.grad_weight and p.grad_bias are null
};

namespace {

// Sums in Acc over this many rows are added to the workspace, which limits their rounding errors.
constexpr int kRowsPerSum = 256;
constexpr int kMaxSingleLaunchRows = 128;
constexpr int kMaxWarps = 16;  // of a block

// The sums over a row of xhat, g and g * xhat.
template <class Acc>
using RowSums = Acc[3];

// The workspace has dweight and dbias [num_slots, pitch], if they are wanted, and then row sums [rows of a launch,
// num_parts].
template <class Acc>
__host__ __device__ Acc* row_sums_in_workspace(const BackwardParams& p, const LaunchPlan& plan) {
  return static_cast<Acc*>(p.workspace) + (!!p.grad_weight + !!p.grad_bias) * plan.num_slots * plan.pitch;
}

// A vector is processed in sub-vectors whose parameters are 16 bytes. More would not fit into registers beside the
// sums.
template <class T, class W>
constexpr int kSubVectorSize = std::min(kVectorSize<T>, kVectorSize<W>);

// ---- vectors --------------------------------------------------------------------------------------------------------

// xhat from the output, where the weight is weight + weight_offset. A weight that is too small to divide by gives NaN.
template <class Acc>
__device__ __forceinline__ Acc recover_xhat(Acc y, Acc weight, Acc bias, Acc weight_offset, Acc correction) {
  const Acc divisor = weight + weight_offset;
  if (abs(divisor) < Acc(kSmallestDivisor)) return std::numeric_limits<Acc>::quiet_NaN();
  return fast_divide(y - bias, divisor) - correction;
}

// The weight and the bias from a column on, or null.
template <class W>
struct Parameters {
  const W *weight, *bias;

  __device__ __forceinline__ Parameters(const BackwardParams& p, int64_t begin)
      : weight(p.weight ? static_cast<const W*>(p.weight) + begin : nullptr),
        bias(p.bias ? static_cast<const W*>(p.bias) + begin : nullptr) {}
};

// Loads the weight from `column` on if it is needed, with zeros after the remaining columns.
template <bool kFastPath, class W, int kSub>
__device__ __forceinline__ void load_weight(Vector<W, kSub>& w, const W* weight, const BackwardParams& p,
                                            const LaunchPlan& plan, int column, int remaining) {
  if (kFastPath) {
    w = {};
    if (remaining > 0) w = *reinterpret_cast<const Vector<W, kSub>*>(weight + column);
  } else if (p.grad_input || p.from_output) {
    load_or(w, weight, column, remaining, plan.aligned_parameters, W(1.0f));
  }
}

// Computes xhat - correction from columns of x, or of the output if p.from_output. After the remaining columns x is 0,
// and so is the result if kPartial is true or if no column remains.
template <bool kFastPath, bool kPartial, class T, class W, int kSub, class Acc>
__device__ __forceinline__ void normalize(Acc (&xhat)[kSub], const Vector<T, kSub>& x, const Vector<W, kSub>& w,
                                          const W* bias, const BackwardParams& p, const LaunchPlan& plan,
                                          const Statistics<Acc>& row, Acc correction, int column, int remaining) {
  if (!kFastPath && p.from_output) {
    Vector<W, kSub> b;
    load_or(b, bias, column, remaining, plan.aligned_parameters, W(0.0f));
    const Acc weight_offset = p.zero_centered_weight ? 1 : 0;
#pragma unroll
    for (int e = 0; e < kSub; ++e) {
      xhat[e] = e < remaining ? recover_xhat(static_cast<Acc>(x.values[e]), static_cast<Acc>(w.values[e]),
                                             static_cast<Acc>(b.values[e]), weight_offset, correction)
                              : 0;
    }
    return;
  }
  widen(xhat, x);
  Statistics<Acc> statistics = row;
  if (remaining <= 0) statistics.mean = 0;
#pragma unroll
  for (int e = 0; e < kSub; ++e) {
    if (kPartial && e >= remaining) statistics.mean = 0;
    xhat[e] = statistics.xhat(xhat[e], correction);
  }
}

// g = dy * weight.
template <class W, int kSub, class Acc>
__device__ __forceinline__ void multiply(Acc (&g)[kSub], const Acc (&dy)[kSub], const Vector<W, kSub>& weight,
                                         bool zero_centered) {
  Acc w[kSub];
  widen(w, weight);
  if (zero_centered) {
#pragma unroll
    for (int e = 0; e < kSub; ++e) g[e] = dy[e] * (w[e] + 1);
  } else {
#pragma unroll
    for (int e = 0; e < kSub; ++e) g[e] = dy[e] * w[e];
  }
}

// ---- sums of a row --------------------------------------------------------------------------------------------------

// Adds this thread's part of `cols` columns of a row to the sums; those of g only if dx is wanted.
template <bool kFastPath, class T, class W, class Tile>
__device__ __forceinline__ void add_to_sums(RowSums<AccOf<T>>& sums, const BackwardParams& p, const LaunchPlan& plan,
                                            const Parameters<W>& parameters, const StagedRow<T, Tile>& dy,
                                            const StagedRow<T, Tile>& x, const Statistics<AccOf<T>>& statistics,
                                            const Position<Tile>& position, int cols) {
  using Acc = AccOf<T>;
  constexpr int kVec = kVectorSize<T>, kSub = kSubVectorSize<T, W>;
  with_constant(kFastPath || plan.aligned, [&](auto aligned) {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (!position.template warp_has_vector<kVec>(i, cols)) continue;
#pragma unroll
      for (int k = 0; k < kVec; k += kSub) {
        const int column = position.vector_index(i) * kVec + k, remaining = cols - column;
        Vector<W, kSub> w;
        load_weight<kFastPath>(w, parameters.weight, p, plan, column, remaining);
        Acc xhat[kSub];
        normalize<kFastPath, !aligned>(xhat, sub_vector<kSub>(x.read(i), k), w, parameters.bias, p, plan, statistics,
                                       Acc(0), column, remaining);
#pragma unroll
        for (int e = 0; e < kSub; ++e) sums[0] += xhat[e];
        if (!kFastPath && !p.grad_input) continue;
        Acc g[kSub];
        widen(g, sub_vector<kSub>(dy.read(i), k));
        multiply(g, g, w, !kFastPath && p.zero_centered_weight);
#pragma unroll
        for (int e = 0; e < kSub; ++e) {
          sums[1] += g[e];
          sums[2] = fma(g[e], xhat[e], sums[2]);
        }
      }
    }
  });
}

// Reduces the sums over the threads of a tile. Two buffers take turns by `round`, so that one barrier per row suffices.
template <class Tile, class Acc>
__device__ __forceinline__ void reduce_tile(RowSums<Acc>& sums, const Position<Tile>& position, int round) {
  if constexpr (Tile::kWarps == 1) {
    for (int offset = position.threads_per_row() / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (Acc& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    }
    __syncwarp();  // only for the compiler: it reads the row again instead of keeping it in registers
  } else {
#pragma unroll
    for (Acc& sum : sums) sum = sum_lanes<kWarpSize>(sum);
    __shared__ RowSums<Acc> warp_sums[2][Tile::kWarps];
    if (position.lane == 0) {
#pragma unroll
      for (int k = 0; k < 3; ++k) warp_sums[round % 2][position.warp][k] = sums[k];
    }
    __syncthreads();
    const int warp = position.lane % Tile::kWarps;  // may be beyond the block
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      sums[k] =
          sum_lanes<Tile::kWarps>(warp * kWarpSize < position.threads_per_row() ? warp_sums[round % 2][warp][k] : 0);
    }
  }
}

// Adds the sums of kLanes lanes. Further lanes with zeros would not change the result.
template <int kLanes, class Acc>
__device__ __forceinline__ void reduce_lanes(RowSums<Acc>& sums, const RowSums<double>& lane_sums) {
#pragma unroll
  for (int k = 0; k < 3; ++k) sums[k] = static_cast<Acc>(sum_lanes<kLanes>(lane_sums[k]));
}

// Reduces the sums over the blocks of a cluster, all of which must have started. Two buffers take turns, so that one
// barrier per row suffices: a block that is ahead writes to a buffer that no block reads.
template <class Acc>
__device__ __forceinline__ void reduce_cluster(RowSums<Acc>& sums, unsigned blocks, int round) {
  __shared__ RowSums<Acc> block_sums[2][kMaxClusterSize];
  if (threadIdx.x < blocks) {
    auto& dst = *cluster_peer(&block_sums[round % 2][cluster_rank()], threadIdx.x);
#pragma unroll
    for (int k = 0; k < 3; ++k) dst[k] = sums[k];
  }
  cluster_arrive();
  cluster_wait();
  const unsigned block = threadIdx.x % kMaxClusterSize;
  RowSums<double> lane_sums = {};
#pragma unroll
  for (int k = 0; k < 3; ++k) lane_sums[k] = block < blocks ? block_sums[round % 2][block][k] : 0;
  reduce_lanes<kMaxClusterSize>(sums, lane_sums);
}

// Reduces the sums of a row's parts, which backward_sums has written.
template <class Acc>
__device__ __forceinline__ void reduce_parts(RowSums<Acc>& sums, const Acc* part_sums, unsigned num_parts) {
  RowSums<double> lane_sums = {};
#pragma unroll 1
  for (unsigned i = threadIdx.x % kWarpSize; i < num_parts; i += kWarpSize) {
#pragma unroll
    for (int k = 0; k < 3; ++k) lane_sums[k] += part_sums[3 * i + k];
  }
  reduce_lanes<kWarpSize>(sums, lane_sums);
}

template <class Acc>
__device__ __forceinline__ RowMeans<Acc> compute_means(const RowSums<Acc>& sums, const BackwardParams& p,
                                                       const LaunchPlan& plan) {
  const auto mean = [&](Acc sum) {
    return divide_by_count(sum, static_cast<Acc>(p.cols), static_cast<Acc>(plan.reciprocal_cols));
  };
  RowMeans<Acc> means = {};
  if (!p.rms) means.xhat = mean(sums[0]), means.g = mean(sums[1]);
  means.g_xhat = mean(sums[2]) - means.xhat * means.g;
  return means;
}

// ---- dweight and dbias ----------------------------------------------------------------------------------------------

// Adds the block's sums of its columns to the workspace, or overwrites the workspace if `first` is true.
template <class Tile, int kVec, class Acc>
__device__ __forceinline__ void add_to_workspace(Acc* workspace, const Acc (&sums)[Tile::kVectors][kVec], bool first,
                                                 const Position<Tile>& position, int cols) {
  if constexpr (Tile::kWarps > 1) {
    with_constant(first, [&](auto overwrites) {
#pragma unroll
      for (int i = 0; i < Tile::kVectors; ++i) {
        if (position.vector_index(i) * kVec >= cols) break;
        auto& dst = reinterpret_cast<Vector<Acc, kVec>*>(workspace)[position.vector_index(i)];
        Vector<Acc, kVec> total = {};
        if (!overwrites) total = dst;
#pragma unroll
        for (int e = 0; e < kVec; ++e) total.values[e] += sums[i][e];
        dst = total;
      }
    });
  } else {
    __shared__ Acc thread_sums[Tile::kBlockThreads][kVec];
    const Acc* const row_sums = &thread_sums[0][0];
    const int step = position.threads_per_row() * kVec;  // columns that the threads of a row hold in one vector each
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (i * step >= cols) break;
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kVec; ++e) thread_sums[threadIdx.x][e] = sums[i][e];
      __syncthreads();
#pragma unroll 1
      for (int c = threadIdx.x; c < step && i * step + c < cols; c += Tile::kBlockThreads) {
        Acc total = 0;
#pragma unroll 4
        for (int r = 0; r < position.rows_per_block(); ++r) total += row_sums[r * step + c];
        Acc& sum = workspace[i * step + c];
        sum = first ? total : sum + total;
      }
    }
  }
}

// dweight and dbias of one column per lane, over all rows of a single launch. The warps share the rows, and compute the
// mean of xhat of each row themselves.
template <class T, class W>
__device__ __forceinline__ void sum_columns(const BackwardParams& p, const LaunchPlan& plan) {
  using Acc = AccOf<T>;
  constexpr int kVec = kVectorSize<T>;
  __shared__ Acc corrections[kMaxSingleLaunchRows];
  __shared__ Acc warp_sums[2][kMaxWarps][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int rows = static_cast<int>(p.rows), cols = static_cast<int>(p.cols);
  const int column = static_cast<int>(blockIdx.y - plan.num_slots) * kWarpSize + lane;
  const T* const dy = static_cast<const T*>(p.grad_output);
  const T* const x = static_cast<const T*>(p.input);

  const Parameters<W> parameters(p, 0);
  const bool needs_correction = plan.grad_weight && !p.rms;
  if (needs_correction) {
    for (int row = warp; row < rows; row += warps) {
      const Statistics<Acc> statistics(p, row);
      Acc sum = 0;
      for (int begin = lane * kVec; begin < cols; begin += kWarpSize * kVec) {
        Vector<T, kVec> v;
        load(v, x + row * p.input_stride + begin, cols - begin, plan.aligned);
        Vector<W, kVec> w;
        if (p.from_output) load_or(w, parameters.weight, begin, cols - begin, plan.aligned_parameters, W(1.0f));
        Acc xhat[kVec];
        normalize<false, true>(xhat, v, w, parameters.bias, p, plan, statistics, Acc(0), begin, cols - begin);
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum += xhat[e];
      }
      sum = sum_lanes<kWarpSize>(sum);
      if (lane == 0) corrections[row] = compute_means<Acc>({sum, 0, 0}, p, plan).xhat;
    }
    __syncthreads();
  }

  const auto parameter = [&](const W* array, Acc default_value) {
    return array ? static_cast<Acc>(array[column]) : default_value;
  };
  Acc dweight = 0, dbias = 0;
  for (int row = warp; row < rows && column < cols; row += warps) {
    const Acc v = static_cast<Acc>(dy[row * p.grad_output_stride + column]);
    dbias += v;
    if (!plan.grad_weight) continue;
    const Acc u = static_cast<Acc>(x[row * p.input_stride + column]);
    const Acc correction = needs_correction ? corrections[row] : 0;
    const Acc xhat = p.from_output ? recover_xhat(u, parameter(parameters.weight, 1), parameter(parameters.bias, 0),
                                                  Acc(p.zero_centered_weight), correction)
                                   : Statistics<Acc>(p, row).xhat(u, correction);
    dweight = fma(v, xhat, dweight);
  }
  warp_sums[0][warp][lane] = dweight;
  warp_sums[1][warp][lane] = dbias;
  __syncthreads();
  for (int k = warp; k < 2 && column < cols; k += warps) {
    W* const gradient = static_cast<W*>(k == 0 ? plan.grad_weight : plan.grad_bias);
    if (!gradient) continue;
    Acc total = 0;
    for (int i = 0; i < warps; ++i) total += warp_sums[k][i][lane];
    gradient[column] = W(total);
  }
}

// ---- kernels --------------------------------------------------------------------------------------------------------

template <class T, class Tile>
using BackwardPipeline = RowPipeline<T, Tile, 3>;  // of grad_output, input and grad_sum

// The addresses of a row of each array, from column `begin` on.
template <bool kFastPath, class T, class Tile>
__device__ __forceinline__ typename BackwardPipeline<T, Tile>::Rows row_addresses(const BackwardParams& p, bool needs_x,
                                                                                  int64_t row, int64_t begin) {
  const auto address = [&](bool exists, const void* array, int64_t stride) {
    return exists ? static_cast<const T*>(array) + row * stride + begin : nullptr;
  };
  return {address(kFastPath || p.grad_output, p.grad_output, p.grad_output_stride),
          address(kFastPath || needs_x, p.input, p.input_stride),
          address(!kFastPath && p.grad_sum, p.grad_sum, p.grad_sum_stride)};
}

// Takes rows, or chunks of rows, in turn. kFastPath is LaunchPlan::fast_path, which saves the tests of what is wanted.
template <bool kFastPath, class T, class W, class Tile>
__device__ __forceinline__ void process_rows(const BackwardParams& p, const LaunchPlan& plan) {
  using Acc = AccOf<T>;
  constexpr int kVec = kVectorSize<T>, kSub = kSubVectorSize<T, W>;
  const bool grad_input = kFastPath || p.grad_input, grad_weight = kFastPath || p.grad_weight;
  const bool grad_bias = kFastPath || p.grad_bias, has_grad_sum = !kFastPath && p.grad_sum;
  const bool needs_x = grad_input || grad_weight, needs_sums = grad_input || (grad_weight && !p.rms);
  const unsigned slot = blockIdx.y;
  const int64_t begin = int64_t{plan.chunk_cols} * blockIdx.x;
  const int block_cols = static_cast<int>(min(p.cols - begin, int64_t{plan.chunk_cols}));

  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ MBarrier full_barriers[kMaxStages];
  BackwardPipeline<T, Tile> pipeline(shared, full_barriers, 1 + needs_x + has_grad_sum, plan.stages,
                                     kFastPath || plan.aligned, true, block_cols,
                                     Position<Tile>(threadIdx.x, plan.log2_lanes));
  // The last rows of a block may not exist. They have no columns, and their address is that of row 0.
  const auto exists = [&](int64_t row) { return row < plan.end_row; };
  const auto addresses = [&](int64_t row) {
    return row_addresses<kFastPath, T, Tile>(p, needs_x, exists(row) ? row : 0, begin);
  };
  const auto cols_of = [&](int64_t row) { return exists(row) ? block_cols : 0; };
  const auto fetch = [&](int64_t row, const Position<Tile>& position) {
    pipeline.fetch(addresses(row), cols_of(row), position);
  };
  constexpr bool kMayUseCluster = Tile::kWarps > 1 && sizeof(T) < 8;
  const int64_t step = plan.num_slots * plan.rows_per_block;
  int64_t block_row = plan.first_row + int64_t{slot} * plan.rows_per_block;  // the block's first row of a round
#pragma unroll 1
  for (int stage = 0; stage < plan.stages; ++stage) {
    const Position<Tile> position(threadIdx.x, plan.log2_lanes);
    fetch(block_row + position.row + stage * step, position);
  }
  if constexpr (kMayUseCluster) {
    if (plan.in_cluster) cluster_arrive(), cluster_wait();
  }
  if (plan.separate_sums) wait_for_previous_grid();

  // Recompute the thread's position for each row and each read of it; keeping it in registers causes spills.
  const auto reload_position = [&] { return Position<Tile>(reload_thread_index(), plan.log2_lanes); };
  const Parameters<W> parameters(p, begin);
  Acc dw[Tile::kVectors][kVec] = {}, db[Tile::kVectors][kVec] = {};
  for (int round = 0; exists(block_row); ++round, block_row += step) {
    const int64_t row = block_row + reload_position().row;
    const int cols = cols_of(row);
    const Statistics<Acc> statistics(p, row, needs_x && exists(row));
    // Loading the next statistics into registers would cause spills.
    if (needs_x && exists(row + step)) Statistics<Acc>::prefetch(p, row + step);
    RowMeans<Acc> means = {};
    {
      pipeline.wait([&] { return addresses(row); }, cols, reload_position());
      const auto position = reload_position();
      RowSums<Acc> sums = {};
      if (needs_sums && !plan.separate_sums) {
        add_to_sums<kFastPath>(sums, p, plan, parameters, pipeline.row(0, position), pipeline.row(1, position),
                               statistics, position, cols);
        reduce_tile(sums, position, round);
        if constexpr (kMayUseCluster) {
          if (plan.in_cluster) reduce_cluster(sums, plan.num_chunks, round);
        }
      } else if (Tile::kWarps > 1 && needs_sums) {
        reduce_parts(sums, row_sums_in_workspace<Acc>(p, plan) + 3 * (row - plan.first_row) * plan.num_parts,
                     plan.num_parts);
      }
      if (needs_sums) means = compute_means(sums, p, plan);
    }

    const auto position = reload_position();
    const auto staged_dy = pipeline.row(0, position), staged_x = pipeline.row(1, position);
    T* const dx_row = static_cast<T*>(p.grad_input) + row * p.cols + begin;
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (!position.template warp_has_vector<kVec>(i, cols)) continue;
      Vector<T, kVec> dx;
#pragma unroll
      for (int k = 0; k < kVec; k += kSub) {
        const int column = position.vector_index(i) * kVec + k, remaining = cols - column;
        Vector<W, kSub> w;
        load_weight<kFastPath>(w, parameters.weight, p, plan, column, remaining);
        Acc xhat[kSub], g[kSub];
        if (needs_x) {
          normalize<kFastPath, false>(xhat, sub_vector<kSub>(staged_x.read(i), k), w, parameters.bias, p, plan,
                                      statistics, means.xhat, column, remaining);
        }
        widen(g, sub_vector<kSub>(staged_dy.read(i), k));
        if (grad_weight) {
#pragma unroll
          for (int e = 0; e < kSub; ++e) dw[i][k + e] = fma(g[e], xhat[e], dw[i][k + e]);
        }
        if (grad_bias) {
#pragma unroll
          for (int e = 0; e < kSub; ++e) db[i][k + e] += g[e];
        }
        if (!grad_input) continue;
        multiply(g, g, w, !kFastPath && p.zero_centered_weight);
#pragma unroll
        for (int e = 0; e < kSub; ++e) g[e] = means.grad_input(g[e], xhat[e], statistics);
        if (has_grad_sum) {
          Acc dsum[kSub];
          widen(dsum, sub_vector<kSub>(pipeline.row(2, position).read(i), k));
#pragma unroll
          for (int e = 0; e < kSub; ++e) g[e] += dsum[e];
        }
        const auto rounded = round_to<T>(g);
#pragma unroll
        for (int e = 0; e < kSub; ++e) dx.values[k + e] = rounded.values[e];
      }
      if (grad_input) pipeline.output(position).store(dx_row, i, dx, cols);
    }
    if (grad_input) pipeline.output(position).end_of_store(dx_row, cols);
    pipeline.release();
    fetch(row + plan.stages * step, position);

    const bool is_last = !exists(block_row + step);
    if (is_last) let_next_grid_start();
    if (!is_last && (round + 1) % kRowsPerSum != 0) continue;
    Acc* const dweight = static_cast<Acc*>(p.workspace) + slot * plan.pitch + begin;
    Acc* const dbias = dweight + (grad_weight ? plan.num_slots * plan.pitch : 0);
    const bool first = round < kRowsPerSum && !plan.accumulates;
    if (grad_weight) add_to_workspace(dweight, dw, first, position, block_cols);
    if (grad_bias) add_to_workspace(dbias, db, first, position, block_cols);
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) dw[i][e] = db[i][e] = 0;
    }
  }
  pipeline.drain();
}

// In a single launch, the blocks after the slots compute columns.
template <class T, class W, class Tile>
__global__ void __launch_bounds__(Tile::kBlockThreads, Tile::kWarps == 1 ? 3 : 1)
    backward_rows(const BackwardParams p, const LaunchPlan plan) {
  if (blockIdx.y >= plan.num_slots) return sum_columns<T, W>(p, plan);
  if (plan.fast_path) {
    process_rows<true, T, W, Tile>(p, plan);
  } else {
    process_rows<false, T, W, Tile>(p, plan);
  }
}

// Each block computes the sums of a part of a row, chunk by chunk.
template <class T, class W>
__global__ void __launch_bounds__(BlockTile::kBlockThreads, 1)
    backward_sums(const BackwardParams p, const LaunchPlan plan) {
  using Acc = AccOf<T>;
  const Position<BlockTile> position;
  const int64_t row = plan.first_row + blockIdx.y, part_cols = int64_t{plan.chunk_cols} * plan.chunks_per_part;
  const int64_t begin = part_cols * blockIdx.x, end = min(p.cols, begin + part_cols);

  extern __shared__ __align__(16) unsigned char shared[];
  BackwardPipeline<T, BlockTile> pipeline(shared, nullptr, 2, plan.stages, plan.aligned, false, plan.chunk_cols,
                                          position);
  const auto cols_of = [&](int64_t chunk_begin) {
    return static_cast<int>(max(min(end - chunk_begin, int64_t{plan.chunk_cols}), int64_t{0}));
  };
  const auto addresses = [&](int64_t chunk_begin) {
    return row_addresses<false, T, BlockTile>(p, true, row, chunk_begin);
  };
  const auto fetch = [&](int64_t chunk_begin) {
    pipeline.fetch(addresses(chunk_begin), cols_of(chunk_begin), position);
  };
#pragma unroll 1
  for (int stage = 0; stage < plan.stages; ++stage) fetch(begin + stage * plan.chunk_cols);
  const Statistics<Acc> statistics(p, row);
  RowSums<double> total = {};
  int round = 0;
  for (int64_t chunk_begin = begin; chunk_begin < end; chunk_begin += plan.chunk_cols) {
    pipeline.wait([&] { return addresses(chunk_begin); }, cols_of(chunk_begin), position);
    RowSums<Acc> sums = {};
    with_constant(plan.fast_path, [&](auto fast_path) {
      add_to_sums<fast_path>(sums, p, plan, Parameters<W>(p, chunk_begin), pipeline.row(0, position),
                             pipeline.row(1, position), statistics, position, cols_of(chunk_begin));
    });
    reduce_tile(sums, position, round++);  // contains the barrier that releases the chunk
#pragma unroll
    for (int k = 0; k < 3; ++k) total[k] += sums[k];
    fetch(chunk_begin + plan.stages * plan.chunk_cols);
  }
  pipeline.drain();
  let_next_grid_start();
  wait_for_previous_grid();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    row_sums_in_workspace<Acc>(p, plan)[3 * (blockIdx.y * int64_t{plan.num_parts} + blockIdx.x) + k] =
        static_cast<Acc>(total[k]);
  }
}

// ---- host code ------------------------------------------------------------------------------------------------------

constexpr size_t kMaxStaticShared = 16 * 1024;
static_assert(kMaxStaticShared >= (kMaxSingleLaunchRows + 2 * kMaxWarps * kWarpSize) * sizeof(double),
              "sum_columns alone needs this");

// The most vectors of a row or chunk that fit into a block's shared memory, with a residual and not aligned.
template <class T>
int64_t max_vectors() {
  using Pipeline = BackwardPipeline<T, BlockTile>;
  const bool fits = Pipeline::bytes(BlockTile::kThreads, 1, 3, 1, false) + kMaxStaticShared <= max_shared_memory();
  const int64_t most = BlockTile::kThreads * BlockTile::kVectors / (fits ? 1 : 2);
  return std::min(most, kMaxClusterChunkVectors);
}

// Divides a row that is longer than a tile into chunks of 1024 vectors, or of more if the row then fits a cluster.
template <class T>
void set_chunk_layout(LaunchPlan& plan, int64_t cols) {
  const int64_t vectors = ceil_div(cols, kVectorSize<T>);
  const int64_t most = max_vectors<T>();
  int64_t num_chunks = ceil_div(vectors, std::min(most, kMaxChunkVectors));
  if (vectors <= kMaxClusterSize * most) num_chunks = std::min(num_chunks, int64_t{kMaxClusterSize});
  const int64_t chunk = ceil_div(ceil_div(vectors, num_chunks), kWarpSize) * kWarpSize;
  num_chunks = ceil_div(vectors, chunk);
  plan.chunk_cols = static_cast<int>(chunk * kVectorSize<T>);
  plan.num_chunks = static_cast<unsigned>(num_chunks);
  plan.chunks_per_part = static_cast<int>(ceil_div(num_chunks, kMaxParts));
  plan.num_parts = static_cast<unsigned>(ceil_div(num_chunks, plan.chunks_per_part));
}

struct Launches {
  LaunchPlan plan;
  LaunchConfig rows;           // of backward_rows
  size_t sums_bytes;           // dynamic shared memory of backward_sums
  unsigned column_blocks = 0;  // of a single launch; 0: the blocks write partial sums
  int64_t rows_per_launch;
};

template <class T, class W, class Tile>
Launches make_launches(const BackwardParams& p, LaunchPlan plan) {
  plan.reciprocal_cols = 1.0 / static_cast<double>(p.cols);
  plan.pitch = ceil_div(p.cols, kVectorSize<T>) * kVectorSize<T>;
  // The rows of dx, even if dx is not wanted, are aligned only if they are whole vectors.
  plan.aligned = is_aligned<T>(p.input, p.input_stride) && is_aligned<T>(p.grad_output, p.grad_output_stride) &&
                 is_aligned<T>(p.grad_input, p.cols) && is_aligned<T>(p.grad_sum, p.grad_sum_stride);
  plan.aligned_parameters = is_aligned<W>(p.weight, 0) && is_aligned<W>(p.bias, 0);
  const bool needs_sums = p.grad_input || (p.grad_weight && !p.rms);
  plan.in_cluster = sizeof(T) < 8 && plan.num_chunks > 1 && plan.num_chunks <= unsigned{kMaxClusterSize} &&
                    has_clusters(backward_rows<T, W, Tile>);
  const bool reads_twice = plan.num_chunks > 1 && !plan.in_cluster;
  plan.separate_sums = needs_sums && reads_twice;

  Launches result;
  result.rows.block = block_threads<Tile, T>(plan.chunk_cols);
  result.rows.stream = static_cast<Stream>(p.stream);
  result.rows.cluster = plan.in_cluster ? plan.num_chunks : 1;
  result.rows.overlaps_previous = plan.separate_sums;
  const int num_arrays = 1 + (p.grad_input || p.grad_weight) + (p.grad_sum != nullptr);
  const auto set_stages = [&](int arrays, bool aligned) {
    const auto bytes = [&](int arrays_per_stage, int stages) {
      return BackwardPipeline<T, Tile>::bytes(static_cast<int>(result.rows.block.x) / plan.rows_per_block,
                                              plan.rows_per_block, arrays_per_stage, stages, aligned);
    };
    plan.stages = bytes(arrays, kMaxStages) + kMaxStaticShared <= max_shared_memory() ? kMaxStages : 1;
    result.rows.shared_bytes = bytes(arrays, plan.stages);
    result.sums_bytes = bytes(2, plan.stages);
  };

  result.rows_per_launch = p.rows;
  if (reads_twice) {  // input and grad_output take half of the cache
    const int64_t row_bytes = 2 * p.cols * static_cast<int64_t>(sizeof(T));
    result.rows_per_launch = std::clamp(l2_cache_size() / 2 / row_bytes, int64_t{1}, std::min(p.rows, kMaxGridY));
  }
  const int64_t groups = ceil_div(result.rows_per_launch, plan.rows_per_block);
  const bool is_single_launch =
      plan.num_chunks == 1 && p.rows <= kMaxSingleLaunchRows && (p.grad_weight || p.grad_bias) &&
      ceil_div(p.cols, kWarpSize) * p.rows * p.cols * static_cast<int64_t>(sizeof(T)) <= kMaxSingleLaunchBytes;
  if (is_single_launch) {
    plan.num_slots = p.grad_input ? groups : 0;
    result.column_blocks = static_cast<unsigned>(ceil_div(p.cols, kWarpSize));
  } else {
    // The number of slots determines the order of summation of dweight and dbias. It is computed for two unaligned
    // arrays, so that it depends neither on the alignment nor on which gradients are wanted. With grad_sum it is
    // computed for three arrays, because all blocks must be resident.
    set_stages(p.grad_sum ? 3 : 2, false);
    const int64_t resident = resident_blocks(result.rows, backward_rows<T, W, Tile>) / plan.num_chunks;
    const int64_t rounds = ceil_div(groups, std::max(resident, int64_t{1}));  // a row may need more blocks than that
    plan.num_slots = ceil_div(groups, rounds);
  }
  set_stages(num_arrays, plan.aligned);
  result.rows.grid = dim3(plan.num_chunks, static_cast<unsigned>(plan.num_slots) + result.column_blocks);
  plan.fast_path = p.grad_input && p.grad_weight && p.grad_bias && !is_single_launch && p.weight && !p.grad_sum &&
                   !p.zero_centered_weight && !p.from_output && plan.aligned && plan.aligned_parameters;
  result.plan = plan;
  return result;
}

// Calls f(Pair<T, W>{}, Tile{}, launches).
template <class F>
void dispatch(const BackwardParams& p, const F& f) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    const auto call = [&](auto tile, const LaunchPlan& plan) {
      f(pair, tile, make_launches<T, W, decltype(tile)>(p, plan));
    };
    LaunchPlan plan = {};
    plan.num_chunks = 1;
    plan.chunk_cols = static_cast<int>(std::min(p.cols, int64_t{INT32_MAX}));
    plan.end_row = p.rows;
    plan.rows_per_block = 1;
    const int64_t vectors = ceil_div(p.cols, kVectorSize<T>);
    if (vectors <= kMaxWarpRowVectors) {
      plan.log2_lanes = log2_lanes_for(vectors);
      plan.rows_per_block = WarpTile::kBlockThreads >> plan.log2_lanes;
      return call(WarpTile{}, plan);
    }
    if (vectors > std::min(kMaxTileVectors, max_vectors<T>())) set_chunk_layout<T>(plan, p.cols);
    call(BlockTile{}, plan);
  });
}

}  // namespace

int64_t backward_workspace(const BackwardParams& p) {
  int64_t bytes = 0;
  dispatch(p, [&](auto pair, auto, const Launches& launches) {
    using Acc = AccOf<typename decltype(pair)::T>;
    const LaunchPlan& plan = launches.plan;
    const int gradients = launches.column_blocks > 0 ? 0 : (p.grad_weight != nullptr) + (p.grad_bias != nullptr);
    const int64_t row_sums = plan.separate_sums ? 3 * launches.rows_per_launch * plan.num_parts : 0;
    bytes = (gradients * plan.num_slots * plan.pitch + row_sums) * static_cast<int64_t>(sizeof(Acc));
  });
  return bytes;
}

void backward(const BackwardParams& p) {
  dispatch(p, [&](auto pair, auto tile, const Launches& launches) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    LaunchPlan plan = launches.plan;
    for (plan.first_row = 0; plan.first_row < p.rows; plan.first_row += launches.rows_per_launch) {
      plan.end_row = std::min(p.rows, plan.first_row + launches.rows_per_launch);
      plan.accumulates = plan.first_row > 0;
      if (plan.separate_sums) {
        BackwardParams sums_params = p;
        sums_params.grad_sum = nullptr;
        if (!p.grad_input) sums_params.grad_output = nullptr;
        LaunchConfig config = launches.rows;
        config.grid = dim3(plan.num_parts, static_cast<unsigned>(plan.end_row - plan.first_row));
        config.shared_bytes = launches.sums_bytes;
        config.overlaps_previous = plan.accumulates;
        launch(config, backward_sums<T, W>, sums_params, plan);
      }
      BackwardParams rows_params = p;
      if (launches.column_blocks > 0) {
        plan.grad_weight = p.grad_weight, plan.grad_bias = p.grad_bias;
        rows_params.grad_weight = rows_params.grad_bias = nullptr;
      }
      launch(launches.rows, backward_rows<T, W, decltype(tile)>, rows_params, plan);
    }
    if (launches.column_blocks > 0) return;
    launch_add_partials(static_cast<const AccOf<T>*>(p.workspace), plan.num_slots, plan.pitch, p.cols,
                        static_cast<W*>(p.grad_weight), static_cast<W*>(p.grad_bias), launches.rows.stream);
  });
}

}  // namespace layernorm::cuda
