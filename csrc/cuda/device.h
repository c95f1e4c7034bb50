// The only file that knows nvcc from a host compiler: launching, shared memory, and the instructions that
// CUDA C++ has no spelling for. The kernels are written against it, and compile twice: by nvcc for a GPU, and
// by g++ with LAYERNORM_EMULATE for the emulator of tests/emulator, which runs them on a CPU and checks what
// they do.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cxxabi.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

// LAYERNORM_SHARED(partial, float[32]); declares shared memory, LAYERNORM_DYNAMIC_SHARED(row, float); points
// to the dynamic part, aligned to 16 bytes.
#define LAYERNORM_SHARED(name, ...)       \
  using name##_shared_type = __VA_ARGS__; \
  __shared__ name##_shared_type name
#define LAYERNORM_DYNAMIC_SHARED(name, ...)                                 \
  extern __shared__ __align__(16) unsigned char layernorm_dynamic_shared[]; \
  auto* name = reinterpret_cast<__VA_ARGS__*>(layernorm_dynamic_shared)

#elif defined(LAYERNORM_EMULATE)

#include "cuda_on_cpu.h"

#define LAYERNORM_SHARED EMULATOR_SHARED
#define LAYERNORM_DYNAMIC_SHARED EMULATOR_DYNAMIC_SHARED

#else
#error "compile with nvcc, or with LAYERNORM_EMULATE for the emulator"
#endif

namespace layernorm {

// ---- launching: for host code -----------------------------------------------------------------------------

#if defined(__CUDACC__)
using Stream = cudaStream_t;
#else
using Stream = void*;
#endif

struct LaunchConfig {
  dim3 grid, block;
  size_t shared_bytes = 0;  // dynamic
  Stream stream = nullptr;
  unsigned cluster = 1;            // blocks per cluster, along x; more than 1 from compute capability 9.0 on
  bool overlaps_previous = false;  // with the stream's previous kernel, see wait_for_previous_grid
#if !defined(__CUDACC__)
  emulator::Place place = emulator::Place::current();
#endif
};

#if defined(__CUDACC__)

namespace launching {

inline std::string kernel_name(const void* kernel) {
  const char* mangled = nullptr;
  if (cudaFuncGetName(&mangled, kernel) != cudaSuccess) return "a kernel";
  int status = 0;
  char* plain = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  const std::string name = status == 0 ? plain : mangled;
  std::free(plain);
  return name.substr(0, name.rfind('('));
}

inline std::string describe(const dim3& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

inline std::string describe(const void* kernel, const LaunchConfig& config) {
  return "launch of " + kernel_name(kernel) + " with grid " + describe(config.grid) + ", block " +
         describe(config.block) + ", cluster " + std::to_string(config.cluster) + ", " +
         std::to_string(config.shared_bytes) + " bytes of dynamic shared memory";
}

// Throws unless a call of the CUDA runtime has succeeded; describe() says what was attempted.
template <class F>
void check(cudaError_t status, const F& describe) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which the next call would report again
  throw std::runtime_error(std::string("layernorm: ") + describe() + ": " + cudaGetErrorString(status));
}

// The value of `key`, which make() computes the first time.
template <class Value, class Key, class F>
Value remember(const Key& key, const F& make) {
  static std::mutex mutex;
  static std::map<Key, Value> values;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = values.find(key);
  return found != values.end() ? found->second : values.emplace(key, make()).first->second;
}

inline int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), [] { return "asking for the current device"; });
  return device;
}

struct Device {
  int multiprocessors, l2_bytes;
  int shared_bytes;  // the most that a block may have, static and dynamic, once the kernel has opted in
};

// The current device.
inline Device device() {
  const int index = current_device();
  return remember<Device>(index, [&] {
    const auto get = [&](cudaDeviceAttr attribute) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, attribute, index), [&] {
        return "asking for attribute " + std::to_string(attribute) + " of device " + std::to_string(index);
      });
      return value;
    };
    return Device{get(cudaDevAttrMultiProcessorCount), get(cudaDevAttrL2CacheSize),
                  get(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
  });
}

struct KernelInfo {
  int architecture;  // compute capability that the kernel's code was generated for: 80, 90, 100, ...
};

// A kernel on the current device. The first call opts in to all of the device's shared memory: up to 48 KiB need no
// opt-in, but that limit is for static and dynamic shared memory together.
inline KernelInfo kernel_info(const void* kernel, const LaunchConfig& config) {
  return remember<KernelInfo>(std::pair(kernel, current_device()), [&] {
    const auto what = [&] { return describe(kernel, config); };
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, kernel), what);
    const int dynamic = device().shared_bytes - static_cast<int>(attributes.sharedSizeBytes);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic), what);
    return KernelInfo{attributes.ptxVersion};
  });
}

// The driver's configuration, whose attributes point into it.
struct Config {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2];

  Config(const LaunchConfig& from, const KernelInfo& kernel) {
    config.gridDim = from.grid;
    config.blockDim = from.block;
    config.dynamicSmemBytes = from.shared_bytes;
    config.stream = from.stream;
    config.attrs = attributes;
    if (from.cluster > 1) {
      auto& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = from.cluster;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    if (from.overlaps_previous && kernel.architecture >= 90) {
      auto& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
  }
  Config(const Config&) = delete;
};

}  // namespace launching

// Whether a kernel can use what compute capability 9.0 introduced: clusters, bulk copies, overlapping launches. That is
// decided by the code, not by the device: PTX for 8.0, compiled by the driver of an H100, contains none of it.
template <class... Params>
bool has_clusters(void (*kernel)(Params...)) {
  return launching::kernel_info(reinterpret_cast<const void*>(kernel), {}).architecture >= 90;
}

// Bytes of shared memory that a block may have on the current device, static and dynamic.
inline size_t max_shared_memory() { return static_cast<size_t>(launching::device().shared_bytes); }

// Bytes of the current device's second-level cache.
inline int64_t l2_cache_size() { return launching::device().l2_bytes; }

// The most blocks of a grid in its second dimension.
constexpr int64_t largest_grid_y() { return 65535; }

// The length of the longest rows that a kernel takes: as given, but the emulator's tests may lower it, to send short
// rows to the kernels for long ones.
constexpr int64_t path_limit(int64_t limit) { return limit; }

// How much work one launch does where more is left to two: as given, but the emulator's tests may lower it.
constexpr int64_t one_launch_limit(int64_t limit) { return limit; }

// How many blocks of a kernel the current device runs at once: at least one. `config.grid` does not matter. Asked of
// the driver once.
template <class... Params>
int resident_blocks(const LaunchConfig& config, void (*kernel)(Params...)) {
  const auto address = reinterpret_cast<const void*>(kernel);
  const auto info = launching::kernel_info(address, config);
  const unsigned threads = config.block.x * config.block.y * config.block.z;
  const std::tuple key(address, launching::current_device(), threads, config.shared_bytes, config.cluster);
  return launching::remember<int>(key, [&] {
    const auto what = [&] { return launching::describe(address, config); };
    int blocks = 0;
    if (config.cluster > 1) {
      LaunchConfig one_cluster = config;
      one_cluster.grid = dim3(config.cluster);
      const launching::Config driver_config(one_cluster, info);
      launching::check(cudaOccupancyMaxActiveClusters(&blocks, kernel, &driver_config.config), what);
      blocks *= static_cast<int>(config.cluster);
    } else {
      launching::check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, static_cast<int>(threads),
                                                                     config.shared_bytes),
                       what);
      blocks *= launching::device().multiprocessors;
    }
    if (blocks == 0) throw std::runtime_error("layernorm: " + what() + ": no block fits on the device");
    return blocks;
  });
}

// The only way to start a kernel. Throws, with the kernel's name and configuration, if it cannot be launched.
template <class... Params, class... Args>
void launch(const LaunchConfig& config, void (*kernel)(Params...), const Args&... args) {
  const auto address = reinterpret_cast<const void*>(kernel);
  const launching::Config driver_config(config, launching::kernel_info(address, config));
  launching::check(cudaLaunchKernelEx(&driver_config.config, kernel, static_cast<Params>(args)...),
                   [&] { return launching::describe(address, config); });
}

#else

template <class... Params>
bool has_clusters(void (*)(Params...)) {
  return emulator::options().architecture >= 90;
}

inline size_t max_shared_memory() { return emulator::max_shared_memory(); }

inline int64_t l2_cache_size() { return 16 * 1024; }  // little, so that rows go by several groups

inline int64_t largest_grid_y() { return 5; }  // few, for the same reason

inline int64_t path_limit(int64_t limit) {
  const int64_t lowered = emulator::options().path_limit;
  return lowered < limit ? lowered : limit;
}

inline int64_t one_launch_limit(int64_t limit) {
  const int64_t lowered = emulator::options().one_launch_limit;
  return lowered < limit ? lowered : limit;
}

template <class... Params>
int resident_blocks(const LaunchConfig& config, void (*)(Params...)) {
  return emulator::options().resident_blocks * static_cast<int>(config.cluster);
}

template <class... Params, class... Args>
void launch(const LaunchConfig& config, void (*kernel)(Params...), const Args&... args) {
  emulator::launch(
      {config.grid, config.block, config.shared_bytes, config.cluster, config.overlaps_previous, config.place}, kernel,
      args...);
}

#endif

// ---- instructions: for kernels. PTX ISA names in the comments ---------------------------------------------

#if defined(__CUDACC__)
// An address in shared memory as PTX wants it.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
#endif

// The instructions of compute capability 9.0 trap in code for an older one: host code asks has_clusters().
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define LAYERNORM_SM90_ASM(...) __trap()
#else
#define LAYERNORM_SM90_ASM(...) asm volatile(__VA_ARGS__)
#endif

// threadIdx.x, asked for again: what is computed from it in a loop does not wait in registers for the next round.
__device__ __forceinline__ unsigned thread_again() {
#if defined(__CUDACC__)
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
#else
  return threadIdx.x;
#endif
}

// x / y to within a few units in the last place.
__device__ __forceinline__ float fast_divide(float x, float y) {
#if defined(__CUDACC__)
  return __fdividef(x / 4, y / 4);  // which takes numbers beyond 2^126 for infinite
#else
  return x / y;
#endif
}
__device__ __forceinline__ double fast_divide(double x, double y) { return x / y; }

// 1 / x to within a unit in the last place, for whole numbers x.
__device__ __forceinline__ float approximate_reciprocal(float x) {
#if defined(__CUDACC__)
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
#else
  return 1 / x;
#endif
}
__device__ __forceinline__ double approximate_reciprocal(double x) { return 1 / x; }

// 16 bytes that are read once: past L1, which is left to the weights. The launch must not write them.
__device__ __forceinline__ uint4 load_once(const uint4* address) {
#if defined(__CUDACC__)
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
#else
  emulator::read_only_load(address, sizeof(uint4));
  return *address;
#endif
}

// Brings to the cache what is at an address that exists.
__device__ __forceinline__ void prefetch([[maybe_unused]] const void* address) {
#if defined(__CUDACC__)
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
#endif
}

// cp.async: 16 bytes from global to shared memory. The thread's copies up to a commit form a group;
// async_wait<n> waits until at most the n newest groups are under way, and shows the others to this thread
// (to its block: after a barrier).
__device__ __forceinline__ void async_copy16(void* shared, const void* global) {
#if defined(__CUDACC__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
#else
  emulator::async_copy(shared, global, 16);
#endif
}
// The same, or 16 bytes of zeros if there is nothing at `global`.
__device__ __forceinline__ void async_copy16_or_zeros(void* shared, const void* global, bool exists) {
#if defined(__CUDACC__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(exists ? 16 : 0)
               : "memory");
#else
  emulator::async_copy(shared, exists ? global : nullptr, 16);
#endif
}
__device__ __forceinline__ void async_commit() {
#if defined(__CUDACC__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emulator::async_commit();
#endif
}
template <int kGroupsLeft>
__device__ __forceinline__ void async_wait() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
#else
  emulator::async_wait(kGroupsLeft);
#endif
}

// mbarrier: in shared memory; counts arrivals and the bytes that asynchronous copies bring. A phase ends, and
// the next begins, when both are complete.
struct alignas(8) MBarrier {
  uint64_t state;
};

// By one thread; then the fence, then a barrier of the block or cluster before others use it.
__device__ __forceinline__ void mbarrier_init(MBarrier* barrier, unsigned arrivals) {
#if defined(__CUDACC__)
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#else
  emulator::mbarrier_init(barrier, arrivals);
#endif
}
// Shows the thread's initialisations to the cluster and to bulk copies.
__device__ __forceinline__ void mbarrier_fence_init() {
#if defined(__CUDACC__)
  LAYERNORM_SM90_ASM("fence.mbarrier_init.release.cluster;" :: : "memory");
#else
  emulator::mbarrier_fence_init();
#endif
}
// Arrives, and tells that copies will bring so many bytes in this phase: at most 1048575.
__device__ __forceinline__ void mbarrier_arrive(MBarrier* barrier, unsigned expected_bytes = 0) {
#if defined(__CUDACC__)
  LAYERNORM_SM90_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                     "r"(expected_bytes) : "memory");
#else
  emulator::mbarrier_arrive(barrier, expected_bytes);
#endif
}
// Waits for the end of the phase of this parity: 0 for the first, 1 for the second, and so on. Shows what its
// copies brought and what happened before its arrivals. The scope is the block, to which the barrier is local:
// acquiring for the cluster would also invalidate the L1 cache (CCTL.IVALL), and with it the weights.
__device__ __forceinline__ void mbarrier_wait(MBarrier* barrier, unsigned parity) {
#if defined(__CUDACC__)
  unsigned done = 0;
  while (done == 0) {
    LAYERNORM_SM90_ASM(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}" : "=r"(done) : "r"(shared_address(barrier)),
        "r"(parity) : "memory");
  }
#else
  emulator::mbarrier_wait(barrier, parity);
#endif
}
// Whether there are bulk copies, which complete on mbarriers: from compute capability 9.0 on.
__device__ __forceinline__ bool has_bulk_copies() {
#if !defined(__CUDACC__)
  return emulator::has_bulk_copies();
#elif __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}
// cp.async.bulk: from global to shared memory; addresses and size are multiples of 16 bytes. Completes on the
// mbarrier.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, unsigned bytes, MBarrier* barrier) {
#if defined(__CUDACC__)
  LAYERNORM_SM90_ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(shared)),
                     "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory");
#else
  emulator::bulk_copy(shared, global, bytes, barrier);
#endif
}

// Clusters: blocks that run together and reach each other's shared memory. A block must not return while
// others may still reach for its shared memory, nor be reached for before it has started: both take a cluster
// barrier or an mbarrier.
__device__ __forceinline__ unsigned cluster_rank() {
#if defined(__CUDACC__)
  unsigned rank = 0;
  LAYERNORM_SM90_ASM("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return emulator::cluster_rank();
#endif
}
// The barrier of all threads of the cluster, in two halves: what comes before an arrival is seen after the
// wait.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDACC__)
  LAYERNORM_SM90_ASM("barrier.cluster.arrive.release.aligned;" :: : "memory");
#else
  emulator::cluster_arrive();
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDACC__)
  LAYERNORM_SM90_ASM("barrier.cluster.wait.acquire.aligned;" :: : "memory");
#else
  emulator::cluster_wait();
#endif
}
// Where the block of this rank has what is at `shared` here.
template <class T>
__device__ __forceinline__ T* cluster_peer(T* shared, unsigned rank) {
#if defined(__CUDACC__)
  uint64_t address = 0;
  LAYERNORM_SM90_ASM("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
  return reinterpret_cast<T*>(address);
#else
  return static_cast<T*>(emulator::cluster_peer(shared, rank));
#endif
}
// st.async: 8 bytes into the shared memory of the block of this rank; counts as 8 bytes at its mbarrier.
// `shared` and `barrier` are the caller's own, the peer's lie at the same place.
__device__ __forceinline__ void store_async(uint64_t* shared, uint64_t value, MBarrier* barrier, unsigned rank) {
#if defined(__CUDACC__)
  LAYERNORM_SM90_ASM(
      "{\n"
      ".reg .b32 to, barrier;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 barrier, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [to], %1, [barrier];\n"
      "}" ::"r"(shared_address(shared)),
      "l"(value), "r"(shared_address(barrier)), "r"(rank) : "memory");
#else
  emulator::store_async(shared, value, barrier, rank);
#endif
}

// griddepcontrol: in a launch with overlaps_previous, what the previous kernel writes may be read, and what
// it reads may be written, after this wait alone. Else, and before compute capability 9.0, it is nothing.
__device__ __forceinline__ void wait_for_previous_grid() {
#if !defined(__CUDACC__)
  emulator::wait_for_previous_grid();
#elif __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start, if it overlaps_previous, once all blocks have come here or returned.
__device__ __forceinline__ void let_next_grid_start() {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#undef LAYERNORM_SM90_ASM

}  // namespace layernorm
