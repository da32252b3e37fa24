// Threads of the tool: the executor that runs plans, and loops that keep every thread busy for a measurement.
#include "tool/executor.h"

#include <algorithm>
#include <barrier>
#include <thread>
#include <vector>

#include "tool/timing.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace onepass::tool {

#if defined(_OPENMP)
namespace {

class OpenMpExecutor final : public Executor {
 public:
  explicit OpenMpExecutor(int threads) : threads_(threads) {}
  int concurrency() const override { return threads_; }

  void run(int64_t count, Task task, void* context) override {
    const auto team = static_cast<int>(std::min<int64_t>(threads_, count));
#pragma omp parallel for num_threads(team) schedule(dynamic, 1) if (team > 1)
    for (int64_t i = 0; i < count; ++i) task(context, i, omp_get_thread_num());
  }

 private:
  int threads_;
};

}  // namespace

int hardware_threads() { return std::max(1, omp_get_num_procs()); }

std::unique_ptr<Executor> make_executor(int threads) {
  if (threads == 1) return std::make_unique<SerialExecutor>();
  return std::make_unique<OpenMpExecutor>(threads);
}
#else
int hardware_threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

std::unique_ptr<Executor> make_executor(int threads) { return std::make_unique<ThreadExecutor>(threads); }
#endif

double seconds_on_all(int threads, const std::function<void(int worker)>& body) {
  std::vector<double> begins(static_cast<size_t>(threads));
  std::vector<double> ends(static_cast<size_t>(threads));
  std::barrier start(threads);
  const auto timed = [&](int worker) {
    start.arrive_and_wait();
    begins[static_cast<size_t>(worker)] = seconds_now();
    body(worker);
    ends[static_cast<size_t>(worker)] = seconds_now();
  };
  std::vector<std::jthread> others;
  for (int worker = 1; worker < threads; ++worker) others.emplace_back(timed, worker);
  timed(0);
  others.clear();
  return *std::max_element(ends.begin(), ends.end()) - *std::min_element(begins.begin(), begins.end());
}

}  // namespace onepass::tool
