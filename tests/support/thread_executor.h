// A pool of std::threads for tests: it needs no OpenMP, and the thread sanitizer understands it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "onepass/executor.h"

namespace onepass::testing {

class ThreadExecutor final : public Executor {
 public:
  // `threads` includes the thread that calls run(), which is worker 0.
  explicit ThreadExecutor(int threads);
  ~ThreadExecutor() override;
  ThreadExecutor(const ThreadExecutor&) = delete;
  ThreadExecutor& operator=(const ThreadExecutor&) = delete;

  int concurrency() const override { return static_cast<int>(threads_.size()) + 1; }
  void run(int64_t count, Task task, void* context) override;

 private:
  void serve(int worker);
  void work(int worker);

  std::mutex run_mutex_;  // one run at a time

  std::mutex mutex_;  // guards what follows, to next_
  std::condition_variable started_;
  std::condition_variable finished_;
  uint64_t generation_ = 0;  // of the run the workers are to join
  size_t busy_ = 0;          // workers that have not finished it
  bool stopping_ = false;
  int64_t count_ = 0;
  Task task_ = nullptr;
  void* context_ = nullptr;

  std::atomic<int64_t> next_{0};  // the next task to hand out
  std::vector<std::thread> threads_;
};

}  // namespace onepass::testing
