// How plans behave on a GPU beside giving the right values: same bits, many streams, captures, lack of
// memory.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <list>
#include <thread>

#include "gpu/pool.h"
#include "onepass/error.h"
#include "onepass/onepass.h"

namespace onepass::testing {
namespace {

using Behaviour = GpuTest;

const Device gpu = Device::cuda();

// Slabs in one block, in a cluster, streamed in pieces and waves; both orders; means; sums over the batch.
constexpr const char* tails[] = {
    "swish | group_norm(4) | hardswish @ 5x16x9x31x33",
    "swish | group_norm(4) | hardswish @ 2x16x31x63x63 bf16",
    "gelu | group_norm(8) @ 5x64x9x11 f16",
    "hardswish | group_norm(4) | mean @ 9x16x13x29x29",
    "relu | group_norm(8) | swish @ 5x64x33x35 nhwc",
    "prelu(per=channel) | instance_norm(affine=true) | mean @ 5x24x40x41 bf16 nhwc",
    "residual_add | group_norm(3) | prelu | channel_mul @ 5x6x90x91",
    "gelu | channel_mul(per=sample) | mean @ 5x7x200x201",
};

Problem with_batch(const Problem& problem, int64_t batch) {
  Shape sizes = problem.input.sizes;
  sizes[0] = batch;
  const Layout layout = problem.input.strides[1] == 1 ? Layout::nhwc : Layout::nchw;
  return {problem.block, sizes, problem.input.dtype, problem.device, layout};
}

// The part of dense values that belongs to one sample of a batch.
std::vector<double> sample_of(const std::vector<double>& values, int64_t batch, int64_t sample) {
  const std::ptrdiff_t size = std::ssize(values) / batch;
  return {values.begin() + sample * size, values.begin() + (sample + 1) * size};
}

// Operands that are per sample are cut, the others stay.
Operands sample_of(const Operands& operands, const Problem& problem, int64_t sample) {
  const int64_t batch = problem.input.sizes[0];
  Operands cut{sample_of(operands.input, batch, sample), operands.parameters};
  const std::vector<Parameter> parameters = problem.block.parameters(problem.input.sizes);
  const std::vector<Parameter> of_one = problem.block.parameters(with_batch(problem, 1).input.sizes);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].sizes != of_one[i].sizes)
      cut.parameters[i] = sample_of(operands.parameters[i], batch, sample);
  }
  return cut;
}

// The samples in the opposite order.
Operands reversed(const Operands& operands, const Problem& problem) {
  Operands result;
  result.parameters.resize(operands.parameters.size());
  for (int64_t n = problem.input.sizes[0]; n-- > 0;) {
    const Operands sample = sample_of(operands, problem, n);
    result.input.insert(result.input.end(), sample.input.begin(), sample.input.end());
    for (size_t i = 0; i < sample.parameters.size(); ++i) {
      const std::vector<double>& from = sample.parameters[i];
      const bool per_sample = from.size() != operands.parameters[i].size();
      std::vector<double>& to = result.parameters[i];
      if (per_sample || to.empty()) to.insert(to.end(), from.begin(), from.end());
    }
  }
  return result;
}

struct TailAndRow {
  Problem problem;
  std::string row;
};
std::vector<TailAndRow> tails_and_rows() {
  std::vector<TailAndRow> list;
  for (const char* const text : tails) {
    const Problem problem = Problem::parse(text, gpu);
    for (const std::string& row : accepting_rows(problem)) list.push_back({problem, row});
  }
  return list;
}

// Tries each tail by each row.
void try_tails(const std::function<std::string(const Plan& plan, const GpuStream& stream)>& attempt) {
  const std::vector<TailAndRow> list = tails_and_rows();
  try_all(std::ssize(list), [&](int64_t index, const GpuStream& stream) {
    const TailAndRow& item = list[static_cast<size_t>(index)];
    return attempt(plan(item.problem, {item.row, ""}), stream);
  });
}

// A kernel that writes nothing gives the same bits too.
bool is_written(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); });
}
bool is_written(const GradientValues& gradients) {
  return std::all_of(gradients.begin(), gradients.end(),
                     [](const std::vector<double>& values) { return is_written(values); });
}

template <class PlanType>
std::string unwritten(const PlanType& plan) {
  return plan.strategy() + " leaves its output unwritten: " + plan.problem().text();
}

template <class PlanType>
std::string different(const std::string& what, const PlanType& plan) {
  return plan.strategy() + " gives other bits " + what + ": " + plan.problem().text();
}

TEST_F(Behaviour, ForwardGivesTheSameBitsInEveryRun) {
  constexpr int runs = 100;
  try_tails([](const Plan& p, const GpuStream& stream) {
    const Operands operands = random_operands(p.problem(), Distribution::normal, 7);
    ForwardMemory memory(p.problem(), operands, p.workspace_bytes(), stream, {.statistics = true});
    Outcome first;
    for (int i = 0; i < runs; ++i) {
      memory.assign(operands);
      p.run(memory.arguments(), memory.workspace(), stream.stream());
      stream.wait(p.strategy() + ": " + p.problem().text());
      Outcome outcome = memory.outcome();
      if (i == 0) first = std::move(outcome);
      if (i == 0 && !is_written(first.output)) return unwritten(p);
      if (i > 0 && (!same_bits(first.output, outcome.output) || first.statistics != outcome.statistics))
        return different("in run " + std::to_string(i), p);
    }
    return std::string();
  });
}

// Many slabs in blocks and in clusters of up to 16: while one is computed, the next arrives in shared memory.
// The output's bytes are compared, on a GPU that other processes interrupt when the whole suite runs.
TEST_F(Behaviour, ManySlabsHaveTheSameBitsInEveryRun) {
  constexpr int runs = 25;
  std::vector<TailAndRow> list;
  for (const char* const text :
       {"swish | group_norm(4) | hardswish @ 300x16x41x43 bf16", "gelu | group_norm(2) @ 70x4x151x153",
        "relu | group_norm(8) @ 10x128x20x20x20", "group_norm(1) | relu @ 40x2x407x409 bf16",
        "group_norm(8) | relu @ 3x64x240x240"}) {
    const Problem problem = Problem::parse(text, gpu);
    for (const std::string& row : accepting_rows(problem)) list.push_back({problem, row});
  }
  try_all(std::ssize(list), [&list](int64_t index, const GpuStream& stream) {
    const auto& [problem, row] = list[static_cast<size_t>(index)];
    const Plan p = plan(problem, {row, ""});
    const Operands operands = random_operands(problem, Distribution::normal, 7);
    ForwardMemory memory(problem, operands, p.workspace_bytes(), stream);
    std::vector<std::byte> first(static_cast<size_t>(problem.output.byte_span()));
    std::vector<std::byte> again(first.size());
    for (int i = 0; i < runs; ++i) {
      const Arguments arguments = memory.arguments();
      p.run(arguments, memory.workspace(), stream.stream());
      std::vector<std::byte>& output = i == 0 ? first : again;
      stream.download(output.data(), arguments.output, output.size());
      stream.wait(row + ": " + problem.text());
      if (i == 0 && !is_written(memory.outcome().output)) return unwritten(p);
      if (i > 0 && first != again) return different("in run " + std::to_string(i), p);
    }
    return std::string();
  });
}

TEST_F(Behaviour, BackwardGivesTheSameBitsInEveryRun) {
  constexpr int runs = 100;
  try_all(std::size(tails), [](int64_t index, const GpuStream& stream) {
    const BackwardProblem problem(Problem::parse(tails[index], gpu));
    const BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 7);
    const BackwardPlan backward = plan_backward(problem);
    GradientValues first;
    for (int i = 0; i < runs; ++i) {
      GradientValues gradients = run(backward, operands, stream).gradients;
      if (i == 0) first = std::move(gradients);
      if (i == 0 && !is_written(first)) return unwritten(backward);
      if (i > 0 && !same_bits(first, gradients)) return different("in run " + std::to_string(i), backward);
    }
    return std::string();
  });
}

// The samples of a batch computed together, each alone, and in the opposite order.
TEST_F(Behaviour, ASampleHasTheSameBitsInAnyBatchAndPosition) {
  try_tails([](const Plan& together, const GpuStream& stream) {
    const Problem& all = together.problem();
    const int64_t batch = all.input.sizes[0];
    const Plan alone = plan(with_batch(all, 1), {together.strategy(), ""});
    const Operands operands = random_operands(all, Distribution::normal, 7);
    const std::vector<double> output = run(together, operands, stream).output;
    if (!is_written(output)) return unwritten(together);
    for (int64_t n = 0; n < std::min<int64_t>(batch, 3); ++n) {
      const Outcome outcome = run(alone, sample_of(operands, all, n), stream);
      if (!same_bits(outcome.output, sample_of(output, batch, n)))
        return different("for sample " + std::to_string(n) + " alone", together);
    }
    const std::vector<double> other = run(together, reversed(operands, all), stream).output;
    for (int64_t n = 0; n < batch; ++n) {
      if (!same_bits(sample_of(other, batch, batch - 1 - n), sample_of(output, batch, n)))
        return different("for sample " + std::to_string(n) + " at another position", together);
    }
    return std::string();
  });
}

// The work of one thread: alone first, then with many launches in flight while other threads do the same.
std::string crowded_errors(const Plan& plan, uint64_t seed, std::barrier<>& together) {
  constexpr int rounds = 5;
  constexpr int launches = 40;
  const GpuStream stream;
  const Operands operands = random_operands(plan.problem(), Distribution::normal, seed);
  const std::vector<double> expected = run(plan, operands, stream).output;
  ForwardMemory memory(plan.problem(), operands, plan.workspace_bytes(), stream);
  std::string errors = is_written(expected) ? "" : unwritten(plan);
  for (int round = 0; round < rounds; ++round) {
    memory.assign(operands);
    together.arrive_and_wait();
    for (int i = 0; i < launches; ++i) plan.run(memory.arguments(), memory.workspace(), stream.stream());
    stream.wait(plan.strategy() + " on eight streams: " + plan.problem().text());
    const Outcome outcome = memory.outcome();
    if (!same_bits(outcome.output, expected)) errors = "other bits than alone";
    if (!outcome.damage.empty()) errors = outcome.damage;
  }
  return errors;
}

// One plan, eight threads, eight streams, memory of their own.
TEST_F(Behaviour, EightThreadsOnEightStreamsShareAPlan) {
  constexpr int thread_count = 8;
  for (const auto& [problem, row] : tails_and_rows()) {
    SCOPED_TRACE(row + ": " + problem.text());
    const Plan shared = plan(problem, {row, ""});
    std::barrier together(thread_count);
    std::vector<std::string> errors(thread_count);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < thread_count; ++thread) {
      threads.emplace_back([&, thread] {
        std::string& error = errors[static_cast<size_t>(thread)];
        try {
          error = crowded_errors(shared, static_cast<uint64_t>(100 + thread), together);
        } catch (const std::exception& thrown) {
          error = thrown.what();
          together.arrive_and_drop();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    ASSERT_TRUE(is_alive(0));
  }
}

// A graph is recorded once and replayed on other data and other weights.
TEST_F(Behaviour, ReplayedGraphReadsWhatIsInMemoryThen) {
  try_tails([](const Plan& p, const GpuStream& stream) {
    const Problem& problem = p.problem();
    ForwardMemory memory(problem, random_operands(problem, Distribution::normal, 9), p.workspace_bytes(),
                         stream);
    // Other threads of the pool allocate meanwhile: only this thread's calls belong to the capture.
    stream.begin_capture(GpuStream::Capture::of_this_thread);
    p.run(memory.arguments(), memory.workspace(), stream.stream());
    const Graph graph = stream.end_capture();
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      const Operands operands = random_operands(problem, Distribution::normal, seed);
      const std::vector<double> expected = run(p, operands, stream).output;
      if (!is_written(expected)) return unwritten(p);
      memory.assign(operands);
      graph.launch(stream.stream());
      stream.wait("a graph with " + p.strategy() + ": " + problem.text());
      const Outcome outcome = memory.outcome();
      if (!same_bits(outcome.output, expected))
        return different("when replayed with seed " + std::to_string(seed), p);
      if (!outcome.damage.empty()) return p.strategy() + ": " + problem.text() + ": " + outcome.damage;
    }
    return std::string();
  });
}

// The plan's kernel is compiled, loaded and resolved while this thread captures in the default mode, in which
// the driver refuses such work of other threads unless they ask for it.
TEST_F(Behaviour, PlanIsBuiltWhileAnotherThreadCaptures) {
  const GpuStream stream;
  const Problem captured = Problem::parse(tails[0], gpu);
  const Plan p = plan(captured);
  const Operands operands = random_operands(captured, Distribution::normal, 1);
  ForwardMemory memory(captured, operands, p.workspace_bytes(), stream);

  // A constant that no earlier run has: the kernel is in no cache.
  const auto now = std::chrono::system_clock::now().time_since_epoch().count() % 1'000'000;
  const Problem fresh = Problem::parse(
      "add(0." + std::to_string(1'000'000 + now) + ") | group_norm(2) | relu @ 2x4x31x17", gpu);
  std::string error;
  std::vector<Plan> built;
  stream.begin_capture();
  p.run(memory.arguments(), memory.workspace(), stream.stream());
  std::thread([&] {
    try {
      for (const std::string& row : accepting_rows(fresh)) built.push_back(plan(fresh, {row, ""}));
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
  }).join();
  const Graph graph = stream.end_capture();
  EXPECT_EQ(error, "");

  graph.launch(stream.stream());
  stream.wait(captured.text());
  Outcome outcome = memory.outcome();
  outcome.comparison = compare(captured, operands, outcome.output);
  EXPECT_TRUE(outcome.passed()) << outcome.text();
  for (const Plan& other : built) {
    const Outcome result = run_and_compare(other, Distribution::normal, 2, stream);
    EXPECT_TRUE(result.passed()) << other.strategy() << ": " << result.text();
  }
}

// All memory taken, down to crumbs.
std::list<cuda::Memory> take_all_memory() {
  std::list<cuda::Memory> taken;
  for (const size_t bytes : {size_t{8} << 30, size_t{1} << 30, size_t{64} << 20, size_t{2} << 20}) {
    try {
      for (;;) taken.emplace_back(0, bytes);
    } catch (const Error&) {
    }
  }
  return taken;
}

TEST_F(Behaviour, LackOfMemoryIsAnErrorThatHarmsNothing) {
  try {
    const cuda::Memory memory(0, size_t{1} << 46);
    ADD_FAILURE() << "64 TiB were given";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("65536.0 GiB"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("are free"), std::string::npos) << error.what();
  }
  const GpuStream stream;
  const Problem problem = Problem::parse("add(0.3125) | group_norm(2) | relu @ 3x8x61x67", gpu);
  {
    const std::list<cuda::Memory> taken = take_all_memory();
    EXPECT_FALSE(taken.empty());
    EXPECT_THROW(cuda::Memory(0, size_t{256} << 20), Error);
    try {  // There may be room for a small kernel and its tensors, or not.
      const Outcome outcome = run_and_compare(plan(problem), Distribution::normal, 1, stream);
      EXPECT_TRUE(outcome.passed()) << outcome.text();
    } catch (const Error& error) {
      std::printf("without memory: %s\n", error.what());
    }
  }
  EXPECT_TRUE(is_alive(0));
  const Outcome outcome = run_and_compare(plan(problem), Distribution::normal, 1, stream);
  EXPECT_TRUE(outcome.passed()) << outcome.text();
}

}  // namespace
}  // namespace onepass::testing
