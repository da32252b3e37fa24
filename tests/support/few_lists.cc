// What the GPU suite goes through of gemm_mma's ways with few channels, and with operands as they lie.
#include "support/lists.h"

#include <iterator>

namespace onepass::testing {
namespace {

constexpr const char* modes[] = {"f32", "tf32", "f16", "bf16"};

// For gemm_mma: fewer input channels in a group than a product has terms, fewer output channels than it has
// rows. One vector of inputs and three, even and odd numbers of taps, one tap; classes of few taps, of none,
// and that meet the same elements; groups; long sums.
constexpr const char* few_blocks[] = {
    "conv1d(8,24,k=4,s=2,p=1) | relu | group_norm(4) @ 3x8x301 ",
    "conv2d(8,80,k=3,s=2,p=1) | silu | group_norm(8) @ 2x8x33x30 ",
    "conv2d(5,72,k=3,p=1) | gelu @ 2x5x29x31 ",
    // Several taps along x in a vector: all, all but one, of each class; far apart; transposed.
    "conv1d(3,40,k=4,d=2,p=3) | relu6 @ 3x3x50 ",
    "conv2d(2,64,k=5,p=2) | group_norm(4) | tanh | mean @ 2x2x24x23 ",
    "conv2d(1,24,k=7,s=2,p=3) | gelu | group_norm(4) @ 2x1x37x39 ",
    "conv3d(8,32,k=2x3x4,p=1,groups=4) | swish @ 2x8x7x9x12 ",
    "conv_transpose2d(1,17,k=6,s=3) | relu @ 2x1x7x19 ",
    "conv_transpose2d(2,24,k=5,s=2,p=1,op=1) | mish | group_norm(8) @ 2x2x9x8 ",
    "conv2d(4,17,k=5,s=2x1,d=1x2,p=2) | channel_mul(per=sample) | group_norm(17) | residual_add @ 2x4x23x24 ",
    "conv2d(20,9,k=3,p=1) | tanh | residual_add @ 2x20x17x19 ",
    "conv2d(24,33,k=3,d=2,p=2) | swish | group_norm(3) @ 2x24x15x16 ",
    "conv2d(12,5,k=7,p=3) | prelu(per=channel) | instance_norm(affine=true) @ 2x12x13x14 ",
    "conv2d(64,3,k=5,p=2) | tanh @ 2x64x18x21 ",
    "conv2d(40,8,k=1) | group_norm(2) | relu | mean @ 3x40x15x16 ",
    "conv2d(8,40,k=1,s=2) | mean @ 3x8x31x33 ",
    "conv3d(6,20,k=3,p=1) | leaky_relu(0.1) | group_norm(2) | hardswish @ 2x6x6x7x9 ",
    "conv3d(4,66,k=2,s=2) | gelu | group_norm(3) | mean @ 3x4x8x9x11 ",
    // Sums of thousands of terms, which tensor cores cut off.
    "conv3d(8,20,k=7,p=3) | relu | group_norm(4) @ 1x8x6x7x8 ",
    "conv_transpose1d(3,16,k=5,s=3) | swish @ 3x3x111 ",
    "conv_transpose2d(8,12,k=4,s=2,p=1) | swish | group_norm(3) | relu @ 2x8x17x15 ",
    "conv_transpose2d(4,24,k=3,s=2,p=1,op=1) | relu | group_norm(4) @ 2x4x13x14 ",
    "conv_transpose2d(12,6,k=2,s=3) | channel_add | group_norm(2) | tanh @ 2x12x9x8 ",
    "conv_transpose2d(9,70,k=5,s=2,d=3) | relu | mean @ 2x9x7x6 ",
    "conv_transpose3d(8,8,k=3,s=2,p=1,op=1) | relu @ 2x8x4x5x6 ",
    "conv_transpose3d(8,4,k=2,s=2) | swish | group_norm(2) @ 2x8x4x5x6 ",
    "conv_transpose2d(10,20,k=3,p=1) | gelu | group_norm(4) @ 2x10x11x13 ",
    "conv2d(32,24,k=3,p=1,groups=4) | relu | group_norm(8) @ 3x32x14x15 ",
    "conv2d(32,32,k=3,s=2,p=1,groups=8) | channel_mul | group_norm(16) | channel_add(per=sample) @ "
    "2x32x17x18 ",
    "conv_transpose2d(24,36,k=4,s=2,p=1,groups=3) | swish | group_norm(6) @ 2x24x7x9 ",
    // Few inputs and many outputs with a norm: values are computed twice (tests/mma_numbers_test.cc).
    "conv2d(5,384,k=1) | instance_norm | relu @ 2x5x20x20 ",
    "conv2d(8,256,k=2) | hardswish | group_norm(8) | tanh | mean @ 3x8x33x29 ",
    "conv2d(3,192,k=1) | residual_add | group_norm(1) | residual_add @ 2x3x20x20 ",
    "conv_transpose2d(8,128,k=2,s=2) | group_norm(8) | gelu @ 2x8x12x13 ",
    "conv1d(4,144,k=3) | group_norm(3) | swish @ 3x4x600 ",
};

// For gemm_mma: taps along x are rows of the product (gemm/mma/row_taps.cuh). One output channel and more,
// one dimension to three, strides that leave taps as terms and that do not divide the kernel, dilation, more
// taps than outputs; classes of transposed ones along x, of no taps, and in other dimensions too.
constexpr const char* row_tap_blocks[] = {
    "conv1d(40,1,k=7,p=3) | tanh @ 3x40x613 ",
    "conv1d(32,3,k=5,s=2,p=2) | group_norm(1) | relu @ 3x32x901 ",
    "conv1d(24,2,k=8,s=3) | swish | group_norm(2) | mean @ 3x24x700 ",
    "conv1d(72,2,k=3,d=4,p=4) | gelu | residual_add @ 2x72x431 ",
    "conv2d(20,1,k=7) | channel_add @ 2x20x15x40 ",
    "conv2d(48,3,k=7,s=2,p=3) | hardswish | group_norm(1) | elu @ 2x48x29x67 ",
    "conv2d(64,8,k=3,p=1) | relu | group_norm(4) @ 2x64x13x45 ",
    "conv2d(33,5,k=2) | mean @ 3x33x17x38 ",
    "conv2d(24,2,k=3x5,s=2x1,p=1x2) | swish | instance_norm(affine=true) | residual_add @ 2x24x19x31 ",
    "conv2d(24,4,k=5,s=2,d=3,p=4) | group_norm(2) | mish | mean @ 2x24x31x50 ",
    "conv2d(96,12,k=6x5,p=2) | prelu(per=channel) @ 1x96x9x26 ",
    "conv3d(48,8,k=4,p=2) | hardswish @ 2x48x5x6x30 ",
    "conv3d(48,6,k=3,p=1,groups=2) | group_norm(2) | relu @ 2x48x5x8x33 ",
    "conv3d(24,1,k=2x3x7,p=0x1x3) | silu | group_norm(1) | channel_mul(per=sample) @ 2x24x4x7x37 ",
    "conv_transpose1d(32,1,k=7) | swish | mean @ 3x32x400 ",
    "conv_transpose1d(48,3,k=7,s=2,p=3) | relu @ 3x48x301 ",
    "conv_transpose1d(24,2,k=2,s=3) | group_norm(2) | gelu @ 3x24x205 ",
    "conv_transpose1d(24,2,k=5,s=4,d=2,op=1) | swish | residual_add @ 3x24x205 ",
    "conv_transpose2d(64,1,k=7) @ 2x64x11x43 ",
    "conv_transpose2d(40,3,k=7,s=2,p=3,op=1) | swish | group_norm(1) | hardswish @ 2x40x7x21 ",
    "conv_transpose2d(36,4,k=4x5,s=1x3,p=1x2,groups=2) | tanh | group_norm(2) @ 2x36x9x17 ",
    "conv_transpose2d(24,8,k=3,s=2,p=1) | channel_mul | group_norm(4) | mean @ 3x24x12x29 ",
    "conv_transpose3d(64,3,k=7,s=2,p=3) @ 1x64x3x4x15 ",
    "conv_transpose3d(96,3,k=5) | hardsigmoid | group_norm(1) | mean @ 2x96x3x5x22 ",
};

// For gemm_mma: x copied to the window as it lies. Runs of 8, 4 and 2 elements along x, also without taps
// along it; vectors of channels; chunks and a single one, channels that fill none.
constexpr const char* copied_blocks[] = {
    "conv2d(72,3,k=7,p=3) | relu | group_norm(1) @ 2x72x11x48 bf16",
    "conv2d(20,5,k=5) | tanh @ 2x20x13x36 f16",
    "conv1d(200,2,k=3,p=1) | gelu | mean @ 3x200x610 bf16",
    "conv3d(128,4,k=3,p=1,groups=2) | swish | group_norm(2) @ 2x128x5x6x48 f16",
    "conv_transpose2d(80,2,k=5,s=2,p=2,op=1) | group_norm(1) | elu @ 2x80x9x28 bf16",
    "conv_transpose3d(48,1,k=3,s=3,p=1) | swish @ 2x48x4x5x18 f16",
    "conv2d(96,24,k=1) | relu | group_norm(4) @ 2x96x9x30 bf16",
    "conv2d(40,72,k=3x1,s=2x1,p=1x0) | gelu @ 2x40x15x16 f16",
    "conv2d(72,3,k=7,p=3) | relu | group_norm(1) @ 2x72x11x19 bf16 nhwc",
    "conv2d(96,80,k=3,s=2,p=1) | silu | group_norm(8) | mean @ 2x96x17x19 f16 nhwc",
    "conv_transpose2d(48,24,k=4,s=3,p=1) | swish @ 2x48x7x9 bf16 nhwc",
    "conv1d(8,40,k=5,d=2) | group_norm(4) | relu @ 3x8x301 f16 nhwc",
};

Problem parsed(const char* block, const char* mode, bool interleaved, const Device& device) {
  return Problem::parse(block + std::string(mode) + (interleaved ? " nhwc" : ""), device);
}

}  // namespace

std::vector<Problem> row_tap_problems(const Device& device) {
  std::vector<Problem> problems;
  for (size_t i = 0; i < std::size(row_tap_blocks); ++i) {
    for (size_t j = i % 2; j < std::size(modes); j += 2)
      problems.push_back(parsed(row_tap_blocks[i], modes[j], (i / 2 + j / 2) % 2 == 0, device));
  }
  return problems;
}

std::vector<Problem> copied_problems(const Device& device) {
  std::vector<Problem> problems;
  for (const char* const text : copied_blocks) problems.push_back(Problem::parse(text, device));
  return problems;
}

std::vector<Problem> few_problems(const Device& device) {
  std::vector<Problem> problems;
  for (size_t i = 0; i < std::size(few_blocks); ++i) {
    for (size_t j = i % 2; j < std::size(modes); j += 2)
      problems.push_back(parsed(few_blocks[i], modes[j], (i + j / 2) % 2 == 0, device));
  }
  for (const Problem& problem : row_tap_problems(device)) problems.push_back(problem);
  for (const Problem& problem : copied_problems(device)) problems.push_back(problem);
  for (const char* const text :
       {"conv2d(8,40,k=3,p=1) | relu | group_norm(5) @ 2x8x21x24 tf32_away",
        "conv_transpose2d(4,24,k=3,s=2,p=1) | gelu | group_norm(3) @ 2x4x13x11 tf32_away nhwc"}) {
    problems.push_back(Problem::parse(text, device));
  }
  return problems;
}

}  // namespace onepass::testing
