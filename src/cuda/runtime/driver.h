// The CUDA driver and NVRTC: opened when first needed, never linked. The functions are declared here as in
// cuda.h and nvrtc.h. One build so serves machines with and without a GPU or a toolkit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/runtime/nvrtc_call.h"

namespace onepass::cuda {

using ContextHandle = struct CUctx_st*;
using ModuleHandle = struct CUmod_st*;
using FunctionHandle = struct CUfunc_st*;
using StreamHandle = struct CUstream_st*;
using EventHandle = struct CUevent_st*;
using DevicePointer = void*;  // CUdeviceptr, an integer of the same size

inline constexpr CudaResult cuda_out_of_memory = 2;

// CUlaunchAttribute with the values used. For a cluster, x is its size. The other two are flags with x = 1:
// all blocks are resident, or the kernel may begin before its predecessor has ended.
struct LaunchAttribute {
  static constexpr int cooperative = 2;
  static constexpr int cluster_dimension = 4;
  static constexpr int programmatic_serialization = 6;
  int id = cluster_dimension;
  int padding = 0;
  alignas(8) uint32_t x = 1;
  uint32_t y = 1;
  uint32_t z = 1;
  char unused[52] = {};
};
static_assert(sizeof(LaunchAttribute) == 72 && alignof(LaunchAttribute) == 8);

// CUlaunchConfig.
struct LaunchConfig {
  uint32_t grid_x = 1, grid_y = 1, grid_z = 1;
  uint32_t block_x = 1, block_y = 1, block_z = 1;
  uint32_t shared_bytes = 0;
  StreamHandle stream = nullptr;
  LaunchAttribute* attributes = nullptr;
  uint32_t attribute_count = 0;
};
static_assert(sizeof(LaunchConfig) == 56);

// CUdevice_attribute and CUfunction_attribute.
enum DeviceAttribute : int {
  clock_kilohertz = 13,
  multiprocessor_count = 16,
  memory_clock_kilohertz = 36,
  memory_bus_bits = 37,
  l2_cache_bytes = 38,
  compute_capability_major = 75,
  compute_capability_minor = 76,
  shared_memory_per_multiprocessor = 81,
  shared_memory_per_block_optin = 97,
};
enum FunctionAttribute : int {
  max_dynamic_shared_bytes = 8,
  non_portable_cluster_size_allowed = 14,
};

struct Driver {
  CudaResult (*cuInit)(unsigned flags);
  CudaResult (*cuDriverGetVersion)(int* version);
  CudaResult (*cuGetErrorName)(CudaResult error, const char** name);
  CudaResult (*cuGetErrorString)(CudaResult error, const char** words);
  CudaResult (*cuDeviceGetCount)(int* count);
  CudaResult (*cuDeviceGet)(int* device, int index);
  CudaResult (*cuDeviceGetName)(char* name, int bytes, int device);
  CudaResult (*cuDeviceGetAttribute)(int* value, int attribute, int device);
  CudaResult (*cuDeviceTotalMem)(size_t* bytes, int device);
  CudaResult (*cuDevicePrimaryCtxRetain)(ContextHandle* context, int device);
  CudaResult (*cuCtxGetCurrent)(ContextHandle* context);
  CudaResult (*cuCtxPushCurrent)(ContextHandle context);
  CudaResult (*cuCtxPopCurrent)(ContextHandle* context);
  CudaResult (*cuCtxSynchronize)();
  CudaResult (*cuThreadExchangeStreamCaptureMode)(int* mode);
  CudaResult (*cuStreamIsCapturing)(StreamHandle stream, int* status);
  CudaResult (*cuModuleLoadData)(ModuleHandle* module, const void* image);
  CudaResult (*cuModuleGetFunction)(FunctionHandle* function, ModuleHandle module, const char* name);
  CudaResult (*cuFuncSetAttribute)(FunctionHandle function, int attribute, int value);
  CudaResult (*cuLaunchKernelEx)(const LaunchConfig* config, FunctionHandle function, void** parameters,
                                 void** extra);
  CudaResult (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, FunctionHandle function, int threads,
                                                            size_t shared_bytes);
  CudaResult (*cuOccupancyMaxActiveClusters)(int* clusters, FunctionHandle function,
                                             const LaunchConfig* config);
  CudaResult (*cuMemGetInfo)(size_t* free, size_t* total);
  CudaResult (*cuMemAlloc)(DevicePointer* memory, size_t bytes);
  CudaResult (*cuMemHostAlloc)(void** memory, size_t bytes, unsigned flags);
  CudaResult (*cuMemFree)(DevicePointer memory);
  CudaResult (*cuMemcpyHtoD)(DevicePointer to, const void* from, size_t bytes);
  CudaResult (*cuMemcpyDtoH)(void* to, DevicePointer from, size_t bytes);
  CudaResult (*cuMemsetD8)(DevicePointer memory, unsigned char value, size_t bytes);
  CudaResult (*cuMemsetD8Async)(DevicePointer memory, unsigned char value, size_t bytes, StreamHandle stream);
  CudaResult (*cuEventCreate)(EventHandle* event, unsigned flags);
  CudaResult (*cuEventRecord)(EventHandle event, StreamHandle stream);
  CudaResult (*cuEventSynchronize)(EventHandle event);
  CudaResult (*cuEventElapsedTime)(float* milliseconds, EventHandle start, EventHandle end);
  CudaResult (*cuEventDestroy)(EventHandle event);

  std::string path;

  // "CUDA_ERROR_OUT_OF_MEMORY, out of memory".
  std::string words(CudaResult error) const;
  std::string version() const;  // "13.0"
};

struct Nvrtc : NvrtcFunctions {
  std::string path;
  std::string version;   // "13.0"
  std::string builtins;  // the library that it loads by name, beside it
};

// Opened and started at the first call, then kept. After a failure the next call tries again: the process may
// have loaded the library meanwhile. They throw Error that says what is missing.
const Driver& driver();
const Nvrtc& nvrtc();  // needs neither a GPU nor the driver

// Folders besides the loader's path where NVRTC may be: the toolkit's, and those of a PyTorch or nvidia wheel
// with a loaded library.
std::vector<std::string> nvrtc_folders(const std::vector<std::string>& loaded);

// Throws Error "WHAT: the driver's words" unless the result is success.
void check(CudaResult result, const char* what);
[[noreturn]] void fail(CudaResult result, const std::string& what);

}  // namespace onepass::cuda
