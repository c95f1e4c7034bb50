// With xhat = (x - mean) * rstd and g = dy * weight, for every row of x and dy [rows, cols], on a GPU:
//
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))      dweight = sum of dy * xhat over the rows      dbias = of dy
//
// and dx = rstd * (g - xhat * mean(g * xhat)) for RMSNorm, whose mean is 0. Where forward has also returned x as a sum,
// the gradient of that is added to dx.
//
// Blocks take rows in turn, and rows come to shared memory while others are worked on. A thread goes over its vectors
// of a row twice: for the row's sums, and for dx. Meanwhile it adds up dweight and dbias of its columns in registers
// over the rows it sees, and leaves them in the workspace, whose rows a second kernel adds up in order:
// 3 * rows * cols * sizeof(T) bytes are moved, and no atomic operation leaves the result to chance.
//
// Longer rows are cut into chunks, one for each block. From compute capability 9.0 on, up to 8 blocks of a cluster
// exchange their sums once a row; still longer rows, and those on older GPUs, are read twice, first by a kernel for
// their sums, in groups of rows that the second-level cache holds until then. Of few rows with few columns, one launch
// makes everything: some of its blocks dx, the others dweight and dbias.
//
// Exactness is that of the CPU kernels (cpu/backward.cpp): the saved mean is rounded, so that the average of xhat is
// not 0; a third sum finds it, and it is taken off before xhat is used. How a row is cut depends on the device, the
// dtype and the number of columns alone, and so does its dx.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467.
#include <algorithm>
#include <cstdint>

#include "../dtypes.h"
#include "partials.cuh"
#include "ring.cuh"

namespace layernorm::cuda {

// How the work is shared out: what the kernels know of it.
struct Plan {
  int64_t first_row, end_row;  // of a launch
  int64_t slots;               // blocks that take rows in turn, or groups of blocks that share them
  int64_t pitch;               // of the workspace: columns from row to row
  double reciprocal_cols;
  unsigned chunks;     // of a row: blocks that share it,
  int chunk;           // each with so many columns
  unsigned parts;      // of a row whose sums are found first: blocks that share it,
  int chunks_of_part;  // each with so many chunks
  int log2_lanes;      // of the lanes of a warp that share a row,
  int rows_of_block;   // which takes so many at a time
  int stages;
  bool in_cluster;
  bool sums_first;                // of rows: found by a launch of their own
  bool adds;                      // to what the workspace holds of dweight and dbias
  bool aligned;                   // rows, at multiples of 16 bytes
  bool aligned_parameters;        // weight and bias
  bool usual;                     // all gradients, nothing but a weight and a bias, all aligned
  void *grad_weight, *grad_bias;  // for blocks that take columns, in place of p.grad_weight and p.grad_bias
};

namespace {

// After so many rows, sums in Acc go to the workspace, to keep them exact.
constexpr int kRowsPerSum = 256;
constexpr int kLargestCluster = 8;
// Of rows that one launch takes for all gradients.
constexpr int kFewRows = 128;
constexpr int kMostWarps = 16;  // of a block

// The sums over a row of xhat, of g and of g * xhat.
template <class Acc>
using Sums = Acc[3];

// The workspace: of dweight and of dbias, if they are wanted, [slots, pitch]; of sums [rows of a launch, parts].
template <class Acc>
__host__ __device__ Acc* sums_in_workspace(const BackwardParams& p, const Plan& plan) {
  return static_cast<Acc*>(p.workspace) + (!!p.grad_weight + !!p.grad_bias) * plan.slots * plan.pitch;
}

// The elements of a vector that are worked on at a time: those whose parameters are 16 bytes. More would not fit into
// registers beside the sums.
template <class T, class W>
constexpr int kPieceSize = std::min(kVectorSize<T>, kVectorSize<W>);

// ---- vectors --------------------------------------------------------------------------------------------------------

// xhat from the output, whose weight is kept less `centre`; NaN where the weight is too small to divide by.
template <class Acc>
__device__ __forceinline__ Acc recovered_xhat(Acc y, Acc weight, Acc bias, Acc centre, Acc shift) {
  const Acc divisor = weight + centre;
  if (abs(divisor) < Acc(kSmallestDivisor)) return std::numeric_limits<Acc>::quiet_NaN();
  return fast_divide(y - bias, divisor) - shift;
}

// The weight and the bias from a column on; null, where there is none.
template <class W>
struct Parameters {
  const W *weight, *bias;

  __device__ __forceinline__ Parameters(const BackwardParams& p, int64_t begin)
      : weight(p.weight ? static_cast<const W*>(p.weight) + begin : nullptr),
        bias(p.bias ? static_cast<const W*>(p.bias) + begin : nullptr) {}
};

// The weight of so many columns from number `column` on, if it is needed; zeros beyond the valid ones.
template <bool kUsual, class W, int kCount>
__device__ __forceinline__ void load_weight(Vector<W, kCount>& w, const W* weight, const BackwardParams& p,
                                            const Plan& plan, int column, int valid) {
  if (kUsual) {
    w = {};
    if (valid > 0) w = *reinterpret_cast<const Vector<W, kCount>*>(weight + column);
  } else if (p.grad_input || p.from_output) {
    load_or(w, weight, column, valid, plan.aligned_parameters, W(1.0f));
  }
}

// xhat of `valid` numbers of x from number `column` on, or recovered from those of the output, less `shift`. Beyond
// them x is 0, and so is xhat if kPartial, or if none is valid.
template <bool kUsual, bool kPartial, class T, class W, int kCount, class Acc>
__device__ __forceinline__ void normalize(Acc (&xhat)[kCount], const Vector<T, kCount>& x, const Vector<W, kCount>& w,
                                          const W* bias, const BackwardParams& p, const Plan& plan,
                                          const Statistics<Acc>& row, Acc shift, int column, int valid) {
  if (!kUsual && p.from_output) {
    Vector<W, kCount> b;
    load_or(b, bias, column, valid, plan.aligned_parameters, W(0.0f));
    const Acc centre = p.zero_centered_weight ? 1 : 0;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      xhat[e] = e < valid ? recovered_xhat(static_cast<Acc>(x.of[e]), static_cast<Acc>(w.of[e]),
                                           static_cast<Acc>(b.of[e]), centre, shift)
                          : 0;
    }
    return;
  }
  widen(xhat, x);
  Statistics<Acc> of_columns = row;
  if (valid <= 0) of_columns.mean = 0;
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if (kPartial && e >= valid) of_columns.mean = 0;
    xhat[e] = of_columns.xhat(xhat[e], shift);
  }
}

// g = dy * weight.
template <class W, int kCount, class Acc>
__device__ __forceinline__ void multiply(Acc (&g)[kCount], const Acc (&dy)[kCount], const Vector<W, kCount>& weight,
                                         bool zero_centered) {
  Acc w[kCount];
  widen(w, weight);
  if (zero_centered) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) g[e] = dy[e] * (w[e] + 1);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) g[e] = dy[e] * w[e];
  }
}

// ---- sums of a row --------------------------------------------------------------------------------------------------

// Adds up this thread's part of `cols` columns of a row; without those of g, if dx is not wanted.
template <bool kUsual, class T, class W, class Tile>
__device__ __forceinline__ void add_up(Sums<AccOf<T>>& sums, const BackwardParams& p, const Plan& plan,
                                       const Parameters<W>& parameters, const Image<T, Tile>& dy,
                                       const Image<T, Tile>& x, const Statistics<AccOf<T>>& statistics,
                                       const Place<Tile>& place, int cols) {
  using Acc = AccOf<T>;
  constexpr int kCount = kVectorSize<T>, kPiece = kPieceSize<T, W>;
  const auto add_vectors = [&](auto is_partial) {
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (!place.template has_columns<kCount>(i, cols)) continue;
#pragma unroll
      for (int k = 0; k < kCount; k += kPiece) {
        const int column = place.vector(i) * kCount + k, valid = cols - column;
        Vector<W, kPiece> w;
        load_weight<kUsual>(w, parameters.weight, p, plan, column, valid);
        Acc xhat[kPiece];
        normalize<kUsual, is_partial>(xhat, piece<kPiece>(x.get(i), k), w, parameters.bias, p, plan, statistics, Acc(0),
                                      column, valid);
#pragma unroll
        for (int e = 0; e < kPiece; ++e) sums[0] += xhat[e];
        if (!kUsual && !p.grad_input) continue;
        Acc g[kPiece];
        widen(g, piece<kPiece>(dy.get(i), k));
        multiply(g, g, w, !kUsual && p.zero_centered_weight);
#pragma unroll
        for (int e = 0; e < kPiece; ++e) {
          sums[1] += g[e];
          sums[2] = fma(g[e], xhat[e], sums[2]);
        }
      }
    }
  };
  if (kUsual || plan.aligned) {
    add_vectors(std::false_type{});
  } else {
    add_vectors(std::true_type{});
  }
}

// The sums over the threads of a tile. Double-buffered, by `round`: one barrier a row.
template <class Tile, class Acc>
__device__ __forceinline__ void sum_tile(Sums<Acc>& sums, const Place<Tile>& place, int round) {
  if constexpr (Tile::kWarps == 1) {
    for (int distance = place.threads() / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (Acc& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    __syncwarp();  // lest what has been read of the row stays in registers: it is read again
  } else {
#pragma unroll
    for (Acc& sum : sums) sum = sum_lanes<kWarpSize>(sum);
    __shared__ Sums<Acc> of_warps[2][Tile::kWarps];
    if (place.lane == 0) {
#pragma unroll
      for (int k = 0; k < 3; ++k) of_warps[round % 2][place.warp][k] = sums[k];
    }
    __syncthreads();
    const int warp = place.lane % Tile::kWarps;  // which may not exist
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      sums[k] = sum_lanes<Tile::kWarps>(warp * kWarpSize < place.threads() ? of_warps[round % 2][warp][k] : 0);
    }
  }
}

// The sums of a row from those of its parts, which lanes have; of kLanes lanes, or of more with zeros, the same.
template <int kLanes, class Acc>
__device__ __forceinline__ void merge(Sums<Acc>& sums, const Sums<double>& of_lane) {
#pragma unroll
  for (int k = 0; k < 3; ++k) sums[k] = static_cast<Acc>(sum_lanes<kLanes>(of_lane[k]));
}

// The sums over the blocks of a cluster, which leave them with each other; called when all blocks have begun. One
// barrier a row, because two rows take turns: a block that is ahead writes where nobody reads.
template <class Acc>
__device__ __forceinline__ void sum_cluster(Sums<Acc>& sums, unsigned blocks, int round) {
  __shared__ Sums<Acc> of_blocks[2][kLargestCluster];
  if (threadIdx.x < blocks) {
    auto& to = *cluster_peer(&of_blocks[round % 2][cluster_rank()], threadIdx.x);
#pragma unroll
    for (int k = 0; k < 3; ++k) to[k] = sums[k];
  }
  cluster_arrive();
  cluster_wait();
  const unsigned block = threadIdx.x % kLargestCluster;
  Sums<double> of_lane = {};
#pragma unroll
  for (int k = 0; k < 3; ++k) of_lane[k] = block < blocks ? of_blocks[round % 2][block][k] : 0;
  merge<kLargestCluster>(sums, of_lane);
}

// From the workspace.
template <class Acc>
__device__ __forceinline__ void load_sums(Sums<Acc>& sums, const Acc* of_parts, unsigned parts) {
  Sums<double> of_lane = {};
#pragma unroll 1
  for (unsigned i = threadIdx.x % kWarpSize; i < parts; i += kWarpSize) {
#pragma unroll
    for (int k = 0; k < 3; ++k) of_lane[k] += of_parts[3 * i + k];
  }
  merge<kWarpSize>(sums, of_lane);
}

template <class Acc>
__device__ __forceinline__ Means<Acc> means_of(const Sums<Acc>& sums, const BackwardParams& p, const Plan& plan) {
  const auto mean = [&](Acc sum) {
    return average(sum, static_cast<Acc>(p.cols), static_cast<Acc>(plan.reciprocal_cols));
  };
  Means<Acc> means = {};
  if (!p.rms) means.xhat = mean(sums[0]), means.g = mean(sums[1]);
  means.g_xhat = mean(sums[2]) - means.xhat * means.g;
  return means;
}

// ---- dweight and dbias ----------------------------------------------------------------------------------------------

// Adds the sums of this thread's columns to those of the block in the workspace, or begins them.
template <class Tile, int kCount, class Acc>
__device__ __forceinline__ void add_to_workspace(Acc* workspace, const Acc (&sums)[Tile::kVectors][kCount], bool first,
                                                 const Place<Tile>& place, int cols) {
  if constexpr (Tile::kWarps > 1) {
    const auto store = [&](auto begin) {
#pragma unroll
      for (int i = 0; i < Tile::kVectors; ++i) {
        if (place.vector(i) * kCount >= cols) break;
        auto& kept = reinterpret_cast<Vector<Acc, kCount>*>(workspace)[place.vector(i)];
        Vector<Acc, kCount> total = {};
        if (!begin) total = kept;
#pragma unroll
        for (int e = 0; e < kCount; ++e) total.of[e] += sums[i][e];
        kept = total;
      }
    };
    if (first) {
      store(std::true_type{});
    } else {
      store(std::false_type{});
    }
  } else {
    __shared__ Acc of_threads[Tile::kBlock][kCount];
    const Acc* const of_rows = &of_threads[0][0];
    const int cols_of_vector = place.threads() * kCount;  // of all threads
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (i * cols_of_vector >= cols) break;
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kCount; ++e) of_threads[threadIdx.x][e] = sums[i][e];
      __syncthreads();
#pragma unroll 1
      for (int c = threadIdx.x; c < cols_of_vector && i * cols_of_vector + c < cols; c += Tile::kBlock) {
        Acc total = 0;
#pragma unroll 4
        for (int r = 0; r < place.rows(); ++r) total += of_rows[r * cols_of_vector + c];
        Acc& sum = workspace[i * cols_of_vector + c];
        sum = first ? total : sum + total;
      }
    }
  }
}

// The second role: dweight and dbias of a column for each lane, from all rows, of which there are few. Warps share
// them, and find for themselves what the saved mean is off by.
template <class T, class W>
__device__ __forceinline__ void sum_columns(const BackwardParams& p, const Plan& plan) {
  using Acc = AccOf<T>;
  constexpr int kCount = kVectorSize<T>;
  __shared__ Acc shifts[kFewRows];
  __shared__ Acc of_warps[2][kMostWarps][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int rows = static_cast<int>(p.rows), cols = static_cast<int>(p.cols);
  const int column = static_cast<int>(blockIdx.y - plan.slots) * kWarpSize + lane;
  const T* const dy = static_cast<const T*>(p.grad_output);
  const T* const x = static_cast<const T*>(p.input);

  const Parameters<W> parameters(p, 0);
  const bool is_shifted = plan.grad_weight && !p.rms;
  if (is_shifted) {
    for (int row = warp; row < rows; row += warps) {
      const Statistics<Acc> statistics(Saved<Acc>(p, row));
      Acc sum = 0;
      for (int begin = lane * kCount; begin < cols; begin += kWarpSize * kCount) {
        Vector<T, kCount> v;
        load(v, x + row * p.input_stride + begin, cols - begin, plan.aligned);
        Vector<W, kCount> w;
        if (p.from_output) load_or(w, parameters.weight, begin, cols - begin, plan.aligned_parameters, W(1.0f));
        Acc xhat[kCount];
        normalize<false, true>(xhat, v, w, parameters.bias, p, plan, statistics, Acc(0), begin, cols - begin);
#pragma unroll
        for (int e = 0; e < kCount; ++e) sum += xhat[e];
      }
      sum = sum_lanes<kWarpSize>(sum);
      if (lane == 0) shifts[row] = means_of<Acc>({sum, 0, 0}, p, plan).xhat;
    }
    __syncthreads();
  }

  const auto parameter = [&](const W* array, Acc otherwise) {
    return array ? static_cast<Acc>(array[column]) : otherwise;
  };
  Acc dweight = 0, dbias = 0;
  for (int row = warp; row < rows && column < cols; row += warps) {
    const Acc v = static_cast<Acc>(dy[row * p.grad_output_stride + column]);
    dbias += v;
    if (!plan.grad_weight) continue;
    const Acc u = static_cast<Acc>(x[row * p.input_stride + column]), shift = is_shifted ? shifts[row] : 0;
    const Acc xhat = p.from_output ? recovered_xhat(u, parameter(parameters.weight, 1), parameter(parameters.bias, 0),
                                                    Acc(p.zero_centered_weight), shift)
                                   : Statistics<Acc>(Saved<Acc>(p, row)).xhat(u, shift);
    dweight = fma(v, xhat, dweight);
  }
  of_warps[0][warp][lane] = dweight;
  of_warps[1][warp][lane] = dbias;
  __syncthreads();
  for (int which = warp; which < 2 && column < cols; which += warps) {
    W* const gradient = static_cast<W*>(which == 0 ? plan.grad_weight : plan.grad_bias);
    if (!gradient) continue;
    Acc total = 0;
    for (int i = 0; i < warps; ++i) total += of_warps[which][i][lane];
    gradient[column] = W(total);
  }
}

// ---- kernels --------------------------------------------------------------------------------------------------------

template <class T, class Tile>
using RowRing = Ring<T, Tile, 3>;  // of grad_output, input and grad_sum

// The rows of number `row`, from column `begin` on.
template <bool kUsual, class T, class Tile>
__device__ __forceinline__ typename RowRing<T, Tile>::Rows rows_at(const BackwardParams& p, bool needs_x, int64_t row,
                                                                   int64_t begin) {
  const auto at = [&](bool exists, const void* array, int64_t stride) {
    return exists ? static_cast<const T*>(array) + row * stride + begin : nullptr;
  };
  return {at(kUsual || p.grad_output, p.grad_output, p.grad_output_stride),
          at(kUsual || needs_x, p.input, p.input_stride), at(!kUsual && p.grad_sum, p.grad_sum, p.grad_sum_stride)};
}

// Takes rows in turn, or a chunk of each; kUsual: without asking again and again what is wanted (Plan::usual).
template <bool kUsual, class T, class W, class Tile>
__device__ __forceinline__ void take_rows(const BackwardParams& p, const Plan& plan) {
  using Acc = AccOf<T>;
  constexpr int kCount = kVectorSize<T>, kPiece = kPieceSize<T, W>;
  const bool grad_input = kUsual || p.grad_input, grad_weight = kUsual || p.grad_weight;
  const bool grad_bias = kUsual || p.grad_bias, has_grad_sum = !kUsual && p.grad_sum;
  const bool needs_x = grad_input || grad_weight, needs_sums = grad_input || (grad_weight && !p.rms);
  const unsigned slot = blockIdx.y;
  const int64_t begin = int64_t{plan.chunk} * blockIdx.x;
  const int cols_of_block = static_cast<int>(min(p.cols - begin, int64_t{plan.chunk}));

  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ MBarrier arrived[kMostStages];
  RowRing<T, Tile> ring(shared, arrived, 1 + needs_x + has_grad_sum, plan.stages, kUsual || plan.aligned, true,
                        cols_of_block, Place<Tile>(threadIdx.x, plan.log2_lanes));
  // A block's last rows may not exist. They have no columns, and are fetched as if they were the first.
  const auto exists = [&](int64_t row) { return row < plan.end_row; };
  const auto rows_from = [&](int64_t row) {
    return rows_at<kUsual, T, Tile>(p, needs_x, exists(row) ? row : 0, begin);
  };
  const auto cols_from = [&](int64_t row) { return exists(row) ? cols_of_block : 0; };
  const auto fetch = [&](int64_t row, const Place<Tile>& place) { ring.fetch(rows_from(row), cols_from(row), place); };
  constexpr bool kMayShare = Tile::kWarps > 1 && sizeof(T) < 8;  // rows, in clusters
  const int64_t step = plan.slots * plan.rows_of_block;
  int64_t row_of_block = plan.first_row + int64_t{slot} * plan.rows_of_block;
#pragma unroll 1
  for (int stage = 0; stage < plan.stages; ++stage) {
    const Place<Tile> place(threadIdx.x, plan.log2_lanes);
    fetch(row_of_block + place.row + stage * step, place);
  }
  if constexpr (kMayShare) {
    if (plan.in_cluster) cluster_arrive(), cluster_wait();
  }
  if (plan.sums_first) wait_for_previous_grid();

  // What depends on the place would wait in registers for the next row, or the second look at this one, and others
  // spill.
  const auto place_again = [&] { return Place<Tile>(reload_thread_index(), plan.log2_lanes); };
  const Parameters<W> parameters(p, begin);
  Acc dw[Tile::kVectors][kCount] = {}, db[Tile::kVectors][kCount] = {};
  for (int round = 0; exists(row_of_block); ++round, row_of_block += step) {
    const int64_t row = row_of_block + place_again().row;
    const int cols = cols_from(row);
    const Statistics<Acc> statistics(needs_x && exists(row) ? Saved<Acc>(p, row) : Saved<Acc>());
    if (needs_x && exists(row + step)) Saved<Acc>::prefetch(p, row + step);  // waiting in registers, they would spill
    Means<Acc> means = {};
    {
      ring.wait([&] { return rows_from(row); }, cols, place_again());
      const auto place = place_again();
      Sums<Acc> sums = {};
      if (needs_sums && !plan.sums_first) {
        add_up<kUsual>(sums, p, plan, parameters, ring.image(0, place), ring.image(1, place), statistics, place, cols);
        sum_tile(sums, place, round);
        if constexpr (kMayShare) {
          if (plan.in_cluster) sum_cluster(sums, plan.chunks, round);
        }
      } else if (Tile::kWarps > 1 && needs_sums) {
        load_sums(sums, sums_in_workspace<Acc>(p, plan) + 3 * (row - plan.first_row) * plan.parts, plan.parts);
      }
      if (needs_sums) means = means_of(sums, p, plan);
    }

    const auto place = place_again();
    const auto dy_image = ring.image(0, place), x_image = ring.image(1, place);
    T* const dx_row = static_cast<T*>(p.grad_input) + row * p.cols + begin;
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      if (!place.template has_columns<kCount>(i, cols)) continue;
      Vector<T, kCount> dx;
#pragma unroll
      for (int k = 0; k < kCount; k += kPiece) {
        const int column = place.vector(i) * kCount + k, valid = cols - column;
        Vector<W, kPiece> w;
        load_weight<kUsual>(w, parameters.weight, p, plan, column, valid);
        Acc xhat[kPiece], g[kPiece];
        if (needs_x) {
          normalize<kUsual, false>(xhat, piece<kPiece>(x_image.get(i), k), w, parameters.bias, p, plan, statistics,
                                   means.xhat, column, valid);
        }
        widen(g, piece<kPiece>(dy_image.get(i), k));
        if (grad_weight) {
#pragma unroll
          for (int e = 0; e < kPiece; ++e) dw[i][k + e] = fma(g[e], xhat[e], dw[i][k + e]);
        }
        if (grad_bias) {
#pragma unroll
          for (int e = 0; e < kPiece; ++e) db[i][k + e] += g[e];
        }
        if (!grad_input) continue;
        multiply(g, g, w, !kUsual && p.zero_centered_weight);
#pragma unroll
        for (int e = 0; e < kPiece; ++e) g[e] = means.grad_input(g[e], xhat[e], statistics);
        if (has_grad_sum) {
          Acc dsum[kPiece];
          widen(dsum, piece<kPiece>(ring.image(2, place).get(i), k));
#pragma unroll
          for (int e = 0; e < kPiece; ++e) g[e] += dsum[e];
        }
        const auto rounded_piece = rounded<T>(g);
#pragma unroll
        for (int e = 0; e < kPiece; ++e) dx.of[k + e] = rounded_piece.of[e];
      }
      if (grad_input) ring.output(place).store(dx_row, i, dx, cols);
    }
    if (grad_input) ring.output(place).end_of_store(dx_row, cols);
    ring.release();
    fetch(row + plan.stages * step, place);

    const bool is_last = !exists(row_of_block + step);
    if (is_last) let_next_grid_start();
    if (!is_last && (round + 1) % kRowsPerSum != 0) continue;
    Acc* const dweight = static_cast<Acc*>(p.workspace) + slot * plan.pitch + begin;
    Acc* const dbias = dweight + (grad_weight ? plan.slots * plan.pitch : 0);
    const bool first = round < kRowsPerSum && !plan.adds;
    if (grad_weight) add_to_workspace(dweight, dw, first, place, cols_of_block);
    if (grad_bias) add_to_workspace(dbias, db, first, place, cols_of_block);
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) dw[i][e] = db[i][e] = 0;
    }
  }
  ring.drain();
}

// Some blocks take rows, and others, of few rows, columns.
template <class T, class W, class Tile>
__global__ void __launch_bounds__(Tile::kBlock, Tile::kWarps == 1 ? 3 : 1)
    backward_rows(const BackwardParams p, const Plan plan) {
  if (blockIdx.y >= plan.slots) return sum_columns<T, W>(p, plan);
  if (plan.usual) {
    take_rows<true, T, W, Tile>(p, plan);
  } else {
    take_rows<false, T, W, Tile>(p, plan);
  }
}

// The sums of a part of a row for each block, chunk by chunk.
template <class T, class W>
__global__ void __launch_bounds__(BlockTile::kBlock, 1) backward_sums(const BackwardParams p, const Plan plan) {
  using Acc = AccOf<T>;
  const Place<BlockTile> place;
  const int64_t row = plan.first_row + blockIdx.y, columns = int64_t{plan.chunk} * plan.chunks_of_part;
  const int64_t begin = columns * blockIdx.x, end = min(p.cols, begin + columns);

  extern __shared__ __align__(16) unsigned char shared[];
  RowRing<T, BlockTile> ring(shared, nullptr, 2, plan.stages, plan.aligned, false, plan.chunk, place);
  const auto cols_from = [&](int64_t at) {
    return static_cast<int>(max(min(end - at, int64_t{plan.chunk}), int64_t{0}));
  };
  const auto rows_from = [&](int64_t at) { return rows_at<false, T, BlockTile>(p, true, row, at); };
  const auto fetch = [&](int64_t at) { ring.fetch(rows_from(at), cols_from(at), place); };
#pragma unroll 1
  for (int stage = 0; stage < plan.stages; ++stage) fetch(begin + stage * plan.chunk);
  const Statistics<Acc> statistics(Saved<Acc>(p, row));
  Sums<double> total = {};
  int round = 0;
  for (int64_t at = begin; at < end; at += plan.chunk) {
    ring.wait([&] { return rows_from(at); }, cols_from(at), place);
    Sums<Acc> sums = {};
    const auto add = [&](auto is_usual) {
      add_up<is_usual>(sums, p, plan, Parameters<W>(p, at), ring.image(0, place), ring.image(1, place), statistics,
                       place, cols_from(at));
    };
    if (plan.usual) {
      add(std::true_type{});
    } else {
      add(std::false_type{});
    }
    sum_tile(sums, place, round++);  // its barrier releases the ring's images
#pragma unroll
    for (int k = 0; k < 3; ++k) total[k] += sums[k];
    fetch(at + plan.stages * plan.chunk);
  }
  ring.drain();
  let_next_grid_start();
  wait_for_previous_grid();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    sums_in_workspace<Acc>(p, plan)[3 * (blockIdx.y * int64_t{plan.parts} + blockIdx.x) + k] =
        static_cast<Acc>(total[k]);
  }
}

// ---- host code ------------------------------------------------------------------------------------------------------

constexpr int kMostParts = 256;
constexpr size_t kStaticShared = 16 * 1024;  // at most
static_assert(kStaticShared >= (kFewRows + 2 * kMostWarps * kWarpSize) * sizeof(double), "sum_columns has this alone");

// The most vectors of a row, or of a chunk, that a block's shared memory has room for, be there a residual, and not
// aligned.
template <class T>
int64_t most_vectors() {
  using Ring = RowRing<T, BlockTile>;
  const bool is_ample = Ring::bytes(BlockTile::kThreads, 1, 3, 1, false) + kStaticShared <= max_shared_memory();
  const int64_t most = BlockTile::kThreads * BlockTile::kVectors / (is_ample ? 1 : 2);
  return std::min(most, kMaxClusterChunkVectors);
}

// Cuts rows of more than a tile: into chunks of 1024 vectors, or of more if a cluster then has them all.
template <class T>
void cut(Plan& plan, int64_t cols) {
  const int64_t vectors = ceil_div(cols, kVectorSize<T>);
  const int64_t most = most_vectors<T>();
  int64_t chunks = ceil_div(vectors, std::min(most, kMaxChunkVectors));
  if (vectors <= kLargestCluster * most) chunks = std::min(chunks, int64_t{kLargestCluster});
  const int64_t chunk = ceil_div(ceil_div(vectors, chunks), kWarpSize) * kWarpSize;
  chunks = ceil_div(vectors, chunk);
  plan.chunk = static_cast<int>(chunk * kVectorSize<T>);
  plan.chunks = static_cast<unsigned>(chunks);
  plan.chunks_of_part = static_cast<int>(ceil_div(chunks, kMostParts));
  plan.parts = static_cast<unsigned>(ceil_div(chunks, plan.chunks_of_part));
}

// What is launched.
struct Launches {
  Plan plan;
  LaunchConfig rows;
  size_t bytes_for_sums;       // of shared memory
  unsigned column_blocks = 0;  // beside those for rows; 0: these leave partial sums
  int64_t rows_at_once;
};

template <class T, class W, class Tile>
Launches launches(const BackwardParams& p, Plan plan) {
  plan.reciprocal_cols = 1.0 / static_cast<double>(p.cols);
  plan.pitch = ceil_div(p.cols, kVectorSize<T>) * kVectorSize<T>;
  // Rows of dx, also if nobody asks for them, are aligned only if they are whole vectors.
  plan.aligned = is_aligned<T>(p.input, p.input_stride) && is_aligned<T>(p.grad_output, p.grad_output_stride) &&
                 is_aligned<T>(p.grad_input, p.cols) && is_aligned<T>(p.grad_sum, p.grad_sum_stride);
  plan.aligned_parameters = is_aligned<W>(p.weight, 0) && is_aligned<W>(p.bias, 0);
  const bool needs_sums = p.grad_input || (p.grad_weight && !p.rms);
  plan.in_cluster = sizeof(T) < 8 && plan.chunks > 1 && plan.chunks <= unsigned{kLargestCluster} &&
                    has_clusters(backward_rows<T, W, Tile>);
  const bool in_groups = plan.chunks > 1 && !plan.in_cluster;
  plan.sums_first = needs_sums && in_groups;

  Launches result;
  result.rows.block = threads_of<Tile, T>(plan.chunk);
  result.rows.stream = static_cast<Stream>(p.stream);
  result.rows.cluster = plan.in_cluster ? plan.chunks : 1;
  result.rows.overlaps_previous = plan.sums_first;
  const int arrays = 1 + (p.grad_input || p.grad_weight) + (p.grad_sum != nullptr);
  const auto set_stages = [&](int images, bool aligned) {
    const auto bytes = [&](int images_of_stage, int stages) {
      return RowRing<T, Tile>::bytes(static_cast<int>(result.rows.block.x) / plan.rows_of_block, plan.rows_of_block,
                                     images_of_stage, stages, aligned);
    };
    plan.stages = bytes(images, kMostStages) + kStaticShared <= max_shared_memory() ? kMostStages : 1;
    result.rows.shared_bytes = bytes(images, plan.stages);
    result.bytes_for_sums = bytes(2, plan.stages);
  };

  result.rows_at_once = p.rows;
  if (in_groups) {  // half of the cache, for input and grad_output
    result.rows_at_once = l2_cache_size() / 2 / (2 * p.cols * static_cast<int64_t>(sizeof(T)));
    result.rows_at_once = std::clamp(result.rows_at_once, int64_t{1}, std::min(p.rows, kMaxGridY));
  }
  const int64_t groups = ceil_div(result.rows_at_once, plan.rows_of_block);
  const bool is_small =
      plan.chunks == 1 && p.rows <= kFewRows && (p.grad_weight || p.grad_bias) &&
      ceil_div(p.cols, kWarpSize) * p.rows * p.cols * static_cast<int64_t>(sizeof(T)) <= kMaxOneLaunchBytes;
  if (is_small) {
    plan.slots = p.grad_input ? groups : 0;
    result.column_blocks = static_cast<unsigned>(ceil_div(p.cols, kWarpSize));
  } else {
    // The number of slots is the order of summation of dweight and dbias. It is chosen for unaligned rows of two
    // arrays, so that it depends neither on the alignment nor on which gradients are wanted. The gradient of a sum is
    // one more array in shared memory: all blocks must be resident with it, too.
    set_stages(p.grad_sum ? 3 : 2, false);
    const int64_t resident = resident_blocks(result.rows, backward_rows<T, W, Tile>) / plan.chunks;
    const int64_t rounds = ceil_div(groups, std::max(resident, int64_t{1}));  // a row may have more chunks than that
    plan.slots = ceil_div(groups, rounds);
  }
  set_stages(arrays, plan.aligned);
  result.rows.grid = dim3(plan.chunks, static_cast<unsigned>(plan.slots) + result.column_blocks);
  plan.usual = p.grad_input && p.grad_weight && p.grad_bias && !is_small && p.weight && !p.grad_sum &&
               !p.zero_centered_weight && !p.from_output && plan.aligned && plan.aligned_parameters;
  result.plan = plan;
  return result;
}

// Calls f(Pair<T, W>{}, Tile{}, launches).
template <class F>
void with_launches(const BackwardParams& p, const F& f) {
  dispatch_dtypes<Elements>(p.dtype, p.param_dtype, [&](auto pair) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    const auto with = [&](auto tile, const Plan& plan) { f(pair, tile, launches<T, W, decltype(tile)>(p, plan)); };
    Plan plan = {};
    plan.chunks = 1;
    plan.chunk = static_cast<int>(std::min(p.cols, int64_t{INT32_MAX}));
    plan.end_row = p.rows;
    plan.rows_of_block = 1;
    const int64_t vectors = ceil_div(p.cols, kVectorSize<T>);
    if (vectors <= kMaxWarpRowVectors) {
      plan.log2_lanes = log2_lanes_for(vectors);
      plan.rows_of_block = WarpTile::kBlock >> plan.log2_lanes;
      return with(WarpTile{}, plan);
    }
    if (vectors <= std::min(kMaxTileVectors, most_vectors<T>())) return with(BlockTile{}, plan);
    cut<T>(plan, p.cols);
    with(BlockTile{}, plan);
  });
}

}  // namespace

int64_t backward_workspace(const BackwardParams& p) {
  int64_t bytes = 0;
  with_launches(p, [&](auto pair, auto, const Launches& launches) {
    using Acc = AccOf<typename decltype(pair)::T>;
    const Plan& plan = launches.plan;
    const int gradients = launches.column_blocks > 0 ? 0 : (p.grad_weight != nullptr) + (p.grad_bias != nullptr);
    const int64_t sums = plan.sums_first ? 3 * launches.rows_at_once * plan.parts : 0;
    bytes = (gradients * plan.slots * plan.pitch + sums) * static_cast<int64_t>(sizeof(Acc));
  });
  return bytes;
}

void backward(const BackwardParams& p) {
  with_launches(p, [&](auto pair, auto tile, const Launches& launches) {
    using T = typename decltype(pair)::T;
    using W = typename decltype(pair)::W;
    Plan plan = launches.plan;
    for (plan.first_row = 0; plan.first_row < p.rows; plan.first_row += launches.rows_at_once) {
      plan.end_row = std::min(p.rows, plan.first_row + launches.rows_at_once);
      plan.adds = plan.first_row > 0;
      if (plan.sums_first) {
        BackwardParams of_sums = p;
        of_sums.grad_sum = nullptr;
        if (!p.grad_input) of_sums.grad_output = nullptr;
        LaunchConfig config = launches.rows;
        config.grid = dim3(plan.parts, static_cast<unsigned>(plan.end_row - plan.first_row));
        config.shared_bytes = launches.bytes_for_sums;
        config.overlaps_previous = plan.adds;
        launch(config, backward_sums<T, W>, of_sums, plan);
      }
      BackwardParams of_rows = p;
      if (launches.column_blocks > 0) {
        plan.grad_weight = p.grad_weight, plan.grad_bias = p.grad_bias;
        of_rows.grad_weight = of_rows.grad_bias = nullptr;
      }
      launch(launches.rows, backward_rows<T, W, decltype(tile)>, of_rows, plan);
    }
    if (launches.column_blocks > 0) return;
    launch_add_partials(static_cast<const AccOf<T>*>(p.workspace), plan.slots, plan.pitch, p.cols,
                        static_cast<W*>(p.grad_weight), static_cast<W*>(p.grad_bias), launches.rows.stream);
  });
}

}  // namespace layernorm::cuda
