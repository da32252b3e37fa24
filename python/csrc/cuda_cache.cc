// The compiled kernels kept on disk, for `onepass cache`.
#include <string>

#include "boxed.h"
#include "onepass/cuda.h"

namespace onepass::torch_binding {
namespace {

// A line for each kernel: its name, architecture, bytes and file name, between tabs.
std::string cache_entries() {
  std::string lines;
  for (const cuda::CacheEntry& entry : cuda::cache_entries()) {
    lines += entry.kernel + '\t' + entry.architecture + '\t' + std::to_string(entry.bytes) + '\t' +
             entry.file.substr(entry.file.rfind('/') + 1) + '\n';
  }
  return lines;
}

int64_t clear_cache() { return cuda::clear_cache(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, library) {
  library.def("cuda_cache_entries() -> str");
  library.def("cuda_clear_cache() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CompositeExplicitAutograd, library) {
  library.impl("cuda_cache_entries", boxed<cache_entries>);
  library.impl("cuda_clear_cache", boxed<clear_cache>);
}

}  // namespace onepass::torch_binding
