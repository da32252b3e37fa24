// A pool of std::threads for tests: it needs no OpenMP, and the thread sanitizer understands it.
#include "support/thread_executor.h"

namespace onepass::testing {

ThreadExecutor::ThreadExecutor(int threads) {
  for (int worker = 1; worker < threads; ++worker) threads_.emplace_back([this, worker] { serve(worker); });
}

ThreadExecutor::~ThreadExecutor() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  started_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadExecutor::run(int64_t count, Task task, void* context) {
  const std::lock_guard one_run(run_mutex_);
  {
    const std::lock_guard lock(mutex_);
    count_ = count;
    task_ = task;
    context_ = context;
    next_ = 0;
    busy_ = threads_.size();
    ++generation_;
  }
  started_.notify_all();
  work(0);
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return busy_ == 0; });
}

void ThreadExecutor::serve(int worker) {
  uint64_t joined = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      started_.wait(lock, [&] { return stopping_ || generation_ != joined; });
      if (stopping_) return;
      joined = generation_;
    }
    work(worker);
    const std::lock_guard lock(mutex_);
    if (--busy_ == 0) finished_.notify_one();
  }
}

// The run cannot change under a worker: the next one starts when all are done with this one.
void ThreadExecutor::work(int worker) {
  for (int64_t index = next_++; index < count_; index = next_++) task_(context_, index, worker);
}

}  // namespace onepass::testing
