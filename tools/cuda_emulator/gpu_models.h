// The limits of GPUs on a launch, for the emulator and the launch audit.
//
// Source: CUDA C++ Programming Guide, "Compute Capabilities" (limits of blocks and multiprocessors) and "Shared Memory"
// (more than 48 KiB of static and dynamic memory needs cudaFuncSetAttribute).
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace gpu_models {

struct Gpu {
  const char* name;
  int architecture;  // compute capability: 80, 90, ...
  int multiprocessors;
  int warps, blocks, shared_bytes;  // the most on a multiprocessor
  int shared_bytes_of_block;        // after cudaFuncSetAttribute
};

constexpr Gpu kGpus[] = {
    {"A100", 80, 108, 64, 32, 164 << 10, 163 << 10},      // Ampere
    {"A10", 86, 72, 48, 16, 100 << 10, 99 << 10},         // Ampere
    {"L4", 89, 58, 48, 24, 100 << 10, 99 << 10},          // Ada
    {"H200", 90, 132, 64, 32, 228 << 10, 227 << 10},      // Hopper
    {"B200", 100, 148, 64, 32, 228 << 10, 227 << 10},     // Blackwell
    {"RTX 5090", 120, 170, 48, 24, 100 << 10, 99 << 10},  // Blackwell
};
constexpr int kWarpSize = 32, kRegisters = 64 << 10, kMaxThreads = 1024, kMaxCluster = 8;
constexpr int kReservedShared = 1 << 10;  // bytes of each block, which the system uses
constexpr int kSharedWithoutOptIn = 48 << 10;

template <class Predicate>
const Gpu& find(const Predicate& is_wanted) {
  const auto gpu = std::find_if(std::begin(kGpus), std::end(kGpus), is_wanted);
  if (gpu == std::end(kGpus)) throw std::invalid_argument("no such GPU in gpu_models.h");
  return *gpu;
}

// The resources of a kernel's code, as printed by `cuobjdump -res-usage`.
struct Kernel {
  int registers = 0;      // of a thread; 0: unknown
  int static_shared = 0;  // bytes
  int architecture = 0;   // of the code
};

struct Launch {
  uint64_t grid[3];
  uint64_t threads;  // of a block
  uint64_t dynamic_shared;
  unsigned cluster;        // blocks
  bool overlaps_previous;  // programmatic stream serialization
};

// Returns how many blocks of a kernel are resident on a multiprocessor; 0 if the launch is invalid.
inline int resident_blocks(const Gpu& gpu, const Kernel& kernel, uint64_t threads, uint64_t dynamic_shared) {
  const uint64_t shared = dynamic_shared + static_cast<uint64_t>(kernel.static_shared);
  if (threads == 0 || threads > kMaxThreads || shared > static_cast<uint64_t>(gpu.shared_bytes_of_block)) return 0;
  const int warps = static_cast<int>(threads + kWarpSize - 1) / kWarpSize;
  const int registers_of_warp = std::max((kernel.registers * kWarpSize + 255) / 256 * 256, 256);
  const int warps_by_registers = kRegisters / registers_of_warp / 4 * 4;  // each of four schedulers has as many warps
  return std::min({warps_by_registers / warps, gpu.warps / warps, gpu.blocks,
                   gpu.shared_bytes / (static_cast<int>(shared) + kReservedShared)});
}

// Returns why the GPU refuses a launch, or runs it incorrectly; empty if it does neither. `allowed` is the dynamic
// shared memory that cudaFuncSetAttribute allowed.
inline std::string refusal(const Gpu& gpu, const Kernel& kernel, const Launch& launch, uint64_t allowed) {
  const auto text = [](auto number) { return std::to_string(number); };
  const auto [x, y, z] = launch.grid;
  const uint64_t static_shared = static_cast<uint64_t>(kernel.static_shared);
  const uint64_t shared = launch.dynamic_shared + static_shared;
  const uint64_t most_shared = static_cast<uint64_t>(gpu.shared_bytes_of_block);
  const uint64_t most_allowed = std::max(uint64_t{kSharedWithoutOptIn}, allowed + static_shared);
  const std::string code = "code for " + text(kernel.architecture);
  if (launch.threads == 0 || launch.threads > kMaxThreads) {
    return "invalid block size: " + text(launch.threads) + " threads";
  }
  if (x - 1 >= 0x7fffffffu || y - 1 >= 65535 || z - 1 >= 65535) {
    return "invalid grid size: " + text(x) + " x " + text(y) + " x " + text(z);
  }
  if (launch.cluster == 0 || launch.cluster > kMaxCluster || x % launch.cluster != 0) {
    return "invalid cluster size: " + text(launch.cluster) + " for a grid of " + text(x);
  }
  if (launch.cluster > 1 && gpu.architecture < 90) return "clusters need compute capability 9.0";
  if (launch.cluster > 1 && kernel.architecture < 90) return code + " has no instructions for clusters";
  if (launch.overlaps_previous && kernel.architecture < 90) return code + " does not wait for the previous kernel";
  if (shared > std::min(most_shared, most_allowed)) {
    return text(shared) + " bytes of shared memory, " + text(static_shared) + " of them static, are more than " +
           (shared > most_shared ? text(most_shared) + " that the GPU has"
                                 : text(most_allowed) + " that cudaFuncSetAttribute has allowed");
  }
  if (resident_blocks(gpu, kernel, launch.threads, launch.dynamic_shared) == 0) {
    return text(launch.threads) + " threads of " + text(kernel.registers) + " registers do not fit on a multiprocessor";
  }
  return {};
}

}  // namespace gpu_models
