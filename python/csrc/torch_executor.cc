// Tasks on at::parallel_for. It gives out ranges rather than thread numbers, and in a nested parallel region
// the caller gets all of them. The ranges are therefore over workers; each takes tasks until none is left.
#include "torch_executor.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace onepass::torch_binding {

int torch_threads() { return std::max(1, static_cast<int>(torch::stable::get_num_threads())); }

void TorchExecutor::run(int64_t count, Task task, void* context) {
  const int64_t workers = std::min<int64_t>(threads_, count);
  if (workers <= 1) {
    for (int64_t i = 0; i < count; ++i) task(context, i, 0);
    return;
  }
  TaskCounter tasks(count, static_cast<int>(workers));
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      while (tasks.take([&](int64_t i) { task(context, i, static_cast<int>(worker)); })) {
      }
    }
  });
}

}  // namespace onepass::torch_binding
