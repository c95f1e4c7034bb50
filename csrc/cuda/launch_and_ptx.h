// The kernels' interface to CUDA: launches, and PTX instructions for which CUDA C++ has no function. Other
// files have no inline assembly, and launch kernels only by launch().
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cxxabi.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace layernorm {

// ---- launches, for host code ----------------------------------------------------------------------------------------

using Stream = cudaStream_t;

// Throws if a call of the CUDA runtime failed. describe() returns the description of the call for the message.
template <class F>
void check_status(cudaError_t status, const F& describe) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error; the next call would report it again
  throw std::runtime_error(std::string("layernorm: ") + describe() + ": " + cudaGetErrorString(status));
}

// Returns the value of `key` from a cache; make() computes it the first time. Each call in the source has its own
// cache: the type of its lambda is unique, so that it calls an instance of this template with its own static variables.
template <class Value, class Key, class F>
Value cached(const Key& key, const F& make) {
  static std::mutex mutex;
  static std::map<Key, Value> values;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = values.find(key);
  return found != values.end() ? found->second : values.emplace(key, make()).first->second;
}

inline int current_device() {
  int device = 0;
  check_status(cudaGetDevice(&device), [] { return "asking for the current device"; });
  return device;
}

inline int device_attribute(int device, cudaDeviceAttr attribute) {
  return cached<int>(std::pair(device, attribute), [&] {
    int value = 0;
    check_status(cudaDeviceGetAttribute(&value, attribute, device), [&] {
      return "asking for attribute " + std::to_string(attribute) + " of device " + std::to_string(device);
    });
    return value;
  });
}

struct LaunchConfig {
  dim3 grid, block;
  size_t shared_bytes = 0;  // dynamic shared memory of a block
  Stream stream = nullptr;
  unsigned cluster = 1;            // blocks per cluster, along x; more than 1 needs compute capability 9.0
  bool overlaps_previous = false;  // may start before the stream's previous kernel ends, see wait_for_previous_grid()
  int device = current_device();
};

// The most bytes of static and dynamic shared memory together that a block may have on the device.
inline size_t max_shared_memory(const LaunchConfig& config) {
  return static_cast<size_t>(device_attribute(config.device, cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

// Returns the kernel's demangled name and its launch configuration, for error messages.
inline std::string describe(const void* kernel, const LaunchConfig& config) {
  const char* mangled = nullptr;
  if (cudaFuncGetName(&mangled, kernel) != cudaSuccess) mangled = "a kernel";
  int status = 0;
  char* const plain = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  const std::string name = status == 0 ? plain : mangled;
  std::free(plain);
  const auto text = [](const dim3& d) {
    return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
  };
  return "launch of " + name.substr(0, name.rfind('(')) + " with grid " + text(config.grid) + ", block " +
         text(config.block) + ", cluster " + std::to_string(config.cluster) + ", " +
         std::to_string(config.shared_bytes) + " bytes of dynamic shared memory";
}

// Returns the compute capability that a kernel was compiled for: 80, 90, 100, ... The first call on a device also lets
// the kernel use all of the device's shared memory, without which it could use 48 KiB, static memory included.
inline int architecture_of(const void* kernel, const LaunchConfig& config) {
  return cached<int>(std::pair(kernel, config.device), [&] {
    const auto what = [&] { return describe(kernel, config); };
    cudaFuncAttributes attributes;
    check_status(cudaFuncGetAttributes(&attributes, kernel), what);
    const int dynamic = static_cast<int>(max_shared_memory(config) - attributes.sharedSizeBytes);
    check_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic), what);
    return attributes.ptxVersion;
  });
}

// A LaunchConfig as cudaLaunchKernelExC() takes it. It points to its own attributes, so it cannot be copied.
struct DriverConfig {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2];

  DriverConfig(const LaunchConfig& from, int architecture) {
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
    if (from.overlaps_previous && architecture >= 90) {
      auto& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
  }
  DriverConfig(const DriverConfig&) = delete;
};

// Returns whether a kernel has the features of compute capability 9.0: clusters and overlapping launches. The
// kernel's code decides, not the device: PTX for 8.0 has none of them, even if the driver compiles it for an H100.
template <class... Params>
bool has_clusters(const LaunchConfig& config, void (*kernel)(Params...)) {
  return architecture_of(reinterpret_cast<const void*>(kernel), config) >= 90;
}

// Returns how many blocks of a kernel are resident on the device at once, and throws if none fits. Ignores config.grid.
// The driver is asked once per kernel and configuration.
inline int resident_blocks(const LaunchConfig& config, const void* kernel) {
  const int architecture = architecture_of(kernel, config);
  const unsigned threads = config.block.x * config.block.y * config.block.z;
  const std::tuple key(kernel, config.device, threads, config.shared_bytes, config.cluster);
  return cached<int>(key, [&] {
    const auto what = [&] { return describe(kernel, config); };
    int blocks = 0;
    if (config.cluster > 1) {
      LaunchConfig one_cluster = config;
      one_cluster.grid = dim3(config.cluster);
      const DriverConfig driver_config(one_cluster, architecture);
      check_status(cudaOccupancyMaxActiveClusters(&blocks, kernel, &driver_config.config), what);
      blocks *= static_cast<int>(config.cluster);
    } else {
      check_status(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, kernel, static_cast<int>(threads),
                                                                          config.shared_bytes, cudaOccupancyDefault),
                   what);
      blocks *= device_attribute(config.device, cudaDevAttrMultiProcessorCount);
    }
    if (blocks == 0) throw std::runtime_error("layernorm: " + what() + ": no block fits on the device");
    return blocks;
  });
}

template <class... Params>
int resident_blocks(const LaunchConfig& config, void (*kernel)(Params...)) {
  return resident_blocks(config, reinterpret_cast<const void*>(kernel));
}

// Launches a kernel, or throws with its name and configuration.
inline void launch(const LaunchConfig& config, const void* kernel, void** arguments) {
  const DriverConfig driver_config(config, architecture_of(kernel, config));
  check_status(cudaLaunchKernelExC(&driver_config.config, kernel, arguments), [&] { return describe(kernel, config); });
}
template <class... Params, class... Args>
void launch(const LaunchConfig& config, void (*kernel)(Params...), const Args&... args) {
  std::tuple<Params...> arguments(static_cast<Params>(args)...);
  std::apply(
      [&](Params&... each) {
        void* addresses[] = {&each...};
        launch(config, reinterpret_cast<const void*>(kernel), addresses);
      },
      arguments);
}

// ---- PTX instructions, for kernels ----------------------------------------------------------------------------------

// Instructions of compute capability 9.0 trap in older code. Host code asks has_clusters() before it needs them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define LAYERNORM_SM90_ASM(...) __trap()
#else
#define LAYERNORM_SM90_ASM(...) asm volatile(__VA_ARGS__)
#endif

// Converts a pointer into shared memory to the 32-bit address that PTX uses.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Control over registers. A kernel keeps its rows or its column sums in registers. They spill to local memory if the
// compiler also keeps addresses, column numbers and elements converted to float from one phase of a row (its sums) to
// the next (its results). Both functions return their argument, through an empty instruction that hides its value:
//
//   recompute_from(v)    the compiler computes what depends on the result again, and reuses nothing of an earlier phase
//   keep_in_register(v)  the compiler keeps the result, and does not compute v again for each use
//
// Arrays stay in registers if the loops over them are unrolled. The compiler unrolls loops over the elements of a
// vector by itself; `#pragma unroll` marks the loops over vectors.
template <class T>
__device__ __forceinline__ T* keep_in_register(T* global) {
  asm("" : "+l"(global));
  __builtin_assume(__isGlobal(global));
  return global;
}
__device__ __forceinline__ int keep_in_register(int value) {
  asm("" : "+r"(value));
  return value;
}
template <class Value>  // of 4 bytes or a multiple
__device__ __forceinline__ Value recompute_from(Value v) {
  if constexpr (std::is_same_v<Value, int64_t>) {
    asm volatile("" : "+l"(v));
  } else {
#pragma unroll
    for (unsigned i = 0; i < sizeof(Value) / 4; ++i) asm volatile("" : "+r"(reinterpret_cast<uint32_t*>(&v)[i]));
  }
  return v;
}
// The compiler does not move loads and stores across this, which emits no instruction.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

// Returns x / y with an error of a few units in the last place.
__device__ __forceinline__ float fast_divide(float x, float y) {
  return __fdividef(x / 4, y / 4);  // __fdividef returns 0 for a divisor beyond 2^126
}

// Prefetches a valid address into the L1 cache.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}
__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Loads a vector of 8, 16 or 32 bytes from global memory if `condition` is true, and else leaves `v` as it is. The load
// is predicated, because the compiler would copy the vector if a branch were around it. kConstant is for memory that no
// thread of the kernel writes and several rows read: the L1 cache keeps it. Other loads allocate no lines there.
template <bool kConstant, class Vector>
__device__ __forceinline__ void load_vector_if(bool condition, Vector& v, const void* from) {
  auto* const to = reinterpret_cast<uint32_t*>(&v);
  const auto* const words = static_cast<const uint32_t*>(from);
  const auto predicate = static_cast<unsigned>(condition);
  if constexpr (sizeof(Vector) == 8) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];}"
                 : "+r"(to[0]), "+r"(to[1])
                 : "l"(words), "r"(predicate));
  } else {
#pragma unroll
    for (unsigned i = 0; i < sizeof(Vector) / 4; i += 4) {
      if constexpr (kConstant) {
        asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];}"
                     : "+r"(to[i]), "+r"(to[i + 1]), "+r"(to[i + 2]), "+r"(to[i + 3])
                     : "l"(words + i), "r"(predicate));
      } else {
        asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];}"
                     : "+r"(to[i]), "+r"(to[i + 1]), "+r"(to[i + 2]), "+r"(to[i + 3])
                     : "l"(words + i), "r"(predicate));
      }
    }
  }
}

// cp.async: starts to copy `bytes` bytes from global to shared memory, where zeros follow them up to kBytes = 4, 8 or
// 16. async_commit() makes the thread's copies since the last commit a group. `unused` is the number of leading bytes
// that precede the array, because a copy of 16 bytes must start at a multiple of 16. No thread reads them; only the
// emulator, which checks bounds, needs their number.
template <int kBytes>
__device__ __forceinline__ void async_copy(void* shared, const void* global, int bytes = kBytes, int /*unused*/ = 0) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global),
                 "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the newest kPendingGroups groups of copies are pending. The thread then sees its other copies;
// the other threads of the block see them after a barrier.
template <int kPendingGroups>
__device__ __forceinline__ void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPendingGroups) : "memory");
}

// The index of the block in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
  LAYERNORM_SM90_ASM("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// The two halves of a barrier for all threads of the cluster. After it, all blocks have started and all barriers that
// were initialized before are valid. It orders no other memory accesses.
__device__ __forceinline__ void cluster_arrive() {
  LAYERNORM_SM90_ASM("barrier.cluster.arrive.relaxed.aligned;" :: : "memory");
}
__device__ __forceinline__ void cluster_wait() { LAYERNORM_SM90_ASM("barrier.cluster.wait.aligned;" :: : "memory"); }

// mbarrier: a barrier in the shared memory of a block, which waits for data that the blocks of its cluster store there.
// Its phases are numbered from 0. A phase ends when its bytes have been announced and as many have arrived.
class TransactionBarrier {
 public:
  // One thread calls this before its cluster_arrive().
  __device__ __forceinline__ void init() {
    LAYERNORM_SM90_ASM("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(this)) : "memory");
    LAYERNORM_SM90_ASM("fence.mbarrier_init.release.cluster;" :: : "memory");
  }
  // Announces the bytes that will arrive in the current phase. One thread calls this in each phase.
  __device__ __forceinline__ void expect(unsigned bytes) {
    const unsigned barrier = shared_address(this);
    LAYERNORM_SM90_ASM("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  }
  // Waits for the end of a phase, which is the current one or the one before. Orders memory at the scope of the block,
  // the default: the data are in the block's shared memory, and the scope of the cluster would invalidate the L1 cache.
  __device__ __forceinline__ void wait(unsigned phase) {
    const unsigned barrier = shared_address(this);
    [[maybe_unused]] const unsigned parity = phase % 2;
    for (unsigned ended = 0; !ended;) {
      LAYERNORM_SM90_ASM(
          "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(ended) : "r"(
              barrier),
          "r"(parity) : "memory");
    }
  }
  // st.async: stores a value to the variable `shared` of the block with this rank in the cluster, which may be this
  // block itself. The bytes then count as arrived at the same barrier of that block.
  template <class T>
  __device__ __forceinline__ void store(T& shared, const T& value, unsigned rank) {
    const auto* words = reinterpret_cast<const unsigned*>(&value);
    const unsigned to = peer_address(&shared, rank), barrier = peer_address(this, rank);
#pragma unroll
    for (unsigned i = 0; i < sizeof(T); i += 4) {
      LAYERNORM_SM90_ASM("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to + i),
                         "r"(words[i / 4]), "r"(barrier) : "memory");
    }
  }

 private:
  // The address of the same shared variable in another block of the cluster.
  __device__ __forceinline__ static unsigned peer_address(const void* shared, unsigned rank) {
    unsigned address = 0;
    LAYERNORM_SM90_ASM("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
    return address;
  }

  uint64_t state_;
};

// griddepcontrol (programmatic dependent launch): a kernel launched with overlaps_previous calls this before it reads
// what the previous kernel writes, or writes what it reads. Does nothing in other launches.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start, if it is launched with overlaps_previous, once all blocks of this kernel have called this
// function or returned.
__device__ __forceinline__ void let_next_grid_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#undef LAYERNORM_SM90_ASM

}  // namespace layernorm
