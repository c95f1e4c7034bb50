// Runs CUDA kernels on a CPU and checks their accesses. This is the interface for kernels (through emulated_device.h)
// and for tests.
//
// Every CUDA thread is a fiber. Fibers switch at barriers and warp collectives, in an order that the test chooses. An
// error that a GPU would answer with a hang or with garbage throws a Fault, which names file and line.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <source_location>
#include <stdexcept>
#include <tuple>

namespace emulator {

using Place = std::source_location;

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  // The seed of the schedule. A warp runs as far as it can before the next one, so that a missing barrier lets one warp
  // overtake another. The seed determines the order of the warps, which is redrawn now and then, and the number of
  // blocks or clusters that take turns, up to 4. With 0, blocks run one after another, and threads in order.
  uint64_t seed = 0;
  int architecture = 90;  // compute capability
  int resident = 3;       // blocks or clusters of a kernel that the GPU holds at once
};
Options& options();
size_t max_shared_memory();  // of a block

// ---- global memory --------------------------------------------------------------------------------------------------

enum class Contents {
  kInput,   // initialized and read-only
  kOutput,  // uninitialized
  kInOut,   // initialized and writable
};

// Lets kernels access a buffer, which reports call `name`. A second registration of an address replaces the first.
void register_buffer(const void* base, size_t bytes, const char* name, Contents contents);
void clear_buffers();

// ---- for emulated_device.h ------------------------------------------------------------------------------------------

struct ThreadView {
  uint3 thread_idx, block_idx;
  dim3 block_dim, grid_dim;
};
extern ThreadView* current_view;
// Not instrumented, because the checker must not check the emulator's own memory.
__attribute__((no_sanitize("thread"))) inline const ThreadView& self() { return *current_view; }

// The value that a thread gives to the others at a barrier or a warp collective. The thread gets the value of the
// thread `source_lane` or, without a source_lane, whether the value of any thread is not 0.
struct Exchange {
  uint64_t value = 0;
  std::optional<int> source_lane{};
};
// Waits as __syncthreads() does. Thread::epochs counts the barriers, by which the checker orders memory accesses.
uint64_t block_barrier(const Exchange& exchange, const Place& place);
uint64_t warp_collective(unsigned mask, const Exchange& exchange, const Place& place);
void warp_barrier(unsigned mask, const Place& place);

void* static_shared(const void* key, size_t bytes, size_t alignment, const char* name);
void* dynamic_shared();

unsigned cluster_rank();
void cluster_arrive();
void cluster_wait(const Place& place = Place::current());

// An mbarrier. A message is a store to a variable of another block; it counts as arrived at that block's barrier, which
// has the same offset in its shared memory as `barrier`.
void barrier_init(const void* barrier);
void barrier_expect(const void* barrier, size_t bytes);
void barrier_send(const void* barrier, const void* to, const void* from, size_t bytes, unsigned rank);
void barrier_wait(const void* barrier, unsigned phase, const Place& place);

// cp.async. Copies arrive as late as CUDA allows, and their target has NaN until then. Bytes after the first `copied`
// become zeros. The first `unused` bytes may be outside a buffer, and stay NaN.
void async_copy(void* to, const void* from, size_t bytes, size_t copied, size_t unused);
void async_commit();
void async_wait(int groups_left);

void wait_for_previous_grid();

// ---- launches -------------------------------------------------------------------------------------------------------

struct Launch {  // the LaunchConfig of launch_and_ptx.h
  dim3 grid, block;
  size_t shared_bytes = 0;
  void* stream = nullptr;
  unsigned cluster = 1;
  bool overlaps_previous = false;
  int device = 0;
  Place place = Place::current();
};

// Every thread calls body(call). `call` points to `bytes` bytes with the kernel's arguments, which threads may only
// read.
void run(const Launch& launch, const void* kernel, void (*body)(const void*), const void* call, size_t bytes);

template <class... Params, class... Args>
void launch(const Launch& config, void (*kernel)(Params...), const Args&... args) {
  const auto call = [kernel, params = std::tuple<Params...>(static_cast<Params>(args)...)] {
    std::apply(kernel, params);
  };
  const auto body = [](const void* it) { (*static_cast<decltype(call)*>(it))(); };
  run(config, reinterpret_cast<const void*>(kernel), body, &call, sizeof call);
}

}  // namespace emulator
