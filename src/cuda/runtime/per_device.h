// What the process keeps for each GPU.
#pragma once

#include <map>
#include <mutex>

namespace onepass::cuda {

// Never destroyed: threads may still launch while the process ends.
template <class Kept>
struct PerDevice {
  std::mutex mutex;
  std::map<int, Kept> of_device;

  static PerDevice& kept() {
    static PerDevice& kept = *new PerDevice;
    return kept;
  }
};

}  // namespace onepass::cuda
