// Slices: the columns of a row that a thread owns for a whole launch, so that their parameters and sums stay in
// registers; the asynchronous copies that bring the next rows to shared memory; and the sums of a row over its warps
// and blocks.
#pragma once

#include "row.cuh"

namespace layernorm::cuda {

// How the columns of a row are dealt to its lanes.
//   kVectors   a lane owns vectors of 16 bytes, and copies them itself: no other thread reads its shared memory. All
//              rows are aligned and whole vectors.
//   kElements  neighbouring lanes own neighbouring elements, which they read without bank conflicts at any alignment.
//              The lanes of a row copy the aligned 16 bytes ("granules") that cover it, and need __syncwarp().
//   kAny       the columns of either, chosen at run time; rows are copied and read as with kElements.
// The columns of a lane, and so the order of summation, depend on the number of columns and not on the alignment.
enum class Mapping { kVectors, kElements, kAny };

// The columns of a row of X, or of a block's part of one, that a thread owns. A row has `kLanes` lanes of a warp, or as
// many as run time says if that is 0; or several whole warps, each with successive columns.
template <class X, Mapping kMapping, int kLanes>
struct Slice {
  using Acc = AccOf<X>;
  static constexpr int kVec = kVectorSize<X>;
  static constexpr int kElements = sizeof(Acc) == 8 ? 8 : 16;  // of a thread
  static constexpr int kVectors = kElements / kVec;
  static constexpr int kWarpCols = kElements * kWarpSize;

  // The shared memory in which a warp stages an array of E. Each row may take one more granule.
  template <class E>
  static constexpr int kBytes = kWarpCols * static_cast<int>(sizeof(E)) +
                                (kMapping == Mapping::kVectors ? 0 : 16 * (kLanes == 0 ? kWarpSize : 1));

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

  // The same slice, whose offsets do not wait in registers.
  __device__ __forceinline__ Slice again() const {
    Slice slice = *this;
    if (kLanes == 0) slice.lanes_of_row = compute_again(lanes_of_row);
    if (kMapping == Mapping::kAny) slice.step_of_elements = compute_again(step_of_elements);
    return slice;
  }

  __device__ __forceinline__ int lanes() const { return kLanes == 0 ? lanes_of_row : kLanes; }
  __device__ __forceinline__ int element_step() const {
    return kMapping == Mapping::kAny ? step_of_elements : kMapping == Mapping::kVectors ? 1 : lanes();
  }
  __device__ __forceinline__ int first() const {
    const bool vectors = kMapping == Mapping::kVectors || (kMapping == Mapping::kAny && step_of_elements == 1);
    return vectors ? lane * kVec : lane;
  }
  // The column of element j, relative to `begin`, apart from that of element 0.
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
#pragma unroll
      for (int e = 0; e < kCount; ++e) v[e] = static_cast<Acc>(staged[step_to(j + e)]);
    }
  }
  // Replaces the elements of a staged row.
  template <class E, int kCount>
  __device__ __forceinline__ void write(E* staged, int j, const Vector<E, kCount>& v) const {
    if constexpr (kMapping == Mapping::kVectors) {
      *reinterpret_cast<Vector<E, kCount>*>(staged + j * kWarpSize) = v;
    } else {
#pragma unroll
      for (int e = 0; e < kCount; ++e) staged[step_to(j + e)] = v.values[e];
    }
  }
  // Loads the elements from global memory, and zeros after the end.
  template <int kCount, class E>
  __device__ __forceinline__ Vector<E, kCount> load(const E* array, int j, int cols, bool aligned = true) const {
    Vector<E, kCount> v;
    const Slice s = again();
    const E* const from = compute_once(array + column(0));
    const auto exists = [&](int step) { return column(0) + step < cols; };
    if constexpr (kMapping == Mapping::kVectors) {
      const int step = s.step_to(j);
      if (!exists(step)) {
        fill(v, E(0.0f));
      } else if (aligned) {
        v = *reinterpret_cast<const Vector<E, kCount>*>(from + step);
      } else {
#pragma unroll
        for (int e = 0; e < kCount; ++e) v.values[e] = from[step + e];
      }
    } else {
#pragma unroll
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
      const Slice s = again();
      E* const to = compute_once(array + column(0));
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const int step = s.step_to(j + e);
        if (column(0) + step < cols) to[step] = static_cast<E>(v[e]);
      }
    }
  }
  // Loads the elements of the weight or the bias of a group, from the block's first column on: of T or of Acc.
  template <class T>
  __device__ __forceinline__ void load_parameter(Acc (&v)[kElements], const View& view, const RowIndex& group,
                                                 int64_t first_column, int cols, Flags flags, Flag exists,
                                                 Acc default_value) const {
#pragma unroll
    for (Acc& value : v) value = default_value;
    if (!flags.has(exists)) return;
    with_parameter_type<T>(flags, [&](auto element) {
      const auto* const from = address<const decltype(element)>(view, group) + first_column;
#pragma unroll
      for (int j = 0; j < kElements; j += kVec) {
        Acc wide[kVec];
        widen(wide, load<kVec>(from, j, cols, flags.has(kAlignedParameters)));
#pragma unroll
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

// The instances of the kernels. The host code chooses one.
template <Mapping kMapping_, int kLanes_>
struct Path {
  static constexpr Mapping kMapping = kMapping_;
  static constexpr int kLanes = kLanes_;  // of a row in a warp; 0: known at run time
  static constexpr bool kIsAny = kMapping == Mapping::kAny, kIsBlock = kLanes > 0, kIsWarp = !kIsAny && !kIsBlock;
  static constexpr bool kIsGated = false;
  using Index = std::conditional_t<kIsAny, int64_t, int>;  // of rows, segments and columns
};
struct WarpVectors : Path<Mapping::kVectors, 0> {};             // aligned rows of whole vectors that a warp holds
struct BlockVectors : Path<Mapping::kVectors, kWarpSize> {};    // longer ones, also of clusters
struct WarpElements : Path<Mapping::kElements, 0> {};           // rows that are not whole vectors, of any alignment
struct BlockElements : Path<Mapping::kElements, kWarpSize> {};  // longer ones
struct AnyRows : Path<Mapping::kAny, 0> {};                     // all rows and options, except float64
struct GatedRows : Path<Mapping::kAny, 0> {                     // all rows of gated norms, and of float64
  static constexpr bool kIsGated = true;
};

constexpr int kMinLanes = 2;  // of a row

// The most threads of a row. Those of float64 need more than 128 registers.
template <class X>
constexpr int kMaxRowThreads = sizeof(AccOf<X>) == 8 ? 256 : kMaxBlockThreads;

// The lanes, warps and blocks of a row. They depend only on the dtype and the number of columns, and so does the order
// of summation.
struct RowDivision {
  bool is_warp;        // whether a warp holds a row
  bool deals_vectors;  // see Mapping
  int row_threads;
  int part_cols, num_parts;  // the parts of a row, of a block each
  Message* messages;         // of all blocks and rounds, if blocks share rows without a cluster

  // A block holds at most `max_vectors` of a part.
  template <class X>
  void divide(int64_t cols, int64_t max_vectors = kMaxPartVectors) {
    using SliceOf = Slice<X, Mapping::kAny, 0>;
    constexpr int64_t kVec = SliceOf::kVec, kWarpVectors = SliceOf::kWarpCols / kVec;
    const int64_t vectors = ceil_div(cols, kVec);
    deals_vectors = cols % kVec == 0;
    is_warp = vectors <= std::min(kMaxWarpVectors, kWarpVectors);
    constexpr int64_t kMaxWarps = kMaxRowThreads<X> / kWarpSize;  // also those that are resident on a multiprocessor
    const int64_t max_part = std::min({kMaxPartVectors, max_vectors, kWarpVectors * kMaxWarps});
    const auto part_for = [&](int64_t parts) { return round_up(ceil_div(vectors, parts), kWarpSize); };
    int64_t parts = is_warp ? 1 : ceil_div(vectors, max_part);
    // As few blocks as keep nearly all warps resident: a cluster of two would have 12 of 16 for 12288 columns.
    const auto resident_warps = [&] {
      const int64_t warps = ceil_div(part_for(parts), kWarpVectors);
      return kMaxWarps / warps * warps;
    };
    while (parts > 1 && parts < kMaxClusterSize && 8 * resident_warps() < 7 * kMaxWarps) ++parts;
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
constexpr int kMaxRowWarps = kMaxBlockThreads / kWarpSize;
template <class Acc>
using WarpSumsMemory = Acc[2][3][kMaxRowWarps + 1];  // the last one of each is 0

template <class Acc>
class WarpSums {
 public:
  // The row of this warp has `count` warps from `first` on; from 0 if they are more than kLanesPerSum. All threads call
  // this, and then synchronize.
  __device__ __forceinline__ WarpSums(WarpSumsMemory<Acc>& memory, int first, int count) {
    const int lane = threadIdx.x % kWarpSize, other = lane % kLanesPerSum;
    for (int i = threadIdx.x; i < 2 * kBuffer; i += blockDim.x) (&memory[0][0][0])[i] = 0;
    put_ = &memory[0][lane & 8 ? 2 : lane / 16][threadIdx.x / kWarpSize];
    const int get_warp = other < count ? first + other : kMaxRowWarps;
    // Without compute_once(), the terms of the sum would take a register each.
    get_ = &memory[0][0][0] + compute_once(min(lane / kLanesPerSum, 2) * (kMaxRowWarps + 1) + get_warp);
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
#pragma unroll
    for (int k = 0; k < 3; ++k) sums[k] = __shfl_sync(kAllLanes, sum, k * kLanesPerSum);
  }

 private:
  static constexpr int kLanesPerSum = 8;  // each reads the sum of another warp
  static constexpr int kBuffer = 3 * (kMaxRowWarps + 1);
  Acc *put_, *get_;
  int buffer_ = 0;  // of the next put(), in elements
};

// ---- the exchange of the parts of a row -----------------------------------------------------------------------------

// The exchange of three numbers of each part of a row between the row's blocks.
//
// The blocks of a cluster send them to each other's shared memory, where four buffers take turns. A block sends the
// numbers of row r after it has received those of row r - 2 from all blocks. Each of these had sent them after a
// barrier before which all its threads had read the numbers of row r - 4, which are now overwritten.
//
// The blocks of a grid publish them in global memory. Each part of each row has messages of its own, which are zero
// before the launch and stored once, so that no block reads older numbers. The tag and the words of a message are
// loaded at once, and blocks read nothing else that another block writes, so that no fence is needed. No block waits
// forever: all blocks are resident, those of a row take the rows in the same order, and they publish their numbers of a
// row before they wait for it. So the blocks of the first unfinished row have published theirs.
//
// If the blocks of a row are not resident at once, one launch stores the numbers, and the next one loads them.
template <class Acc, bool kAny>
class PartExchange {
 public:
  using Value = Acc[3];
  static constexpr int kBuffers = 4;
  struct Memory {
    Value values[kBuffers][kMaxClusterSize];
    TransactionBarrier barriers[kBuffers];
  };

  // One thread calls this before its cluster_arrive().
  __device__ __forceinline__ static void init(Memory& memory) {
    for (auto& barrier : memory.barriers) barrier.init();
  }

  // `staged` is shared memory of staged_bytes().
  __device__ __forceinline__ PartExchange(Memory& memory, void* staged, const RowDivision& plan, Flags flags)
      : memory_(memory), staged_(static_cast<Value*>(staged)), plan_(plan), flags_(flags) {}

  // The block sends the value of its part of a row. `round` counts the rows of the block. The comparisons of
  // threadIdx.x would wait in registers without compute_again().
  __device__ __forceinline__ void send(const Value& value, int round) const {
    const int buffer = round % kBuffers, part = blockIdx.x, thread = compute_again(static_cast<int>(threadIdx.x));
    if (flags_.has(kInCluster)) {
      if (thread == 0) memory_.barriers[buffer].expect(plan_.num_parts * sizeof(Value));
      if (thread < plan_.num_parts) memory_.barriers[buffer].store(memory_.values[buffer][part], value, thread);
    } else if (kAny && thread == 0 && !flags_.has(kReceivesSums)) {
#pragma unroll
      for (int k = 0; k < 3; ++k) stored(round)[part][k] = value[k];
    } else if (thread == 0 && flags_.has(kSendsSums)) {
#pragma unroll
      for (int m = 0; m < kMessages; ++m) {
        const unsigned* const words = reinterpret_cast<const unsigned*>(&value) + 3 * m;
        Message{1, {words[0], words[1], words[2]}}.publish(messages(round, part) + m);
      }
    }
  }
  // Returns to all threads the values of the row's parts. Each thread of a grid's block waits for one of them.
  __device__ __forceinline__ const Value* receive(int round) const {
    if (flags_.has(kInCluster)) {
      memory_.barriers[round % kBuffers].wait(round / kBuffers);
      return memory_.values[round % kBuffers];
    }
    if (kAny && !flags_.has(kSendsSums)) return stored(round);
    const int thread = compute_again(static_cast<int>(threadIdx.x));
    __syncthreads();  // all threads have read the last values
    if (thread < plan_.num_parts) {
#pragma unroll
      for (int m = 0; m < kMessages; ++m) {
        const Message message = Message::wait_for(messages(round, thread) + m);
#pragma unroll
        for (int w = 0; w < 3; ++w) reinterpret_cast<unsigned*>(&staged_[thread])[3 * m + w] = message.words[w];
      }
    }
    __syncthreads();
    return staged_;
  }

  // ---- for host code ----

  // The bytes of shared memory that a block of a grid needs. A grid has no more parts than threads.
  static size_t staged_bytes(const RowDivision& plan, int64_t threads) {
    return plan.num_parts > threads ? 0 : static_cast<size_t>(plan.num_parts) * sizeof(Value);
  }
  static int64_t message_bytes(dim3 grid, int64_t rounds) {
    return rounds * grid.y * grid.x * kMessages * static_cast<int64_t>(sizeof(Message));
  }

 private:
  static constexpr int kMessages = sizeof(Value) / sizeof(Message::words);

  // The blocks of a row have the same blockIdx.y and round.
  __device__ __forceinline__ static int64_t first_part(int round) {
    return (int64_t{compute_again(round)} * gridDim.y + blockIdx.y) * gridDim.x;
  }
  __device__ __forceinline__ Message* messages(int round, int part) const {
    return plan_.messages + (first_part(round) + part) * kMessages;
  }
  __device__ __forceinline__ Value* stored(int round) const {
    return reinterpret_cast<Value*>(plan_.messages) + first_part(round);
  }

  Memory& memory_;
  Value* const staged_;
  const RowDivision& plan_;
  const Flags flags_;
};

// Returns how many rows the resident blocks of a kernel hold, if they can exchange the values of the rows' parts. If it
// is 0, a row takes two launches of an instance for any rows.
template <class Params, class Plan>
int resident_rows(const LaunchConfig& config, void (*kernel)(Params, Plan), const Plan& plan) {
  const bool in_grid = plan.num_parts > static_cast<int>(config.cluster);
  const bool fits = plan.num_parts <= static_cast<int>(config.block.x) && has_cooperative_launches(config);
  return in_grid && !fits ? 0 : resident_blocks(config, kernel) / plan.num_parts;
}

// Launches a kernel whose blocks exchange the values of a row's parts through plan.messages, of `bytes`.
template <class Params, class Plan>
void launch_grid(LaunchConfig config, void (*kernel)(Params, Plan), const Params& p, Plan plan, int64_t bytes) {
  config.cooperative = resident_rows(config, kernel, plan) > 0;
  plan.flags.set(kSendsSums, true);
  if (config.cooperative) {
    clear(config, plan.messages, static_cast<size_t>(bytes));
  } else {
    launch(config, kernel, p, plan);
    plan.flags.set(kSendsSums, false);
  }
  plan.flags.set(kReceivesSums, true);
  launch(config, kernel, p, plan);
}

}  // namespace layernorm::cuda
