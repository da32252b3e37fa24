// PyTorch's current stream of a GPU.
#pragma once

#include "onepass/executor.h"

namespace onepass::torch_binding {

// The stream on which the calling thread's operators of this GPU run.
Stream current_stream(int device);

}  // namespace onepass::torch_binding
