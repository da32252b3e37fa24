// Packed weights that are kept for many calls: the same bits as of calls that pack, launched and replayed.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "gpu/pool.h"
#include "onepass/cuda.h"
#include "onepass/onepass.h"
#include "support/guarded_memory.h"

namespace onepass::testing {
namespace {

using Frozen = GpuTest;

const Device gpu = Device::cuda();

// Groups, classes of a transposed convolution, all types; norms, means and neither.
constexpr const char* texts[] = {
    "conv2d(24,72,k=3,p=1) | relu @ 5x24x11x9 tf32",
    "conv2d(24,72,k=3,p=1) | relu | group_norm(4) @ 5x24x11x9 f32",
    "conv2d(24,72,k=3,p=1) | relu | group_norm(4) @ 5x24x11x9 bf16",
    "conv2d(48,60,k=3,p=1,groups=3) | relu | group_norm(6) @ 5x48x11x9 tf32",
    "conv2d(17,20,k=5,p=2) | swish | group_norm(5) | mean @ 5x17x31x48 f16",
    "conv_transpose2d(24,40,k=3,s=2) | swish | group_norm(4) @ 5x24x9x7 tf32",
    "conv_transpose3d(16,16,k=2,s=2) | relu @ 2x16x5x6x7 bf16",
    "conv2d(24,72,k=3,s=2,p=1) | relu | group_norm(4) @ 5x24x11x9 bf16 nhwc",
    "conv2d(40,24,k=3,p=1) | silu @ 3x40x13x9 f16 nhwc",
};

struct TextAndRow {
  const char* text;
  std::string row;
};
std::vector<TextAndRow> all_rows() {
  std::vector<TextAndRow> list;
  for (const char* const text : texts) {
    for (std::string& row : rows_named("gemm_", Problem::parse(text, gpu)))
      list.push_back({text, std::move(row)});
  }
  return list;
}

// A weight that is not finite marks all samples, which the packing says and the call does.
Operands operands_of(const Problem& problem, bool finite) {
  Operands operands = random_operands(problem, Distribution::normal, 5);
  if (!finite) operands.parameters[0][operands.parameters[0].size() / 2] = HUGE_VAL;
  return operands;
}

std::string frozen_errors(const Plan& p, bool finite, const GpuStream& stream) {
  const Problem& problem = p.problem();
  const std::string what = p.strategy() + (finite ? ": " : ", an infinite weight: ") + problem.text();
  const Operands operands = operands_of(problem, finite);
  const std::vector<double> wanted = run(p, operands, stream).output;
  ForwardMemory memory(problem, operands, p.workspace_bytes(), stream);
  Buffer packed(stream, GuardedMemory(p.packed_bytes(), 0));
  Arguments arguments = memory.arguments();
  p.pack(arguments.parameters, packed.data(), stream.stream());
  stream.wait("packing of " + what);
  packed.fetch();
  packed.host().allow(0, static_cast<int64_t>(p.packed_bytes()));
  if (!packed.host().is_intact()) return what + ": packing writes beyond its memory";
  packed.host().remember();
  arguments.packed = packed.data();
  stream.begin_capture(GpuStream::Capture::of_this_thread);
  p.run(arguments, memory.workspace(), stream.stream());
  const Graph graph = stream.end_capture();
  for (const bool replayed : {false, false, true, true}) {
    memory.assign(operands);
    if (replayed) {
      graph.launch(stream.stream());
    } else {
      p.run(arguments, memory.workspace(), stream.stream());
    }
    stream.wait(what);
    const Outcome outcome = memory.outcome();
    if (!same_bits(outcome.output, wanted)) return what + (replayed ? ": replayed" : "") + ": other bits";
    if (!outcome.damage.empty()) return what + ": " + outcome.damage;
  }
  packed.fetch();
  return packed.host().is_intact() ? "" : what + ": a call writes to packed weights";
}

TEST_F(Frozen, GivesTheBitsOfACallThatPacks) {
  const std::vector<TextAndRow> list = all_rows();
  try_all(std::ssize(list), [&](int64_t index, const GpuStream& stream) -> std::string {
    const auto& [text, row] = list[static_cast<size_t>(index)];
    const Plan p = plan(Problem::parse(text, gpu), {row, ""});
    if (p.packed_bytes() == 0) return row == "gemm_pingpong" ? "" : row + " keeps nothing: " + text;
    const std::string errors = frozen_errors(p, true, stream);
    return errors.empty() ? frozen_errors(p, false, stream) : errors;
  });
}

// Another plan with the same packing number runs with these packed weights.
TEST_F(Frozen, PackedWeightsServeOtherBatches) {
  const Problem first = Problem::parse("conv2d(24,72,k=3,p=1) | relu | group_norm(4) @ 5x24x11x9 bf16", gpu);
  const Problem other = Problem::parse("conv2d(24,72,k=3,p=1) | relu | group_norm(4) @ 9x24x11x9 bf16", gpu);
  for (const std::string& row : rows_named("gemm_", first)) {
    const Plan p = plan(first, {row, ""});
    const Plan q = plan(other, {row, ""});
    if (p.packed_bytes() == 0 || p.packing() != q.packing()) continue;
    const GpuStream stream;
    const Operands operands = random_operands(other, Distribution::normal, 6);
    const std::vector<double> wanted = run(q, operands, stream).output;
    ForwardMemory memory(other, operands, q.workspace_bytes(), stream);
    Arguments arguments = memory.arguments();
    const cuda::Memory packed(0, p.packed_bytes());
    p.pack(arguments.parameters, packed.data(), stream.stream());
    arguments.packed = packed.data();
    q.run(arguments, memory.workspace(), stream.stream());
    stream.wait(row);
    EXPECT_TRUE(same_bits(memory.outcome().output, wanted)) << row;
  }
}

}  // namespace
}  // namespace onepass::testing
