// The batch that a plan cuts its tiles for: the problem's, or that of the plan being exported.
#pragma once

#include <cstdint>
#include <utility>

#include "cuda/runtime/scoped.h"

namespace onepass::cuda {

// Some rows cut tiles across samples, so their kernels depend on the batch they are cut for. An export tries
// its formulas with other batches. While a CutFor lives, plans of its thread are cut for its batch instead.
class CutFor : public Scoped {
 public:
  explicit CutFor(int64_t batch) : before_(std::exchange(batch_, batch)) {}
  ~CutFor() { batch_ = before_; }
  static int64_t instead_of(int64_t batch) { return batch_ > 0 ? batch_ : batch; }

 private:
  static inline thread_local int64_t batch_ = 0;
  int64_t before_;
};

}  // namespace onepass::cuda
