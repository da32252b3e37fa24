// A stand-in for libcuda.so.1 and libnvrtc.so: GPUs that remember what they were asked and compute nothing.
//
// $ONEPASS_STUB_GPUS says how many there are (2). The first is an H200, the others A100s. "Device" memory is
// the process's own. Text compiles to itself; "#error" in it fails, and what follows "//log " is the log.
// On text with the words $ONEPASS_STUB_FAULT_AT the compiler waits until there is a file $ONEPASS_STUB_GATE,
// then does what $ONEPASS_STUB_FAULT says: crash, exit, be killed (kill), kill its parent (orphan). Its
// version is 99.$ONEPASS_STUB_MINOR (1).
#include "stub_cuda.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>

#include "cuda/runtime/driver.h"

namespace {

using namespace onepass::cuda;
using onepass::stub::State;

constexpr CudaResult invalid_device = 101;
constexpr CudaResult invalid_context = 201;
constexpr CudaResult capture_unsupported = 900;
constexpr int relaxed = 2;

State state;
std::mutex mutex;
thread_local std::vector<ContextHandle> contexts;
thread_local int capture_mode = 0;

int gpu_count() {
  const char* text = std::getenv("ONEPASS_STUB_GPUS");
  return text == nullptr ? 2 : std::atoi(text);
}

CudaResult result_of(const char* function) { return state.failing == function ? state.error : 0; }

// For functions that need a context and are refused during a capture elsewhere.
CudaResult unsafe_result_of(const char* function) {
  if (contexts.empty()) return invalid_context;
  if (state.capturing && capture_mode != relaxed) return capture_unsupported;
  return result_of(function);
}

CudaResult work_result_of(const char* function) {
  return contexts.empty() ? invalid_context : result_of(function);
}

int attribute_of(int device, int attribute) {
  static const std::map<int, std::pair<int, int>> values{
      {clock_kilohertz, {1980000, 1410000}},
      {multiprocessor_count, {132, 108}},
      {memory_clock_kilohertz, {3201000, 1215000}},
      {memory_bus_bits, {6144, 5120}},
      {l2_cache_bytes, {50 << 20, 40 << 20}},
      {compute_capability_major, {9, 8}},
      {compute_capability_minor, {0, 0}},
      {shared_memory_per_multiprocessor, {228 << 10, 164 << 10}},
      {shared_memory_per_block_optin, {227 << 10, 163 << 10}},
  };
  const auto& [first, others] = values.at(attribute);
  return device == 0 ? first : others;
}

// CU_LAUNCH_PARAM_BUFFER_POINTER is 1, _SIZE 2; the list ends with a null pointer.
std::string parameter_bytes(void** extra) {
  const char* bytes = nullptr;
  size_t count = 0;
  for (; *extra != nullptr; extra += 2) {
    if (extra[0] == reinterpret_cast<void*>(1)) bytes = static_cast<const char*>(extra[1]);
    if (extra[0] == reinterpret_cast<void*>(2)) count = *static_cast<size_t*>(extra[1]);
  }
  return {bytes, count};
}

}  // namespace

#define STUB extern "C" __attribute__((visibility("default")))

STUB State* onepass_stub_state() { return &state; }

STUB CudaResult cuInit(unsigned) { return gpu_count() == 0 ? 100 : result_of("cuInit"); }

STUB CudaResult cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

STUB CudaResult cuGetErrorName(CudaResult error, const char** name) {
  static const std::map<int, const char*> names{{1, "CUDA_ERROR_INVALID_VALUE"},
                                                {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                {100, "CUDA_ERROR_NO_DEVICE"},
                                                {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  const auto found = names.find(error);
  if (found == names.end()) return 1;
  *name = found->second;
  return 0;
}

STUB CudaResult cuGetErrorString(CudaResult error, const char** words) {
  *words = error == 2 ? "out of memory" : error == 100 ? "no CUDA-capable device is detected" : "stub words";
  return 0;
}

STUB CudaResult cuDeviceGetCount(int* count) {
  *count = gpu_count();
  return result_of("cuDeviceGetCount");
}

STUB CudaResult cuDeviceGet(int* device, int index) {
  *device = index;
  return index < gpu_count() ? 0 : invalid_device;
}

STUB CudaResult cuDeviceGetName(char* name, int bytes, int device) {
  std::strncpy(name, device == 0 ? "NVIDIA H200" : "NVIDIA A100", static_cast<size_t>(bytes));
  return 0;
}

STUB CudaResult cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute_of(device, attribute);
  return result_of("cuDeviceGetAttribute");
}

STUB CudaResult cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = size_t{140} << 30;
  return 0;
}

STUB CudaResult cuDevicePrimaryCtxRetain(ContextHandle* context, int device) {
  if (state.capturing && capture_mode != relaxed) return capture_unsupported;
  const std::lock_guard lock(mutex);
  ++state.retained_contexts;
  *context = static_cast<ContextHandle>(onepass::stub::context_of(device));
  return result_of("cuDevicePrimaryCtxRetain");
}

STUB CudaResult cuCtxGetCurrent(ContextHandle* context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  return 0;
}

STUB CudaResult cuCtxPushCurrent_v2(ContextHandle context) {
  contexts.push_back(context);
  return 0;
}

STUB CudaResult cuCtxPopCurrent_v2(ContextHandle* context) {
  if (contexts.empty()) return invalid_context;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}

STUB CudaResult cuCtxSynchronize() { return work_result_of("cuCtxSynchronize"); }

STUB CudaResult cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}

STUB CudaResult cuModuleLoadData(ModuleHandle* module, const void*) {
  const std::lock_guard lock(mutex);
  const CudaResult result = unsafe_result_of("cuModuleLoadData");
  if (result == 0) ++state.loaded_modules;
  *module = reinterpret_cast<ModuleHandle>(0x100);
  return result;
}

STUB CudaResult cuModuleGetFunction(FunctionHandle* function, ModuleHandle, const char*) {
  *function = reinterpret_cast<FunctionHandle>(0x200);
  return unsafe_result_of("cuModuleGetFunction");
}

STUB CudaResult cuFuncSetAttribute(FunctionHandle, int attribute, int value) {
  const std::lock_guard lock(mutex);
  state.attributes.push_back({attribute, value});
  return unsafe_result_of("cuFuncSetAttribute");
}

STUB CudaResult cuLaunchKernelEx(const LaunchConfig* config, FunctionHandle, void**, void** extra) {
  const std::lock_guard lock(mutex);
  onepass::stub::LaunchRecord record{config->grid_x,
                                     config->block_x,
                                     config->shared_bytes,
                                     config->stream,
                                     {},
                                     parameter_bytes(extra),
                                     contexts.empty() ? nullptr : contexts.back()};
  for (uint32_t i = 0; i < config->attribute_count; ++i) {
    const LaunchAttribute& attribute = config->attributes[i];
    if (attribute.id == LaunchAttribute::cluster_dimension) {
      record.clusters.insert(record.clusters.end(), {attribute.x, attribute.y, attribute.z});
    }
    if (attribute.id == LaunchAttribute::programmatic_serialization) record.is_early = attribute.x == 1;
  }
  state.launches.push_back(std::move(record));
  return work_result_of("cuLaunchKernelEx");
}

STUB CudaResult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, FunctionHandle, int threads,
                                                            size_t shared_bytes) {
  *blocks = shared_bytes > state.room ? 0 : 2048 / threads;
  return work_result_of("cuOccupancyMaxActiveBlocksPerMultiprocessor");
}

STUB CudaResult cuOccupancyMaxActiveClusters(int* clusters, FunctionHandle, const LaunchConfig* config) {
  const bool fits = config->attribute_count == 1 && config->shared_bytes <= state.room;
  *clusters = fits ? static_cast<int>(128 / config->attributes->x) : 0;
  return work_result_of("cuOccupancyMaxActiveClusters");
}

STUB CudaResult cuMemGetInfo_v2(size_t* free, size_t* total) {
  *free = state.free_bytes;
  *total = size_t{140} << 30;
  return 0;
}

STUB CudaResult cuMemAlloc_v2(DevicePointer* memory, size_t bytes) {
  if (bytes > state.free_bytes) return cuda_out_of_memory;
  const CudaResult result = unsafe_result_of("cuMemAlloc");
  if (result == 0) *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return result;
}

STUB CudaResult cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  const CudaResult result = unsafe_result_of("cuMemHostAlloc");
  // As the driver's memory: whatever was there before.
  if (result == 0) *memory = std::memset(std::aligned_alloc(256, (bytes + 255) / 256 * 256), 0xa5, bytes);
  return result;
}

STUB CudaResult cuMemFree_v2(DevicePointer memory) {
  std::free(memory);
  return unsafe_result_of("cuMemFree");
}

STUB CudaResult cuMemcpyHtoD_v2(DevicePointer to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return work_result_of("cuMemcpyHtoD");
}

STUB CudaResult cuMemcpyDtoH_v2(void* to, DevicePointer from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return work_result_of("cuMemcpyDtoH");
}

STUB CudaResult cuMemsetD8_v2(DevicePointer memory, unsigned char value, size_t bytes) {
  std::memset(memory, value, bytes);
  return work_result_of("cuMemsetD8");
}

STUB CudaResult cuMemsetD8Async(DevicePointer memory, unsigned char value, size_t bytes, StreamHandle) {
  std::memset(memory, value, bytes);
  return work_result_of("cuMemsetD8Async");
}

STUB CudaResult cuEventCreate(EventHandle* event, unsigned) {
  *event = reinterpret_cast<EventHandle>(0x300);
  return work_result_of("cuEventCreate");
}

STUB CudaResult cuEventRecord(EventHandle, StreamHandle) { return work_result_of("cuEventRecord"); }
STUB CudaResult cuEventSynchronize(EventHandle) { return work_result_of("cuEventSynchronize"); }

STUB CudaResult cuStreamIsCapturing(StreamHandle stream, int* status) {
  *status = stream != nullptr && state.capturing ? 1 : 0;
  return work_result_of("cuStreamIsCapturing");
}

STUB CudaResult cuEventElapsedTime(float* milliseconds, EventHandle, EventHandle) {
  const std::lock_guard lock(mutex);
  const bool scripted = state.milliseconds != nullptr && !state.launches.empty();
  *milliseconds = scripted ? state.milliseconds(state.launches.back()) : 2.5f;
  return 0;
}

STUB CudaResult cuEventDestroy_v2(EventHandle) { return 0; }

// What tests/gpu needs besides: with this driver and the real NVRTC its kernels are compiled where there is
// no GPU; nothing is launched, so what they compare is wrong.
STUB CudaResult cuStreamCreate(StreamHandle* stream, unsigned) {
  static std::atomic<uintptr_t> next{0x10000};
  *stream = reinterpret_cast<StreamHandle>(next += 16);
  return 0;
}
STUB CudaResult cuStreamDestroy_v2(StreamHandle) { return 0; }
STUB CudaResult cuStreamSynchronize(StreamHandle) { return 0; }
STUB CudaResult cuStreamBeginCapture_v2(StreamHandle, int) { return 0; }
STUB CudaResult cuStreamEndCapture(StreamHandle, void** graph) {
  *graph = &state;
  return 0;
}
STUB CudaResult cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, size_t bytes, StreamHandle) {
  return cuMemcpyHtoD_v2(to, from, bytes);
}
STUB CudaResult cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, size_t bytes, StreamHandle) {
  return cuMemcpyDtoH_v2(to, from, bytes);
}
STUB CudaResult cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  *executable = graph;
  return 0;
}
STUB CudaResult cuGraphLaunch(void*, StreamHandle) { return 0; }
STUB CudaResult cuGraphExecDestroy(void*) { return 0; }
STUB CudaResult cuGraphDestroy(void*) { return 0; }

namespace {

struct StubProgram {
  std::string text;
  std::string log;
};

StubProgram* program_of(ProgramHandle handle) { return reinterpret_cast<StubProgram*>(handle); }

// By the environment, which a process that compiles for another has too.
std::string setting(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

void suffer(const std::string& fault) {
  const std::string gate = setting("ONEPASS_STUB_GATE");
  while (!gate.empty() && !std::ifstream(gate)) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  if (fault == "crash") std::raise(SIGSEGV);
  if (fault == "kill") std::raise(SIGKILL);
  if (fault == "orphan") {
    kill(getppid(), SIGKILL);
    pause();
  }
  if (fault == "exit") std::_Exit(3);
}

}  // namespace

STUB CudaResult nvrtcVersion(int* major, int* minor) {
  *major = 99;
  *minor = setting("ONEPASS_STUB_MINOR").empty() ? 1 : std::stoi(setting("ONEPASS_STUB_MINOR"));
  return 0;
}

STUB const char* nvrtcGetErrorString(CudaResult) { return "STUB_ERROR"; }

STUB CudaResult nvrtcCreateProgram(ProgramHandle* program, const char* text, const char*, int,
                                   const char* const*, const char* const*) {
  const std::string source = text;
  const size_t log = source.find("//log ");
  auto* made = new StubProgram{source, log == std::string::npos ? "" : source.substr(log + 6)};
  *program = reinterpret_cast<ProgramHandle>(made);
  return 0;
}

STUB CudaResult nvrtcDestroyProgram(ProgramHandle* program) {
  delete program_of(*program);
  return 0;
}

// Takes long enough that threads which may overlap do.
STUB CudaResult nvrtcCompileProgram(ProgramHandle program, int, const char* const*) {
  static std::atomic<int> active{0};
  const int now = ++active;
  ++state.compilations;
  for (int most = state.concurrent_compilations; most < now;) {
    if (state.concurrent_compilations.compare_exchange_weak(most, now)) break;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  --active;
  const std::string& text = program_of(program)->text;
  const auto has = [&](const std::string& words) {
    return !words.empty() && text.find(words) != std::string::npos;
  };
  if (has(setting("ONEPASS_STUB_FAULT_AT"))) suffer(setting("ONEPASS_STUB_FAULT"));
  return has("#error") || has(state.refused) ? 6 : 0;
}

STUB CudaResult nvrtcGetProgramLogSize(ProgramHandle program, size_t* bytes) {
  *bytes = program_of(program)->log.size() + 1;
  return 0;
}

STUB CudaResult nvrtcGetProgramLog(ProgramHandle program, char* log) {
  std::strcpy(log, program_of(program)->log.c_str());
  return 0;
}

STUB CudaResult nvrtcGetCUBINSize(ProgramHandle program, size_t* bytes) {
  *bytes = program_of(program)->text.size();
  return 0;
}

STUB CudaResult nvrtcGetCUBIN(ProgramHandle program, char* image) {
  const std::string& text = program_of(program)->text;
  std::copy(text.begin(), text.end(), image);
  return 0;
}
