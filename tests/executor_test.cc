// ThreadExecutor: each task once, no worker twice at a time, exceptions, several callers, plans.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "onepass/error.h"
#include "onepass/executor.h"
#include "onepass/plan.h"

namespace onepass {
namespace {

TEST(ThreadExecutor, RunsEachTaskOnceAndNoWorkerTwiceAtATime) {
  ThreadExecutor executor(4);
  EXPECT_EQ(executor.concurrency(), 4);
  for (const int64_t count : {0, 1, 3, 1000}) {
    std::vector<int> runs(static_cast<size_t>(count), 0);
    std::vector<std::atomic<int>> active(4);
    std::atomic<int> clashes = 0;
    executor.for_each(count, [&](int64_t index, int worker) {
      if (active[static_cast<size_t>(worker)]++ != 0) ++clashes;
      ++runs[static_cast<size_t>(index)];
      --active[static_cast<size_t>(worker)];
    });
    EXPECT_EQ(runs, std::vector<int>(static_cast<size_t>(count), 1));
    EXPECT_EQ(clashes, 0);
  }
}

TEST(TaskCounter, GivesFewTasksOneByOneAndManyInRunsUntilItIsStopped) {
  const auto taken = [](TaskCounter& tasks) {
    int64_t found = 0;
    tasks.take([&](int64_t) { ++found; });
    return found;
  };
  TaskCounter few(60, 2);
  EXPECT_EQ(taken(few), 1);
  TaskCounter many(6400, 2);
  EXPECT_EQ(taken(many), 100);
  many.stop();
  EXPECT_EQ(taken(many), 0);
}

TEST(ThreadExecutor, AllItsThreadsWorkAtATime) {
  ThreadExecutor executor(3);
  std::atomic<int> arrived = 0;
  executor.for_each(3, [&](int64_t, int) {
    ++arrived;
    while (arrived < 3) std::this_thread::yield();  // never ends unless all run at a time
  });
  EXPECT_EQ(arrived, 3);
}

TEST(ThreadExecutor, ZeroThreadsAreAllProcessorsAndFewerAreRefused) {
  EXPECT_GE(ThreadExecutor().concurrency(), 1);
  EXPECT_THROW(ThreadExecutor(-1), Error);
}

TEST(ThreadExecutor, ThrowsWhatATaskThrewAndServesAgain) {
  for (const int threads : {1, 4}) {
    ThreadExecutor executor(threads);
    std::atomic<int> begun = 0;
    const auto fail = [&](int64_t index, int) {
      ++begun;
      if (index == 3) throw std::runtime_error("task 3");
    };
    EXPECT_THROW(executor.for_each(1'000'000, fail), std::runtime_error);
    EXPECT_LT(begun, 1'000'000);
    std::atomic<int> runs = 0;
    executor.for_each(100, [&](int64_t, int) { ++runs; });
    EXPECT_EQ(runs, 100);
  }
}

TEST(ThreadExecutor, ServesSeveralCallers) {
  ThreadExecutor executor(2);
  std::atomic<int> runs = 0;
  std::vector<std::jthread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 25; ++i) executor.for_each(10, [&](int64_t, int) { ++runs; });
    });
  }
  callers.clear();
  EXPECT_EQ(runs, 1000);
}

TEST(ThreadExecutor, GivesAPlanTheBitsOfOneThread) {
  const Plan plan = onepass::plan(
      Problem::parse("conv2d(3,16,k=3,p=1) | silu | group_norm(4) @ 4x3x40x40", Device::cpu(3)));
  const Problem& problem = plan.problem();
  const auto tensor = [](const TensorSpec& spec, float step) {
    std::vector<float> values(static_cast<size_t>(element_count(spec.sizes)));
    for (size_t i = 0; i < values.size(); ++i) values[i] = step * static_cast<float>(i % 97) - 1.0F;
    return values;
  };
  const std::vector<float> input = tensor(problem.input, 0.02F);
  std::vector<std::vector<float>> parameters;
  for (const TensorSpec& spec : problem.parameters) parameters.push_back(tensor(spec, 0.03F));
  const auto run = [&](Executor& executor) {
    std::vector<float> output(static_cast<size_t>(element_count(problem.output.sizes)));
    Arguments arguments{input.data(), output.data(), {}};
    for (const std::vector<float>& parameter : parameters) arguments.parameters.push_back(parameter.data());
    const size_t bytes = (plan.workspace_bytes() + 63) / 64 * 64;
    const std::unique_ptr<void, decltype(&std::free)> workspace(std::aligned_alloc(64, bytes + 64),
                                                                &std::free);
    plan.run(arguments, workspace.get(), executor);
    return output;
  };
  SerialExecutor serial;
  ThreadExecutor threads(3);
  EXPECT_EQ(run(threads), run(serial));
}

}  // namespace
}  // namespace onepass
