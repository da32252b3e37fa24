// Counters that kernels add to and the host reads without waiting.
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "cuda/runtime/context.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/per_device.h"
#include "onepass/cuda.h"

namespace onepass::cuda {
namespace {

constexpr size_t page_counters = 512;  // 4 KiB: one allocation serves the layers of a model

// Of one device. All pages are kept: a graph may be replayed after its layer is gone.
struct DevicePages {
  std::vector<int64_t*> pages;
  size_t used = page_counters;  // of the last one
};

// Kernels of the device reach it by the same address.
int64_t* allocate_page(int device) {
  constexpr unsigned portable_and_mapped = 3;  // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
  const CurrentContext current(primary_context(device));
  const OutsideCapture outside;
  void* memory = nullptr;
  check(driver().cuMemHostAlloc(&memory, page_counters * sizeof(int64_t), portable_and_mapped),
        "host memory for counters cannot be allocated");
  std::memset(memory, 0, page_counters * sizeof(int64_t));
  return static_cast<int64_t*>(memory);
}

}  // namespace

int64_t* new_counter(int device) {
  auto& kept = PerDevice<DevicePages>::kept();
  const std::lock_guard lock(kept.mutex);
  DevicePages& own = kept.of_device[device];
  if (own.used == page_counters) {
    own.pages.push_back(allocate_page(device));
    own.used = 0;
  }
  return own.pages.back() + own.used++;
}

int64_t value_of(const int64_t* counter) {
  return std::atomic_ref(*const_cast<int64_t*>(counter)).load(std::memory_order_relaxed);
}

}  // namespace onepass::cuda
