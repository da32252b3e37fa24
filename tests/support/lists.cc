// What the GPU suite goes through, and the part of it that one run takes.
#include "support/lists.h"

#include <algorithm>

#include "plan/strategy.h"
#include "support/cases.h"

namespace onepass::testing {
namespace {

constexpr const char* modes[] = {"f32", "tf32", "f16", "bf16"};

// Sizes that are no multiple of anything, every kind of chain, both orders; channels that do not fill a
// product or a tile, groups within and across tiles, units held in registers and computed twice.
constexpr const char* wide_blocks[] = {
    // The workloads, small.
    "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 2x64x6x256 ",
    "conv_transpose3d(64,128,k=3,bias=false) | relu | group_norm(8) @ 2x64x5x6x7 ",
    // One, two and three dimensions; padding, dilation, kernels of all shapes.
    "conv1d(16,16,k=1) | relu @ 3x16x97 ",
    "conv1d(16,24,k=3,p=1) | group_norm(3) | gelu @ 2x16x1300 ",
    "conv1d(17,33,k=9,d=3,p=4) | instance_norm(affine=true) | mean @ 3x17x80 ",
    "conv1d(32,64,k=5) | swish | mean @ 2x32x700 ",
    "conv2d(16,64,k=7,p=3,bias=false) | group_norm(32) | relu @ 2x16x21x19 ",
    "conv2d(20,32,k=3,p=same) | group_norm(8) | silu | mean @ 2x20x17x19 ",
    "conv2d(48,40,k=1) | mean @ 2x48x23x25 ",
    "conv2d(24,70,k=3,d=2,p=2) | swish @ 2x24x29x31 ",
    "conv2d(16,24,k=4) | prelu(per=channel) | instance_norm | channel_add(per=sample) @ 2x16x18x21 ",
    "conv2d(64,16,k=1) | group_norm(1) | tanh @ 3x64x15x16 ",
    "conv2d(18,17,k=5,p=2) | channel_mul(per=sample) | group_norm(17) | residual_add | relu @ 2x18x13x14 ",
    "conv2d(32,320,k=3,p=1) | silu | group_norm(32) @ 2x32x16x16 ",
    "conv2d(40,130,k=3,p=1) | residual_add | group_norm(2) | gelu @ 2x40x24x23 ",
    "conv2d(96,192,k=3,p=1) | group_norm(1) | mish @ 2x96x9x8 ",
    "conv2d(130,64,k=3,p=1) | relu | group_norm(4) @ 1x130x40x41 ",
    "conv2d(16,16,k=11x1,p=5x0) | elu(0.5) | group_norm(4) @ 2x16x33x12 ",
    "conv2d(16,32,k=3,p=5,d=3) | leaky_relu(0.1) | group_norm(4) @ 2x16x11x9 ",
    "conv3d(16,32,k=3,p=1) | leaky_relu(0.1) | group_norm(2) | hardswish @ 2x16x6x7x9 ",
    "conv3d(16,33,k=2) | gelu | group_norm(3) | swish | mean @ 3x16x8x9x11 ",
    "conv3d(32,16,k=3,d=2,p=1x2x0) | hardswish | mean @ 2x32x9x8x7 ",
    "conv3d(16,80,k=1x3x3,p=0x1x1) | relu6 | instance_norm(affine=true) @ 2x16x5x20x21 ",
    // Strides, also of more than the kernel, with dilation, and of one dimension alone.
    "conv1d(16,16,k=4,s=2,p=1) | relu | group_norm(4) @ 3x16x301 ",
    "conv2d(24,72,k=3,s=2,p=1) | silu | group_norm(8) @ 2x24x33x30 ",
    "conv2d(32,20,k=1,s=2) | relu @ 2x32x13x14 ",
    "conv2d(16,32,k=3,s=3x2,d=2x3,p=4) | group_norm(2) | gelu | mean @ 2x16x31x29 ",
    "conv2d(16,16,k=2,s=5x1) | tanh @ 2x16x23x24 ",
    "conv3d(16,40,k=3,s=2,p=1) | leaky_relu(0.1) | instance_norm(affine=true) @ 2x16x9x8x11 ",
    "conv3d(20,24,k=3x3x1,s=1x2x1,p=1) | relu | group_norm(3) @ 2x20x5x9x7 ",
    // Transposed ones.
    "conv_transpose1d(24,48,k=4,p=1) | swish @ 3x24x411 ",
    "conv_transpose1d(16,16,k=4,d=2) | group_norm(4) | relu @ 4x16x63 ",
    "conv_transpose2d(32,80,k=3,p=1) | relu | group_norm(2) | gelu @ 2x32x11x13 ",
    "conv_transpose2d(16,20,k=5,d=2,p=3) | tanh | residual_add @ 2x16x9x8 ",
    "conv_transpose2d(36,20,k=3x1) | prelu | instance_norm(affine=true) | prelu(per=channel) @ 2x36x30x32 ",
    "conv_transpose3d(16,24,k=2) | group_norm(2) | swish | mean @ 2x16x5x4x6 ",
    "conv_transpose3d(32,72,k=3,p=2,bias=false) | clamp(-0.5,0.5) | group_norm(6) @ 2x32x6x7x8 ",
    // Transposed ones with a stride, whose outputs meet the same elements.
    "conv_transpose1d(16,33,k=3,s=3) | swish @ 3x16x211 ",
    "conv_transpose2d(24,20,k=2,s=2) | leaky_relu(0.1) | instance_norm(affine=true) | relu @ 2x24x9x11 ",
    "conv_transpose2d(32,16,k=4x2,s=4x2,bias=false) | group_norm(4) | residual_add @ 2x32x7x9 ",
    "conv_transpose2d(16,72,k=2x3,s=2x1,p=0x1) | channel_add | group_norm(8) | tanh @ 2x16x8x30 ",
    "conv_transpose3d(16,24,k=2,s=2) | gelu | group_norm(3) @ 2x16x4x5x6 ",
    "conv_transpose1d(16,16,k=2,s=2) | group_norm(2) | swish @ 1x16x84002 ",
    // Boxes of outputs.
    "conv2d(16,64,k=3,p=1) | relu | group_norm(4) @ 1x16x150x301 ",
    "conv3d(16,64,k=3,p=1) | instance_norm | leaky_relu(0.1) @ 1x16x9x40x90 ",
    // More tiles in a unit than a GPU holds.
    "conv1d(16,16,k=3) | swish | group_norm(2) | hardswish @ 1x16x84001 ",
    "conv1d(16,128,k=1) | relu | group_norm(1) @ 1x16x42000 ",
};

// Sizes that are no multiple of anything, every kind of chain, both orders.
constexpr const char* thin_blocks[] = {
    // The workloads, small.
    "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 5x3x7x13x11 ",
    "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 2x3x16x32x32 ",
    "conv_transpose3d(3,16,k=3,s=2) | swish | group_norm(4) | hardswish @ 2x3x5x9x7 ",
    "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 3x3x4x8x10 ",
    // More samples than multiprocessors: a cluster does not share one.
    "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 150x3x5x9x8 ",
    "conv2d(5,24,k=3) | relu | group_norm(8) | mean @ 290x5x6x7 ",
    // One, two and three dimensions; strides, padding, dilation.
    "conv1d(1,8,k=5) | relu @ 3x1x97 ",
    "conv1d(4,12,k=3,s=2,p=1) | group_norm(3) | gelu @ 4x4x133 ",
    "conv1d(2,64,k=9,d=3,p=4) | instance_norm(affine=true) | mean @ 3x2x80 ",
    "conv2d(3,64,k=7,s=2,p=3,bias=false) | group_norm(32) | relu @ 2x3x33x31 ",
    "conv2d(3,32,k=3,p=same) | group_norm(8) | silu | mean @ 3x3x17x19 ",
    "conv2d(1,9,k=2) | mean @ 4x1x23x5 ",
    "conv2d(5,7,k=3,s=3,d=2,p=2) | swish | mean @ 2x5x29x31 ",
    "conv2d(8,24,k=4,s=2) | prelu(per=channel) | instance_norm | channel_add(per=sample) @ 2x8x18x21 ",
    "conv2d(4,16,k=1) | group_norm(1) | tanh @ 3x4x15x16 ",
    // Rows of whole sectors, rows in pieces that end within sectors, many tiles.
    "conv2d(1,24,k=5,p=2) | hardswish | group_norm(4) | silu @ 2x1x40x64 ",
    "conv2d(2,24,k=4,p=2) | swish | group_norm(24) @ 2x2x30x140 ",
    "conv2d(2,17,k=5,p=2) | channel_mul(per=sample) | group_norm(17) | residual_add | relu @ 2x2x13x14 ",
    "conv3d(1,8,k=3,p=1) | leaky_relu(0.1) | group_norm(2) | mish @ 2x1x6x7x9 ",
    "conv3d(4,33,k=2,s=2) | gelu | group_norm(3) | mean @ 3x4x8x9x11 ",
    "conv3d(2,5,k=3,d=2) | hardswish | mean @ 2x2x9x8x7 ",
    "conv3d(3,12,k=3x1x2,s=1x2x1,p=1x0x1) | group_norm(4) | relu @ 2x3x7x10x9 ",
    // Transposed ones: classes without taps, more output than input, dilation that meets no tap.
    "conv_transpose1d(3,8,k=2,s=3) | swish @ 3x3x41 ",
    "conv_transpose1d(2,16,k=4,s=2,p=1) | group_norm(4) | relu @ 4x2x63 ",
    "conv_transpose2d(3,8,k=4,s=2,p=1) | relu | group_norm(2) | gelu @ 2x3x11x13 ",
    "conv_transpose2d(4,12,k=3,s=3,op=2) | group_norm(3) | mean @ 2x4x7x6 ",
    "conv_transpose2d(1,3,k=5,s=4,d=2,p=3) | tanh | residual_add @ 2x1x9x8 ",
    "conv_transpose2d(6,20,k=3) | prelu | instance_norm(affine=true) | prelu(per=channel) @ 2x6x10x12 ",
    "conv_transpose3d(2,8,k=2,s=2) | group_norm(2) | swish | mean @ 3x2x5x4x6 ",
    "conv_transpose3d(1,4,k=3,s=2,d=2,p=1,bias=false) | relu6 @ 2x1x4x5x3 ",
    "conv_transpose3d(2,24,k=4,s=2,p=1) | silu | group_norm(6) | residual_add @ 2x2x3x6x7 ",
    // Slabs on many blocks: sets of channels, one of them smaller; groups across products; one dimension;
    // planes and rows that do not divide; more samples than clusters.
    "conv2d(8,64,k=5,p=2) | hardswish | group_norm(4) | silu @ 3x8x40x44 ",
    "conv2d(4,40,k=3,p=1) | relu | group_norm(5) | gelu @ 2x4x61x67 ",
    "conv2d(3,48,k=3,s=2) | group_norm(4) | channel_mul | residual_add | relu @ 2x3x97x91 ",
    "conv1d(3,16,k=7) | swish | group_norm(2) | tanh @ 2x3x20011 ",
    "conv3d(2,16,k=3,p=1) | gelu | group_norm(16) @ 2x2x21x23x25 ",
    "conv_transpose2d(5,16,k=4,s=2,p=1) | mish | group_norm(1) | hardswish @ 2x5x41x37 ",
    "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 2x3x8x16x16 ",
    "conv2d(3,16,k=3) | swish | group_norm(4) | relu @ 300x3x20x18 ",
};

// For compute-sanitizer. Every type, both orders; slabs in a warp, a block and a cluster.
constexpr const char* small_tails[] = {
    "swish | group_norm(4) | hardswish @ 2x8x7x9",
    "swish | group_norm(2) | hardswish @ 2x8x71x73",
    "gelu | group_norm(2) | residual_add @ 2x4x95x97 bf16",
    "group_norm(3) | channel_mul(per=sample) | silu @ 3x12x33 f16",
    "relu | group_norm(2) | swish @ 2x24x9x11 nhwc",
    "channel_mul | group_norm(2) | residual_add @ 2x16x65x67 bf16 nhwc",
    "swish | group_norm(4) | channel_mul | gelu @ 5x48x13x7 f16 nhwc",
    "mish | group_norm(2) | softplus | mean @ 3x16x83x81 f16 nhwc",
    "hardswish | group_norm(2) | mean @ 3x8x19x21",
    // Means of slabs that clusters hold: rows that end within a warp's part, rows of several warps.
    "relu | group_norm(1) | swish | mean @ 3x96x13x17",
    "channel_mul | group_norm(2) | residual_add | gelu | mean @ 2x160x17x19 bf16",
    "prelu(per=channel) | instance_norm(affine=true) | tanh | mean @ 2x6x13x11 bf16 nhwc",
    "gelu | channel_add | residual_add @ 2x7x19x5",
    "mean @ 2x3x5000",
};

std::vector<Problem> parsed(std::span<const char* const> texts, const Device& device) {
  std::vector<Problem> problems;
  for (const char* const text : texts) problems.push_back(Problem::parse(text, device));
  return problems;
}

Problem parsed(const char* block, const char* mode, bool interleaved, const Device& device) {
  return Problem::parse(block + std::string(mode) + (interleaved ? " nhwc" : ""), device);
}

bool is_product(const std::string& row) {
  return row.starts_with("gemm_") || (row.starts_with("thin_") && row != "thin_cores");
}

}  // namespace

std::vector<std::string> accepting_rows(const Problem& problem) {
  std::vector<std::string> rows;
  for (const Strategy* row : strategies(Device::Kind::cuda)) {
    if (row->refusal(problem).empty()) rows.emplace_back(row->name);
  }
  return rows;
}

std::vector<std::string> rows_named(const std::string& prefix, const Problem& problem) {
  std::vector<std::string> rows = accepting_rows(problem);
  std::erase_if(rows, [&](const std::string& row) { return !row.starts_with(prefix); });
  return rows;
}

bool accepts(const BackwardProblem& problem) {
  const auto rows = backward_strategies(Device::Kind::cuda);
  return std::any_of(rows.begin(), rows.end(),
                     [&](const BackwardStrategy* row) { return row->refusal(problem).empty(); });
}

std::vector<std::string> rows_in_turn(std::vector<std::string> rows, int64_t index, size_t count,
                                      int64_t turn) {
  if (rows.size() <= count) return rows;
  const int64_t first = (index + turn * static_cast<int64_t>(count)) % std::ssize(rows);
  std::rotate(rows.begin(), rows.begin() + first, rows.end());
  rows.resize(count);
  return rows;
}

std::vector<std::string> one_row_each(const std::vector<Problem>& problems, const RowsOf& rows_of,
                                      int64_t turn) {
  std::vector<std::string> taken;
  for (int64_t i = 0; i < std::ssize(problems); ++i) {
    const std::vector<std::string> row = rows_in_turn(rows_of(problems[static_cast<size_t>(i)]), i, 1, turn);
    taken.push_back(row.empty() ? "" : row.front());
  }
  return taken;
}

std::vector<Problem> in_turn(const std::vector<Problem>& problems, int64_t turn) {
  std::vector<Problem> some;
  for (auto i = static_cast<size_t>(turn % turns_in_all); i < problems.size(); i += turns_in_all)
    some.push_back(problems[i]);
  return some;
}

std::vector<Problem> gpu_cases(const Device& device) {
  std::vector<Problem> problems;
  for (const std::string& text : read_cases()) {
    Problem problem = Problem::parse(text, device);
    if (problem.input.dtype != DType::f64) problems.push_back(std::move(problem));
  }
  return problems;
}

std::vector<ProblemAndRow> cases_in_turn(const Device& device, int64_t turn) {
  std::vector<ProblemAndRow> pairs;
  int64_t dealt[2] = {0, 0};
  for (const Problem& problem : gpu_cases(device)) {
    for (std::string& row : accepting_rows(problem)) {
      if (dealt[is_product(row) ? 1 : 0]++ % turns_in_all == turn % turns_in_all)
        pairs.push_back({problem, std::move(row)});
    }
  }
  return pairs;
}

std::vector<Problem> wide_problems(const Device& device) {
  std::vector<Problem> problems;
  for (size_t i = 0; i < std::size(wide_blocks); ++i) {
    for (size_t j = 0; j < std::size(modes); ++j) {
      // Each block in one mode, every fourth one in another too, by turns.
      if (j != i % 4 && (i % 4 != i / 4 % 4 || j != (i + 2) % 4)) continue;
      problems.push_back(parsed(wide_blocks[i], modes[j], i % 5 == 1 || (i + j) % 9 == 4, device));
    }
  }
  for (const char* const text :
       {"conv2d(32,64,k=3,p=1) | relu | group_norm(8) @ 2x32x21x24 tf32_away",
        "conv3d(24,48,k=3,p=1) | instance_norm(affine=true) | leaky_relu(0.01) @ 2x24x5x9x11 tf32_away nhwc",
        "conv_transpose2d(16,64,k=3) | gelu | group_norm(8) @ 2x16x38x256 tf32_away",
        // Transposed ones with a stride, whose classes meet different elements.
        "conv_transpose1d(48,24,k=7,s=3,p=2,op=1) | swish | group_norm(3) @ 3x48x87 f16 nhwc",
        "conv_transpose2d(32,48,k=3,s=2,p=1,op=1) | relu | group_norm(4) | silu @ 3x32x9x11 tf32",
        "conv_transpose2d(40,72,k=4,s=2,p=1) | gelu | residual_add @ 2x40x8x13 bf16",
        "conv_transpose2d(64,130,k=5,s=3,p=1,op=2) | swish | group_norm(2) | mean @ 2x64x7x6 f16",
        "conv_transpose2d(32,80,k=4x3,s=2x1,p=1) | leaky_relu(0.1) | group_norm(8) @ 2x32x7x9 tf32 nhwc",
        "conv_transpose3d(24,20,k=5,s=2,p=2,bias=false) | group_norm(5) | relu @ 2x24x4x5x6 bf16",
        "conv_transpose3d(16,32,k=3,s=2,p=1,op=1) | instance_norm(affine=true) | prelu @ 2x16x3x4x5 tf32"}) {
    problems.push_back(Problem::parse(text, device));
  }
  return problems;
}

std::vector<std::string> wide_rows(const Problem& problem) {
  std::vector<std::string> rows = rows_named("gemm_", problem);
  std::erase(rows, "gemm_mma");
  return rows;
}

std::vector<Problem> thin_problems(const Device& device) {
  std::vector<Problem> problems;
  for (size_t i = 0; i < std::size(thin_blocks); ++i) {
    for (size_t j = i % 2; j < std::size(modes); j += 2)
      problems.push_back(parsed(thin_blocks[i], modes[j], problems.size() % 3 == 0, device));
  }
  return problems;
}

std::vector<Problem> thin_forward_problems(const Device& device) {
  std::vector<Problem> problems = thin_problems(device);
  for (const char* const text :
       {"conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 3x3x6x9x11 tf32_away",
        "conv3d(8,32,k=3) | hardswish | group_norm(4) | mean @ 9x8x6x9x11 tf32_away",
        "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 2x3x4x5x8 tf32_away",
        "conv2d(8,40,k=3,p=1) | relu | group_norm(5) | silu @ 2x8x21x24 tf32_away",
        "conv2d(4,24,k=5,s=2,p=2) | gelu | group_norm(3) @ 2x4x23x21 tf32_away nhwc"}) {
    problems.push_back(Problem::parse(text, device));
  }
  return problems;
}

std::vector<std::string> thin_rows(const Problem& problem) { return rows_named("thin_", problem); }

std::vector<int64_t> thin_gradients_in_turn(int64_t count, int64_t turn) {
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < count; ++i) {
    if ((5 * i + turn) % 13 < 8) chosen.push_back(i);
  }
  return chosen;
}

std::vector<Problem> grouped_problems(const Device& device) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv2d(64,128,k=3,p=1,groups=2) | relu | group_norm(8) | silu @ 3x64x14x15 tf32",
        "conv2d(64,128,k=3,p=1,groups=2) | relu | group_norm(8) | silu @ 3x64x14x15 bf16 nhwc",
        "conv2d(51,60,k=3,p=1,groups=3,bias=false) | group_norm(3) | gelu @ 2x51x13x11 f16",
        "conv_transpose2d(48,72,k=4,s=2,p=1,groups=3) | relu | group_norm(6) | channel_add @ 2x48x7x9 bf16 "
        "nhwc",
        "conv2d(80,80,k=3,s=2,p=1,groups=5) | channel_mul | group_norm(10) | channel_add(per=sample) @ "
        "3x80x17x18 f32",
        "conv2d(48,48,k=3,p=1,groups=3) | prelu(per=channel) | instance_norm(affine=true) | residual_add @ "
        "2x48x9x40 tf32 nhwc",
        "conv1d(32,96,k=5,groups=2) | swish | group_norm(4) | relu | mean @ 5x32x300 bf16",
        "conv1d(34,34,k=3,p=1,groups=2) | mean @ 3x34x97 tf32",
        "conv3d(64,72,k=3,p=1,groups=4) | leaky_relu(0.1) | group_norm(12) | mean @ 2x64x5x6x7 f16 nhwc",
        "conv3d(32,160,k=3,p=1,groups=2) | residual_add | tanh @ 2x32x6x7x9 bf16",
        "conv_transpose2d(36,40,k=3,p=1,groups=2) | channel_add | group_norm(2) | prelu(per=channel) @ "
        "3x36x11x12 tf32",
        "conv_transpose2d(48,36,k=2,s=2,groups=2) | relu | group_norm(6) @ 2x48x9x11 bf16 nhwc",
        "conv_transpose2d(34,34,k=4,s=2,p=1,groups=2) | swish | group_norm(2) @ 2x34x7x9 tf32",
        "conv_transpose3d(32,32,k=3,s=2,p=1,op=1,groups=2) | relu | group_norm(4) @ 2x32x5x4x6 bf16",
        "conv2d(96,256,k=3,p=1,groups=2) | relu | group_norm(2) @ 1x96x40x41 f32 nhwc",
        // Slabs with channels of several groups.
        "conv2d(64,96,k=3,p=1,groups=4) | relu | group_norm(2) | silu @ 3x64x14x15 tf32",
        "conv2d(24,48,k=5,p=2,groups=3,bias=false) | group_norm(1) | gelu | mean @ 3x24x13x11 bf16 nhwc",
        "conv_transpose2d(32,24,k=4,s=2,p=1,groups=2) | swish | group_norm(3) | residual_add @ 2x32x7x9 f16",
        "conv3d(16,64,k=3,s=2,p=1,groups=2) | channel_mul | group_norm(1) | mean @ 3x16x7x9x8 f32"}) {
    problems.push_back(Problem::parse(text, device));
  }
  return problems;
}

std::vector<Problem> pingpong_problems(const Device& device) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv_transpose2d(16,64,k=3) | gelu | group_norm(8) @ 2x16x38x256 bf16",
        "conv_transpose2d(40,64,k=3) | gelu | group_norm(8) @ 4x40x4x168 bf16",
        "conv2d(16,48,k=3,p=1) | relu | group_norm(6) | silu @ 150x16x6x24 bf16",
        "conv2d(17,20,k=5,p=2) | swish | group_norm(5) @ 5x17x31x48 bf16",
        "conv1d(48,64,k=3,p=1) | group_norm(4) @ 300x48x64 bf16",
        "conv1d(40,16,k=9,d=2) | hardswish | group_norm(1) @ 7x40x2000 bf16",
        "conv3d(16,32,k=3,p=1) | leaky_relu(0.1) | instance_norm @ 3x16x9x10x24 bf16",
        "conv_transpose3d(24,16,k=3,bias=false) | group_norm(16) | gelu @ 4x24x9x10x16 bf16",
        "conv2d(16,64,k=1) | channel_mul | group_norm(4) | channel_add @ 40x16x20x40 bf16",
        "conv3d(16,16,k=1) | group_norm(4) @ 8x16x8x8x8 bf16",
        "conv_transpose2d(16,64,k=3) | gelu | group_norm(8) @ 2x16x38x256 f16",
        "conv_transpose2d(40,64,k=3) | gelu | group_norm(8) @ 4x40x4x168 f16",
        "conv2d(32,64,k=1) | relu | group_norm(8) | relu @ 40x32x5x40 bf16",
        "conv2d(16,24,k=3,p=1) | silu | group_norm(6) @ 5x16x12x24 f16",
        "conv2d(32,64,k=1) | relu | group_norm(8) | relu @ 40x32x5x40 f16",
        "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 7x64x16x256 tf32",
        "conv2d(17,20,k=5,p=2) | swish | group_norm(5) | relu @ 5x17x31x48 tf32",
        "conv1d(40,16,k=9,d=2) | hardswish | group_norm(1) @ 7x40x2000 tf32",
        "conv_transpose2d(24,64,k=4) | group_norm(64) | tanh @ 3x24x21x40 tf32",
        "conv3d(16,32,k=3,p=1) | leaky_relu(0.1) | instance_norm @ 3x16x9x10x24 tf32",
        "conv2d(24,40,k=1) | silu | group_norm(5) | channel_add @ 200x24x33x16 tf32",
        "conv2d(16,24,k=1) | instance_norm | relu @ 3x16x12x24 tf32",
        "conv2d(16,24,k=3,p=1) | group_norm(6) @ 2x16x38x256 tf32"}) {
    problems.push_back(Problem::parse(text, device));
  }
  return problems;
}

std::vector<Problem> wide_gradients(const Device& device) {
  std::vector<Problem> problems;
  for (const char* const text : {
           // The workloads, small.
           "conv_transpose2d(64,64,k=3) @ 3x64x30x31 tf32",
           "conv_transpose2d(64,64,k=3) @ 3x64x30x32 bf16",
           "conv_transpose3d(64,128,k=3,bias=false) @ 2x64x5x6x7 bf16 nhwc",
           // Few taps and many, padding and dilation, channels that fill no tile, several tiles. Modes and
           // orders by turns: a kernel takes the compiler long.
           "conv1d(17,33,k=9,d=3,p=4) @ 3x17x80 f16",
           "conv2d(24,70,k=3,d=2,p=2) @ 2x24x29x31 tf32 nhwc",
           "conv2d(16,20,k=2) @ 2x16x18x21 tf32",
           "conv2d(130,200,k=3,p=1) @ 2x130x14x13 bf16",
           "conv3d(20,33,k=3,p=1) @ 2x20x6x7x9 tf32",
           "conv_transpose1d(24,48,k=4,p=1) @ 3x24x411 f16",
           "conv_transpose2d(16,20,k=5,d=2,p=3) @ 2x16x9x8 bf16 nhwc",
           "conv2d(16,16,k=3,p=1) @ 5x16x150x130 tf32",
           // In groups: each a product by itself, several together, channels that fill nothing.
           "conv2d(64,96,k=3,p=1,groups=2) @ 3x64x17x19 tf32",
           "conv2d(64,64,k=3,p=1,groups=4) @ 3x64x17x19 bf16 nhwc",
           "conv2d(51,60,k=3,p=1,groups=3) @ 2x51x13x11 f16",
           "conv1d(128,64,k=5,groups=4) @ 3x128x80 tf32 nhwc",
           "conv_transpose2d(96,54,k=3,p=1,groups=3) @ 2x96x11x12 tf32",
           "conv_transpose3d(64,64,k=3,p=1,groups=4) @ 2x64x6x7x9 bf16",
       }) {
    problems.push_back(Problem::parse(text, device));
  }
  return problems;
}

std::vector<SmallProblems> small_forward(const Device& device) {
  constexpr const char* convolutions[] = {
      "conv2d(3,8,p=1) | relu | group_norm(2) @ 2x3x9x7",
      "conv_transpose3d(3,4,k=3,s=2,p=1) | swish @ 1x3x3x4x5 f16 nhwc",
      "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 2x3x4x5x6 tf32",
      "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 11x3x5x6x7 f16 nhwc",
      "conv3d(3,8,k=2) | hardswish | group_norm(4) | mean @ 9x3x4x5x6 bf16 nhwc",
      "conv2d(3,8,k=3) | relu | group_norm(2) | mean @ 2x3x25x26 near_f32",
      "conv2d(3,8,k=3,p=1) | relu | group_norm(2) @ 2x3x9x8 tf32_away",
  };
  constexpr const char* wide[] = {
      "conv_transpose2d(16,24,k=3) | gelu | group_norm(3) @ 2x16x9x11 tf32",
      "conv2d(16,16,k=3,p=1) | relu | group_norm(2) @ 2x16x9x11 bf16 nhwc",
      "conv3d(16,24,k=2) | group_norm(2) | swish | mean @ 2x16x4x5x6",
      "conv2d(5,12,k=3,s=2,p=1) | relu | group_norm(3) @ 2x5x9x11 bf16 nhwc",
      "conv2d(20,6,k=3,p=1) | relu | group_norm(3) @ 2x20x7x6",
      "conv_transpose2d(6,4,k=3,s=2,p=1) | swish | group_norm(2) @ 2x6x5x6 tf32",
      "conv2d(24,16,k=3,p=1) | swish | residual_add @ 2x24x9x11 f16 nhwc",
      "conv2d(12,24,k=3,p=1,groups=3) | relu | group_norm(2) @ 2x12x9x8 bf16",
  };
  // More slabs than blocks or clusters: what is staged, exchanged and waited for is used again.
  constexpr const char* many_slabs[] = {
      "swish | group_norm(1) | hardswish @ 140x2x131x131 bf16",
      "gelu | group_norm(2) @ 36x4x151x153",
      "group_norm(1) | relu @ 9x2x407x409",
      // Rows of several blocks; several blocks a multiprocessor; more blocks than a cluster has.
      "gelu | group_norm(1) | silu | mean @ 36x2x301x303 bf16",
      "swish | channel_mul | group_norm(2) | hardswish @ 290x8x49x51",
      "mish | group_norm(1) | relu @ 9x2x811x809",
      "relu | group_norm(1) | gelu | mean @ 9x2x1001x999 bf16",
  };
  // Several tiles a sample, which exchange moments; values held as f16 and as integers.
  constexpr const char* by_turns[] = {
      "conv2d(16,16,k=3,p=1) | relu | group_norm(4) @ 3x16x24x40 bf16",
      "conv2d(16,24,k=3,p=1) | gelu | group_norm(6) | relu @ 3x16x20x36 tf32",
  };
  constexpr const char* narrow[] = {
      "conv2d(12,12,k=3,p=1,groups=12) | channel_mul | residual_add @ 2x12x16x20 bf16",
      "conv2d(8,8,k=5,s=2,p=2,groups=2) | relu | group_norm(2) @ 2x8x9x13 nhwc",
      "conv_transpose2d(6,9,k=3,s=2,p=1,op=1,groups=3) | swish @ 2x6x5x7 tf32",
  };
  constexpr const char* banded[] = {
      "conv2d(12,12,k=3,p=1,groups=12) | channel_mul | residual_add @ 2x12x16x20 bf16",
      "conv2d(16,16,k=5,s=2,p=2,groups=4) | relu | group_norm(2) @ 2x16x9x13 f16 nhwc",
      "conv3d(6,6,k=3,p=1,groups=6) | swish @ 2x6x5x9x11 bf16",
      "conv2d(40,40,k=3,p=1,groups=40) | relu @ 2x40x9x16 bf16 nhwc",
      "conv_transpose2d(6,9,k=3,s=2,p=1,op=1,groups=3) | swish @ 2x6x5x7 bf16",
  };
  constexpr const char* scaled[] = {
      "conv2d(12,12,k=1,groups=12) | channel_mul | residual_add @ 2x12x16x20 bf16",
      "conv2d(8,8,k=1,groups=8,bias=false) | relu | group_norm(2) @ 2x8x9x13 tf32 nhwc",
  };
  std::vector<Problem> all = parsed(small_tails, device);
  for (Problem& problem : parsed(convolutions, device)) all.push_back(std::move(problem));
  return {{"", std::move(all)},
          {"narrow", parsed(narrow, device)},
          {"banded", parsed(banded, device)},
          {"scaled", parsed(scaled, device)},
          {"gemm_", parsed(wide, device)},
          {"tail_", parsed(many_slabs, device)},
          {"gemm_pingpong", parsed(by_turns, device)}};
}

std::vector<Problem> small_backward(const Device& device) {
  constexpr const char* convolutions[] = {
      "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 2x3x3x4x5 tf32",
      "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 3x3x5x6x7 tf32",
      "conv2d(3,8,p=1) | relu | group_norm(2) @ 2x3x9x7",
      "conv2d(24,40,k=3,p=1) @ 2x24x9x7 tf32",
      "conv_transpose2d(16,16,k=3) @ 2x16x6x7 bf16 nhwc",
      "conv2d(6,6,k=3,p=1,groups=6) @ 2x6x9x7",
      "conv_transpose2d(8,12,k=3,s=2,groups=4) @ 2x8x5x6 bf16 nhwc",
      "conv2d(12,12,k=1,groups=12) @ 2x12x9x8 tf32",
      "conv2d(8,8,k=1,groups=8) | swish | group_norm(2) @ 2x8x6x7 nhwc",
  };
  std::vector<Problem> all = parsed(small_tails, device);
  for (Problem& problem : parsed(convolutions, device)) all.push_back(std::move(problem));
  return all;
}

}  // namespace onepass::testing
