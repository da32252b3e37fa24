// The executor that runs tasks on the calling thread.
#include "onepass/executor.h"

namespace onepass {

Executor::~Executor() = default;

void SerialExecutor::run(int64_t count, Task task, void* context) {
  for (int64_t i = 0; i < count; ++i) task(context, i, 0);
}

}  // namespace onepass
