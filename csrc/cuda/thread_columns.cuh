// The code that forward and backward of rows in shared memory share. ThreadColumns: the columns that a thread owns for
// a whole launch, so that their weights and sums stay in registers. Variants: the classes of rows and options, each
// with an instance of a kernel. RowDivision: the blocks and threads of a row. WarpSums: a row's sums over its warps.
#pragma once

#include "row.cuh"

namespace layernorm::cuda {

// Which columns of a row a lane owns: 16 of those of its warp (ThreadColumns::kElements), counted by j.
//
//   kVectors   vectors of 16 bytes. A lane copies its own vectors to shared memory, so that no other thread reads them.
//              All rows must be aligned and whole vectors.
//   kElements  every 32nd element, or 16th, 8th, ... if a row has fewer lanes, so that shared memory has no bank
//              conflicts. Together, the lanes copy the aligned groups of 16 bytes ("granules") that cover the
//              columns. A lane reads elements that other lanes have copied, after __syncwarp().
//   kGeneral   the columns of kVectors or of kElements, as the host decides for a launch. Lanes copy and read them as
//              with kElements.
//
//   bfloat16 columns     mapping     lane l of warp 0 (columns 0 to 511)         lane l of warp 1
//   1024                 kVectors    8 l to 8 l + 7 and 256 + 8 l to 263 + 8 l   these columns + 512
//   1023                 kElements   l, l + 32, l + 64, ..., l + 480             these columns + 512; reads 0 for 1023
//   64: 4 lanes per row  kVectors    8 l to 8 l + 7 and 32 + 8 l to 39 + 8 l     other rows: each warp has 8
//
// The columns of a lane, and so the order of summation, depend on the number of columns and not on the alignment.
enum class Mapping { kVectors, kElements, kGeneral };

// The columns that a thread owns, of a row of X or, if blocks share the row, of its block's part of the row. kLanes is
// the number of lanes of a warp that share a row: all 32, or 0 if the host decides this number for a launch. With fewer
// than 32, a warp has several rows.
template <class X, Mapping kMapping, int kLanes>
struct ThreadColumns {
  static constexpr int kVec = kVectorSize<X>;
  static constexpr int kElements = 16;  // columns of a thread
  static constexpr int kVectors = kElements / kVec;
  static constexpr int kWarpCols = kElements * kWarpSize;

  // Bytes of shared memory for a warp's `rows` rows of an array of E. A row that is not aligned may touch one granule
  // more.
  template <class E>
  __host__ __device__ static constexpr int staged_bytes(int rows) {
    return kWarpCols * static_cast<int>(sizeof(E)) + (kMapping == Mapping::kVectors ? 0 : 16 * rows);
  }

  int warp_begin;  // the warp's first column, among the block's
  int lane_in_warp;
  int lane_in_row;           // the lane's index among the lanes of this warp that share its row
  int row_in_warp;           // the index of that row among the rows of the warp
  int runtime_row_lanes;     // row_lanes() if kLanes is 0
  int runtime_element_step;  // element_step() of kGeneral

  // `warp` is the warp's index among those that share the row, and `lanes` is row_lanes(). With kGeneral, `vectors`
  // tells whether lanes own the columns of kVectors or those of kElements.
  __device__ __forceinline__ ThreadColumns(int warp, int lanes, bool vectors)
      : warp_begin(warp * kWarpCols),
        lane_in_warp(keep_in_register(static_cast<int>(threadIdx.x % kWarpSize))),
        lane_in_row(kLanes == 0 ? lane_in_warp & (lanes - 1) : lane_in_warp),
        row_in_warp(kLanes == 0 ? lane_in_warp / lanes : 0),
        runtime_row_lanes(lanes),
        runtime_element_step(vectors ? 1 : lanes) {}

  // A copy from which the compiler computes columns again: see recompute_from(). With kVectors, the columns take so few
  // registers that they are kept.
  __device__ __forceinline__ ThreadColumns recomputed() const {
    ThreadColumns columns = *this;
    if (kMapping == Mapping::kVectors) return columns;
    if (kLanes == 0) columns.runtime_row_lanes = recompute_from(runtime_row_lanes);
    if (kMapping == Mapping::kGeneral) columns.runtime_element_step = recompute_from(runtime_element_step);
    return columns;
  }

  // The number of lanes of a warp that share a row.
  __device__ __forceinline__ int row_lanes() const { return kLanes == 0 ? runtime_row_lanes : kLanes; }
  // Columns from one element of this lane to its next one, if both have the same j / kVec.
  __device__ __forceinline__ int element_step() const {
    return kMapping == Mapping::kGeneral ? runtime_element_step : kMapping == Mapping::kVectors ? 1 : row_lanes();
  }
  // Columns from the warp's first one to this lane's element 0.
  __device__ __forceinline__ int lane_offset() const {
    const bool vectors = kMapping == Mapping::kVectors || (kMapping == Mapping::kGeneral && runtime_element_step == 1);
    return vectors ? lane_in_row * kVec : lane_in_row;
  }
  // Columns from this lane's element 0 to its element j.
  __device__ __forceinline__ int distance_to(int j) const {
    return j / kVec * (kVec * row_lanes()) + j % kVec * element_step();
  }
  // The column of this lane's element j, among the block's.
  __device__ __forceinline__ int column(int j) const { return warp_begin + lane_offset() + distance_to(j); }

  // Starts to copy the warp's columns of a row from global memory to `shared`, the warp's memory for this array.
  // `array` points to the block's first column. The block has `cols` columns; zeros replace columns after the last one.
  template <class E>
  __device__ __forceinline__ void fetch(unsigned char* shared, const E* array, int cols) const {
    if constexpr (kMapping == Mapping::kVectors) {
      constexpr int kVectorBytes = kVec * sizeof(E);
      unsigned char* const to = shared + lane_in_warp * kVectorBytes;
      const E* const from = keep_in_register(array + column(0));
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        async_copy<kVectorBytes>(to + i * kWarpSize * kVectorBytes, from + distance_to(i * kVec),
                                 column(i * kVec) < cols ? kVectorBytes : 0);
      }
    } else {
      constexpr int kLaneGranules = kElements * sizeof(E) / 16;
      const E* const from = keep_in_register(array + warp_begin);
      const int offset = misalignment(from), n = min(cols - warp_begin, row_lanes() * kElements);
      // The bytes from the start of the first granule to the end of the columns.
      const int end = n > 0 ? offset + n * static_cast<int>(sizeof(E)) : 0;
      unsigned char* const to = staged_row<E>(shared);
      const auto copy = [&](int granule) {
        async_copy<16>(to + granule * 16, reinterpret_cast<const unsigned char*>(from) - offset + granule * 16,
                       min(max(end - granule * 16, 0), 16), granule == 0 ? offset : 0);
      };
#pragma unroll
      for (int i = 0; i < kLaneGranules; ++i) copy(i * row_lanes() + lane_in_row);
      if (lane_in_row == 0) copy(kLaneGranules * row_lanes());  // one more granule, if the row is not aligned
    }
  }

  // The address in shared memory of this thread's element 0, which fetch() has copied. `offset` is the misalignment()
  // of the row's address in global memory; each warp's first column has the same.
  template <class E>
  __device__ __forceinline__ E* staged_elements(unsigned char* shared, int offset) const {
    if constexpr (kMapping == Mapping::kVectors) {
      return reinterpret_cast<E*>(shared) + lane_in_warp * kVec;
    } else {
      return reinterpret_cast<E*>(staged_row<E>(shared) + offset) + lane_offset();
    }
  }
  // Bytes from the last multiple of 16 to an address. fetch() copies from that multiple on.
  __device__ __forceinline__ int misalignment(const void* address) const {
    return static_cast<int>(reinterpret_cast<uintptr_t>(address) % 16);
  }

  // The next four functions move kCount elements of this thread, from element j on: a whole vector with kVectors, a
  // vector or less with the other mappings. `staged` is the result of staged_elements(), and `array` the address in
  // global memory of the block's first column.

  template <class E, int kCount>
  __device__ __forceinline__ void read_shared(Acc (&v)[kCount], const E* staged, int j) const {
    if constexpr (kMapping == Mapping::kVectors) {
      const Vector<E, kCount> vector = *reinterpret_cast<const Vector<E, kCount>*>(staged + j * kWarpSize);
      widen(v, vector);
    } else {
      for (int e = 0; e < kCount; ++e) v[e] = static_cast<Acc>(staged[distance_to(j + e)]);
    }
  }
  template <class E, int kCount>
  __device__ __forceinline__ void write_shared(E* staged, int j, const Vector<E, kCount>& v) const {
    if constexpr (kMapping == Mapping::kVectors) {
      *reinterpret_cast<Vector<E, kCount>*>(staged + j * kWarpSize) = v;
    } else {
      for (int e = 0; e < kCount; ++e) staged[distance_to(j + e)] = v.values[e];
    }
  }
  // Elements at or after column `cols` are zeros.
  template <int kCount, class E>
  __device__ __forceinline__ Vector<E, kCount> load_global(const E* array, int j, int cols) const {
    Vector<E, kCount> v;
    const ThreadColumns columns = recomputed();
    const E* const from = keep_in_register(array + column(0));
    const auto exists = [&](int distance) { return column(0) + distance < cols; };
    if constexpr (kMapping == Mapping::kVectors) {
      const int distance = columns.distance_to(j);
      if (!exists(distance)) {
        fill(v, E(0.0f));
      } else {
        v = *reinterpret_cast<const Vector<E, kCount>*>(from + distance);
      }
    } else {
      for (int e = 0; e < kCount; ++e) {
        const int distance = columns.distance_to(j + e);
        v.values[e] = exists(distance) ? from[distance] : E(0.0f);
      }
    }
    return v;
  }
  // Stores the elements before column `cols`. Lanes that own neighbouring elements write whole sectors together.
  template <class E, int kCount>
  __device__ __forceinline__ void store_global(E* array, int j, const Acc (&v)[kCount], int cols) const {
    if constexpr (kMapping == Mapping::kVectors) {
      const Vector<E, kCount> rounded = round_to<E>(v);  // outside the condition, so that it needs no branch
      if (column(j) < cols) *reinterpret_cast<Vector<E, kCount>*>(array + column(j)) = rounded;
    } else {
      const ThreadColumns columns = recomputed();
      E* const to = keep_in_register(array + column(0));
      for (int e = 0; e < kCount; ++e) {
        const int distance = columns.distance_to(j + e);
        if (column(0) + distance < cols) to[distance] = static_cast<E>(v[e]);
      }
    }
  }
  // Loads a sample's weight (kWeight) or bias (kBias) of all columns of this thread; ones or zeros if the call has
  // none. The block has `cols` columns, from block_begin on.
  template <class T>
  __device__ __forceinline__ void load_parameter(Acc (&v)[kElements], Flag parameter, const View& view, int64_t sample,
                                                 int64_t block_begin, int cols, Flags flags) const {
    for (Acc& value : v) value = parameter == kWeight ? 1 : 0;
    if (!flags.has(parameter)) return;
    with_weight_type<T>(flags, [&](auto element) {
      const auto* const from = address<const decltype(element)>(view, {sample, 0}) + block_begin;
#pragma unroll
      for (int j = 0; j < kElements; j += kVec) {
        Acc wide[kVec];
        widen(wide, load_global<kVec>(from, j, cols));
        for (int e = 0; e < kVec; ++e)
          v[j + e] = parameter == kWeight && flags.has(kZeroCentered) ? wide[e] + 1 : wide[e];
      }
    });
  }

 private:
  // The part of a warp's memory for an array that has this lane's row.
  template <class E>
  __device__ __forceinline__ unsigned char* staged_row(unsigned char* shared) const {
    return shared +
           (kLanes == kWarpSize ? 0 : row_in_warp * (row_lanes() * kElements * static_cast<int>(sizeof(E)) + 16));
  }
};

// A variant: a class of rows and options, for which an instance of a kernel is compiled. The host chooses one for each
// call.
template <Mapping kMapping_, int kLanes_, unsigned kUnsupported_>
struct BasicVariant {
  static constexpr Mapping kMapping = kMapping_;
  static constexpr int kLanes = kLanes_;                   // see ThreadColumns
  static constexpr unsigned kUnsupported = kUnsupported_;  // flags that calls of this variant never have
  static constexpr bool kIsGeneral = kMapping == Mapping::kGeneral;
  static constexpr bool kRowSpansWarps = kLanes > 0;                    // a row has one or more whole warps
  static constexpr bool kRowFitsWarp = !kIsGeneral && !kRowSpansWarps;  // a row has some or all lanes of one warp
  static constexpr bool kIsGated = false;                               // has a gate
  using Index = std::conditional_t<kIsGeneral, int64_t, int>;           // of rows, segments and columns
};
constexpr unsigned kBlockUnsupported = kTwoLaunches | kMemoryEfficient | kInputScale;
constexpr unsigned kWarpUnsupported = kBlockUnsupported | kBlocksShareRow;
constexpr unsigned kGatedUnsupported = kResidual | kInputScale | kGradSum | kMemoryEfficient;
// The names of the first four say how many threads have a row, and which columns they own. Warp: a warp or less; Block:
// a block, or the blocks of a cluster. Vectors and Elements: Mapping::kVectors and kElements. GeneralRows decides both
// at run time, which takes more instructions. It has the rows and options for which the others are not compiled, such
// as rows of two launches and strides of more than 32 bits (see plan_launch() of each pass).
struct WarpVectors : BasicVariant<Mapping::kVectors, 0, kWarpUnsupported> {};
struct BlockVectors : BasicVariant<Mapping::kVectors, kWarpSize, kBlockUnsupported> {};
struct WarpElements : BasicVariant<Mapping::kElements, 0, kWarpUnsupported> {};
struct BlockElements : BasicVariant<Mapping::kElements, kWarpSize, kBlockUnsupported> {};
struct GeneralRows : BasicVariant<Mapping::kGeneral, 0, 0> {};              // all rows; all options but a gate
struct GatedRows : BasicVariant<Mapping::kGeneral, 0, kGatedUnsupported> {  // all rows of gated norms
  static constexpr bool kIsGated = true;
};

// Waits until the copies of the oldest of `stages` pending stages have arrived. async_wait() needs the number of stages
// that may still be pending, stages - 1, as a constant, so this recurses from kMostStages down to `stages`.
template <int kMostStages>
__device__ __forceinline__ void wait_for_stage(int stages) {
  if constexpr (kMostStages > 1) {
    if (stages < kMostStages) return wait_for_stage<kMostStages - 1>(stages);
  }
  async_wait<kMostStages - 1>();
  __syncwarp();
}

// Clears the flags that no call of this variant has, so that the compiler drops their code.
template <class Variant>
__device__ __forceinline__ Flags supported_flags(Flags flags) {
  return {flags.bits & ~(Variant::kUnsupported | kUnsupportedByCode)};
}

constexpr int kMinLanes = 2;  // per row

// How many blocks, warps and lanes share a row. Only the dtype and the number of columns decide this, because it
// determines the order of summation.
struct RowDivision {
  bool row_fits_warp;  // else a row has whole warps of one or more blocks
  bool whole_vectors;  // the row is whole vectors: threads own the columns of Mapping::kVectors
  int row_threads;     // per row in one block
  int block_cols;      // columns of a row that a block has; the last block may have fewer
  int row_blocks;      // per row

  // A block has at most max_block_vectors vectors of a row. A row of several blocks is divided further, up to a cluster
  // of 8, until a block has at most preferred_warps warps.
  template <class X>
  void divide(int64_t cols, int64_t preferred_warps, int64_t max_block_vectors = kMaxBlockVectors) {
    using Columns = ThreadColumns<X, Mapping::kGeneral, 0>;
    constexpr int64_t kVec = Columns::kVec, kWarpVectors = Columns::kWarpCols / kVec;
    constexpr int64_t kMaxWarps = kMaxBlockWarps;  // also the warps that are resident on a multiprocessor in backward
    const int64_t vectors = ceil_div(cols, kVec);
    whole_vectors = cols % kVec == 0;
    row_fits_warp = vectors <= std::min(kMaxWarpVectors, kWarpVectors);
    if (row_fits_warp) {
      row_blocks = 1;
      block_cols = static_cast<int>(cols);
      row_threads = kMinLanes;
      while (row_threads * Columns::kElements < cols) row_threads *= 2;
      return;
    }
    max_block_vectors = std::min({max_block_vectors, kMaxBlockVectors, kWarpVectors * kMaxWarps});
    int64_t blocks = 1;
    while (ceil_div(vectors, blocks) > max_block_vectors) blocks *= 2;
    const auto vectors_of_block = [&] { return round_up(ceil_div(vectors, blocks), kWarpSize); };
    // Whether more blocks should share the row: blocks of this size have too many warps, or so many that the blocks
    // which fit on a multiprocessor leave more than a quarter of its kMaxWarps unused.
    const auto needs_more = [&] {
      const int64_t warps = ceil_div(vectors_of_block(), kWarpVectors), resident_warps = kMaxWarps / warps * warps;
      return warps > preferred_warps || 4 * resident_warps < 3 * kMaxWarps;
    };
    // Clusters of 2, 4 or 8, because other sizes leave multiprocessors idle.
    while (blocks > 1 && blocks < kMaxClusterSize && needs_more()) blocks *= 2;
    // Rows that no cluster holds take two launches: their blocks are smaller, so that more of them keep the GPU busy.
    if (blocks > kMaxClusterSize) blocks = ceil_div(vectors, max_block_vectors / 2);
    block_cols = static_cast<int>(std::min((blocks == 1 ? vectors : vectors_of_block()) * kVec, cols));
    row_blocks = static_cast<int>(ceil_div(cols, block_cols));
    row_threads = static_cast<int>(ceil_div(block_cols, Columns::kWarpCols)) * kWarpSize;
  }
};

// Adds up three sums over the warps of a row, which are in one block: all warps call put(), a block barrier, and get().
// Two buffers take turns, so that one barrier per row suffices: between the get() of a row and the put() that reuses
// its buffer, two rows later, is the barrier of the row between them.
using WarpSumsMemory = Acc[2][3][kMaxBlockWarps + 1];  // [buffer][sum][warp]; the last "warp" stays 0

class WarpSums {
 public:
  // The row of this warp has the warps [first_warp, first_warp + row_warps) of the block. All threads of the block call
  // this, and then synchronize, because it clears the memory.
  __device__ __forceinline__ WarpSums(WarpSumsMemory& memory, int first_warp, int row_warps) {
    const int lane = threadIdx.x % kWarpSize, lane_of_sum = lane % kLanesPerSum;
    for (int i = threadIdx.x; i < 2 * kBuffer; i += blockDim.x) (&memory[0][0][0])[i] = 0;
    // Lanes 0, 16 and 8 put sums 0, 1 and 2. Lane l gets a warp's part of sum min(l / 8, 2), or 0.
    put_ = &memory[0][lane & 8 ? 2 : lane / 16][threadIdx.x / kWarpSize];
    const int get_warp = lane_of_sum < row_warps ? first_warp + lane_of_sum : kMaxBlockWarps;
    get_ = &memory[0][0][0] + keep_in_register(min(lane / kLanesPerSum, 2) * (kMaxBlockWarps + 1) + get_warp);
  }
  // Adds the sums over the lanes of the warp, and stores the results. This takes 6 shuffles instead of 15, because
  // lanes give up all sums but one: lanes 0 to 7 go on with sums[0], 16 to 23 with sums[1], and the others with
  // sums[2].
  __device__ __forceinline__ void put(const Acc (&sums)[3], int lane) {
    const auto add = [&](Acc kept, Acc sent, int offset) { return kept + __shfl_xor_sync(kAllLanes, sent, offset); };
    const bool second = lane & 16, third = lane & 8;
    const Acc a = add(second ? sums[1] : sums[0], second ? sums[0] : sums[1], 16), b = add(sums[2], sums[2], 16);
    Acc sum = add(third ? b : a, third ? a : b, 8);
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) sum = add(sum, sum, offset);
    if (lane == 0 || lane == 8 || lane == 16) put_[buffer_] = sum;
    buffer_ = kBuffer - buffer_;
  }
  // Adds the sums that the row's warps put last, for all lanes of all these warps. Lanes 8 k to 8 k + 7 each load sum k
  // of another warp, or of two.
  __device__ __forceinline__ void get(Acc (&sums)[3], int row_warps) {
    const Acc* const from = get_ + (kBuffer - buffer_);
    Acc sum = from[0];
    if (row_warps > kLanesPerSum) sum += from[kLanesPerSum];  // such a row has the whole block; absent warps are 0
#pragma unroll
    for (int offset = kLanesPerSum / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    for (int k = 0; k < 3; ++k) sums[k] = __shfl_sync(kAllLanes, sum, k * kLanesPerSum);
  }

 private:
  static constexpr int kLanesPerSum = 8;
  static constexpr int kBuffer = 3 * (kMaxBlockWarps + 1);  // elements
  Acc *put_, *get_;                                         // this lane's addresses in the first buffer
  int buffer_ = 0;                                          // 0 or kBuffer: the buffer of the next put()
};

}  // namespace layernorm::cuda
