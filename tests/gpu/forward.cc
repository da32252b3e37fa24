// Every forward row on a GPU against the reference: the list of cases, random problems, hard data, large
// tails.
#include <iostream>
#include <random>

#include "gpu/pool.h"
#include "onepass/onepass.h"
#include "support/cases.h"
#include "support/random_problem.h"

namespace onepass::testing {
namespace {

using Forward = GpuTest;

const Device gpu = Device::cuda();

std::vector<Problem> parsed(std::span<const char* const> texts) {
  std::vector<Problem> problems;
  for (const char* const text : texts) problems.push_back(Problem::parse(text, gpu));
  return problems;
}

// By every row that takes a problem, or by so many of them by turns.
void check_all(const std::vector<Problem>& problems, const Check& check, size_t rows = 100) {
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    Check own = check;
    own.seed += static_cast<uint64_t>(index);
    return forward_errors(problem, rows_in_turn(accepting_rows(problem), index, rows, turn()), own, stream);
  });
}

// Every tenth pair of a case and a row, the others in other turns: each is a kernel or more to compile.
TEST_F(Forward, AgreesWithTheReferenceOnCases) {
  for (const std::string& text : read_cases()) {
    const Problem problem = Problem::parse(text, gpu);
    EXPECT_EQ(accepting_rows(problem).empty(), problem.input.dtype == DType::f64) << text;
  }
  const std::vector<ProblemAndRow> pairs = cases_in_turn(gpu, turn());
  try_all(std::ssize(pairs), [&](int64_t index, const GpuStream& stream) {
    const auto& [problem, row] = pairs[static_cast<size_t>(index)];
    return forward_errors(problem, std::span(&row, 1),
                          {.distributions = {Distribution::uniform, Distribution::normal},
                           .seed = 1 + static_cast<uint64_t>(index)},
                          stream);
  });
}

TEST_F(Forward, AgreesWithTheReferenceOnHardData) {
  std::vector<Problem> problems = parsed(hard_blocks);
  for (Problem& problem : parsed(hard_tails)) problems.push_back(std::move(problem));
  const Check check{.distributions = {std::begin(distributions), std::end(distributions)},
                    .placements = {Placement::vectors},
                    .seed = 1000};
  check_all(problems, check);
  // A slab that is held as f16: some of these distributions overflow it.
  const Problem waiting =
      Problem::parse("gelu | group_norm(2,eps=1e-12) | hardswish @ 1x4x131x129 bf16", gpu);
  const std::vector<std::string> rows = rows_named("tail_staged", waiting);
  try_all(1, [&](int64_t, const GpuStream& stream) { return forward_errors(waiting, rows, check, stream); });
}

// Several waves, pieces, blocks and clusters; rows of every alignment.
TEST_F(Forward, AgreesWithTheReferenceOnLargeTails) {
  std::vector<Problem> problems = parsed(large_tails);
  constexpr const char* texts[] = {
      // The tails of the four workloads.
      "swish | group_norm(4) | hardswish @ 2x16x31x63x63",
      "gelu | group_norm(8) @ 1x64x258x258",
      "relu | group_norm(8) @ 1x128x34x34x34",
      "hardswish | group_norm(4) | mean @ 5x16x13x29x29",
      "swish | group_norm(4) | hardswish @ 2x16x31x63x63 bf16",
      "gelu | group_norm(8) @ 1x64x258x258 f16",
      "relu | group_norm(8) @ 1x128x34x34x34 bf16",
      "hardswish | group_norm(4) | mean @ 5x16x13x29x29 f16",
      "swish | group_norm(4) | hardswish @ 1x16x31x63x63 nhwc",
      "gelu | group_norm(8) @ 1x64x258x258 bf16 nhwc",
      "relu | group_norm(8) @ 1x128x34x34x34 nhwc",
      "hardswish | group_norm(4) | mean @ 9x16x13x29x29 bf16 nhwc",
      // Many slabs: more than the GPU has room for at a time.
      "swish | group_norm(4) | hardswish @ 60x16x1x63x63",
      "gelu | group_norm(32) @ 40x64x9x31 f16",
      "hardswish | group_norm(4) | mean @ 700x16x5x5 bf16",
      "hardswish | group_norm(2) | mean @ 270x4x2311",
      "gelu | group_norm(2) | mean @ 270x6x4511 bf16",
      "relu | instance_norm | swish @ 300x40x3x7 nhwc",
      // Few and large ones.
      "instance_norm(affine=true) | leaky_relu(0.01) @ 1x3x96x96x96",
      "instance_norm | relu @ 1x2x96x96x96 nhwc",
      "group_norm(1) | silu @ 2x1280x17x9",
      "group_norm(1) | silu @ 2x1280x17x9 f16 nhwc",
      "group_norm(1) | gelu @ 1x5000x1x1",
      "group_norm(1) | gelu @ 1x3x1000003",
      "group_norm(2) | residual_add | relu @ 3x64x65x67",
      "residual_add | group_norm(2) | residual_add @ 2x16x129x130 f16",
      "group_norm(32) | channel_mul(per=sample) | channel_add(per=sample) | silu @ 3x320x32x32 bf16",
      // Without a norm.
      "gelu | residual_add @ 3x17x101x99",
      "channel_add(per=sample) | mish @ 5x24x64x64 f16 nhwc",
      "swish | mean @ 1x3x1000003",
      "prelu(per=channel) | mean @ 300x17x9x9 nhwc",
  };
  for (Problem& problem : parsed(texts)) problems.push_back(std::move(problem));
  check_all(problems, {.seed = 2000}, 2);
}

// Spatial sizes below, at and beside the sizes of vectors, teams and warps.
TEST_F(Forward, AgreesWithTheReferenceOnSmallSpatialSizes) {
  std::vector<Problem> problems;
  for (int64_t size = 1; size <= 20; ++size) {
    const std::string sizes = std::to_string(size);
    if (size % 3 == 0)
      problems.push_back(Problem::parse("swish | group_norm(3) | relu @ 3x12x" + sizes, gpu));
    if (size % 3 == 1)
      problems.push_back(Problem::parse(
          "group_norm(4) | gelu @ 2x20x" + sizes + (size % 2 == 0 ? " bf16 nhwc" : " f16 nhwc"), gpu));
    if (size % 2 == 1)
      problems.push_back(Problem::parse("group_norm(2) | silu @ 2x6x" + sizes + "x" + sizes + " bf16", gpu));
  }
  for (const char* const text :
       {"group_norm(8) | relu @ 7x64x1x1", "group_norm(1) | mean @ 3x320x1x1 f16", "tanh @ 9x33x1x1 bf16",
        "group_norm(8) | relu @ 7x64x1x1 nhwc", "instance_norm(affine=true) | swish @ 4x40x1x1"}) {
    problems.push_back(Problem::parse(text, gpu));
  }
  check_all(problems, {.seed = 3000}, 2);
}

// Slices, expanded tensors and orders that no tail kernel takes: the last row copies.
TEST_F(Forward, AgreesWithTheReferenceOnStridedTensors) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"swish | group_norm(2) | relu @ 3x8x9x7", "group_norm(2) | residual_add @ 2x6x5x11 f16",
        "conv2d(3,8,p=1) | group_norm(4) | relu @ 2x3x9x7 bf16", "tanh @ 2x5x13", "prelu | mean @ 2x7x5x6"}) {
    const Problem dense = Problem::parse(text, gpu);
    Shape larger = dense.input.sizes;
    larger.back() += 3;
    Problem padded_rows = dense;
    padded_rows.input.strides = TensorSpec::dense(dense.input.dtype, larger).strides;
    problems.push_back(padded_rows);
    Problem repeated_sample = dense;
    repeated_sample.input.strides[0] = 0;
    problems.push_back(repeated_sample);
    if (dense.output.sizes == dense.input.sizes) {
      Problem other_order = dense;
      other_order.output = TensorSpec::dense(dense.output.dtype, dense.output.sizes, Layout::nhwc);
      problems.push_back(other_order);
    }
  }
  for (const Problem& problem : problems) problem.validate();
  check_all(problems, {.seed = 4000});
}

TEST_F(Forward, RunsInPlace) {
  constexpr const char* texts[] = {
      "swish | group_norm(4) | hardswish @ 3x16x9x31x33", "swish | group_norm(4) | hardswish @ 5x8x7x9 nhwc",
      "group_norm(2) | residual_add | relu @ 2x16x65x67", "gelu | group_norm(8) @ 3x64x40x41 bf16",
      "instance_norm | relu @ 2x3x200x200 f16",           "gelu | channel_mul @ 4x33x17x19",
      "group_norm(1) | silu @ 2x1280x17x9 nhwc",          "relu @ 1x1x1",
  };
  const std::vector<Problem> problems = parsed(texts);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    std::vector<std::string> rows = accepting_rows(problem);
    return forward_errors(problem, rows, {.seed = 5000, .options = {.in_place = true}}, stream);
  });
}

TEST_F(Forward, WritesTheStatisticsOfTheReference) {
  constexpr const char* texts[] = {
      "conv2d(3,8,k=3,p=1) | relu | group_norm(2) @ 3x3x9x13",
      "conv_transpose2d(3,8,k=3,s=2) | swish | group_norm(4) | hardswish @ 2x3x9x13 bf16",
      "swish | group_norm(4) | hardswish @ 2x8x61x33",
      "swish | group_norm(4) | hardswish @ 2x16x31x63x63",
      "gelu | group_norm(2) | mean @ 2x8x9x13 f16 nhwc",
      "instance_norm | mean @ 2x3x11x5 nhwc",
      "instance_norm | relu @ 2x3x300x301 f16",
      "group_norm(1) | silu @ 3x1280x17x9",
      "group_norm(4) @ 5x32x1x1",
  };
  check_all(parsed(texts), {.distributions = {Distribution::normal, Distribution::offset_100},
                            .placements = {Placement::vectors},
                            .seed = 6000,
                            .options = {.statistics = true}});
}

TEST_F(Forward, AgreesWithTheReferenceOnRandomProblems) {
  const uint64_t first = base_seed();
  const int64_t tried = try_for(6, [first](int64_t index, const GpuStream& stream) {
    const uint64_t seed = first + static_cast<uint64_t>(index);
    const Problem problem = random_problem(seed, gpu);
    // One row: other problems try the others.
    const std::vector<std::string> rows = accepting_rows(problem);
    if (rows.empty()) return "no row takes " + problem.text();
    const std::string row = rows[seed % rows.size()];
    const size_t next = seed % std::size(distributions);
    const Check check{.distributions = {distributions[next], distributions[(next + 4) % 9]},
                      .placements = {placements[seed % std::size(placements)]},
                      .seed = seed,
                      .options = {.statistics = false}};
    return forward_errors(problem, std::span(&row, 1), check, stream);
  });
  std::cout << "seeds " << first << " to " << first + static_cast<uint64_t>(tried) - 1 << '\n';
  EXPECT_GT(tried, 0);
}

// A random tail at 50,000 to 1,000,000 elements.
TEST_F(Forward, AgreesWithTheReferenceOnRandomLargeTails) {
  const uint64_t first = base_seed() + 1'000'000;
  const int64_t tried = try_for(6, [first](int64_t index, const GpuStream& stream) {
    const uint64_t seed = first + static_cast<uint64_t>(index);
    const Problem problem = random_large_tail(seed, gpu);
    return forward_errors(problem, rows_in_turn(accepting_rows(problem), index, 1, turn()),
                          {.placements = {placements[seed % std::size(placements)]}, .seed = seed}, stream);
  });
  std::cout << "seeds " << first << " to " << first + static_cast<uint64_t>(tried) - 1 << '\n';
  EXPECT_GT(tried, 0);
}

}  // namespace
}  // namespace onepass::testing
