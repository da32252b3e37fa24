// A set small enough for compute-sanitizer, which slows kernels a hundredfold: gpu_test
// --gtest_filter='Small*'. Every row, both orders, every type; slabs in a warp, a block and a cluster;
// streams in pieces and waves.
#include "gpu/pool.h"
#include "onepass/onepass.h"
#include "plan/strategy.h"

namespace onepass::testing {
namespace {

using Small = GpuTest;

const Device gpu = Device::cuda();

constexpr const char* problems[] = {
    "swish | group_norm(4) | hardswish @ 2x8x7x9",
    "swish | group_norm(2) | hardswish @ 2x8x71x73",
    "gelu | group_norm(2) | residual_add @ 2x4x95x97 bf16",
    "group_norm(3) | channel_mul(per=sample) | silu @ 3x12x33 f16",
    "relu | group_norm(2) | swish @ 2x24x9x11 nhwc",
    "hardswish | group_norm(2) | mean @ 3x8x19x21",
    "prelu(per=channel) | instance_norm(affine=true) | tanh | mean @ 2x6x13x11 bf16 nhwc",
    "gelu | channel_add | residual_add @ 2x7x19x5",
    "mean @ 2x3x5000",
};

std::vector<Problem> with(std::initializer_list<const char*> others) {
  std::vector<Problem> all;
  for (const char* const text : problems) all.push_back(Problem::parse(text, gpu));
  for (const char* const text : others) all.push_back(Problem::parse(text, gpu));
  return all;
}

// Kernels are compiled side by side and run one by one: compute-sanitizer loses track of launches otherwise.
void try_each(const std::vector<Problem>& all, const std::function<void(const Problem&)>& compile,
              const std::function<std::string(const Problem&, const GpuStream&)>& check) {
  try_all(std::ssize(all), [&](int64_t index, const GpuStream&) {
    compile(all[static_cast<size_t>(index)]);
    return std::string();
  });
  const GpuStream stream;
  for (const Problem& problem : all) {
    const std::string errors = check(problem, stream);
    if (!errors.empty()) ADD_FAILURE() << errors;
  }
}

// By every row whose name begins so.
void check_forward(const std::vector<Problem>& all, const Check& check, const std::string& prefix) {
  const auto rows_of = [&prefix](const Problem& problem) { return rows_named(prefix, problem); };
  try_each(
      all,
      [&](const Problem& problem) {
        for (const std::string& row : rows_of(problem)) plan(problem, {row, ""});
      },
      [&](const Problem& problem, const GpuStream& stream) {
        const std::vector<std::string> rows = rows_of(problem);
        return forward_errors(problem, rows, check, stream);
      });
}

TEST_F(Small, Forward) {
  check_forward(
      with({"conv2d(3,8,p=1) | relu | group_norm(2) @ 2x3x9x7",
            "conv_transpose3d(3,4,k=3,s=2,p=1) | swish @ 1x3x3x4x5 f16 nhwc",
            "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 2x3x4x5x6 tf32",
            "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 11x3x5x6x7 f16 nhwc",
            "conv3d(3,8,k=2) | hardswish | group_norm(4) | mean @ 9x3x4x5x6 bf16 nhwc",
            "conv2d(3,8,k=3) | relu | group_norm(2) | mean @ 2x3x25x26 near_f32"}),
      {.seed = 1, .options = {.statistics = true}}, "");
}

TEST_F(Small, ForwardOfWideConvolutions) {
  std::vector<Problem> all;
  for (const char* const text : {"conv_transpose2d(16,24,k=3) | gelu | group_norm(3) @ 2x16x9x11 tf32",
                                 "conv2d(16,16,k=3,p=1) | relu | group_norm(2) @ 2x16x9x11 bf16 nhwc",
                                 "conv3d(16,24,k=2) | group_norm(2) | swish | mean @ 2x16x4x5x6"}) {
    all.push_back(Problem::parse(text, gpu));
  }
  check_forward(all, {.seed = 2}, "gemm_");
}

// More slabs than blocks or clusters: what is staged, exchanged and waited for is used again.
TEST_F(Small, ForwardOfManySlabs) {
  std::vector<Problem> all;
  for (const char* const text :
       {"swish | group_norm(1) | hardswish @ 140x2x131x131 bf16", "gelu | group_norm(2) @ 36x4x151x153",
        "group_norm(1) | relu @ 9x2x407x409"}) {
    all.push_back(Problem::parse(text, gpu));
  }
  check_forward(all, {.placements = {Placement::elements}, .seed = 4}, "tail_");
}

TEST_F(Small, Backward) {
  const std::vector<Problem> all =
      with({"conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 2x3x3x4x5 tf32",
            "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 3x3x5x6x7 tf32",
            "conv2d(3,8,p=1) | relu | group_norm(2) @ 2x3x9x7", "conv2d(24,40,k=3,p=1) @ 2x24x9x7 tf32",
            "conv_transpose2d(16,16,k=3) @ 2x16x6x7 bf16 nhwc"});
  try_each(
      all,
      [](const Problem& problem) {
        const BackwardProblem backward(problem);
        for (const BackwardStrategy* row : backward_strategies(Device::Kind::cuda)) {
          if (row->refusal(backward).empty()) plan_backward(backward, {std::string(row->name), ""});
        }
      },
      [](const Problem& problem, const GpuStream& stream) {
        return backward_errors(BackwardProblem(problem), {.seed = 3}, stream);
      });
}

}  // namespace
}  // namespace onepass::testing
