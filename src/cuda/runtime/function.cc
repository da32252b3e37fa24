// Kernels on a GPU: loading, attributes, launches.
#include "cuda/runtime/function.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/runtime/context.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/recording.h"
#include "cuda/runtime/sha256.h"
#include "onepass/error.h"
#include "plan/build_error.h"

namespace onepass::cuda {
namespace {

// The largest cluster every GPU with clusters takes.
constexpr uint32_t portable_cluster = 8;

thread_local LaunchChain* chain_of_thread = nullptr;

using LaunchAttributes = std::array<LaunchAttribute, 2>;

LaunchConfig config_of(const Launch& launch, int64_t blocks, LaunchAttributes& attributes) {
  LaunchConfig config;
  config.grid_x = static_cast<uint32_t>(blocks == 0 ? launch.blocks.value() : blocks);
  config.block_x = launch.threads;
  config.shared_bytes = launch.shared_bytes;
  config.attributes = attributes.data();
  const auto add = [&](int id, uint32_t x) { attributes[config.attribute_count++] = {.id = id, .x = x}; };
  if (launch.cooperative) {
    add(LaunchAttribute::cooperative, 1);
  } else if (launch.cluster > 1) {
    add(LaunchAttribute::cluster_dimension, launch.cluster);
  }
  if (launch.waits && LaunchChain::follows_kernel()) add(LaunchAttribute::programmatic_serialization, 1);
  return config;
}

bool is_capturing(StreamHandle stream) {
  int status = 0;  // CU_STREAM_CAPTURE_STATUS_NONE
  const CudaResult result = driver().cuStreamIsCapturing(stream, &status);
  return result == cuda_success && status != 0;
}

int threads_per_multiprocessor(const Gpu& gpu) {
  const bool workstation = (gpu.compute_major == 8 && gpu.compute_minor != 0) || gpu.compute_major == 12;
  return workstation ? 1536 : 2048;
}

// Blocks that registers, threads and shared memory of a multiprocessor have room for.
int64_t typical_blocks(const Launch& launch, const Cubin& cubin, const Gpu& gpu) {
  constexpr int64_t registers = 65536;
  constexpr int64_t reserved_shared_bytes = 1024;  // of each block, by the system
  const int64_t threads = (launch.threads + 31) / 32 * 32;
  const int64_t registers_of_block = threads * std::max(8, (cubin.registers + 7) / 8 * 8);
  const int64_t shared_of_block = launch.shared_bytes + cubin.shared_bytes + reserved_shared_bytes;
  return std::min({threads_per_multiprocessor(gpu) / threads, registers / registers_of_block,
                   gpu.shared_bytes_per_multiprocessor / shared_of_block});
}

// A cluster lies within a GPC, and those have about 16 multiprocessors.
int typical_clusters(const Launch& launch, const Cubin& cubin, const Gpu& gpu) {
  constexpr int64_t gpc = 16;
  const int64_t blocks = typical_blocks(launch, cubin, gpu);
  if (launch.cluster == 1) return static_cast<int>(blocks * gpu.multiprocessors);
  return static_cast<int>(gpu.multiprocessors / gpc * (gpc * blocks / launch.cluster));
}

}  // namespace

LaunchChain::LaunchChain() : before_(std::exchange(chain_of_thread, this)) {}
LaunchChain::~LaunchChain() { chain_of_thread = before_; }
void LaunchChain::note_kernel() {
  if (chain_of_thread) chain_of_thread->has_kernel_ = true;
}
void LaunchChain::note_other() {
  if (chain_of_thread) chain_of_thread->has_kernel_ = false;
}
bool LaunchChain::follows_kernel() { return chain_of_thread && chain_of_thread->has_kernel_; }

// A kernel in the memory of one GPU, the same for all Functions with this machine code. Never unloaded: a
// captured graph may launch it after the plan is gone.
struct Function::Loaded {
  ContextHandle context = nullptr;
  FunctionHandle function = nullptr;

  static std::shared_ptr<const Loaded> find_or_load(const std::string& name, const Cubin& cubin,
                                                    const Launch& launch, int device);

 private:
  struct Kept;

  void load(const std::string& name, const Cubin& cubin, int device);
  void allow(const std::string& name, const Launch& launch);

  uint32_t shared_bytes = 0;  // the most that a launch may ask for
};

struct Function::Loaded::Kept {
  std::mutex mutex;
  std::map<std::pair<int, std::string>, std::shared_ptr<Loaded>> kernels;  // by device and hash of the image
};

std::shared_ptr<const Function::Loaded> Function::Loaded::find_or_load(const std::string& name,
                                                                       const Cubin& cubin,
                                                                       const Launch& launch, int device) {
  static Kept& kept = *new Kept;
  const ContextHandle context = primary_context(device);
  const CurrentContext current(context);
  const OutsideCapture outside;
  const std::lock_guard lock(kept.mutex);
  std::shared_ptr<Loaded>& loaded = kept.kernels[{device, Sha256().add(cubin.image).hex()}];
  if (!loaded) {
    auto made = std::make_shared<Loaded>();
    made->context = context;
    made->load(name, cubin, device);
    loaded = std::move(made);
  }
  loaded->allow(name, launch);
  return loaded;
}

void Function::Loaded::load(const std::string& name, const Cubin& cubin, int device) {
  ModuleHandle module = nullptr;
  CudaResult result = driver().cuModuleLoadData(&module, cubin.image.data());
  if (result == cuda_success) result = driver().cuModuleGetFunction(&function, module, name.c_str());
  if (result != cuda_success) {
    fail(result, "kernel " + name + " cannot be loaded on cuda:" + std::to_string(device) + " (driver " +
                     driver().version() + ", NVRTC " + nvrtc().version + ")");
  }
}

// Attributes belong to the kernel, not to a launch: what one Function was promised stays.
void Function::Loaded::allow(const std::string& name, const Launch& launch) {
  shared_bytes = std::max(shared_bytes, launch.shared_bytes);
  CudaResult result =
      driver().cuFuncSetAttribute(function, max_dynamic_shared_bytes, static_cast<int>(shared_bytes));
  if (result == cuda_success && launch.cluster > portable_cluster) {
    result = driver().cuFuncSetAttribute(function, non_portable_cluster_size_allowed, 1);
  }
  if (result != cuda_success) {
    throw BuildError("kernel " + name + " cannot have " + std::to_string(launch.shared_bytes) +
                     " bytes of shared memory in clusters of " + std::to_string(launch.cluster) + ": " +
                     driver().words(result));
  }
}

Function::Function(const Source& source, const Device& device, const Launch& launch)
    : gpu_(&gpu_of(device)), launch_(launch), source_(source), cubin_(compile(source, gpu_->architecture)) {
  if (!device.architecture.empty()) return;
  loaded_ = Loaded::find_or_load(source.name, cubin_, launch, device.index);
  require_resident(1);
}

void Function::require_resident(int64_t clusters) const {
  const int count = count_resident_clusters();
  if (count >= clusters) return;
  throw BuildError("kernel " + source_.name + " has no room: the GPU runs " + std::to_string(count) +
                   " of its " +
                   (launch_.cluster == 1 ? "blocks" : "clusters of " + std::to_string(launch_.cluster)) +
                   " at a time, must be at least " + std::to_string(clusters));
}

std::string Function::resident_name() const {
  Sha256 hash;
  hash.add_field(source_.text).add_field(std::to_string(launch_.threads));
  hash.add_field(std::to_string(launch_.cluster)).add_field(std::to_string(launch_.shared_bytes));
  return "resident_" + source_.name + "_" + hash.hex().substr(0, 8);
}

Number Function::resident_clusters() const {
  return Number::named(count_resident_clusters(), resident_name());
}

int Function::count_resident_clusters() const {
  if (!loaded_) return typical_clusters(launch_, cubin_, *gpu_);
  const CurrentContext current(loaded_->context);
  int count = 0;
  CudaResult result = cuda_success;
  if (launch_.cluster == 1) {  // also where the GPU knows no clusters
    result = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
        &count, loaded_->function, static_cast<int>(launch_.threads), launch_.shared_bytes);
    count *= gpu_->multiprocessors;
  } else {
    LaunchAttributes attributes;
    const LaunchConfig config = config_of(launch_, 0, attributes);
    result = driver().cuOccupancyMaxActiveClusters(&count, loaded_->function, &config);
  }
  if (result != cuda_success)
    fail(result, "the occupancy of kernel " + source_.name + " cannot be determined");
  return count;
}

void Function::launch(const void* parameters, size_t bytes, Stream stream, const Number& blocks) const {
  if (Recording::current()) throw Error("kernel " + source_.name + " is launched without formulas");
  if (!loaded_)
    throw Error("kernel " + source_.name + " was compiled for an architecture, not for a GPU: it cannot run");
  const CurrentContext current(loaded_->context);
  LaunchAttributes attributes;
  LaunchConfig config = config_of(launch_, blocks.value(), attributes);
  config.stream = static_cast<StreamHandle>(stream.handle);
  // CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END: the driver reads no more than these bytes.
  void* extra[] = {reinterpret_cast<void*>(1), const_cast<void*>(parameters), reinterpret_cast<void*>(2),
                   &bytes, nullptr};
  void* one[] = {const_cast<void*>(parameters)};
  // A captured cooperative kernel takes no buffer of parameters: with one the launch fails, with or without a
  // programmatic dependency (CUDA_ERROR_INVALID_VALUE, driver 13.0). The dependency is left out too: with
  // plain parameters it was not tried.
  const bool is_captured = launch_.cooperative && is_capturing(config.stream);
  if (is_captured) config.attribute_count = 1;
  const CudaResult result = driver().cuLaunchKernelEx(&config, loaded_->function, is_captured ? one : nullptr,
                                                      is_captured ? nullptr : extra);
  if (result != cuda_success) {
    fail(result, "kernel " + source_.name + " cannot be launched with " + std::to_string(config.grid_x) +
                     " blocks of " + std::to_string(config.block_x) + " threads");
  }
  LaunchChain::note_kernel();
}

void clear(void* memory, const Number& bytes, Stream stream, const Device& device) {
  if (bytes.value() == 0) return;
  if (Recording* recording = Recording::current()) {
    recording->clear(memory, bytes);
    return;
  }
  const CurrentContext current(primary_context(device.index));
  check(driver().cuMemsetD8Async(memory, 0, static_cast<size_t>(bytes.value()),
                                 static_cast<StreamHandle>(stream.handle)),
        "memory cannot be cleared");
  LaunchChain::note_other();
}

}  // namespace onepass::cuda
