// Samples whose values overflow f16 are counted where a plan computes them again.
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gpu/pool.h"
#include "onepass/cuda.h"
#include "onepass/onepass.h"

namespace onepass::testing {
namespace {

using Redone = GpuTest;

const Device gpu = Device::cuda();

constexpr const char* texts[] = {
    "conv2d(24,72,k=3,p=1) | relu @ 5x24x11x9 tf32",
    "conv2d(24,72,k=3,p=1) | relu | group_norm(4) @ 5x24x11x9 f32",
    "conv2d(48,60,k=3,p=1,groups=3) | relu | group_norm(6) @ 5x48x11x9 tf32",
    "conv2d(17,20,k=5,p=2) | swish | group_norm(5) | relu @ 5x17x31x48 tf32",
    "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 5x3x6x9x11 tf32",
    "conv_transpose2d(3,8,k=3,s=2) | swish | group_norm(4) | hardswish @ 5x3x9x7 tf32",
};

// Whether the row computes products of halves first, and what they cannot hold again. Others have no need to.
bool speculates(const Plan& p) {
  const auto says = [&](const char* words) { return p.explain().find(words) != std::string::npos; };
  if (p.strategy() == "gemm_mma") return says("overflow f16");  // tf32 holds what f32 does
  return p.strategy().starts_with("gemm_") || says("then: thin_cores");
}

struct PlanText {
  std::string text;
  std::string row;
};

std::vector<PlanText> all_rows() {
  std::vector<PlanText> list;
  for (const char* const text : texts) {
    for (std::string& row : accepting_rows(Problem::parse(text, gpu))) {
      if (row.starts_with("gemm_") || row.starts_with("thin_")) list.push_back({text, std::move(row)});
    }
  }
  return list;
}

// Two samples are large: one in a part of its first channel, so in one group of the convolution, the other in
// all. By a power of two: operands stay what they are rounded to.
Operands with_large_samples(const Problem& problem) {
  Operands operands = random_operands(problem, Distribution::normal, 5);
  const size_t size = operands.input.size() / static_cast<size_t>(problem.input.sizes[0]);
  const auto enlarge = [&](size_t sample, size_t count) {
    for (size_t i = sample * size; i < sample * size + count; ++i)
      operands.input[i] = static_cast<float>(operands.input[i] * 0x1p20);
  };
  enlarge(1, size / 48);
  enlarge(3, size);
  return operands;
}

std::string wrong(const Plan& p, const std::string& when, int64_t found, int64_t wanted) {
  return p.strategy() + ": " + p.problem().text() + ": " + when + " " + std::to_string(found) +
         " samples are counted, " + std::to_string(wanted) + " wanted";
}

// None where nothing overflows, each sample once a run, in memory of the GPU and in host memory, launched and
// replayed. Every row that speculates is among those tried.
TEST_F(Redone, SamplesAreCountedOnceARun) {
  const std::vector<PlanText> list = all_rows();
  std::mutex mutex;
  std::set<std::string> speculating;
  try_all(std::ssize(list), [&](int64_t index, const GpuStream& stream) -> std::string {
    const auto& [text, row] = list[static_cast<size_t>(index)];
    const Problem problem = Problem::parse(text, gpu);
    const Plan p = plan(problem, {row, ""});
    const int64_t once = speculates(p) ? 2 : 0;
    if (once > 0) {
      const std::lock_guard lock(mutex);
      speculating.insert(row);
    }
    const Operands plain = random_operands(problem, Distribution::normal, 5);
    const Operands large = with_large_samples(problem);
    ForwardMemory memory(problem, plain, p.workspace_bytes(), Place(stream, Placement::vectors));
    Arguments arguments = memory.arguments();
    cuda::Memory on_gpu(0, sizeof(int64_t));
    on_gpu.fill(0);
    int64_t* const on_host = cuda::new_counter(0);
    const auto run = [&](int64_t* counter) {
      arguments.redone = counter;
      p.run(arguments, memory.workspace(), stream.stream());
      stream.wait(p.strategy() + ": " + problem.text());
    };

    run(on_host);
    if (cuda::value_of(on_host) != 0) return wrong(p, "of plain data", cuda::value_of(on_host), 0);
    memory.assign(large);
    for (const int64_t runs : {1, 2}) {
      run(on_host);
      if (cuda::value_of(on_host) != runs * once)
        return wrong(p, "after a run", cuda::value_of(on_host), runs * once);
      run(static_cast<int64_t*>(on_gpu.data()));
      int64_t found = -1;
      on_gpu.download(&found, sizeof found);
      if (found != runs * once) return wrong(p, "in memory of the GPU", found, runs * once);
    }
    run(nullptr);
    const Outcome outcome = memory.outcome();
    const Comparison comparison = compare(problem, large, outcome.output);
    if (comparison.failures > 0) return p.strategy() + ": " + problem.text() + "\n  " + comparison.text();

    arguments.redone = on_host;
    stream.begin_capture(GpuStream::Capture::of_this_thread);
    p.run(arguments, memory.workspace(), stream.stream());
    const Graph graph = stream.end_capture();
    for (int i = 0; i < 2; ++i) graph.launch(stream.stream());
    stream.wait("a graph with " + p.strategy() + ": " + problem.text());
    if (cuda::value_of(on_host) != 4 * once)
      return wrong(p, "after two replays", cuda::value_of(on_host), 4 * once);
    return "";
  });
  if (cuda::describe_device(0).find("sm_90a") == std::string::npos) return;  // others have fewer rows
  for (const char* const row :
       {"gemm_wgmma", "gemm_mma", "gemm_packed", "gemm_pingpong", "thin_samples", "thin_wgmma"}) {
    EXPECT_TRUE(speculating.contains(row)) << row;
  }
}

}  // namespace
}  // namespace onepass::testing
