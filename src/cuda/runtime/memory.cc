// Memory and timers of a GPU for callers without a framework, and descriptions of the GPUs.
#include <array>
#include <cstdio>
#include <memory>
#include <utility>

#include "cuda/runtime/context.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/gpu.h"
#include "onepass/cuda.h"
#include "onepass/error.h"

namespace onepass::cuda {
namespace {

std::string gibibytes(size_t bytes) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f GiB", static_cast<double>(bytes) / (1 << 30));
  return text.data();
}

std::string amount(size_t bytes) {
  return bytes < size_t{1} << 28 ? std::to_string(bytes) + " bytes" : gibibytes(bytes);
}

[[noreturn]] void refuse_allocation(CudaResult result, int device, size_t bytes) {
  if (result != cuda_out_of_memory) {
    fail(result, "cuda:" + std::to_string(device) + " cannot give " + amount(bytes) + " of memory");
  }
  size_t available = 0;
  size_t total = 0;
  driver().cuMemGetInfo(&available, &total);
  throw Error("cuda:" + std::to_string(device) + " has no " + amount(bytes) +
              " of memory left: " + gibibytes(available) + " of " + gibibytes(total) + " are free");
}

std::string nvrtc_text() {
  try {
    return "NVRTC " + nvrtc().version + " from " + nvrtc().path;
  } catch (const Error&) {
    return "no NVRTC";
  }
}

}  // namespace

std::string unavailable_reason() {
  try {
    if (gpu_count() == 0)
      return "this machine has no GPU that the CUDA driver at " + driver().path + " knows";
    nvrtc();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

int device_count() { return unavailable_reason().empty() ? gpu_count() : 0; }

std::string describe_device(int index) {
  const Gpu& gpu = gpu_of(Device::cuda(index));
  size_t bytes = 0;
  check(driver().cuDeviceTotalMem(&bytes, device_handle(index)), "the memory of a GPU cannot be read");
  return gpu.name + ", " + gpu.architecture + ", " + std::to_string(gpu.multiprocessors) +
         " multiprocessors, " + gibibytes(bytes) + "; driver " + driver().version() + ", " + nvrtc_text();
}

Rates device_rates(int index) { return device_rates(Device::cuda(index)); }

Rates device_rates(const Device& device) {
  const Gpu& gpu = gpu_of(device);
  return {gpu.bytes_per_second, gpu.flops, reached_tensor_flops(gpu)};
}

Memory::Memory(int device, size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  const CurrentContext current(primary_context(device));
  const OutsideCapture outside;
  const CudaResult result = driver().cuMemAlloc(&data_, bytes);
  if (result != cuda_success) refuse_allocation(result, device, bytes);
}

// An error here is an earlier one of the GPU's work, which synchronize() reports.
Memory::~Memory() {
  if (data_ == nullptr) return;
  try {
    const CurrentContext current(primary_context(device_));
    const OutsideCapture outside;
    driver().cuMemFree(data_);
  } catch (const Error&) {
  }
}

Memory::Memory(Memory&& other) noexcept
    : device_(other.device_),
      bytes_(std::exchange(other.bytes_, 0)),
      data_(std::exchange(other.data_, nullptr)) {}

void Memory::upload(const void* from, size_t bytes) {
  if (bytes > bytes_) throw Error(std::to_string(bytes) + " bytes do not fit in " + std::to_string(bytes_));
  if (bytes == 0) return;
  const CurrentContext current(primary_context(device_));
  check(driver().cuMemcpyHtoD(data_, from, bytes), "memory cannot be copied to the GPU");
}

void Memory::download(void* to, size_t bytes) const {
  if (bytes > bytes_)
    throw Error(std::to_string(bytes) + " bytes are more than the memory has: " + std::to_string(bytes_));
  if (bytes == 0) return;
  const CurrentContext current(primary_context(device_));
  check(driver().cuMemcpyDtoH(to, data_, bytes), "memory cannot be copied from the GPU");
}

void Memory::fill(unsigned char value) {
  if (bytes_ == 0) return;
  const CurrentContext current(primary_context(device_));
  check(driver().cuMemsetD8(data_, value, bytes_), "memory of the GPU cannot be filled");
}

void synchronize(int device) {
  const CurrentContext current(primary_context(device));
  check(driver().cuCtxSynchronize(), "work on the GPU failed");
}

bool is_captured(int device, Stream stream) {
  const CurrentContext current(primary_context(device));
  int status = 0;  // none
  check(driver().cuStreamIsCapturing(static_cast<StreamHandle>(stream.handle), &status),
        "the state of a stream cannot be read");
  return status != 0;
}

struct Timer::Events {
  ContextHandle context = nullptr;
  EventHandle start = nullptr;
  EventHandle stop = nullptr;

  ~Events() {
    for (const EventHandle event : {start, stop}) {
      if (event != nullptr) driver().cuEventDestroy(event);
    }
  }
};

Timer::Timer(int device) : events_(nullptr) {
  auto events = std::make_unique<Events>();
  events->context = primary_context(device);
  const CurrentContext current(events->context);
  check(driver().cuEventCreate(&events->start, 0), "a timer of the GPU cannot be created");
  check(driver().cuEventCreate(&events->stop, 0), "a timer of the GPU cannot be created");
  events_ = events.release();
}

Timer::~Timer() { delete events_; }

void Timer::start(Stream stream) {
  const CurrentContext current(events_->context);
  check(driver().cuEventRecord(events_->start, static_cast<StreamHandle>(stream.handle)),
        "a timer of the GPU cannot be started");
}

double Timer::stop(Stream stream) {
  const CurrentContext current(events_->context);
  check(driver().cuEventRecord(events_->stop, static_cast<StreamHandle>(stream.handle)),
        "a timer of the GPU cannot be stopped");
  check(driver().cuEventSynchronize(events_->stop), "work on the GPU failed");
  float milliseconds = 0;
  check(driver().cuEventElapsedTime(&milliseconds, events_->start, events_->stop), "work on the GPU failed");
  return static_cast<double>(milliseconds) / 1e3;
}

}  // namespace onepass::cuda
