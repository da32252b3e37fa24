// Primary contexts, retained when first used.
#include "cuda/runtime/context.h"

#include <mutex>

#include "cuda/runtime/per_device.h"
#include "onepass/error.h"

namespace onepass::cuda {
int gpu_count() {
  int count = 0;
  check(driver().cuDeviceGetCount(&count), "GPUs cannot be counted");
  return count;
}

int device_handle(int index) {
  const int count = gpu_count();
  if (index < 0 || index >= count) {
    throw Error("cuda:" + std::to_string(index) + " does not exist: this machine has " +
                (count == 0   ? "no GPU"
                 : count == 1 ? "1 GPU"
                              : std::to_string(count) + " GPUs"));
  }
  int device = 0;
  check(driver().cuDeviceGet(&device, index), "a GPU cannot be opened");
  return device;
}

ContextHandle primary_context(int index) {
  auto& kept = PerDevice<ContextHandle>::kept();
  const std::lock_guard lock(kept.mutex);
  const auto found = kept.of_device.find(index);
  if (found != kept.of_device.end()) return found->second;
  const OutsideCapture outside;
  ContextHandle context = nullptr;
  const CudaResult result = driver().cuDevicePrimaryCtxRetain(&context, device_handle(index));
  if (result != cuda_success) fail(result, "cuda:" + std::to_string(index) + " cannot be used");
  kept.of_device.emplace(index, context);
  return context;
}

CurrentContext::CurrentContext(ContextHandle wanted) {
  const Driver& cuda = driver();
  ContextHandle current = nullptr;
  if (cuda.cuCtxGetCurrent(&current) == cuda_success && current == wanted) return;
  check(cuda.cuCtxPushCurrent(wanted), "the context of a GPU cannot be made current");
  pushed_ = true;
}

CurrentContext::~CurrentContext() {
  ContextHandle popped = nullptr;
  if (pushed_) driver().cuCtxPopCurrent(&popped);
}

OutsideCapture::OutsideCapture() : mode_(2) {  // CU_STREAM_CAPTURE_MODE_RELAXED
  check(driver().cuThreadExchangeStreamCaptureMode(&mode_), "the capture mode cannot be changed");
}

OutsideCapture::~OutsideCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }

}  // namespace onepass::cuda
