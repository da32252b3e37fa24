// Where a plan runs: on the caller's thread pool, behind two functions, or on a stream of a GPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "onepass/export.h"

namespace onepass {

class ONEPASS_API Executor {
 public:
  // A task: `index` in [0, count), `worker` in [0, concurrency()), never the same worker twice at a time.
  using Task = void (*)(void* context, int64_t index, int worker);

  virtual ~Executor();
  virtual int concurrency() const = 0;
  // Runs task(context, i, worker) once for each i < count, in any order, and returns when all are done.
  virtual void run(int64_t count, Task task, void* context) = 0;

  // The same for any callable f(index, worker).
  template <class F>
  void for_each(int64_t count, F&& f) {
    using Function = std::remove_reference_t<F>;
    const Task task = [](void* context, int64_t index, int worker) {
      (*static_cast<Function*>(context))(index, worker);
    };
    run(count, task, const_cast<void*>(static_cast<const void*>(&f)));
  }
};

// The tasks of a run, for workers that take what is left. Many tasks are given out in runs: each turn of the
// counter moves its cache line to another core, which takes as long as a short task.
class TaskCounter {
 public:
  explicit TaskCounter(int64_t count = 0, int workers = 1)
      : count_(count),
        step_(std::max<int64_t>(1, count / (int64_t{turns_of_worker} * std::max(1, workers)))) {}
  // Only while no worker takes.
  void restart(int64_t count, int workers) {
    const TaskCounter fresh(count, workers);
    count_ = fresh.count_;
    step_ = fresh.step_;
    next_ = 0;
  }
  // Calls f(index) for the next tasks; false where none was left.
  template <class F>
  bool take(F&& f) {
    const int64_t begin = next_.fetch_add(step_);
    const int64_t end = std::min(count_, begin + step_);
    for (int64_t index = begin; index < end; ++index) f(index);
    return begin < count_;
  }
  // Leaves the tasks that were not taken.
  void stop() { next_ = count_; }

 private:
  static constexpr int turns_of_worker = 32;

  int64_t count_;
  int64_t step_;
  std::atomic<int64_t> next_{0};
};

// Runs everything on the calling thread.
class ONEPASS_API SerialExecutor final : public Executor {
 public:
  int concurrency() const override { return 1; }
  void run(int64_t count, Task task, void* context) override;
};

// A pool of threads that lives as long as this object. It serves programs that have no pool of their own.
class ONEPASS_API ThreadExecutor final : public Executor {
 public:
  // `threads` includes the thread that calls run(), which is worker 0. Zero is one for each processor.
  explicit ThreadExecutor(int threads = 0);
  ~ThreadExecutor() override;
  ThreadExecutor(const ThreadExecutor&) = delete;
  ThreadExecutor& operator=(const ThreadExecutor&) = delete;

  int concurrency() const override;
  // Calls of several threads run one after another. A task must not call run() of its own executor.
  // The first exception of a task is thrown again here, after what the workers have taken; the other tasks
  // are not begun.
  void run(int64_t count, Task task, void* context) override;

 private:
  struct Pool;
  std::unique_ptr<Pool> pool_;
};

// A CUstream (or cudaStream_t) of the device a plan was made for; null: the default stream.
struct Stream {
  void* handle = nullptr;
};

}  // namespace onepass
