// Slice: the columns of a row that a thread owns for a whole launch, so that their parameters and sums stay in
// registers. Path: the constants that select an instance of a kernel. WarpSums: the sums of a row over its warps.
#pragma once

#include "row.cuh"

namespace layernorm::cuda {

// How the columns of a row are dealt to its lanes.
//   kVectors   a lane owns vectors of 16 bytes, and copies them itself: no other thread reads its shared memory. All
//              rows are aligned and whole vectors.
//   kElements  neighbouring lanes own neighbouring elements, which they read without bank conflicts at any alignment.
//              The lanes of a row copy the aligned 16 bytes ("granules") that cover it, and need __syncwarp().
//   kGeneral   the columns of either, chosen at run time; rows are copied and read as with kElements.
// Example: 1023 bfloat16 columns are not whole vectors of 8, so kElements. A warp covers 16 * 32 = 512 columns, and the
// row has two warps, which begin at columns 0 and 512. For each warp, lane l owns the columns begin + l + 32 * j, for j
// from 0 to 15: lane 0 has 0, 32, ..., 480 and lane 31 has 31, 63, ..., 511; in the second warp, lane 0 has 512, 544,
// ..., 992 and lane 30 has 542, ..., 1022. The last column of its lane 31 would be 1023, which does not exist and is 0.
// Row r starts 2046 * r bytes after the first: 14 bytes after a multiple of 16 for r = 1, so that offset_of() is 14,
// and fetch() copies 65 granules for the first warp, two by each lane and the last one by lane 0.
// With 1024 columns, kVectors: lane l owns begin + 8 * l to begin + 8 * l + 7, and the eight columns 256 further.
// The columns of a lane, and so the order of summation, depend on the number of columns and not on the alignment.
enum class Mapping { kVectors, kElements, kGeneral };

// The columns of a row of X, or of a block's part of one, that a thread owns. A row has `kLanes` lanes of a warp, or as
// many as run time says if that is 0; or several whole warps, each with successive columns.
template <class X, Mapping kMapping, int kLanes>
struct Slice {
  static constexpr int kVec = kVectorSize<X>;
  static constexpr int kElements = 16;  // of a thread
  static constexpr int kVectors = kElements / kVec;
  static constexpr int kWarpCols = kElements * kWarpSize;

  // The bytes of shared memory in which a warp stages an array of E. Each of its rows may take one more granule.
  template <class E>
  __host__ __device__ static constexpr int staged_bytes(int rows) {
    return kWarpCols * static_cast<int>(sizeof(E)) + (kMapping == Mapping::kVectors ? 0 : 16 * rows);
  }

  int begin;  // the first column of the warp
  int lane_in_warp;
  int lane;                            // among the lanes of the row in this warp
  int row;                             // of the warp
  int lanes_of_row, step_of_elements;  // if run time decides

  // `warp` is the index of the warp among those of the row.
  __device__ __forceinline__ Slice(int warp, int lanes, bool vectors)
      : begin(warp * kWarpCols),
        lane_in_warp(compute_once(static_cast<int>(threadIdx.x % kWarpSize))),
        lane(kLanes == 0 ? lane_in_warp & (lanes - 1) : lane_in_warp),
        row(kLanes == 0 ? lane_in_warp / lanes : 0),
        lanes_of_row(lanes),
        step_of_elements(vectors ? 1 : lanes) {}

  // The same slice for another phase of a row: see compute_again(). The columns of vectors take few registers.
  __device__ __forceinline__ Slice rebuilt() const {
    Slice slice = *this;
    if (kMapping == Mapping::kVectors) return slice;
    if (kLanes == 0) slice.lanes_of_row = compute_again(lanes_of_row);
    if (kMapping == Mapping::kGeneral) slice.step_of_elements = compute_again(step_of_elements);
    return slice;
  }

  __device__ __forceinline__ int lanes() const { return kLanes == 0 ? lanes_of_row : kLanes; }
  __device__ __forceinline__ int element_step() const {
    return kMapping == Mapping::kGeneral ? step_of_elements : kMapping == Mapping::kVectors ? 1 : lanes();
  }
  __device__ __forceinline__ int first() const {
    const bool vectors = kMapping == Mapping::kVectors || (kMapping == Mapping::kGeneral && step_of_elements == 1);
    return vectors ? lane * kVec : lane;
  }
  // The distance of element j's column from that of element 0.
  __device__ __forceinline__ int step_to(int j) const {
    return j / kVec * (kVec * lanes()) + j % kVec * element_step();
  }
  __device__ __forceinline__ int column(int j) const { return begin + first() + step_to(j); }

  // Starts to copy a row, or a block's part of one, of `cols` columns to the warp's shared memory. The other columns
  // become zeros.
  template <class E>
  __device__ __forceinline__ void fetch(unsigned char* shared, const E* array, int cols) const {
    if constexpr (kMapping == Mapping::kVectors) {
      constexpr int kVectorBytes = kVec * sizeof(E);
      unsigned char* const to = shared + lane_in_warp * kVectorBytes;
      const E* const from = compute_once(array + column(0));
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        async_copy<kVectorBytes>(to + i * kWarpSize * kVectorBytes, from + step_to(i * kVec),
                                 column(i * kVec) < cols ? kVectorBytes : 0);
      }
    } else {
      constexpr int kGranules = kElements * sizeof(E) / 16;
      const E* const from = compute_once(array + begin);
      const int offset = offset_of(from), n = min(cols - begin, lanes() * kElements);
      const int end = n > 0 ? offset + n * static_cast<int>(sizeof(E)) : 0;
      unsigned char* const to = row_of<E>(shared);
      const auto copy = [&](int granule) {
        async_copy<16>(to + granule * 16, reinterpret_cast<const unsigned char*>(from) - offset + granule * 16,
                       min(max(end - granule * 16, 0), 16), granule == 0 ? offset : 0);
      };
#pragma unroll
      for (int i = 0; i < kGranules; ++i) copy(i * lanes() + lane);
      if (lane == 0) copy(kGranules * lanes());
    }
  }

  // Where fetch() puts this thread's first element of a row. `offset` is from offset_of() for that row.
  template <class E>
  __device__ __forceinline__ E* staged(unsigned char* shared, int offset) const {
    if constexpr (kMapping == Mapping::kVectors) {
      return reinterpret_cast<E*>(shared) + lane_in_warp * kVec;
    } else {
      return reinterpret_cast<E*>(row_of<E>(shared) + offset) + first();
    }
  }
  // The distance of this warp's columns from the aligned 16 bytes before them. Aligned rows have none.
  __device__ __forceinline__ int offset_of(const void* first_column) const {
    return static_cast<int>(reinterpret_cast<uintptr_t>(first_column) % 16);
  }
  // The following functions process kCount elements of this thread from element j on: one of its vectors, or fewer
  // elements unless the mapping is kVectors.

  // Reads the elements of a staged row.
  template <class E, int kCount>
  __device__ __forceinline__ void read(Acc (&v)[kCount], const E* staged, int j) const {
    if constexpr (kMapping == Mapping::kVectors) {
      const Vector<E, kCount> vector = *reinterpret_cast<const Vector<E, kCount>*>(staged + j * kWarpSize);
      widen(v, vector);
    } else {
      for (int e = 0; e < kCount; ++e) v[e] = static_cast<Acc>(staged[step_to(j + e)]);
    }
  }
  // Replaces the elements of a staged row.
  template <class E, int kCount>
  __device__ __forceinline__ void write(E* staged, int j, const Vector<E, kCount>& v) const {
    if constexpr (kMapping == Mapping::kVectors) {
      *reinterpret_cast<Vector<E, kCount>*>(staged + j * kWarpSize) = v;
    } else {
      for (int e = 0; e < kCount; ++e) staged[step_to(j + e)] = v.values[e];
    }
  }
  // Loads the elements from global memory, and zeros after the end.
  template <int kCount, class E>
  __device__ __forceinline__ Vector<E, kCount> load(const E* array, int j, int cols) const {
    Vector<E, kCount> v;
    const Slice s = rebuilt();
    const E* const from = compute_once(array + column(0));
    const auto exists = [&](int step) { return column(0) + step < cols; };
    if constexpr (kMapping == Mapping::kVectors) {
      const int step = s.step_to(j);
      if (!exists(step)) {
        fill(v, E(0.0f));
      } else {
        v = *reinterpret_cast<const Vector<E, kCount>*>(from + step);
      }
    } else {
      for (int e = 0; e < kCount; ++e) {
        const int step = s.step_to(j + e);
        v.values[e] = exists(step) ? from[step] : E(0.0f);
      }
    }
    return v;
  }
  // Stores the elements in global memory. Lanes that own neighbouring elements write whole sectors together.
  template <class E, int kCount>
  __device__ __forceinline__ void store(E* array, int j, const Acc (&v)[kCount], int cols) const {
    if constexpr (kMapping == Mapping::kVectors) {
      const Vector<E, kCount> rounded = round_to<E>(v);  // ahead of the test, which then takes no branch
      if (column(j) < cols) *reinterpret_cast<Vector<E, kCount>*>(array + column(j)) = rounded;
    } else {
      const Slice s = rebuilt();
      E* const to = compute_once(array + column(0));
      for (int e = 0; e < kCount; ++e) {
        const int step = s.step_to(j + e);
        if (column(0) + step < cols) to[step] = static_cast<E>(v[e]);
      }
    }
  }
  // Loads the elements of the weight or the bias of a sample, from the block's first column on: of T or float.
  template <class T>
  __device__ __forceinline__ void load_parameter(Acc (&v)[kElements], const View& view, const RowIndex& sample,
                                                 int64_t first_column, int cols, Flags flags, Flag exists,
                                                 Acc default_value) const {
    for (Acc& value : v) value = default_value;
    if (!flags.has(exists)) return;
    with_parameter_type<T>(flags, [&](auto element) {
      const auto* const from = address<const decltype(element)>(view, sample) + first_column;
#pragma unroll
      for (int j = 0; j < kElements; j += kVec) {
        Acc wide[kVec];
        widen(wide, load<kVec>(from, j, cols));
        for (int e = 0; e < kVec; ++e) v[j + e] = exists == kWeight && flags.has(kZeroCentered) ? wide[e] + 1 : wide[e];
      }
    });
  }

 private:
  template <class E>
  __device__ __forceinline__ unsigned char* row_of(unsigned char* shared) const {
    return shared + (kLanes == kWarpSize ? 0 : row * (lanes() * kElements * static_cast<int>(sizeof(E)) + 16));
  }
};

// The paths: for which rows and options an instance of a kernel is compiled. The host code chooses one.
template <Mapping kMapping_, int kLanes_, unsigned kAbsent_>
struct BasicPath {
  static constexpr Mapping kMapping = kMapping_;
  static constexpr int kLanes = kLanes_;         // of a row in a warp; 0: known at run time
  static constexpr unsigned kAbsent = kAbsent_;  // the flags of calls that take another path
  static constexpr bool kIsGeneral = kMapping == Mapping::kGeneral, kIsBlock = kLanes > 0;
  static constexpr bool kIsWarp = !kIsGeneral && !kIsBlock, kIsGated = false;
  using Index = std::conditional_t<kIsGeneral, int64_t, int>;  // of rows, segments and columns
};
constexpr unsigned kNotOfBlocks = kTwoLaunches | kMemoryEfficient | kInputScale, kNotOfWarps = kNotOfBlocks | kHasParts;
struct WarpVectors : BasicPath<Mapping::kVectors, 0, kNotOfWarps> {};              // rows of whole vectors, in a warp
struct BlockVectors : BasicPath<Mapping::kVectors, kWarpSize, kNotOfBlocks> {};    // longer ones, also of clusters
struct WarpElements : BasicPath<Mapping::kElements, 0, kNotOfWarps> {};            // rows that are not whole vectors
struct BlockElements : BasicPath<Mapping::kElements, kWarpSize, kNotOfBlocks> {};  // longer ones
struct GeneralRows : BasicPath<Mapping::kGeneral, 0, 0> {};                        // all rows and options
struct GatedRows
    : BasicPath<Mapping::kGeneral, 0, kResidual | kInputScale | kGradSum | kMemoryEfficient> {  // of gated norms
  static constexpr bool kIsGated = true;
};

// Waits for the copies of the oldest of `stages` stages, which are at most kMostStages.
template <int kMostStages>
__device__ __forceinline__ void wait_for_stage(int stages) {
  if constexpr (kMostStages > 1) {
    if (stages < kMostStages) return wait_for_stage<kMostStages - 1>(stages);
  }
  async_wait<kMostStages - 1>();
  __syncwarp();
}

// Clears the flags that no call of this path has, so that the compiler drops their code.
template <class Path>
__device__ __forceinline__ Flags flags_of(Flags flags) {
  return {flags.bits & ~(Path::kAbsent | kNotSupported)};
}

constexpr int kMinLanes = 2;  // of a row

// The lanes, warps and blocks of a row. They depend only on the dtype and the number of columns, and so does the order
// of summation.
struct RowDivision {
  bool is_warp;        // whether a warp holds a row
  bool deals_vectors;  // see Mapping
  int row_threads;
  int part_cols, num_parts;  // the parts of a row, of a block each

  // A part has at most `max_part` vectors. A row of several parts is divided further, up to the blocks of a cluster,
  // until a part has at most `preferred_warps` warps.
  template <class X>
  void divide(int64_t cols, int64_t preferred_warps, int64_t max_part = kMaxPartVectors) {
    using SliceOf = Slice<X, Mapping::kGeneral, 0>;
    constexpr int64_t kVec = SliceOf::kVec, kWarpVectors = SliceOf::kWarpCols / kVec;
    const int64_t vectors = ceil_div(cols, kVec);
    deals_vectors = cols % kVec == 0;
    is_warp = vectors <= std::min(kMaxWarpVectors, kWarpVectors);
    constexpr int64_t kMaxWarps = kMaxBlockWarps;  // also those that are resident on a multiprocessor in backward
    max_part = std::min({max_part, kMaxPartVectors, kWarpVectors * kMaxWarps});
    const auto part_for = [&](int64_t parts) { return round_up(ceil_div(vectors, parts), kWarpSize); };
    int64_t parts = 1;
    if (!is_warp) {
      // Clusters of 2, 4 or 8, because others leave multiprocessors idle: the smallest whose blocks have at most the
      // preferred number of warps and keep most warps resident, or else 8.
      const auto needs_more = [&] {
        const int64_t warps = ceil_div(part_for(parts), kWarpVectors), resident_warps = kMaxWarps / warps * warps;
        return warps > preferred_warps || 4 * resident_warps < 3 * kMaxWarps;
      };
      while (ceil_div(vectors, parts) > max_part) parts *= 2;
      while (parts > 1 && parts < kMaxClusterSize && needs_more()) parts *= 2;
    }
    if (parts > kMaxClusterSize) parts = ceil_div(vectors, max_part / 2);  // more blocks keep the GPU busy
    const int64_t part = parts == 1 ? vectors : part_for(parts);
    part_cols = static_cast<int>(std::min(part * kVec, cols));
    num_parts = static_cast<int>(ceil_div(cols, part_cols));
    row_threads = static_cast<int>(ceil_div(part_cols, SliceOf::kWarpCols)) * kWarpSize;
    if (!is_warp) return;
    row_threads = kMinLanes;
    while (row_threads * SliceOf::kElements < cols) row_threads *= 2;
  }
};

// The sums of the warps of a block's rows. Two buffers take turns, so that one block barrier per row suffices: between
// put() and get() for the same row, and so between get() and the put() that overwrites what it reads.
using WarpSumsMemory = Acc[2][3][kMaxBlockWarps + 1];  // the last one of each is 0

class WarpSums {
 public:
  // The row of this warp has `count` warps from `first` on; from 0 if they are more than kLanesPerSum. All threads call
  // this, and then synchronize.
  __device__ __forceinline__ WarpSums(WarpSumsMemory& memory, int first, int count) {
    const int lane = threadIdx.x % kWarpSize, other = lane % kLanesPerSum;
    for (int i = threadIdx.x; i < 2 * kBuffer; i += blockDim.x) (&memory[0][0][0])[i] = 0;
    put_ = &memory[0][lane & 8 ? 2 : lane / 16][threadIdx.x / kWarpSize];
    const int get_warp = other < count ? first + other : kMaxBlockWarps;
    get_ = &memory[0][0][0] + compute_once(min(lane / kLanesPerSum, 2) * (kMaxBlockWarps + 1) + get_warp);
  }
  // Adds up three sums in 6 shuffles, instead of 15: some lanes go on with the first, others with another one.
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
  // Returns the sums that the row's `count` warps put last.
  __device__ __forceinline__ void get(Acc (&sums)[3], int count) {
    const Acc* const from = get_ + (kBuffer - buffer_);
    Acc sum = from[0];
    if (count > kLanesPerSum) sum += from[kLanesPerSum];  // 0 if there is no such warp
#pragma unroll
    for (int offset = kLanesPerSum / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    for (int k = 0; k < 3; ++k) sums[k] = __shfl_sync(kAllLanes, sum, k * kLanesPerSum);
  }

 private:
  static constexpr int kLanesPerSum = 8;  // each reads the sum of another warp
  static constexpr int kBuffer = 3 * (kMaxBlockWarps + 1);
  Acc *put_, *get_;
  int buffer_ = 0;  // of the next put(), in elements
};

}  // namespace layernorm::cuda
