// The executor with a pool of threads: workers sleep between runs and take tasks from a counter.
#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "onepass/error.h"
#include "onepass/executor.h"

namespace onepass {

struct ThreadExecutor::Pool {
  std::mutex run_mutex;  // one run at a time

  std::mutex mutex;  // guards what follows, to `failure`
  std::condition_variable started;
  std::condition_variable finished;
  uint64_t generation = 0;  // of the run the workers are to join
  size_t busy = 0;          // workers that have not finished it
  bool stopping = false;
  Task task = nullptr;
  void* context = nullptr;
  std::exception_ptr failure;

  TaskCounter tasks;
  std::vector<std::thread> threads;

  ~Pool() { stop(); }

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    started.notify_all();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  void serve(int worker) {
    uint64_t joined = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex);
        started.wait(lock, [&] { return stopping || generation != joined; });
        if (stopping) return;
        joined = generation;
      }
      work(worker);
      const std::lock_guard lock(mutex);
      if (--busy == 0) finished.notify_one();
    }
  }

  // The run cannot change under a worker: the next one starts when all are done with this one.
  void work(int worker) {
    try {
      while (tasks.take([&](int64_t index) { task(context, index, worker); })) {
      }
    } catch (...) {
      tasks.stop();
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  }
};

ThreadExecutor::ThreadExecutor(int threads) : pool_(std::make_unique<Pool>()) {
  if (threads < 0) throw Error("threads is " + std::to_string(threads) + ", must be 0 or more");
  if (threads == 0) threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  Pool& pool = *pool_;
  for (int worker = 1; worker < threads; ++worker) {
    pool.threads.emplace_back([&pool, worker] { pool.serve(worker); });
  }
}

ThreadExecutor::~ThreadExecutor() = default;

int ThreadExecutor::concurrency() const { return static_cast<int>(pool_->threads.size()) + 1; }

void ThreadExecutor::run(int64_t count, Task task, void* context) {
  Pool& pool = *pool_;
  const std::lock_guard one_run(pool.run_mutex);
  if (count <= 1 || pool.threads.empty()) {
    for (int64_t index = 0; index < count; ++index) task(context, index, 0);
    return;
  }
  {
    const std::lock_guard lock(pool.mutex);
    pool.tasks.restart(count, concurrency());
    pool.task = task;
    pool.context = context;
    pool.busy = pool.threads.size();
    ++pool.generation;
  }
  pool.started.notify_all();
  pool.work(0);
  std::unique_lock lock(pool.mutex);
  pool.finished.wait(lock, [&] { return pool.busy == 0; });
  if (std::exception_ptr failure = std::exchange(pool.failure, nullptr)) std::rethrow_exception(failure);
}

}  // namespace onepass
