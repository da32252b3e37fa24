// The threads that the tool starts by itself: those of its measurements.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tool/executor.h"

namespace onepass::tool {
namespace {

TEST(SecondsOnAll, RunsTheBodyOnEveryThreadAtOnceAndIsDoneWithAll) {
  constexpr int threads = 4;
  std::vector<int> calls(threads);
  std::atomic<int> arrived = 0;
  const double seconds = seconds_on_all(threads, [&](int worker) {
    ++arrived;
    while (arrived < threads) std::this_thread::yield();  // never ends unless all run at a time
    ++calls[static_cast<size_t>(worker)];
  });
  EXPECT_EQ(calls, std::vector<int>(threads, 1));
  EXPECT_GT(seconds, 0);
}

}  // namespace
}  // namespace onepass::tool
