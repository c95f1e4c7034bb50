// Fibers, barriers, warp collectives, shared memory and launches.
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <span>
#include <sstream>

#include "gpu_models.h"
#include "lowered_limits.h"
#include "machine.h"

namespace emulator {

ThreadView* current_view = nullptr;
RunningLaunch* running = nullptr;
Thread* current = nullptr;

namespace {

constexpr int kWarpSize = 32;
constexpr size_t kGuardBytes = 4096;          // below every stack; an access to them is a segmentation fault
constexpr uint8_t kUninitializedByte = 0xff;  // new shared memory has NaN, or -1, which is no valid index

Options current_options;
std::mutex one_launch_at_a_time;
void* host_stack_pointer = nullptr;
// Stacks, and the shared memory of resident blocks, which the next launch reuses.
std::vector<Thread> threads;
std::vector<char*> arenas;
std::map<std::pair<const void*, unsigned>, int> launched;  // the number of launches by kernel and cluster size

// ---- fibers ---------------------------------------------------------------------------------------------------------

#if !defined(__x86_64__)
#error "the emulator switches stacks in assembly, for x86-64 only"
#endif
// Pushes the callee-saved registers, stores the stack pointer to *save, and continues on the stack `load`.
extern "C" void emulator_switch_stack(void** save, void* load);
asm(R"(
.text
.p2align 4
.type emulator_switch_stack,@function
emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch_stack,.-emulator_switch_stack
)");

char* map_memory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw Fault("the emulator is out of memory");
  return static_cast<char*>(memory);
}

void allocate_threads(size_t count) {
  while (threads.size() < count) {
    char* memory = map_memory(kGuardBytes + kStackBytes);
    if (mprotect(memory, kGuardBytes, PROT_NONE) != 0) throw Fault("the emulator cannot protect a guard page");
    threads.emplace_back().stack = memory + kGuardBytes;
  }
}

// Returns the indices of `count` clusters or warps in the order in which they run: ascending with seed 0, else random.
std::vector<size_t> draw_order(size_t count, std::mt19937_64& random) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (current_options.seed != 0) std::shuffle(order.begin(), order.end(), random);
  return order;
}

// Returns a runnable thread of the first warp in running->order that has one, and marks it as running.
Thread* pick_runnable_thread() {
  RunningLaunch& r = *running;
  const bool random = current_options.seed != 0;
  if (random && (r.random() & 63) == 0) std::shuffle(r.order.begin(), r.order.end(), r.random);
  for (size_t index : r.order) {
    Warp& warp = r.warps[index];
    if (warp.runnable == 0) continue;
    const int turn = random ? static_cast<int>(r.random() % kWarpSize) : 0;
    const int lane = (std::countr_zero(std::rotr(warp.runnable, turn)) + turn) % kWarpSize;
    warp.runnable &= ~(1u << lane);
    return &warp.threads[lane];
  }
  return nullptr;
}

// ---- reports --------------------------------------------------------------------------------------------------------

std::string describe(const Place& place) {
  const std::string file = place.file_name();
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(place.line());
}

bool same_place(const Place& a, const Place& b) {
  return a.line() == b.line() && a.column() == b.column() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

std::string describe_deadlock() {
  std::map<std::string, unsigned> threads_by_place;
  for (const Block& block : running->blocks) {
    for (const Thread* thread = block.threads; thread < block.threads + block.size; ++thread) {
      const Group* const group = thread->waits_for;
      ++threads_by_place[group ? std::string("wait at a ") + group->barrier + ", " + describe(group->place)
                               : "have returned"];
    }
  }
  std::string text = "deadlock:";
  for (const auto& [place, count] : threads_by_place) text += "\n  " + std::to_string(count) + " thread(s) " + place;
  return text;
}

// Returns what addr2line of binutils prints for a code address.
std::string addr2line(const char* options, const char* address) {
  Dl_info module{};
  if (!dladdr(address, &module)) return "";
  std::ostringstream command;
  command << "addr2line " << options << " -e '" << module.dli_fname << "' 0x" << std::hex
          << address - static_cast<const char*>(module.dli_fbase) << " 2>/dev/null";
  std::string text;
  if (FILE* pipe = popen(command.str().c_str(), "r")) {
    for (int c; (c = std::fgetc(pipe)) != EOF;) text += static_cast<char>(c);
    pclose(pipe);
  }
  return text;
}

std::string function_name(const void* function) {
  static std::map<const void*, std::string> seen;
  std::string& name = seen[function];
  if (!name.empty()) return name;
  const std::string lines = addr2line("-fC", static_cast<const char*>(function));
  return name = lines.substr(0, lines.find('\n'));
}

// ---- barriers and collectives ---------------------------------------------------------------------------------------

void make_runnable(Thread& thread) {
  thread.waits_for = nullptr;
  thread.warp->runnable |= 1u << thread.lane;
}

// Stores the stack pointer in *save, and continues a thread, or the host.
void switch_to(Thread* thread, void** save) {
  current = thread;
  current_view = thread ? &thread->view : nullptr;
  emulator_switch_stack(save, thread ? thread->stack_pointer : host_stack_pointer);
}

// Switches to the next runnable thread. If there is none, or after a fault, the host continues, in run_blocks().
void switch_away() {
  Thread* me = current;
  Thread* next = running->fault.empty() ? pick_runnable_thread() : nullptr;
  if (next != me) switch_to(next, &me->stack_pointer);
}

// If all live threads of the group have arrived, gives each waiting thread the result of its exchange, and wakes it.
void complete_if_all_arrived(Group& group) {
  if (group.live == 0 || group.arrived != group.live) return;
  group.arrived = 0;
  group.completed_barriers++;
  const auto for_each_waiting = [&](auto f) {
    for (Thread* t = group.threads; t < group.threads + group.size; ++t) {
      if (t->waits_for == &group) f(*t);
    }
  };
  bool any = false, waited_for_previous_grid = false;
  for_each_waiting([&](const Thread& t) {
    any |= t.exchange.value != 0;
    waited_for_previous_grid |= t.waited_for_previous_grid;
  });
  for_each_waiting([&](Thread& t) {
    if (&group == t.block) t.waited_for_previous_grid = waited_for_previous_grid;
    t.result = any;
    if (!t.exchange.source_lane) return;
    const auto source = static_cast<unsigned>(*t.exchange.source_lane);
    if (source >= group.size || group.threads[source].waits_for != &group) {
      fail("shuffle of " + describe_thread(t.id) + " at " + describe(group.place) + " reads lane " +
           std::to_string(*t.exchange.source_lane) + ", which does not take part");
    }
    t.result = group.threads[source].exchange.value;
  });
  for_each_waiting(make_runnable);
}

void arrive(Group& group) {
  group.arrived++;
  complete_if_all_arrived(group);
}

TransactionBarrier& find_barrier(const void* barrier, const void* pc) {
  const auto found = running->barriers.find(barrier);
  require(found != running->barriers.end(), "an mbarrier that is not initialized", pc);
  return found->second;
}

void complete_phase_if_all_received(TransactionBarrier& b) {
  if (!b.announced || b.missing_bytes != 0) return;
  b.announced = false;
  b.completed_barriers++;
  b.last_messages = std::move(b.arrived_messages);
  b.arrived_messages.clear();
  for (Thread* t = b.threads; t < b.threads + b.size; ++t) {
    if (t->waits_for == &b) make_runnable(*t);
  }
}

// Waits until all live threads of the group have arrived at this place, and returns the result of the exchange.
uint64_t wait_for_group(Group& group, const Exchange& exchange, const Place& place) {
  if (group.arrived > 0 && !same_place(group.place, place)) {
    fail(std::string("divergent ") + group.barrier + ": " + describe_thread(current->id) + " arrives at " +
         describe(place) + " while others wait at " + describe(group.place));
  }
  group.place = place;
  current->exchange = exchange;
  current->waits_for = &group;
  arrive(group);
  switch_away();
  return current->result;
}

// ---- the life of a thread and of a launch ---------------------------------------------------------------------------

[[noreturn]] void finish_thread() {
  Thread& thread = *current;
  Block& block = *thread.block;
  if (!thread.open_copies.empty() || !thread.copy_groups.empty()) {
    fail(describe_thread(thread.id) + " returned before its asynchronous copies were complete");
  }
  if (thread.epochs.cluster_arrived != thread.epochs.cluster_waited) {
    fail(describe_thread(thread.id) + " returned between cluster_arrive and cluster_wait");
  }
  running->live--;
  Group* const groups[] = {thread.warp, &block, block.cluster};
  for (Group* group : groups) group->live--;
  if (block.live == 0) {
    checker_end_block(block);
    const bool waited = std::any_of(block.threads, block.threads + block.size,
                                    [](const Thread& t) { return t.waited_for_previous_grid; });
    if (running->launch.overlaps_previous && !waited) {
      fail("block " + std::to_string(thread.id.block) +
           " returned without a wait for the previous grid: the next grid could start before that one has ended");
    }
  }
  for (Group* group : groups) complete_if_all_arrived(*group);  // a returned thread counts as arrived
  switch_away();
  std::abort();
}

void thread_main() {
  running->body(running->call);
  finish_thread();
}

uint3 unflatten(uint64_t i, dim3 d) {
  return {static_cast<unsigned>(i % d.x), static_cast<unsigned>(i / d.x % d.y), static_cast<unsigned>(i / d.x / d.y)};
}

void start_thread(Thread& thread, Block& block, Warp& warp, unsigned index, uint64_t block_id) {
  char* stack = thread.stack;
  thread = {};
  thread.stack = stack;
  thread.view = {unflatten(index, running->launch.block), block.index, running->launch.block, running->launch.grid};
  thread.id = {static_cast<uint32_t>(block_id), static_cast<uint32_t>(block_id / running->launch.cluster), index};
  thread.lane = index % kWarpSize;
  thread.block = &block;
  thread.warp = &warp;
  make_runnable(thread);
  // The stack is as emulator_switch_stack leaves it: six registers, the return address, and 8 bytes for the alignment.
  auto* top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&thread_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  thread.stack_pointer = top;
}

// Makes the blocks of the clusters with these indices resident: sets up their groups and their threads.
void start_clusters(std::span<const size_t> ids) {
  RunningLaunch& r = *running;
  const size_t blocks = ids.size() * r.launch.cluster;
  r.clusters.assign(ids.size(), {});
  r.blocks.assign(blocks, {});
  r.warps.assign(blocks * r.warps_per_block, {});
  r.barriers.clear();
  r.live = static_cast<unsigned>(blocks) * r.threads_per_block;
  const unsigned size = r.threads_per_block;
  const auto group_of = [](const char* barrier, Thread* first, unsigned size) {
    return Group{barrier, first, size, size, 0, 0, {}};
  };
  for (size_t k = 0; k < blocks; ++k) {
    Thread* const first = &threads[k * size];
    const auto rank = static_cast<unsigned>(k % r.launch.cluster);
    const size_t id = ids[k / r.launch.cluster] * r.launch.cluster + rank;
    Cluster& cluster = r.clusters[k / r.launch.cluster];
    if (rank == 0) cluster = {group_of("cluster barrier", first, r.launch.cluster * size), {}};
    Block& block = r.blocks[k];
    block = {group_of("block barrier", first, size), unflatten(id, r.launch.grid), rank, &cluster, arenas[k]};
    for (unsigned i = 0; i < size; ++i) {
      Warp& warp = r.warps[k * r.warps_per_block + i / kWarpSize];
      if (i % kWarpSize == 0) {
        warp = {group_of("warp collective", first + i, std::min<unsigned>(kWarpSize, size - i)), 0};
      }
      start_thread(first[i], block, warp, i, id);
    }
  }
  r.order = draw_order(r.warps.size(), r.random);
}

void run_blocks() {
  while (running->fault.empty() && running->live > 0) {
    if (Thread* next = pick_runnable_thread()) {
      switch_to(next, &host_stack_pointer);
    } else {
      running->fault = describe_deadlock();
    }
  }
}

// The emulated GPU has the limits of the first model of its architecture.
const gpu_models::Gpu& gpu() {
  return gpu_models::find([](const auto& model) { return model.architecture == current_options.architecture; });
}

// Returns why the GPU would refuse a launch, or an empty string. The launch audit also checks the registers.
std::string refusal(const Launch& l, size_t static_bytes) {
  const gpu_models::Kernel kernel{0, static_cast<int>(static_bytes), current_options.architecture};
  const gpu_models::Launch launch = {{l.grid.x, l.grid.y, l.grid.z},
                                     static_cast<uint64_t>(l.block.x) * l.block.y * l.block.z,
                                     l.shared_bytes,
                                     l.cluster,
                                     l.overlaps_previous && current_options.architecture >= 90};
  // As in csrc/cuda/launch_and_ptx.h, whose launch() allows each kernel all of the device's shared memory.
  return gpu_models::refusal(gpu(), kernel, launch, max_shared_memory() - static_bytes);
}

// Returns an array of the current block's shared memory. The first thread of a cluster that declares it initializes the
// array of every block, because another block may access it before its own block reaches the declaration.
void* shared_memory(size_t offset, size_t bytes, const char* name) {
  Block& block = *current->block;
  if (block.cluster->shared.insert(offset).second) {
    for (unsigned rank = 0; rank < running->launch.cluster; ++rank) {
      Block& owner = peer(block, rank);
      std::memset(owner.arena + offset, kUninitializedByte, bytes);
      add_shared_memory(owner, owner.arena + offset, bytes, name);
    }
  }
  return block.arena + offset;
}

void run_grid(const Launch& launch, void (*body)(const void*), const void* call, size_t bytes) {
  RunningLaunch r{launch, body, call};
  r.threads_per_block = launch.block.x * launch.block.y * launch.block.z;
  r.warps_per_block = (r.threads_per_block + kWarpSize - 1) / kWarpSize;
  r.random.seed(current_options.seed);
  r.static_end = kRedZone;

  const size_t clusters = static_cast<size_t>(launch.grid.x) * launch.grid.y * launch.grid.z / launch.cluster;
  const std::vector<size_t> order = draw_order(clusters, r.random);
  const size_t resident = std::min<size_t>(1 + current_options.seed % 4, order.size());
  allocate_threads(resident * launch.cluster * r.threads_per_block);
  while (arenas.size() < resident * launch.cluster) arenas.push_back(map_memory(kArenaBytes));

  running = &r;
  checker_begin_launch(launch.overlaps_previous && current_options.architecture >= 90, call, bytes);
  for (size_t begin = 0; begin < order.size() && r.fault.empty(); begin += resident) {
    start_clusters(std::span(order).subspan(begin, std::min(resident, order.size() - begin)));
    run_blocks();
  }
  running = nullptr;
  checker_end_launch();
  if (!r.fault.empty()) throw Fault(r.fault);
}

}  // namespace

// ---- for the other parts of the emulator ----------------------------------------------------------------------------

std::string describe_thread(const ThreadId& id) {
  return "block " + std::to_string(id.block) + " thread " + std::to_string(id.thread);
}

void fail(std::string what) {
  if (running->fault.empty()) running->fault = std::move(what);
  switch_away();
  std::abort();
}

void require(bool condition, const char* otherwise, const void* pc) {
  if (!condition) fail(std::string(otherwise) + ", by " + describe_thread(current->id) + " at " + source_line(pc));
}

Block& peer(Block& block, unsigned rank) { return *(&block - block.rank + rank); }

std::string source_line(const void* pc) {
  static std::map<const void*, std::string> seen;
  std::string& text = seen[pc];
  if (!text.empty()) return text;
  std::istringstream lines(addr2line("-si", static_cast<const char*>(pc) - 1));  // pc is a return address
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("emulated_device.h:")) continue;
    text += (text.empty() ? "" : " < ") + line.substr(0, line.find(' '));  // no discriminator
  }
  if (text.empty()) text = "an unknown line";
  return text;
}

void* cluster_peer(const void* address, unsigned rank, const void* pc) {
  Block& block = *current->block;
  require(current->epochs.cluster_waited > 0,
          "an access to a block that may not have started: no cluster barrier before", pc);
  require(rank < running->launch.cluster, "a block that the cluster does not have", pc);
  require(in_shared(block, address), "the peer of an address outside the block's shared memory", pc);
  require(peer(block, rank).live != 0, "the shared memory of a block that has returned", pc);
  return peer(block, rank).arena + (static_cast<const char*>(address) - block.arena);
}

void receive_message(const void* barrier, size_t bytes, const void* pc) {
  TransactionBarrier& b = find_barrier(barrier, pc);
  b.missing_bytes -= static_cast<int64_t>(bytes);
  b.arrived_messages[current->id.block] = current->epochs.block;
  complete_phase_if_all_received(b);
}

bool in_shared(const Block& block, const void* address) {
  const char* a = static_cast<const char*>(address);
  return a >= block.arena && a < block.arena + kArenaBytes;
}

// ---- for kernels ----------------------------------------------------------------------------------------------------

Options& options() { return current_options; }

size_t max_shared_memory() { return static_cast<size_t>(gpu().shared_bytes_of_block); }

void run(const Launch& launch, const void* kernel, void (*body)(const void*), const void* call, size_t bytes) {
  std::lock_guard lock(one_launch_at_a_time);
  ++launched[{kernel, launch.cluster}];
  try {
    const std::string why = refusal(launch, 0);
    if (!why.empty()) throw Fault(why);
    run_grid(launch, body, call, bytes);
  } catch (const Fault& fault) {
    throw Fault(function_name(kernel) + ", launched at " + describe(launch.place) + ": " + fault.what());
  }
}

uint64_t block_barrier(const Exchange& exchange, const Place& place) {
  const uint64_t result = wait_for_group(*current->block, exchange, place);
  current->epochs.block++;
  return result;
}

uint64_t warp_collective(unsigned mask, const Exchange& exchange, const Place& place) {
  if (mask != 0xffffffffu) {
    fail(describe_thread(current->id) + " names fewer than all lanes in the mask of a warp collective at " +
         describe(place));
  }
  return wait_for_group(*current->warp, exchange, place);
}

void warp_barrier(unsigned mask, const Place& place) {
  warp_collective(mask, {}, place);
  current->epochs.warp++;  // other collectives order no memory accesses
}

unsigned cluster_rank() { return current->block->rank; }

void cluster_arrive() {
  Epochs& epochs = current->epochs;
  require(epochs.cluster_arrived == epochs.cluster_waited, "a second arrival at one cluster barrier",
          __builtin_return_address(0));
  epochs.cluster_arrived++;
  arrive(*current->block->cluster);
}

void cluster_wait(const Place& place) {
  Thread& thread = *current;
  Cluster& cluster = *thread.block->cluster;
  require(thread.epochs.cluster_arrived != thread.epochs.cluster_waited,
          "a wait at a cluster barrier without an arrival", __builtin_return_address(0));
  if (cluster.completed_barriers == thread.epochs.cluster_waited) {
    cluster.place = place;
    thread.exchange = {};
    thread.waits_for = &cluster;
    switch_away();
  }
  thread.epochs.cluster_waited++;
}

void barrier_init(const void* barrier) {
  require(current->epochs.cluster_arrived == 0, "an mbarrier that is initialized after cluster_arrive",
          __builtin_return_address(0));
  Block& block = *current->block;
  running->barriers[barrier] = {{"transaction barrier", block.threads, block.size, 0, 0, 0, {}}};
}

void barrier_expect(const void* barrier, size_t bytes) {
  const void* pc = __builtin_return_address(0);
  TransactionBarrier& b = find_barrier(barrier, pc);
  require(!b.announced, "a second announcement in one phase of an mbarrier", pc);
  b.announced = true;
  b.missing_bytes += static_cast<int64_t>(bytes);
  complete_phase_if_all_received(b);
}

void barrier_wait(const void* barrier, unsigned phase, const Place& place) {
  const void* pc = __builtin_return_address(0);
  TransactionBarrier& b = find_barrier(barrier, pc);
  if (b.completed_barriers == phase) {
    b.place = place;
    current->waits_for = &b;
    switch_away();
  }
  require(b.completed_barriers == phase + 1, "a wait for a phase of an mbarrier that is neither this nor the last", pc);
  for (const auto& [block, epoch] : b.last_messages) current->known_messages[block] = epoch;
}

void* static_shared(const void* key, size_t bytes, size_t alignment, const char* name) {
  RunningLaunch& r = *running;
  const auto [slot, is_new] = r.static_offsets.try_emplace(key);
  if (is_new) {
    // Not more aligned than declared (an odd multiple of the alignment), so that a wider access is misaligned.
    const size_t step = std::max<size_t>(alignment, 4);
    slot->second = (r.static_end / (2 * step) + 1) * (2 * step) + step;
    r.static_end = slot->second + bytes + kRedZone;
    r.static_bytes += bytes;
    if (r.static_bytes > kMaxStatic || r.static_end > kDynamicBase) fail("more than 48 KiB of static shared memory");
    // The size of an array is known only when a thread reaches its declaration, so the launch is checked again.
    if (const std::string why = refusal(r.launch, r.static_bytes); !why.empty()) fail(why);
  }
  return shared_memory(slot->second, bytes, name);
}

void* dynamic_shared() {
  return shared_memory(kDynamicBase + 16, running->launch.shared_bytes, "dynamic shared memory");
}

void wait_for_previous_grid() { current->waited_for_previous_grid = true; }

}  // namespace emulator

// ---- for emulated_build.py ------------------------------------------------------------------------------------------

extern "C" {

void emulator_configure(uint64_t seed, int architecture, int resident, int64_t path_limit, int64_t few_iterations) {
  emulator::options() = {seed, architecture, resident};
  layernorm::cuda::lower_launch_limits(path_limit, few_iterations);
}

// Returns a line "number_of_launches cluster_size kernel" for each kernel and cluster size since the last call.
const char* emulator_launched() {
  static std::string lines;
  lines.clear();
  for (const auto& [launch, count] : emulator::launched) {
    const auto& [kernel, cluster] = launch;
    lines += std::to_string(count) + " " + std::to_string(cluster) + " " + emulator::function_name(kernel) + "\n";
  }
  emulator::launched.clear();
  return lines.c_str();
}
}
