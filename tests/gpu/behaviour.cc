// How plans behave on a GPU beside giving the right values: same bits, many streams, captures, lack of
// memory.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <list>
#include <span>
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
  size_t tail;  // the problem's index
};
std::vector<TailAndRow> with_rows(std::span<const char* const> texts) {
  std::vector<TailAndRow> list;
  for (size_t i = 0; i < texts.size(); ++i) {
    const Problem problem = Problem::parse(texts[i], gpu);
    for (const std::string& row : accepting_rows(problem)) list.push_back({problem, row, i});
  }
  return list;
}

// Random operands of each problem, for all of its rows: drawing millions of them takes longer than kernels.
std::vector<Operands> operands_of(std::span<const char* const> texts, uint64_t seed) {
  std::vector<Operands> operands(texts.size());
  try_all(std::ssize(texts), [&](int64_t index, const GpuStream&) {
    const auto i = static_cast<size_t>(index);
    operands[i] = random_operands(Problem::parse(texts[i], gpu), Distribution::normal, seed);
    return std::string();
  });
  return operands;
}

// Tries each tail by each row, on operands of this seed.
using TailAttempt =
    std::function<std::string(const Plan& plan, const Operands& operands, const GpuStream& stream)>;
void try_tails(std::span<const char* const> texts, uint64_t seed, const TailAttempt& attempt) {
  const std::vector<TailAndRow> list = with_rows(texts);
  const std::vector<Operands> operands = operands_of(texts, seed);
  try_all(std::ssize(list), [&](int64_t index, const GpuStream& stream) {
    const TailAndRow& item = list[static_cast<size_t>(index)];
    return attempt(plan(item.problem, {item.row, ""}), operands[item.tail], stream);
  });
}

// Tensors that a plan writes in the GPU's memory, as bytes.
class Written {
 public:
  void add(void* data, int64_t bytes) {
    if (data != nullptr && bytes > 0) parts_.push_back({data, static_cast<size_t>(bytes)});
    poison_.resize(std::max(poison_.size(), static_cast<size_t>(bytes)), std::byte{0xff});
  }
  // NaN again, behind the stream's work so far.
  void poison(const GpuStream& stream) const {
    for (const Part& part : parts_) stream.upload(part.data, poison_.data(), part.bytes);
  }
  std::vector<std::vector<std::byte>> bytes(const GpuStream& stream) const {
    std::vector<std::vector<std::byte>> all;
    for (const Part& part : parts_) {
      all.emplace_back(part.bytes);
      stream.download(all.back().data(), part.data, part.bytes);
    }
    return all;
  }

 private:
  struct Part {
    void* data;
    size_t bytes;
  };
  std::vector<Part> parts_;
  std::vector<std::byte> poison_;
};

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

// Runs a plan so often and compares the bytes that it writes, NaN before each run.
std::string forward_differences(const Plan& p, const Operands& operands, int runs, const RunOptions& options,
                                const GpuStream& stream) {
  const Problem& problem = p.problem();
  const std::string what = p.strategy() + ": " + problem.text();
  ForwardMemory memory(problem, operands, p.workspace_bytes(), stream, options);
  const Arguments arguments = memory.arguments();
  Written written;
  written.add(arguments.output, problem.output.byte_span());
  if (options.statistics)
    written.add(arguments.statistics, slab_count(problem) * 2 * static_cast<int64_t>(sizeof(float)));
  std::vector<std::vector<std::byte>> first;
  for (int i = 0; i < runs; ++i) {
    written.poison(stream);
    p.run(arguments, memory.workspace(), stream.stream());
    stream.wait(what);
    const std::vector<std::vector<std::byte>> bytes = written.bytes(stream);
    if (i > 0 && bytes != first) return different("in run " + std::to_string(i), p);
    if (i == 0) first = bytes;
  }
  const Outcome outcome = memory.outcome();
  if (!is_written(outcome.output)) return unwritten(p);
  return outcome.damage.empty() ? "" : what + ": " + outcome.damage;
}

TEST_F(Behaviour, ForwardGivesTheSameBitsInEveryRun) {
  try_tails(tails, 7, [](const Plan& p, const Operands& operands, const GpuStream& stream) {
    return forward_differences(p, operands, 100, {.statistics = true}, stream);
  });
}

// Many slabs in blocks and in clusters of up to 16: while one is computed, the next arrives in shared memory,
// on a GPU that other processes interrupt when the whole suite runs.
TEST_F(Behaviour, ManySlabsHaveTheSameBitsInEveryRun) {
  constexpr const char* texts[] = {
      "swish | group_norm(4) | hardswish @ 300x16x41x43 bf16", "gelu | group_norm(2) @ 70x4x151x153",
      "relu | group_norm(8) @ 10x128x20x20x20", "group_norm(1) | relu @ 40x2x407x409 bf16",
      "group_norm(8) | relu @ 3x64x240x240"};
  try_tails(texts, 7, [](const Plan& p, const Operands& operands, const GpuStream& stream) {
    return forward_differences(p, operands, 25, {}, stream);
  });
}

TEST_F(Behaviour, BackwardGivesTheSameBitsInEveryRun) {
  constexpr int runs = 100;
  try_all(std::size(tails), [](int64_t index, const GpuStream& stream) {
    const BackwardProblem problem(Problem::parse(tails[index], gpu));
    const BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 7);
    const Plan forward = plan(problem.forward);
    const BackwardPlan backward = plan_backward(problem);
    const std::string what = backward.strategy() + ": " + problem.text();
    BackwardMemory memory(problem, operands, stream);
    const cuda::Memory workspace(0, std::max(forward.workspace_bytes(), backward.workspace_bytes()));
    Written written;
    std::vector<std::vector<std::byte>> first;
    for (int i = 0; i < runs; ++i) {
      written.poison(stream);
      forward.run(memory.forward_arguments(), workspace.data(), stream.stream());
      stream.wait(what);
      const BackwardArguments arguments = memory.backward_arguments();
      backward.run(arguments, workspace.data(), stream.stream());
      stream.wait(what);
      if (i == 0) {
        written.add(arguments.input_gradient, problem.input_gradient.byte_span());
        for (size_t j = 0; j < problem.parameter_gradients.size(); ++j)
          written.add(arguments.parameter_gradients[j], problem.parameter_gradients[j].byte_span());
      }
      const std::vector<std::vector<std::byte>> bytes = written.bytes(stream);
      if (i > 0 && bytes != first) return different("in run " + std::to_string(i), backward);
      if (i == 0) first = bytes;
    }
    const BackwardOutcome outcome = memory.outcome();
    if (!is_written(outcome.gradients)) return unwritten(backward);
    return outcome.damage.empty() ? std::string() : what + ": " + outcome.damage;
  });
}

// The samples of a batch computed together, each alone, and in the opposite order.
TEST_F(Behaviour, ASampleHasTheSameBitsInAnyBatchAndPosition) {
  try_tails(tails, 7, [](const Plan& together, const Operands& operands, const GpuStream& stream) {
    const Problem& all = together.problem();
    const int64_t batch = all.input.sizes[0];
    const Plan alone = plan(with_batch(all, 1), {together.strategy(), ""});
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
std::string crowded_errors(const Plan& plan, const Operands& operands, std::barrier<>& together) {
  constexpr int rounds = 5;
  constexpr int launches = 40;
  const GpuStream stream;
  const std::string what = plan.strategy() + " on eight streams: " + plan.problem().text();
  ForwardMemory memory(plan.problem(), operands, plan.workspace_bytes(), stream);
  const Arguments arguments = memory.arguments();
  Written written;
  written.add(arguments.output, plan.problem().output.byte_span());
  plan.run(arguments, memory.workspace(), stream.stream());
  stream.wait(what);
  const std::vector<std::vector<std::byte>> expected = written.bytes(stream);
  std::string errors;
  for (int round = 0; round < rounds; ++round) {
    written.poison(stream);
    together.arrive_and_wait();
    for (int i = 0; i < launches; ++i) plan.run(arguments, memory.workspace(), stream.stream());
    stream.wait(what);
    if (written.bytes(stream) != expected) errors = "other bits than alone";
  }
  const Outcome outcome = memory.outcome();
  if (!is_written(outcome.output)) errors = unwritten(plan);
  if (!outcome.damage.empty()) errors = outcome.damage;
  return errors;
}

// One plan, eight threads, eight streams, memory of their own.
TEST_F(Behaviour, EightThreadsOnEightStreamsShareAPlan) {
  constexpr size_t thread_count = 8;
  std::vector<std::vector<Operands>> operands;
  for (size_t thread = 0; thread < thread_count; ++thread)
    operands.push_back(operands_of(tails, 100 + thread));
  const std::vector<TailAndRow> list = with_rows(tails);
  std::vector<ProblemAndRow> kernels;
  for (const auto& [problem, row, tail] : list) kernels.push_back({problem, row});
  compile_all(kernels);
  for (const auto& [problem, row, tail] : list) {
    SCOPED_TRACE(row + ": " + problem.text());
    const Plan shared = plan(problem, {row, ""});
    std::barrier together(static_cast<std::ptrdiff_t>(thread_count));
    std::vector<std::string> errors(thread_count);
    std::vector<std::thread> threads;
    for (size_t thread = 0; thread < thread_count; ++thread) {
      const Operands& own = operands[thread][tail];
      threads.emplace_back([&, thread] {
        try {
          errors[thread] = crowded_errors(shared, own, together);
        } catch (const std::exception& thrown) {
          errors[thread] = thrown.what();
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
  constexpr uint64_t seeds = 3;
  std::vector<std::vector<Operands>> others;
  for (uint64_t seed = 1; seed <= seeds; ++seed) others.push_back(operands_of(tails, seed));
  const std::vector<Operands> recorded = operands_of(tails, 9);
  const std::vector<TailAndRow> list = with_rows(tails);
  try_all(std::ssize(list), [&](int64_t index, const GpuStream& stream) {
    const auto& [problem, row, tail] = list[static_cast<size_t>(index)];
    const Plan p = plan(problem, {row, ""});
    ForwardMemory memory(problem, recorded[tail], p.workspace_bytes(), stream);
    // Other threads of the pool allocate meanwhile: only this thread's calls belong to the capture.
    stream.begin_capture(GpuStream::Capture::of_this_thread);
    p.run(memory.arguments(), memory.workspace(), stream.stream());
    const Graph graph = stream.end_capture();
    for (size_t i = 0; i < others.size(); ++i) {
      const Operands& operands = others[i][tail];
      const std::vector<double> expected = run(p, operands, stream).output;
      if (!is_written(expected)) return unwritten(p);
      memory.assign(operands);
      graph.launch(stream.stream());
      stream.wait("a graph with " + p.strategy() + ": " + problem.text());
      const Outcome outcome = memory.outcome();
      if (!same_bits(outcome.output, expected))
        return different("when replayed with seed " + std::to_string(i + 1), p);
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
