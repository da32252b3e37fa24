// The GPU of a device: its sizes and clocks as the driver tells them, rates of costs/ where it does not.
#include "cuda/runtime/gpu.h"

#include <array>
#include <memory>
#include <mutex>

#include "cuda/runtime/context.h"
#include "cuda/runtime/per_device.h"
#include "onepass/error.h"

namespace onepass::cuda {
namespace {

const Gpu& named_architecture(const std::string& architecture) {
  if (const Gpu* gpu = typical_gpu(architecture)) return *gpu;
  std::string names;
  for (const std::string& name : known_architectures()) names += (names.empty() ? "" : ", ") + name;
  throw Error("architecture \"" + architecture + "\" is unknown, must be one of " + names);
}

// wgmma and setmaxnreg exist only in the architecture-specific sm_90a.
std::string architecture_of(int major, int minor) {
  return "sm_" + std::to_string(major) + std::to_string(minor) + (major == 9 && minor == 0 ? "a" : "");
}

int attribute(DeviceAttribute which, int device) {
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, which, device), "a property of a GPU cannot be read");
  return value;
}

std::string name_of(int device) {
  std::array<char, 256> name{};
  check(driver().cuDeviceGetName(name.data(), static_cast<int>(name.size()), device),
        "the name of a GPU cannot be read");
  return name.data();
}

double copy_rate(const std::string& name, int device) {
  if (const double measured = measured_copy_rate(name); measured > 0) return measured;
  const double clock = 1e3 * attribute(memory_clock_kilohertz, device);
  return copy_share * 2 * clock * attribute(memory_bus_bits, device) / 8;  // two transfers a clock
}

double fp32_flops(const Gpu& gpu, int device) {
  return 2e3 * attribute(clock_kilohertz, device) * gpu.lanes() * gpu.multiprocessors;
}

Gpu ask_driver(int index) {
  const int device = device_handle(index);
  Gpu gpu;
  gpu.name = name_of(device);
  gpu.compute_major = attribute(compute_capability_major, device);
  gpu.compute_minor = attribute(compute_capability_minor, device);
  gpu.architecture = architecture_of(gpu.compute_major, gpu.compute_minor);
  gpu.multiprocessors = attribute(multiprocessor_count, device);
  gpu.shared_bytes_per_block = attribute(shared_memory_per_block_optin, device);
  gpu.shared_bytes_per_multiprocessor = attribute(shared_memory_per_multiprocessor, device);
  gpu.l2_bytes = attribute(l2_cache_bytes, device);
  gpu.bytes_per_second = copy_rate(gpu.name, device);
  gpu.flops = fp32_flops(gpu, device);
  // Virtual machines and integrated GPUs may hide their clocks.
  const Gpu* typical = typical_gpu(gpu.architecture);
  if (gpu.bytes_per_second <= 0)
    gpu.bytes_per_second = typical ? typical->bytes_per_second : guessed_bytes_per_second;
  if (gpu.flops <= 0) gpu.flops = typical ? typical->flops : guessed_flops;
  return gpu;
}

const Gpu& present_gpu(int index) {
  auto& known = PerDevice<std::unique_ptr<const Gpu>>::kept();
  const std::lock_guard lock(known.mutex);
  std::unique_ptr<const Gpu>& gpu = known.of_device[index];
  if (!gpu) gpu = std::make_unique<const Gpu>(ask_driver(index));
  return *gpu;
}

}  // namespace

const Gpu& gpu_of(const Device& device) {
  if (device.kind != Device::Kind::cuda) throw Error("device " + device.text() + " is no GPU");
  return device.architecture.empty() ? present_gpu(device.index) : named_architecture(device.architecture);
}

const std::vector<std::string>& known_architectures() {
  static const std::vector<std::string> list = [] {
    std::vector<std::string> names;
    for (const Gpu& gpu : typical_gpus()) names.push_back(gpu.architecture);
    return names;
  }();
  return list;
}

}  // namespace onepass::cuda
