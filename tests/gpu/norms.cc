// Norms at their limits on a GPU: slabs of equal values, of one element, far from zero; and samples, whose
// bits do not depend on what lies beside them.
#include <algorithm>
#include <cmath>
#include <set>

#include "gpu/pool.h"
#include "onepass/cuda.h"
#include "onepass/onepass.h"
#include "plan/strategy.h"

namespace onepass::testing {
namespace {

using Norms = GpuTest;

const Device gpu = Device::cuda();

std::vector<Problem> parsed(std::initializer_list<const char*> texts) {
  std::vector<Problem> problems;
  for (const char* const text : texts) problems.push_back(Problem::parse(text, gpu));
  return problems;
}

std::vector<ProblemAndRow> with_all_rows(const std::vector<Problem>& problems) {
  std::vector<ProblemAndRow> list;
  for (const Problem& problem : problems) {
    for (const std::string& row : accepting_rows(problem)) list.push_back({problem, row});
  }
  return list;
}

// Index of the parameter, or the number of them where the block has none of this role.
size_t index_of(const Problem& problem, Parameter::Role role) {
  const std::vector<Parameter> parameters = problem.block.parameters(problem.input.sizes);
  const auto found = std::find_if(parameters.begin(), parameters.end(),
                                  [&](const Parameter& parameter) { return parameter.role == role; });
  return static_cast<size_t>(found - parameters.begin());
}

// The first output that is not its channel's bias of the norm exactly, in words; on vectors and beside them.
std::string not_beta(const ProblemAndRow& item, const Operands& operands, const GpuStream& stream) {
  const auto& [problem, row] = item;
  const Plan own = plan(problem, {row, ""});
  const std::vector<double>& beta = operands.parameters[index_of(problem, Parameter::Role::norm_bias)];
  const auto channels = static_cast<size_t>(problem.output.sizes[1]);
  const size_t rows = static_cast<size_t>(problem.output.sizes[0]) * channels;
  for (const Placement placement : {Placement::vectors, Placement::elements}) {
    const Outcome outcome = run(own, operands, Place(stream, placement));
    const size_t spatial = outcome.output.size() / rows;
    for (size_t i = 0; i < outcome.output.size(); ++i) {
      const double wanted = beta[i / spatial % channels];
      if (outcome.output[i] == wanted) continue;
      return row + ": element " + std::to_string(i) + " is off by " +
             std::to_string((outcome.output[i] - wanted) * 1e9) + "e-9 from beta " + std::to_string(wanted) +
             ": " + problem.text();
    }
    if (!outcome.damage.empty()) return row + ": " + outcome.damage + ": " + problem.text();
  }
  return "";
}

double rounded(double value, DType dtype) {
  if (dtype == DType::f32) return static_cast<float>(value);
  const double step = std::ldexp(1.0, std::ilogb(value) - (dtype == DType::f16 ? 10 : 7));
  return std::nearbyint(value / step) * step;
}

// All values of a slab are the same number, another one in each slab. Numbers with all bits, whose multiples
// no sum has exactly. Behind a convolution: of weights 0, so that its bias is what the norm gets.
Operands equal_values(const Problem& problem) {
  Operands operands = random_operands(problem, Distribution::normal, 31);
  if (const size_t weight = index_of(problem, Parameter::Role::conv_weight);
      weight < operands.parameters.size()) {
    std::fill(operands.parameters[weight].begin(), operands.parameters[weight].end(), 0.0);
    std::vector<double>& bias = operands.parameters[index_of(problem, Parameter::Role::conv_bias)];
    std::fill(bias.begin(), bias.end(), rounded(0.7312345678, problem.input.dtype));
    return operands;
  }
  const auto slabs = static_cast<size_t>(slab_count(problem));
  const size_t elements = operands.input.size() / slabs;
  for (size_t i = 0; i < operands.input.size(); ++i) {
    const double value = 1.1123456789 + 0.7345678912 * static_cast<double>(i / elements % 11);
    operands.input[i] = rounded(value, problem.input.dtype);
  }
  return operands;
}

// x * scale + (beta - mean * scale) is off by what rounds the sum in brackets: 1e-5 of a value about 1. The
// sums of equal values are no multiples of them, so that means are off too.
TEST_F(Norms, EqualValuesGiveBetaExactly) {
  const std::vector<ProblemAndRow> list = with_all_rows(parsed({
      "group_norm(2) @ 3x8x9x7",
      "group_norm(4) @ 3x8x71x73",
      "swish | group_norm(2) @ 3x4x151x153",
      "gelu | group_norm(1) @ 2x3x301x303",
      "group_norm(2) @ 3x4x95x97 bf16",
      "swish | group_norm(1) @ 3x2x407x409 bf16",
      "relu | group_norm(1) @ 3x2x407x409 f16",
      "swish | group_norm(1) @ 3x2x811x809",
      "relu | group_norm(1) @ 2x2x1001x999 bf16",
      "group_norm(2) @ 150x8x49x51",
      "swish | group_norm(2) @ 2x24x9x11 nhwc",
      "swish | group_norm(4) @ 2x16x65x67 bf16 nhwc",
      "group_norm(3) | mean @ 3x9x19x21",
      "swish | instance_norm(affine=true) | mean @ 2x6x13x11 nhwc",
      "hardswish | group_norm(4) | mean @ 5x16x13x29x29",
      "conv2d(3,8,k=3,p=1) | swish | group_norm(2) @ 2x3x19x21 tf32",
      "conv2d(3,24,k=3,p=1) | gelu | group_norm(4) @ 3x3x40x41",
      "conv_transpose3d(3,16,k=3,s=2,p=1) | relu | group_norm(4) @ 2x3x6x10x11 tf32",
      "conv_transpose2d(3,12,k=4,s=2,p=1) | group_norm(3) @ 2x3x16x17 bf16 nhwc",
      "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 4x3x9x17x19 tf32",
      "conv3d(3,12,k=2) | hardswish | group_norm(4) | mean @ 9x3x4x5x6 f16 nhwc",
      "conv2d(32,48,k=3,p=1) | gelu | group_norm(6) @ 3x32x20x21 tf32",
      "conv2d(32,64,k=3,p=1) | relu | group_norm(4) @ 2x32x33x31 bf16",
      "conv2d(48,40,k=3) | group_norm(2) | mean @ 3x48x19x21 tf32",
      "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 2x64x60x86 tf32",
      "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 2x64x60x86 bf16",
      "conv_transpose3d(32,64,k=3,s=2,p=1) | group_norm(8) @ 1x32x5x6x7",
  }));
  try_all(std::ssize(list), [&](int64_t index, const GpuStream& stream) {
    const ProblemAndRow& item = list[static_cast<size_t>(index)];
    return not_beta(item, equal_values(item.problem), stream);
  });
}

TEST_F(Norms, SlabOfOneElementGivesBetaExactly) {
  const std::vector<ProblemAndRow> list = with_all_rows(parsed({
      "instance_norm(affine=true) @ 5x24x1x1",
      "swish | group_norm(7) @ 5x7x1",
      "group_norm(40) @ 3x40x1x1 bf16",
      "gelu | group_norm(16) @ 4x16x1x1 f16 nhwc",
      "swish | instance_norm(affine=true) | mean @ 4x9x1x1",
      "conv2d(3,8,k=3) | swish | instance_norm(affine=true) @ 4x3x3x3 tf32",
      "conv2d(3,16,k=3) | gelu | group_norm(16) @ 4x3x3x3",
      "conv3d(3,16,k=4) | hardswish | group_norm(16) | mean @ 9x3x4x4x4 tf32",
      "conv2d(32,64,k=3) | gelu | group_norm(64) @ 4x32x3x3 bf16",
      "conv2d(32,48,k=3) | swish | group_norm(48) @ 3x32x3x3 tf32",
      "conv2d(32,48,k=3) | group_norm(48) | mean @ 3x32x3x3",
  }));
  try_all(std::ssize(list), [&](int64_t index, const GpuStream& stream) {
    const ProblemAndRow& item = list[static_cast<size_t>(index)];
    return not_beta(item, random_operands(item.problem, Distribution::normal, 32), stream);
  });
}

// Slabs far from zero, tails in f32. What the mean is rounded to (half of a unit in its last place) is all
// that is left; PyTorch's x * scale + shift rounds the shift too, and its mean is the last of many that were
// rounded.
TEST_F(Norms, MeanFarFromZeroCostsHalfAUnitOfIt) {
  const std::vector<ProblemAndRow> list = with_all_rows(parsed({
      "group_norm(2) @ 4x8x9x7",
      "group_norm(4) @ 4x8x33x35",
      "group_norm(4) @ 6x8x71x73",
      "group_norm(2) @ 6x4x151x153",
      "group_norm(1) @ 3x3x301x303",
      "group_norm(1) @ 2x2x811x809",
      "group_norm(8) @ 4x64x17x19 nhwc",
      "group_norm(2) @ 2x16x65x67 nhwc",
  }));
  try_all(std::ssize(list), [&](int64_t index, const GpuStream& stream) {
    const auto& [problem, row] = list[static_cast<size_t>(index)];
    const Plan own = plan(problem, {row, ""});
    const auto channels = static_cast<size_t>(problem.output.sizes[1]);
    for (const auto& [distribution, mean] :
         {std::pair(Distribution::offset_100, 100.0), std::pair(Distribution::offset_10000, 10000.0)}) {
      const Operands operands = random_operands(problem, distribution, 33);
      const Expected expected = expected_output(problem, operands.input, operands.parameters);
      const Outcome outcome = run(own, operands, Place(stream, Placement::vectors));
      const std::vector<double>& weight =
          operands.parameters[index_of(problem, Parameter::Role::norm_weight)];
      // Deviations are about 1: a unit of the mean's last place, and some of the output's.
      const double unit = std::ldexp(1.0, std::ilogb(mean) - 23);
      const size_t spatial =
          outcome.output.size() / (static_cast<size_t>(problem.output.sizes[0]) * channels);
      for (size_t i = 0; i < outcome.output.size(); ++i) {
        const double error = std::abs(outcome.output[i] - expected.values[i]);
        const double magnitude = std::abs(weight[i / spatial % channels]);
        const double allowed = 0.62 * unit * magnitude + 4e-6 * (magnitude + std::abs(expected.values[i]));
        if (error <= allowed) continue;
        return row + ": element " + std::to_string(i) + " is off by " + std::to_string(error / unit) +
               " units of the mean, its weight is " + std::to_string(magnitude) + ": " + problem.text();
      }
    }
    return std::string();
  });
}

// --- A sample beside others ---

Problem with_batch(const Problem& problem, int64_t batch) {
  Problem other = problem;
  other.input.sizes[0] = other.output.sizes[0] = batch;
  return other;
}

std::vector<double> samples_of(const std::vector<double>& values, int64_t batch, int64_t first,
                               int64_t count) {
  const std::ptrdiff_t size = std::ssize(values) / batch;
  return {values.begin() + first * size, values.begin() + (first + count) * size};
}

// The rows whose numbers are chosen for the batch such that sums are added up in another order (see "The bits
// of a sample" in docs/architecture.md), and the largest batch that has the kernel of one sample.
int64_t most_alike(const std::string& row) { return row == "thin_wgmma" ? 4 : INT64_MAX; }

// Vectors follow 16-byte boundaries. Where samples are no whole vectors, one that begins elsewhere between
// two boundaries is added up in another order.
bool lies_alike(const Problem& problem, int64_t n) {
  const int64_t elements = element_count(problem.input.sizes) / problem.input.sizes[0];
  return n * elements * byte_size(problem.input.dtype) % 16 == 0;
}

std::string sample_differences(const Problem& problem, const std::string& row, const GpuStream& stream) {
  const int64_t batch = problem.input.sizes[0];
  const Operands operands = random_operands(problem, Distribution::normal, 34);
  const Place place(stream, Placement::vectors);
  const std::vector<double> together = run(plan(problem, {row, ""}), operands, place).output;
  // Alone, and beside some others: other numbers of blocks, waves and clusters.
  for (const int64_t some : {int64_t{1}, int64_t{3}}) {
    const Problem fewer = with_batch(problem, some);
    const Plan own = plan(fewer, {row, ""});
    for (const int64_t n : {int64_t{0}, std::min(batch / 2, batch - some), batch - some}) {
      if (!lies_alike(problem, n)) continue;
      const Operands cut{samples_of(operands.input, batch, n, some), operands.parameters};
      if (!same_bits(run(own, cut, place).output, samples_of(together, batch, n, some)))
        return row + " gives other bits for " + std::to_string(some) + " from sample " + std::to_string(n) +
               " on: " + problem.text();
    }
  }
  return "";
}

TEST_F(Norms, ASampleHasTheBitsItHasAlone) {
  const std::vector<Problem> problems = parsed({
      "swish | group_norm(4) | hardswish @ 70x16x9x13",
      "swish | group_norm(4) | hardswish @ 20x16x9x31x33",
      "gelu | group_norm(1) @ 9x2x407x409 bf16",
      "relu | group_norm(8) | swish @ 9x64x33x35 nhwc",
      "group_norm(1) | relu @ 9x3x7x7",
      "hardswish | group_norm(4) | mean @ 40x16x13x29x28",
      "hardswish | group_norm(4) | silu | mean @ 40x16x13x29x28",
      "swish | group_norm(2) | gelu | mean @ 40x160x16x18 bf16",
      "swish | group_norm(2) | hardswish @ 300x16x24x26",
      "gelu | group_norm(1) | relu @ 7x2x812x810",
      "group_norm(1) | silu | mean @ 7x2x1002x1000 bf16",
      "relu | group_norm(8) | swish | mean @ 70x16x9x12",
      "mish | group_norm(4) | gelu | mean @ 9x64x33x35 bf16 nhwc",
      "conv2d(3,16,k=3,p=1) | swish | group_norm(4) | silu @ 70x3x40x44 tf32",
      "conv2d(3,24,k=3,p=1) | gelu | group_norm(6) @ 33x3x40x44 bf16 nhwc",
      "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 37x3x6x10x12 tf32",
      "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 4x3x9x17x20 tf32",
      "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 37x3x9x17x20",
      "conv2d(64,64,k=3,p=1) | relu | group_norm(8) @ 21x64x16x16 tf32",
      "conv2d(32,128,k=3,p=1) | swish | group_norm(8) | mean @ 21x32x16x16 bf16",
      "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 9x64x60x86 tf32",
      "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 9x64x60x86 bf16",
      "conv2d(16,24,k=3,groups=4) | relu | group_norm(2) @ 33x16x13x14 tf32",
      "conv2d(16,16,k=1,groups=16) | swish | group_norm(4) @ 40x16x13x29 bf16",
      "conv2d(64,96,k=3,s=2,p=1) | relu | group_norm(8) @ 9x64x33x35",
      "conv2d(64,96,k=3,s=2,p=1) | relu | group_norm(8) @ 9x64x33x35 bf16 nhwc",
  });
  std::vector<ProblemAndRow> list;
  std::set<std::string> met;
  for (const ProblemAndRow& item : with_all_rows(problems)) {
    const int64_t batch = std::min(item.problem.input.sizes[0], most_alike(item.row));
    const Problem alike = with_batch(item.problem, batch);
    const std::vector<std::string> rows = accepting_rows(alike);
    if (std::find(rows.begin(), rows.end(), item.row) == rows.end()) continue;
    list.push_back({alike, item.row});
    met.insert(item.row);
  }
  if (cuda::describe_device(0).find("sm_90a") != std::string::npos) {
    for (const Strategy* row : strategies(Device::Kind::cuda))
      EXPECT_TRUE(met.contains(std::string(row->name))) << row->name << " takes none of the problems";
  }
  try_all(std::ssize(list), [&](int64_t index, const GpuStream& stream) {
    const ProblemAndRow& item = list[static_cast<size_t>(index)];
    return sample_differences(item.problem, item.row, stream);
  });
}

}  // namespace
}  // namespace onepass::testing
