// What CUDA's documentation says of the collectives and instructions that the kernels use, as checks that run
// in kernels. Compiled by g++ they test the emulator, in several schedules; compiled by nvcc they test these
// checks on a GPU.
#include <cstdio>
#include <memory>

#include "device.h"

using namespace layernorm;

namespace {

constexpr unsigned kAll = 0xffffffffu;

// `wrong` holds the line of a check that failed, or 0.
#define EXPECT(...)                        \
  do {                                     \
    if (!(__VA_ARGS__)) *wrong = __LINE__; \
  } while (0)

// ---- warps ------------------------------------------------------------------------------------------------
__global__ void shuffles(int width, int* wrong) {
  const int lane = threadIdx.x % 32, begin = lane / width * width;
  const double v = 100.0 + lane;
  for (int k = 0; k < 32; ++k) {
    EXPECT(__shfl_sync(kAll, v, k, width) == 100.0 + begin + k % width);
    EXPECT(__shfl_up_sync(kAll, v, k, width) == (lane - k >= begin ? 100.0 + lane - k : v));
    EXPECT(__shfl_down_sync(kAll, v, k, width) == (lane + k < begin + width ? 100.0 + lane + k : v));
    const int other = lane ^ k;
    EXPECT(__shfl_xor_sync(kAll, v, k, width) == (other < begin + width ? 100.0 + other : v));
  }
  const __nv_bfloat16 b = __float2bfloat16(static_cast<float>(lane));
  EXPECT(__bfloat162float(__shfl_xor_sync(kAll, b, 1)) == static_cast<float>(lane ^ 1));
  const __half2 h = __floats2half2_rn(static_cast<float>(lane), -1.f);
  EXPECT(__low2float(__shfl_down_sync(kAll, h, 1)) == static_cast<float>(lane < 31 ? lane + 1 : 31));
}
__global__ void votes(int* wrong) {
  const unsigned lane = threadIdx.x % 32;
  EXPECT(__ballot_sync(kAll, lane % 3 == 0) == 0x49249249u);
  EXPECT(__any_sync(kAll, lane == 31));
  EXPECT(!__any_sync(kAll, 0));
  EXPECT(!__all_sync(kAll, lane != 5));
  EXPECT(__all_sync(kAll, 7));
  EXPECT(__syncthreads_count(threadIdx.x < 40) == 40);
  EXPECT(__syncthreads_or(threadIdx.x == 70) != 0);
  EXPECT(__syncthreads_or(0) == 0);
  EXPECT(__syncthreads_and(threadIdx.x != 70) == 0);
  EXPECT(__syncthreads_and(1) != 0);
}
// The halves of a warp in different branches, each with its own mask.
__global__ void branches(int* wrong) {
  const int lane = threadIdx.x % 32;
  int sum = lane;
  if (lane < 16) {
    for (int o = 8; o > 0; o /= 2) sum += __shfl_xor_sync(0x0000ffffu, sum, o);
    EXPECT(sum == 120);
  } else {
    __syncwarp(0xffff0000u);
    for (int o = 8; o > 0; o /= 2) sum += __shfl_xor_sync(0xffff0000u, sum, o);
    EXPECT(sum == 376);
  }
  __syncwarp();
}
// 20 lanes, of which 4 leave: the full mask means those that remain.
__global__ void part_of_a_warp(int* wrong) {
  EXPECT(__ballot_sync(kAll, 1) == 0xfffffu);
  if (threadIdx.x < 4) return;
  EXPECT(__ballot_sync(kAll, 1) == 0xffff0u);
}

// ---- indices and atomics ----------------------------------------------------------------------------------
__global__ void count_threads(int* counts) {
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  atomicAdd(&counts[block * 24 + thread], 1);
}
__global__ void check_counts(const int* counts, int* wrong) { EXPECT(counts[blockIdx.x * 24 + threadIdx.x] == 1); }
__global__ void atomics(int* counts) {
  atomicAdd(&counts[0], 1);
  if (atomicCAS(&counts[1], 0, 5) == 0) atomicExch(&counts[2], 77);
}
__global__ void check_atomics(const int* counts, int* wrong) {
  EXPECT(counts[0] == 192 && counts[1] == 5 && counts[2] == 77);
}

// ---- memory -----------------------------------------------------------------------------------------------
__global__ void arithmetic(int* wrong) {
  EXPECT(min(3, -2) == -2 && max(2.5f, 1.f) == 2.5f);
  EXPECT(__float_as_uint(1.f) == 0x3f800000u && __uint_as_float(0x40000000u) == 2.f);
  EXPECT(__fsqrt_rn(9.f) == 3.f && __frcp_rn(4.f) == 0.25f && __fdiv_rn(1.f, 8.f) == 0.125f);
  EXPECT(__fmaf_rn(3.f, 4.f, 5.f) == 17.f && __fadd_rn(1.f, 2.f) == 3.f && __fsub_rn(1.f, 2.f) == -1.f);
  EXPECT(__fmul_rn(3.f, 4.f) == 12.f && rsqrt(4.0) == 0.5);
#if defined(LAYERNORM_EMULATE)  // rough on purpose
  EXPECT(rsqrtf(4.f) == 0.5f + 0x1p-14f);
#else
  EXPECT(rsqrtf(4.f) > 0.4999999f && rsqrtf(4.f) < 0.5000001f);  // 2 ulp
#endif
}
__global__ void fill(float* row) { row[threadIdx.x] = static_cast<float>(threadIdx.x); }
__global__ void cached_loads(const float* row, int* wrong) {
  EXPECT(__ldg(&row[threadIdx.x]) == static_cast<float>(threadIdx.x));
  const uint4 v = load_once(reinterpret_cast<const uint4*>(row) + threadIdx.x / 4);
  EXPECT(__uint_as_float(v.w) == static_cast<float>(threadIdx.x / 4 * 4 + 3));
}
// Two groups of copies: the older is waited for first.
__global__ void async_copies(const float* row, int* wrong) {
  LAYERNORM_DYNAMIC_SHARED(tiles, float4);
  for (int stage = 0; stage < 2; ++stage) {
    async_copy16(&tiles[stage * 16 + threadIdx.x], row + 4 * (stage * 16 + threadIdx.x));
    async_commit();
  }
  async_wait<1>();
  EXPECT(tiles[threadIdx.x].y == 4.f * threadIdx.x + 1);
  async_wait<0>();
  __syncthreads();
  EXPECT(tiles[16 + (threadIdx.x ^ 1)].z == 64.f + 4 * (threadIdx.x ^ 1) + 2);
}

// ---- mbarriers and clusters
// ------------------------------------------------------------------------------------------------ Phases,
// with and without bytes; the parity before the first phase counts as complete.
__global__ void phases(const float* row, int* wrong) {
  LAYERNORM_DYNAMIC_SHARED(tile, float);
  LAYERNORM_SHARED(full, MBarrier);
  LAYERNORM_SHARED(counted, MBarrier);
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init(&counted, blockDim.x);
    mbarrier_fence_init();
  }
  __syncthreads();
  mbarrier_wait(&full, 1);
  for (unsigned round = 0; round < 3; ++round) {
    if (threadIdx.x == 0) {
      mbarrier_arrive(&full, 256);
      bulk_copy(tile, row + 4 * round, 128, &full);
      bulk_copy(tile + 32, row + 32 + 4 * round, 128, &full);
    }
    mbarrier_wait(&full, round % 2);
    EXPECT(tile[threadIdx.x] == 4.f * round + threadIdx.x);
    mbarrier_arrive(&counted);
    mbarrier_wait(&counted, round % 2);
  }
}
__global__ void clusters(int* wrong) {
  LAYERNORM_SHARED(mine, float);
  LAYERNORM_SHARED(inbox, uint64_t[4]);
  LAYERNORM_SHARED(received, MBarrier);
  const unsigned rank = cluster_rank();
  EXPECT(rank == blockIdx.x % 4);
  if (threadIdx.x == 0) {
    mine = static_cast<float>(rank);
    mbarrier_init(&received, 1);
    mbarrier_fence_init();
    mbarrier_arrive(&received, 4 * sizeof(uint64_t));
  }
  cluster_arrive();
  cluster_wait();
  EXPECT(*cluster_peer(&mine, (rank + 1) % 4) == static_cast<float>((rank + 1) % 4));
  if (threadIdx.x < 4) store_async(&inbox[rank], 100 + rank, &received, threadIdx.x);
  mbarrier_wait(&received, 0);
  EXPECT(inbox[threadIdx.x % 4] == 100 + threadIdx.x % 4);
  cluster_arrive();
  cluster_wait();
}
__global__ void first_grid(float* row) {
  wait_for_previous_grid();
  row[threadIdx.x] = 3.f;
  let_next_grid_start();
}
__global__ void next_grid(const float* row, int* wrong) {
  wait_for_previous_grid();
  EXPECT(row[threadIdx.x ^ 1] == 3.f);
}

// Zeroed memory for kernels.
template <class T>
class Buffer {
 public:
#if defined(__CUDACC__)
  explicit Buffer(size_t n)
      : data_([n] {
          void* data = nullptr;
          cudaMallocManaged(&data, n * sizeof(T));
          cudaMemset(data, 0, n * sizeof(T));
          return static_cast<T*>(data);
        }()) {}
  ~Buffer() { cudaFree(data_); }
  operator T*() const { return data_; }

 private:
  T* data_;
#else
  explicit Buffer(size_t n) : data_(new T[n]()) {
    emulator::register_buffer(data_.get(), n * sizeof(T), "buffer", emulator::Contents::kInOut);
  }
  operator T*() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
#endif
};

// The line of a check that failed, or 0.
int run() {
  const Buffer<int> counts(5 * 3 * 2 * 24), totals(3), result(1);
  const Buffer<float> row(256);
  int* wrong = result;
  for (int width = 1; width <= 32; width *= 2) launch({2, 64}, shuffles, width, wrong);
  launch({2, 96}, votes, wrong);
  launch({2, 64}, branches, wrong);
  launch({2, 20}, part_of_a_warp, wrong);
  launch({dim3(5, 3, 2), dim3(2, 3, 4)}, count_threads, counts);
  launch({5 * 3 * 2, 24}, check_counts, counts, wrong);
  launch({2, 96}, atomics, totals);
  launch({1, 1}, check_atomics, totals, wrong);
  launch({1, 1}, arithmetic, wrong);
  launch({1, 256}, fill, row);
  launch({2, 256}, cached_loads, row, wrong);
  launch({2, 16, 32 * sizeof(float4)}, async_copies, row, wrong);
  if (has_clusters(clusters)) {
    const LaunchConfig with_tile{1, 64, 256};
    if (resident_blocks(with_tile, phases) < 1) return __LINE__;
    launch(with_tile, phases, row, wrong);
    launch({8, 32, 0, nullptr, 4}, clusters, wrong);
    if (resident_blocks({8, 32, 0, nullptr, 4}, clusters) % 4 != 0) return __LINE__;
    launch({1, 256, 0, nullptr, 1, true}, first_grid, row);
    launch({1, 256, 0, nullptr, 1, true}, next_grid, row, wrong);
  }
#if defined(__CUDACC__)
  if (cudaDeviceSynchronize() != cudaSuccess) return __LINE__;
#endif
  return *wrong;
}

}  // namespace

int main() {
#if defined(__CUDACC__)
  const int wrong = run();
#else
  int wrong = 0;
  for (int schedule = 0; schedule < 6 && wrong == 0; ++schedule) {
    emulator::options().order = static_cast<emulator::Order>(schedule < 2 ? schedule : 2);
    emulator::options().seed = schedule;
    emulator::options().concurrent_blocks = 1 + schedule;
    wrong = run();
    emulator::clear_buffers();
  }
#endif
  std::printf("%d\n", wrong);
}
