// y = (x - mean) * rstd * weight + bias for every row of x [groups, rows, cols] on a GPU. RMSNorm's mean is 0.
//
// A block fetches its part of a row to shared memory, computes the moments of the part and then the output from there:
// 2 * groups * rows * cols * sizeof(T) bytes are moved. A part has up to four chunks. From compute capability 9.0 on,
// the blocks of a cluster share a longer row and exchange their moments. Still longer rows, and those on older GPUs,
// take two launches, the first of which stores the moments of each chunk.
//
// The numerical method is that of cpu/forward.cpp: one sweep sums the differences from an estimate of the mean and
// their squares. The formula of Chan, Golub and LeVeque merges the moments of parts.
//
// A residual is added first, and the sum replaces it in shared memory. If the sum is float and the input has 16 bits, a
// vector of the input and of the output has 8 bytes.
//
// Sources: Ba et al. 2016, arXiv:1607.06450. Zhang and Sennrich 2019, arXiv:1910.07467. Chan, Golub and LeVeque,
// Updating formulae and a pairwise algorithm for computing sample variances, 1979.
#include <algorithm>

#include "../dtypes.h"
#include "row.cuh"

namespace layernorm::cuda {

constexpr int kMaxBlockChunks = 4;                   // that a block keeps, so that three blocks fit on a multiprocessor
constexpr int kMaxRowChunks = 10 * kMaxClusterSize;  // of a row that a cluster keeps
template <class Tile>
constexpr int kMaxThreads = Tile::kIsBlock ? 256 : 128;
// As many as fit without spills: if a row takes a block, 40 warps of 48 registers per thread, and 24 in code for 8.0;
// else 32 warps of 64 registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kRowBlocksPerSM = 3;
#else
constexpr int kRowBlocksPerSM = 5;
#endif
template <class X, class Tile>
constexpr int kMinBlocksPerSM = sizeof(X) == 8   ? 512 / kMaxThreads<Tile>
                                : Tile::kIsBlock ? kRowBlocksPerSM
                                                 : 8;

// The flags of the most usual calls, and the flags that they may have besides. Their code is compiled separately.
constexpr unsigned kFastPathFlags = kAligned | kAlignedParameters | kWeight;
constexpr unsigned kFastPathOptions = kInCluster | kHasGroups | kRms | kBias;

template <class Acc>
struct ForwardPlan : RowLayout {
  explicit ForwardPlan(const RowLayout& layout) : RowLayout(layout) {}

  Flags flags;
  int chunks_per_block;
  FastDivisor blocks_per_row, rows;  // rows of a group
  Acc eps;
  Divisor<Acc> cols, part, last_part;
  void* workspace = nullptr;
};

namespace {

// ---- moments --------------------------------------------------------------------------------------------------------

// The moments of `count` numbers x * scale. Their mean is pivot + correction; for RMSNorm it is 0. m2 is the sum of the
// squares of their differences from the mean.
template <class Acc>
struct Moments {
  Acc pivot, correction, m2, count, scale;
};

// The moments multiplied by `scale`. Moments that are scaled already are not finite without their scale.
template <class Acc>
__device__ __forceinline__ Moments<Acc> rescale(Moments<Acc> m, Acc scale) {
  if (m.scale == scale) return m;
  if (scale == 1) return {0, 0, kInfinity<Acc>, m.count, 1};
  return {m.pivot * scale, m.correction * scale, m.m2 * scale * scale, m.count, scale};
}

// Merges the moments of two disjoint sets of numbers of the same scale. Either set may be empty.
template <class Acc>
__device__ __forceinline__ Moments<Acc> merge(const Moments<Acc>& a, const Moments<Acc>& b) {
  if (a.count == 0) return b;
  if (b.count == 0) return a;
  const Acc count = a.count + b.count, weight = b.count / count;
  const Acc mean_diff = ((b.pivot - a.pivot) + b.correction) - a.correction;
  return {a.pivot, fma(mean_diff, weight, a.correction), fma(mean_diff * mean_diff, a.count * weight, a.m2 + b.m2),
          count, a.scale};
}

// Merges the moments of a row's parts, in an order that depends only on their number. All lanes get the result.
template <class Acc>
__device__ __forceinline__ Moments<Acc> merge_parts(const Moments<Acc>* parts, int num_parts) {
  for (Acc scale = 1;; scale = kScale<Acc>) {
    Moments<Acc> own = {0, 0, 0, 0, scale};
    for (int i = threadIdx.x % kWarpSize; i < num_parts; i += kWarpSize) own = merge(own, rescale(parts[i], scale));
    for (int offset = 1; offset < kWarpSize; offset *= 2) {  // only lane 0 gets the sum of all lanes
      const int other = threadIdx.x % kWarpSize + offset;
      const auto get = [&](Acc value) { return __shfl_sync(kAllLanes, value, other % kWarpSize); };
      own = merge(own, Moments<Acc>{get(own.pivot), get(own.correction), get(own.m2), get(own.count), scale});
    }
    const auto first = [](Acc value) { return __shfl_sync(kAllLanes, value, 0); };
    own = {first(own.pivot), first(own.correction), first(own.m2), first(own.count), scale};
    if (own.m2 < kInfinity<Acc> || scale != 1) return own;
  }
}

// ---- chunks ---------------------------------------------------------------------------------------------------------

// Columns [begin, begin + cols) of a row, and their shared memory. Without a residual, x is the input.
template <class Types, class Tile>
struct Chunk {
  using T = typename Types::T;
  using X = typename Types::X;
  using W = typename Types::W;
  using Acc = AccOf<X>;
  static constexpr int kVec = kVectorSize<X>;
  template <class E>
  using Row = StagedRow<E, kVec, Tile>;

  const ForwardParams& p;
  const Flags flags;
  const Tile& tile;
  RowIndex row;
  int64_t begin;
  int cols;
  unsigned char* shared;

  // An array in the shared memory of the chunk, or of the next chunk if `shift` is true and the row is not aligned.
  template <class E>
  __device__ __forceinline__ Row<E> staged(E* first, bool shift) const {
    const bool aligned = flags.has(kAligned);
    const size_t bytes = shift && !aligned ? Row<X>::bytes(tile.threads()) : 0;
    return {shared + bytes, first + begin, cols, tile, aligned};
  }
  __device__ __forceinline__ bool adds() const { return flags.has(kResidual); }
  __device__ __forceinline__ Row<X> fetched() const {
    return staged(address<X>(adds() ? p.residual : p.input, row), true);
  }
  __device__ __forceinline__ Row<X> x() const { return staged(address<X>(adds() ? p.sum : p.input, row), !adds()); }
  __device__ __forceinline__ Row<T> output() const { return staged(address<T>(p.output, row), adds()); }

  // Adds the input to the fetched residual, and stores the sum, x.
  __device__ __forceinline__ void add_residual() const {
    const T* const input = address<const T>(p.input, row) + begin;
    const auto residual = fetched(), sum = x();
    tile.template for_each_vector<kVec>(cols, [&](int i) {
      Vector<T, kVec> input_vector;
      load_or(input_vector, input + tile.vector_index(i) * kVec, true, tile.template remaining<kVec>(i, cols),
              flags.has(kAligned), T(0.0f));
      Acc a[kVec], b[kVec];
      widen(a, input_vector);
      widen(b, residual.read(i));
#pragma unroll
      for (int e = 0; e < kVec; ++e) a[e] += b[e];
      const auto v = round_to<X>(a);
      sum.store(i, v);
      if (flags.has(kAligned)) sum.write(i, v);
    });
    sum.end_of_store();
  }

  // The average of the first vector of x, an estimate of the mean.
  __device__ __forceinline__ Acc estimate_mean() const {
    if (cols == 0) return 0;
    const int count = min(cols, kVec);
    Acc v[kVec], mean = 0;
    widen(v, x().read_from(0));
#pragma unroll
    for (int e = 0; e < kVec; ++e) mean += v[e] * (Acc(1) / kVec);  // a sum of large numbers would overflow
    return count == kVec ? mean : mean * (Acc(kVec) / static_cast<Acc>(count));
  }

  // Adds this thread's d = x * scale - pivot and their squares to the sums.
  __device__ __forceinline__ void add_to_sums(Acc (&sums)[2], const Moments<Acc>& moments) const {
    const auto staged_x = x();
    Acc diffs[2] = {}, squares[2] = {};
    tile.template for_each_vector<kVec>(cols, [&](int i) {
      Acc v[kVec];
      widen(v, staged_x.read(i));
#pragma unroll
      for (int e = 0; e < kVec; ++e) {  // the zeros after the end stay zeros
        const bool exists = flags.has(kAligned) || e < tile.template remaining<kVec>(i, cols);
        const Acc d = fma(v[e], moments.scale, exists ? -moments.pivot : 0);
        diffs[e % 2] += d;
        squares[e % 2] = fma(d, d, squares[e % 2]);
      }
    });
    sums[0] += diffs[0] + diffs[1];
    sums[1] += squares[0] + squares[1];
  }

  // Computes the output from x in shared memory. The correction is subtracted before any multiplication, so that the
  // difference is exactly 0 for a constant row.
  __device__ __forceinline__ void normalize_and_store(const Moments<Acc>& moments, Acc rstd) const {
    const auto staged_x = x();
    const auto y = output();
    tile.template for_each_vector<kVec>(cols, [&](int i) {
      Acc v[kVec], wide_w[kVec], wide_b[kVec];
      Vector<W, kVec> parameter;
      load_parameter(parameter, p.weight, kWeight, i, W(1.0f));
      widen(wide_w, parameter);
      load_parameter(parameter, p.bias, kBias, i, W(0.0f));
      widen(wide_b, parameter);
      widen(v, staged_x.read(i));
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const Acc xhat = (fma(v[e], moments.scale, -moments.pivot) - moments.correction) * rstd;
        v[e] = fma(xhat, flags.has(kZeroCentered) ? wide_w[e] + 1 : wide_w[e], wide_b[e]);
      }
      y.store(i, round_to<T>(v));
    });
    y.end_of_store();
  }

 private:
  // Loads the columns of vector i of the weight or the bias. Aligned rows have no partial vectors.
  __device__ __forceinline__ void load_parameter(Vector<W, kVec>& v, const View& view, Flag exists, int i,
                                                 W default_value) const {
    const int remaining = flags.has(kAligned) ? kVec : tile.template remaining<kVec>(i, cols);
    const W* const parameter = address<const W>(view, {row.group, 0}) + begin;
    load_or(v, parameter + tile.vector_index(i) * kVec, flags.has(exists), remaining, flags.has(kAlignedParameters),
            default_value);
  }
};

// The moments of this block's part of a row, or of this thread's row. A pivot that is too far from the mean is replaced
// by the mean, see cpu/forward.cpp; and if the sums overflow, they are computed again with kScale. Columns that hold
// NaN or infinity still give NaN.
template <class Acc, class Tile, class F>
__device__ __forceinline__ Moments<Acc> reduce_moments(const Tile& tile, const Divisor<Acc>& cols, bool rms, Acc pivot,
                                                       const F& add_to_sums) {
  Moments<Acc> result = {pivot, 0, 0, cols.value, 1};
  bool is_estimate = !rms;
  for (int buffer = 0;; buffer ^= 1) {
    Acc sums[2] = {};
    add_to_sums(sums, result);
    sum_tile(sums, tile, buffer);
    result.correction = rms ? 0 : cols.divide(sums[0]);
    const Acc correction_squared = result.count * result.correction * result.correction;
    result.m2 = sums[1] - correction_squared;
    if (result.m2 < 0) result.m2 = 0;  // this comparison keeps NaN
    const bool overflows = !(result.m2 < kInfinity<Acc>) && result.scale == 1;
    const bool is_far = is_estimate && correction_squared > result.m2;
    if (!__any_sync(kAllLanes, overflows || is_far)) return result;
    if (overflows) {
      result.scale = kScale<Acc>, result.pivot *= kScale<Acc>;
    } else if (is_far) {
      result.pivot += result.correction, is_estimate = false;
    }  // else the warp's other rows are computed again, with the same result
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <bool kIsFastPath, class Types, class Tile>
__device__ __forceinline__ void process_rows(const ForwardParams& p,
                                             const ForwardPlan<AccOf<typename Types::X>>& plan) {
  using X = typename Types::X;
  using Acc = AccOf<X>;
  // Only rows of block tiles have parts.
  const unsigned bits = Tile::kIsBlock ? plan.flags.bits : plan.flags.bits & ~(kInCluster | kStoresSums | kLoadsSums);
  const Flags flags = {kIsFastPath ? kFastPathFlags | (bits & kFastPathOptions) : bits};
  const Tile tile{Tile::kIsBlock ? kWholeBlock : plan.log2_threads, static_cast<int>(threadIdx.x),
                  static_cast<int>(blockDim.x), 0};
  int64_t block_row = blockIdx.x;
  int part = 0;
  const bool has_parts = flags.has(kInCluster | kStoresSums | kLoadsSums);
  if (has_parts) {
    const auto [quotient, remainder] = plan.blocks_per_row.divide(block_row);
    block_row = quotient, part = static_cast<int>(remainder);
  }
  // The last block may have rows that do not exist. They have no columns, and their vectors are zeros.
  const int64_t row_number = block_row * tile.rows_per_block() + tile.row();
  const bool exists = Tile::kIsBlock || row_number < p.groups * p.rows;
  const RowIndex row = find_group(exists ? row_number : 0, flags.has(kHasGroups), plan.rows);
  const int first_chunk = part * plan.chunks_per_block;
  const int num_chunks = Tile::kIsBlock ? min(plan.chunks_per_block, plan.num_chunks - first_chunk) : 1;
  extern __shared__ __align__(16) unsigned char shared[];
  const auto chunk_at = [&](int k) {
    const int64_t begin = int64_t{plan.chunk_cols} * (first_chunk + k);
    const int cols = static_cast<int>(min(p.cols - begin, int64_t{plan.chunk_cols}));
    const int place = k + tile.row() * (flags.has(kAligned) ? 1 : 2);
    unsigned char* const chunk_shared = shared + place * StagedRow<X, kVectorSize<X>, Tile>::bytes(tile.threads());
    return Chunk<Types, Tile>{p, flags, tile, row, begin, exists ? cols : 0, chunk_shared};
  };
  __shared__ ClusterExchange<Moments<Acc>> exchange;
  if (flags.has(kInCluster)) {
    if (threadIdx.x == 0) exchange.init();
    cluster_arrive();
  }
  if (flags.has(kLoadsSums)) wait_for_previous_grid();
#pragma unroll 1
  for (int k = 0; k < num_chunks; ++k) chunk_at(k).fetched().fetch();
  async_commit();
  async_wait<0>();
  if (flags.has(kResidual)) {
    if (!flags.has(kAligned)) tile.sync();
#pragma unroll 1
    for (int k = 0; k < num_chunks; ++k) chunk_at(k).add_residual();
  }
  tile.sync();

  Moments<Acc> moments;
  auto* const stored_moments = static_cast<Moments<Acc>*>(plan.workspace) + row_number * plan.blocks_per_row.divisor();
  const int num_parts = has_parts ? static_cast<int>(plan.blocks_per_row.divisor()) : 1;
  if (!flags.has(kLoadsSums)) {
    const bool rms = flags.has(kRms);
    const Divisor<Acc> cols = part + 1 == num_parts ? plan.last_part : plan.part;
    moments = reduce_moments(tile, cols, rms, rms ? 0 : chunk_at(0).estimate_mean(), [&](auto& sums, const auto& from) {
#pragma unroll 1
      for (int k = 0; k < num_chunks; ++k) chunk_at(k).add_to_sums(sums, from);
    });
  }
  if (flags.has(kStoresSums)) {
    if (threadIdx.x == 0) stored_moments[part] = moments;
    return let_next_grid_start();
  }
  const Moments<Acc>* parts = stored_moments;
  if (flags.has(kInCluster)) {
    cluster_wait();  // all blocks have started
    parts = exchange.gather(moments, num_parts, 0);
  }
  if (has_parts) moments = merge_parts(parts, num_parts);

  const Acc rstd = scaled_rstd(moments.m2 * plan.cols.reciprocal, plan.eps, moments.scale);
  if (part == 0 && tile.thread() == 0 && exists) {
    if (!p.rms) {
      *address<Acc>(p.mean, row) = (moments.pivot + moments.correction) * (moments.scale == 1 ? 1 : 1 / kScale<Acc>);
    }
    *address<Acc>(p.rstd, row) = unscaled_rstd(rstd, plan.eps, moments.scale);
  }
#pragma unroll 1
  for (int k = 0; k < num_chunks; ++k) {
    chunk_at(flags.has(kResidual) ? num_chunks - 1 - k : k).normalize_and_store(moments, rstd);
  }
}

// Types is that of dtypes.h. Two launches that read a row need the workspace [groups * rows, blocks_per_row] of
// Moments.
template <class Types, class Tile>
__global__ void __launch_bounds__(kMaxThreads<Tile>, kMinBlocksPerSM<typename Types::X, Tile>)
    forward_rows(const ForwardParams p, const ForwardPlan<AccOf<typename Types::X>> plan) {
  if ((plan.flags.bits & ~kFastPathOptions) == kFastPathFlags) return process_rows<true, Types, Tile>(p, plan);
  process_rows<false, Types, Tile>(p, plan);
}

// ---- host code ------------------------------------------------------------------------------------------------------

template <class Types, class Tile>
void launch_forward(const ForwardParams& p, const RowLayout& layout) {
  using X = typename Types::X;
  using Acc = AccOf<X>;
  const auto kernel = forward_rows<Types, Tile>;
  LaunchConfig config;
  ForwardPlan<Acc> plan(layout);
  plan.flags = make_flags<typename Types::T, X, typename Types::W>(p);
  plan.rows = FastDivisor(p.rows);
  plan.eps = static_cast<Acc>(p.eps);
  plan.cols = Divisor<Acc>(p.cols);

  const int64_t threads = plan.is_warp_tile ? 128 : plan.block_tile_threads;
  const int rows = plan.rows_per_block(threads);
  const auto bytes = [&](int64_t chunks, bool aligned) {
    return rows * (chunks + !aligned) * StagedRow<X, kVectorSize<X>, Tile>::bytes(static_cast<int>(threads) / rows);
  };
  constexpr size_t kMaxStaticShared = 1024;
  // The chunks of a block of a cluster: many, so that clusters are small.
  const int in_cluster = std::max(static_cast<int>(ceil_div(plan.num_chunks, kMaxClusterSize)), kMaxBlockChunks);
  const bool fits_block = plan.num_chunks <= kMaxBlockChunks;
  const bool reads_twice = !fits_block && (plan.num_chunks > kMaxRowChunks || !has_clusters(config, kernel) ||
                                           bytes(in_cluster, false) + kMaxStaticShared > max_shared_memory(config));
  plan.chunks_per_block = fits_block ? plan.num_chunks : reads_twice ? 1 : in_cluster;
  const int64_t blocks_per_row = ceil_div(plan.num_chunks, plan.chunks_per_block);
  plan.flags.set(kInCluster, !reads_twice && blocks_per_row > 1);
  plan.blocks_per_row = FastDivisor(blocks_per_row);
  const int64_t part_cols = int64_t{plan.chunk_cols} * plan.chunks_per_block;
  plan.part = Divisor<Acc>(part_cols);
  plan.last_part = Divisor<Acc>(p.cols - part_cols * (blocks_per_row - 1));

  config.grid = static_cast<unsigned>(ceil_div(p.groups * p.rows, rows) * blocks_per_row);
  config.block = static_cast<unsigned>(threads);
  config.shared_bytes = bytes(plan.chunks_per_block, plan.flags.has(kAligned));
  config.stream = static_cast<Stream>(p.stream);
  config.cluster = reads_twice ? 1 : static_cast<unsigned>(blocks_per_row);
  if (!reads_twice) return launch(config, kernel, p, plan);

  const auto bytes_per_row = blocks_per_row * static_cast<int64_t>(sizeof(Moments<Acc>));
  plan.workspace = p.allocator->allocate(p.groups * p.rows * bytes_per_row);
  plan.flags.set(kStoresSums, true);
  launch(config, kernel, p, plan);
  plan.flags.set(kStoresSums, false);
  plan.flags.set(kLoadsSums, true);
  plan.flags.set(kResidual, false);
  ForwardParams second = p;
  if (p.residual.data) second.input = p.sum;
  config.overlaps_previous = true;
  launch(config, kernel, second, plan);
}

}  // namespace

void forward(const ForwardParams& p) {
  if (p.channels_first) return channels_first_forward(p);
  dispatch_dtypes<Elements>(p, [&](auto types) {
    using Types = decltype(types);
    const RowLayout layout(p.cols, kVectorSize<typename Types::X>, kMaxChunkVectors);
    layout.is_warp_tile ? launch_forward<Types, WarpTile>(p, layout) : launch_forward<Types, BlockTile>(p, layout);
  });
}

}  // namespace layernorm::cuda
