// A CUDA runtime that launches nothing, for launch_audit.py, which preloads it. So the host code of a CUDA build runs
// without a GPU: this runtime answers like the driver of the chosen GPU, and records every launch that the GPU would
// refuse. It has only functions that a CUDA graph can capture: launches, and queries that neither synchronize nor
// allocate memory.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <map>
#include <sstream>
#include <string>

#include "gpu_models.h"

namespace {

struct Kernel : gpu_models::Kernel {
  std::string name;      // mangled
  std::string function;  // the name without namespaces and template arguments
  uint64_t allowed = 0;  // bytes of dynamic shared memory, by cudaFuncSetAttribute on the current device
};

const gpu_models::Gpu* gpu = &gpu_models::kGpus[0];
int current_device = 0, queries = 0;
std::string faults, launches;

// The mangled names of the kernels by their stubs, the host functions whose addresses the API of the runtime takes.
std::map<const void*, std::string>& stubs() {
  static std::map<const void*, std::string> names;
  return names;
}
std::map<std::string, Kernel> kernels;

void record_fault(const std::string& kernel, const std::string& what) { faults += kernel + ": " + what + "\n"; }

// Counts a query about a kernel, and answers it by f(kernel), which returns the status.
template <class F>
cudaError_t answer(const void* stub, const F& f) {
  ++queries;
  const auto name = stubs().find(stub);
  const auto found = name == stubs().end() ? kernels.end() : kernels.find(name->second);
  if (found == kernels.end()) {
    record_fault(name == stubs().end() ? "?" : name->second, "not among the kernels for this GPU");
    return cudaErrorInvalidDeviceFunction;
  }
  return f(found->second);
}

gpu_models::Launch describe(const cudaLaunchConfig_t& config) {
  gpu_models::Launch launch = {{config.gridDim.x, config.gridDim.y, config.gridDim.z},
                               uint64_t{config.blockDim.x} * config.blockDim.y * config.blockDim.z,
                               config.dynamicSmemBytes,
                               1,
                               false};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) launch.cluster = attribute.val.clusterDim.x;
    launch.overlaps_previous |= attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization;
  }
  return launch;
}

// Returns whether a launch of persistent blocks has more blocks than the GPU holds at once, so that some start only
// after others end. One group of grid.x blocks, which share a row, is always allowed.
bool has_second_wave(const Kernel& kernel, const uint64_t (&grid)[3], uint64_t resident) {
  if (kernel.function == "channels_first_backward") return grid[0] > resident;
  const bool is_persistent = kernel.function == "backward_staged" || kernel.function == "forward_staged";
  return is_persistent && grid[1] > std::max(resident / grid[0], uint64_t{1});
}

}  // namespace

extern "C" {

// ---- for launch_audit.py --------------------------------------------------------------------------------------------

// Chooses the GPU and the code that it runs: the architecture, and `resources`, which has "name function registers
// static_shared" for each kernel.
void audit_gpu(const char* name, int architecture, const char* resources) {
  gpu = &gpu_models::find([&](const auto& model) { return std::string(model.name) == name; });
  kernels.clear();
  std::istringstream words(resources);
  Kernel kernel;
  kernel.architecture = architecture;
  while (words >> kernel.name >> kernel.function >> kernel.registers >> kernel.static_shared) {
    kernels[kernel.name] = kernel;
  }
}

// Starts a call of an operator. Unless it repeats the last one, the current device gets a new number, so that the call
// finds neither cached answers nor opt-ins of earlier calls.
void audit_next_call(bool is_repeated) {
  if (!is_repeated) {
    ++current_device;
    for (auto& [name, kernel] : kernels) kernel.allowed = 0;
  }
  queries = 0;
  faults.clear();
  launches.clear();
}

// Return the lines that describe the faults and the launches of the call, and the number of its queries to the runtime.
const char* audit_faults() { return faults.c_str(); }
const char* audit_launches() { return launches.c_str(); }
int audit_queries() { return queries; }

// ---- the runtime ----------------------------------------------------------------------------------------------------

void __cudaRegisterFunction(void** handle, const char* stub, char* device_stub, const char* name, int limit, uint3* a,
                            uint3* b, dim3* c, dim3* d, int* e) {
  stubs()[stub] = name;
  static const auto real =
      reinterpret_cast<decltype(&__cudaRegisterFunction)>(dlsym(RTLD_NEXT, "__cudaRegisterFunction"));
  if (real) real(handle, stub, device_stub, name, limit, a, b, c, d, e);
}

cudaError_t cudaGetDevice(int* device) { return ++queries, *device = current_device, cudaSuccess; }
cudaError_t cudaGetLastError() { return ++queries, cudaSuccess; }

cudaError_t cudaFuncGetName(const char** name, const void* stub) {
  return answer(stub, [&](const Kernel& kernel) { return *name = kernel.name.c_str(), cudaSuccess; });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  ++queries;
  if (attribute == cudaDevAttrMultiProcessorCount) return *value = gpu->multiprocessors, cudaSuccess;
  if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) return *value = gpu->shared_bytes_of_block, cudaSuccess;
  record_fault("cudaDeviceGetAttribute", "unknown attribute " + std::to_string(attribute));
  return cudaErrorInvalidValue;
}

cudaError_t cudaFuncSetAttribute(const void* stub, cudaFuncAttribute attribute, int value) {
  return answer(stub, [&](Kernel& kernel) {
    const int most = gpu->shared_bytes_of_block - kernel.static_shared;
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value >= 0 && value <= most) {
      return kernel.allowed = static_cast<uint64_t>(value), cudaSuccess;
    }
    record_fault(kernel.name, "cudaFuncSetAttribute of attribute " + std::to_string(attribute) + " to " +
                                  std::to_string(value) + ", with " + std::to_string(kernel.static_shared) +
                                  " bytes of static shared memory");
    return cudaErrorInvalidValue;
  });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* stub) {
  return answer(stub, [&](const Kernel& kernel) {
    *attributes = {};
    attributes->sharedSizeBytes = static_cast<size_t>(kernel.static_shared);
    attributes->ptxVersion = kernel.architecture;
    // The driver compiles older PTX for the GPU that it finds.
    attributes->binaryVersion = std::max(kernel.architecture, gpu->architecture);
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* stub, int threads,
                                                                   size_t dynamic_shared, unsigned) {
  return answer(stub, [&](const Kernel& kernel) {
    *blocks = gpu_models::resident_blocks(*gpu, kernel, static_cast<uint64_t>(threads), dynamic_shared);
    // Without an opt-in for so much shared memory, the kernel could not be launched.
    if (dynamic_shared + static_cast<size_t>(kernel.static_shared) > gpu_models::kSharedWithoutOptIn &&
        dynamic_shared > kernel.allowed) {
      *blocks = 0;
    }
    if (*blocks == 0) {
      record_fault(kernel.name, "no resident block of " + std::to_string(threads) + " threads with " +
                                    std::to_string(dynamic_shared) + " bytes of dynamic shared memory");
    }
    return cudaSuccess;
  });
}

// An approximation: a cluster must also fit on one graphics processing cluster.
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* stub, const cudaLaunchConfig_t* config) {
  const auto launch = describe(*config);
  int blocks = 0;
  const auto status = cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
      &blocks, stub, static_cast<int>(launch.threads), launch.dynamic_shared, 0);
  *clusters = blocks * gpu->multiprocessors / static_cast<int>(launch.cluster);
  return status;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub, void**) {
  --queries;  // answer() counts a query, and a launch is not one
  return answer(stub, [&](const Kernel& kernel) {
    const auto launch = describe(*config);
    const std::string why = gpu_models::refusal(*gpu, kernel, launch, kernel.allowed);
    if (!why.empty()) return record_fault(kernel.name, why), cudaErrorInvalidValue;
    const int per_multiprocessor = gpu_models::resident_blocks(*gpu, kernel, launch.threads, launch.dynamic_shared);
    const auto resident = static_cast<uint64_t>(per_multiprocessor * gpu->multiprocessors);
    const auto& [x, y, z] = launch.grid;
    if (has_second_wave(kernel, launch.grid, resident)) {
      record_fault(kernel.name, "more persistent blocks than are resident: " + std::to_string(x * y * z) + " of " +
                                    std::to_string(resident));
    }
    std::ostringstream line;
    line << kernel.function << " grid " << x << "x" << y << "x" << z << ", " << launch.threads << " threads, cluster "
         << launch.cluster << ", " << launch.dynamic_shared << " bytes, " << per_multiprocessor << " resident"
         << "\n";
    launches += line.str();
    return cudaSuccess;
  });
}

}  // extern "C"
