// PyTorch's thread pool as the executor of plans.
#pragma once

#include "onepass/executor.h"

namespace onepass::torch_binding {

// How many threads torch.set_num_threads allows.
int torch_threads();

class TorchExecutor final : public Executor {
 public:
  explicit TorchExecutor(int threads) : threads_(threads) {}
  int concurrency() const override { return threads_; }
  void run(int64_t count, Task task, void* context) override;

 private:
  int threads_;
};

}  // namespace onepass::torch_binding
