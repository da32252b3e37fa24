// PyTorch's current stream, from the libtorch_cuda that is in the process: one build serves PyTorch with and
// without CUDA.
#include "cuda_stream.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include "onepass/error.h"

namespace onepass::torch_binding {
namespace {

using GetStream = AOTITorchError (*)(int32_t device_index, void** stream);

GetStream find_get_stream() {
  // A tensor on a GPU exists only in a process that has loaded it.
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  void* function = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
  if (!function) throw Error("this PyTorch has no CUDA: libtorch_cuda.so is not in the process");
  return reinterpret_cast<GetStream>(function);
}

}  // namespace

Stream current_stream(int device) {
  static const GetStream get_stream = find_get_stream();
  Stream stream;
  TORCH_ERROR_CODE_CHECK(get_stream(device, &stream.handle));
  return stream;
}

}  // namespace onepass::torch_binding
