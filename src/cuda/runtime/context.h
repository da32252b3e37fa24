// Work on a GPU from any thread: its primary context is made current, and captures of other threads are not
// disturbed.
#pragma once

#include "cuda/runtime/driver.h"
#include "cuda/runtime/scoped.h"

namespace onepass::cuda {

// How many GPUs the driver has; throws Error where there is no driver.
int gpu_count();
// The driver's handle; throws Error "cuda:3 does not exist: this machine has 1 GPU".
int device_handle(int index);

// The device's primary context, the one PyTorch and the CUDA runtime use. Retained once for each device and
// kept: a caller may have captured work in it.
ContextHandle primary_context(int index);

// Makes the context current until the end of the scope, then restores the previous one.
class CurrentContext : public Scoped {
 public:
  explicit CurrentContext(ContextHandle wanted);
  ~CurrentContext();

 private:
  bool pushed_ = false;
};

// The driver refuses to load code or allocate memory while any thread captures a stream in the default mode.
// Neither is part of a capture, so the check is off for this thread until the end of the scope.
class OutsideCapture : public Scoped {
 public:
  OutsideCapture();
  ~OutsideCapture();

 private:
  int mode_;  // the thread's own
};

}  // namespace onepass::cuda
