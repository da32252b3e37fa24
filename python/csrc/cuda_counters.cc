// The counters of samples that are computed again, by number.
#include "cuda_counters.h"

#include <torch/csrc/stable/library.h>

#include <mutex>
#include <string>
#include <vector>

#include "boxed.h"
#include "onepass/cuda.h"
#include "onepass/error.h"

namespace onepass::torch_binding {
namespace {

struct Counter {
  int device = 0;
  int64_t* address = nullptr;
};

class Counters {
 public:
  int64_t add(int device) {
    int64_t* const address = cuda::new_counter(device);
    const std::lock_guard lock(mutex_);
    counters_.push_back({device, address});
    return std::ssize(counters_) - 1;
  }

  Counter at(int64_t number) const {
    const std::lock_guard lock(mutex_);
    if (number < 0 || number >= std::ssize(counters_))
      throw Error("there is no counter " + std::to_string(number));
    return counters_[static_cast<size_t>(number)];
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Counter> counters_;
};

Counters& counters() {
  static Counters all;
  return all;
}

int64_t new_counter(int64_t device) { return counters().add(static_cast<int>(device)); }

int64_t counted(int64_t number) { return cuda::value_of(counters().at(number).address); }

}  // namespace

int64_t* counter_of(int64_t number, int device) {
  if (number == no_counter) return nullptr;
  const Counter counter = counters().at(number);
  if (counter.device != device)
    throw Error("counter " + std::to_string(number) + " belongs to cuda:" + std::to_string(counter.device));
  return counter.address;
}

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, library) {
  library.def("cuda_new_counter(int device) -> int");
  library.def("cuda_counted(int number) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CompositeExplicitAutograd, library) {
  library.impl("cuda_new_counter", boxed<new_counter>);
  library.impl("cuda_counted", boxed<counted>);
}

}  // namespace onepass::torch_binding
