// Counters that kernels add to and the host reads without waiting.
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "cuda/context.h"
#include "cuda/driver.h"
#include "onepass/cuda.h"

namespace onepass::cuda {
namespace {

constexpr size_t page_counters = 512;  // 4 KiB: one allocation serves the layers of a model

struct Page {
  int64_t* counters = nullptr;
  size_t used = page_counters;
};

struct Pages {
  std::mutex mutex;
  std::map<int, Page> of_device;  // the last of each
};

// Never destroyed: kernels may still add while the process ends.
Pages& pages() {
  static Pages& kept = *new Pages;
  return kept;
}

// Kernels of the device reach it by the same address.
int64_t* allocate_page(int device) {
  constexpr unsigned portable_and_mapped = 3;  // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
  const CurrentContext current(primary_context(device));
  const OutsideCapture outside;
  void* memory = nullptr;
  check(driver().cuMemHostAlloc(&memory, page_counters * sizeof(int64_t), portable_and_mapped),
        "host memory for counters cannot be had");
  std::memset(memory, 0, page_counters * sizeof(int64_t));
  return static_cast<int64_t*>(memory);
}

}  // namespace

int64_t* new_counter(int device) {
  Pages& kept = pages();
  const std::lock_guard lock(kept.mutex);
  Page& page = kept.of_device[device];
  if (page.used == page_counters) page = {allocate_page(device), 0};
  return page.counters + page.used++;
}

int64_t value_of(const int64_t* counter) {
  return std::atomic_ref(*const_cast<int64_t*>(counter)).load(std::memory_order_relaxed);
}

}  // namespace onepass::cuda
