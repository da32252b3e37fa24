// What the tests script and read of the stub that stands in for the CUDA driver and for NVRTC.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace onepass::stub {

// One call of cuLaunchKernelEx, as the driver saw it.
struct LaunchRecord {
  uint32_t grid = 0;
  uint32_t threads = 0;
  uint32_t shared_bytes = 0;
  void* stream = nullptr;
  std::vector<uint32_t> clusters;  // of each cluster attribute, as x, y, z
  std::string parameters;          // the bytes
  void* context = nullptr;         // current at that time
  bool is_early = false;           // before the kernel before it has ended
};

struct AttributeRecord {
  int attribute = 0;
  int value = 0;
};

struct State {
  // Scripted by the tests.
  std::string failing;                 // this function fails
  int error = 1;                       // with this code
  std::atomic<bool> capturing{false};  // as if another thread captured a stream in the default mode
  size_t free_bytes = size_t{1} << 30;
  size_t room = SIZE_MAX;  // a kernel with more dynamic shared memory has no room on a multiprocessor
  std::string refused;     // a source with these words does not compile
  // Between two events, by the launch before the second of them; 2.5 where not set.
  std::function<float(const LaunchRecord&)> milliseconds;

  // Read by the tests.
  std::vector<LaunchRecord> launches;
  std::vector<AttributeRecord> attributes;
  int loaded_modules = 0;
  int retained_contexts = 0;
  std::atomic<int> compilations{0};
  std::atomic<int> concurrent_compilations{0};  // the most at a time
};

// The context of GPU `index`, and one that belongs to the test.
inline void* context_of(int index) { return reinterpret_cast<void*>(0x1000 + static_cast<uintptr_t>(index)); }
inline void* foreign_context() { return reinterpret_cast<void*>(0x9000); }

}  // namespace onepass::stub

extern "C" onepass::stub::State* onepass_stub_state();
