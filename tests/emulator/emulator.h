// Runs CUDA kernels on a CPU, for tests only: what the kernels (through cuda_on_cpu.h and csrc/cuda/device.h)
// and the tests see of it.
//
// Every CUDA thread is a fiber. The fibers of a block, or of a cluster, are switched at barriers and warp
// collectives in an order that the test chooses. What a GPU answers with a hang, garbage or silence is a
// Fault that names file and line.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "buffers.h"

namespace emulator {

using Place = std::source_location;

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Which thread runs next. Every order drives one warp as far as it can go before it turns to the next, so
// that a missing barrier lets one warp overtake another; kRandom draws the priorities of the warps and
// redraws them now and then.
enum class Order { kForward, kReverse, kRandom };

struct Options {
  Order order = Order::kForward;
  uint64_t seed = 0;
  unsigned concurrent_blocks = 1;      // interleaved with each other; the blocks of a cluster always are
  uint64_t max_switches = 1ull << 28;  // of threads in one launch; more is a loop that waits in vain
  int architecture = 90;               // compute capability: below 90 clusters, bulk copies and overlap are faults
  int resident_blocks = 3;             // what the occupancy query answers; few, so that persistent loops go round
  int64_t path_limit = INT64_MAX;      // see device.h
  int64_t one_launch_limit = INT64_MAX;
};
Options& options();
size_t max_shared_memory();  // of a block, static and dynamic, of options().architecture

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;  // dynamic
  unsigned cluster;     // blocks per cluster, along x
  bool overlaps_previous;
  Place place;
};

// ---- what a kernel asks for -------------------------------------------------------------------------------
struct ThreadView {
  uint3 thread_idx, block_idx;
  dim3 block_dim, grid_dim;
};
extern ThreadView* current_view;
// Not to be seen by the checker, as it reads the emulator's memory.
__attribute__((no_sanitize("thread"))) inline const ThreadView& self() { return *current_view; }

enum class Collective : uint8_t { kSync, kShuffle, kBallot, kAny, kAll };
enum class Vote : uint8_t { kNone, kCount, kAnd, kOr };

int block_barrier(Vote vote, bool predicate, const Place& place);
uint64_t warp_collective(Collective what, unsigned mask, uint64_t value, int source_lane, const Place& place);
int lane();
void yield();  // a loop that waits for another thread must call this: threads are not preempted

unsigned cluster_rank();
void cluster_arrive();
void cluster_wait();
void* cluster_peer(const void* address, unsigned rank);

void* static_shared(const void* key, size_t bytes, size_t alignment, const char* name);
void* dynamic_shared(size_t alignment);

uint64_t atomic_begin(const void* address, size_t bytes);  // nothing runs between the two
void atomic_end(void* address, size_t bytes, uint64_t value);
void read_only_load(const void* address,
                    size_t bytes);  // through the cache that this launch's writes do not reach

// Copies take effect as late as the rules allow, and their target reads as NaN until then.
void async_copy(void* to, const void* from, size_t bytes);
void async_commit();
void async_wait(int groups_left);

void mbarrier_init(const void* barrier, unsigned arrivals);
void mbarrier_fence_init();
void mbarrier_arrive(const void* barrier, unsigned expected_bytes);
void mbarrier_wait(const void* barrier, unsigned parity);
bool has_bulk_copies();
void bulk_copy(void* to, const void* from, size_t bytes, const void* barrier);
void store_async(void* to, uint64_t value, const void* barrier, unsigned rank);

void wait_for_previous_grid();

// Ends the launch with a Fault. The fiber is abandoned: nothing on its stack is destroyed.
[[noreturn]] void trap();

// ---- launching --------------------------------------------------------------------------------------------
void run(const Launch& launch, const void* kernel, void (*body)(void*), void* closure);

template <class... Params>
struct Call {
  void (*kernel)(Params...);
  std::tuple<Params...> params;  // the host's: not to be seen by the checker
  __attribute__((no_sanitize("thread"))) static void run(void* call) {
    run(*static_cast<Call*>(call), std::index_sequence_for<Params...>());
  }
  template <size_t... I>
  __attribute__((no_sanitize("thread"))) static void run(Call& call, std::index_sequence<I...>) {
    call.kernel(std::get<I>(call.params)...);
  }
};

template <class... Params, class... Args>
void launch(const Launch& config, void (*kernel)(Params...), const Args&... args) {
  Call<Params...> call{kernel, {static_cast<Params>(args)...}};
  run(config, reinterpret_cast<const void*>(kernel), &Call<Params...>::run, &call);
}

}  // namespace emulator
