// Working on a GPU from any thread: its primary context made current, a stream capture elsewhere not
// disturbed.
#pragma once

#include "cuda/runtime/driver.h"

namespace onepass::cuda {

// How many GPUs the driver has; throws Error where there is no driver.
int gpu_count();
// The driver's handle; throws Error "cuda:3 does not exist: this machine has 1 GPU".
int device_handle(int index);

// The device's primary context, the one PyTorch and the CUDA runtime use. Retained once for each device and
// kept: a caller may have captured work in it.
ContextHandle primary_context(int index);

// Makes the context current until the end of the scope; what was current is so again then.
class CurrentContext {
 public:
  explicit CurrentContext(ContextHandle wanted);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pushed_ = false;
};

// Loading code and allocating memory are refused while any thread captures a stream in the default mode;
// neither is part of a capture, so the check is off for this thread until the end of the scope.
class OutsideCapture {
 public:
  OutsideCapture();
  ~OutsideCapture();
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  int mode_;  // the thread's own
};

}  // namespace onepass::cuda
