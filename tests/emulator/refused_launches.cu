// Launches that a GPU refuses or runs incorrectly, beside correct ones, for audit_runtime.cpp to tell apart.
// test_launch_audit.py compiles this file with nvcc, links it with audit_runtime.cpp, and checks the printed lines.
#include <cuda_runtime.h>

#include <cstdio>
#include <string>

extern "C" {
void audit_gpu(const char* name, int architecture, const char* file);
void audit_next_call();
const char* audit_faults();
}

// The test writes a file with the kernels' registers and static shared memory, which need not be those of this code.
template <int>
__global__ void small() {}
template <int>
__global__ void large() {}
template <int>
__global__ void backward_rows() {}
template <int>
__global__ void unlisted() {}

namespace {

struct Config {
  dim3 grid;
  unsigned threads = 128;
  size_t shared = 0;
  unsigned cluster = 1;
  bool overlaps = false;
};

void launch(void (*kernel)(), const Config& from) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {from.grid, from.threads, from.shared};
  config.attrs = attributes;
  if (from.cluster != 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim.x = from.cluster;
  }
  if (from.overlaps) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchKernelEx(&config, kernel);
}

void opt_in(void (*kernel)(), int bytes) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

int resident_blocks(void (*kernel)(), int threads, size_t shared) {
  int blocks = -1;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared);
  return blocks;
}

struct Case {
  const char *name, *expected;  // part of the fault; empty: no fault
  const char* gpu;
  int code;
  void (*run)();
};

constexpr int kKiB = 1024;  // `small` has 4 KiB of static shared memory and 32 registers, `large` has 255 registers

const Case kCases[] = {
    {"static_and_dynamic_fit", "", "H200", 90, [] { launch(small<0>, {1, 128, 44 * kKiB}); }},
    {"static_counts", "51200 bytes of shared memory, 4096 of them static", "H200", 90,
     [] { launch(small<0>, {1, 128, 46 * kKiB}); }},
    {"opted_in", "", "H200", 90,
     [] {
       opt_in(small<0>, 223 * kKiB);
       launch(small<0>, {1, 128, 223 * kKiB});
     }},
    {"opted_in_for_less", "that cudaFuncSetAttribute has allowed", "H200", 90,
     [] {
       opt_in(small<0>, 100 * kKiB);
       launch(small<0>, {1, 128, 101 * kKiB});
     }},
    {"opted_in_on_another_device", "that cudaFuncSetAttribute has allowed", "H200", 90,
     [] {
       opt_in(small<0>, 100 * kKiB);
       audit_next_call();
       launch(small<0>, {1, 128, 100 * kKiB});
     }},
    {"opt_in_beside_static", "cudaFuncSetAttribute of 232448 bytes beside 4096 static ones", "H200", 90,
     [] { opt_in(small<0>, 227 * kKiB); }},
    {"more_than_the_gpu_has", "that the GPU has", "L4", 80, [] { launch(small<0>, {1, 128, 96 * kKiB}); }},
    {"registers_fit", "", "H200", 90, [] { launch(large<0>, {1, 256}); }},
    {"registers_times_threads", "512 threads of 255 registers do not fit", "H200", 90,
     [] { launch(large<0>, {1, 512}); }},
    {"threads", "invalid block size: 1056 threads", "H200", 90, [] { launch(small<0>, {1, 1056}); }},
    {"empty_grid", "invalid grid size: 0 x 1 x 1", "H200", 90, [] { launch(small<0>, {0}); }},
    {"grid_y", "invalid grid size: 1 x 65536 x 1", "H200", 90, [] { launch(small<0>, {dim3(1, 65536)}); }},
    {"cluster", "", "H200", 90, [] { launch(small<0>, {16, 128, 0, 8}); }},
    {"cluster_of_16", "invalid cluster size", "H200", 90, [] { launch(small<0>, {16, 128, 0, 16}); }},
    {"cluster_that_does_not_divide", "invalid cluster size", "H200", 90, [] { launch(small<0>, {9, 128, 0, 8}); }},
    {"cluster_on_an_old_gpu", "clusters need compute capability 9.0", "A100", 80,
     [] { launch(small<0>, {16, 128, 0, 8}); }},
    {"cluster_of_old_code", "code for 80 has no instructions for clusters", "H200", 80,
     [] { launch(small<0>, {16, 128, 0, 8}); }},
    {"overlap", "", "B200", 90, [] { launch(small<0>, {1, 128, 0, 1, true}); }},
    {"overlap_of_old_code", "code for 80 does not wait", "B200", 80, [] { launch(small<0>, {1, 128, 0, 1, true}); }},
    {"occupancy", "", "H200", 90,
     [] {
       if (resident_blocks(small<0>, 1024, 0) != 2) launch(small<0>, {0});
     }},
    {"no_resident_block", "no resident block of 128 threads with 51200 bytes", "H200", 90,
     [] { resident_blocks(small<0>, 128, 50 * kKiB); }},
    {"one_wave", "", "H200", 90, [] { launch(backward_rows<0>, {dim3(1, 132), 1024}); }},
    {"second_wave", "more persistent blocks than are resident: 133 of 132", "H200", 90,
     [] { launch(backward_rows<0>, {dim3(1, 133), 1024}); }},
    {"unlisted_kernel", "not among the kernels for this GPU", "H200", 90, [] { launch(unlisted<0>, {1}); }},
    {"unknown_attribute", "unknown attribute", "H200", 90,
     [] {
       int value;
       cudaDeviceGetAttribute(&value, cudaDevAttrClockRate, 0);
     }},
};

}  // namespace

// Prints "name <tab> expected <tab> faults" for each case. The argument is the file with the kernels' resources.
int main(int, char** arguments) {
  for (const Case& c : kCases) {
    audit_gpu(c.gpu, c.code, arguments[1]);
    audit_next_call();
    c.run();
    std::string faults = audit_faults();
    for (char& letter : faults) letter = letter == '\n' ? ';' : letter;
    std::printf("%s\t%s\t%s\n", c.name, c.expected, faults.c_str());
  }
}
