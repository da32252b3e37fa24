// What the GPU suite goes through of convolutions whose groups have few channels.
#include "support/lists.h"

namespace onepass::testing {

std::vector<Problem> narrow_problems(const Device& device) {
  std::vector<Problem> problems;
  for (const char* const text : {
           // Depthwise: one to three dimensions, both orders, strides, dilation, sizes that fill nothing.
           "conv2d(24,24,k=3,p=1,groups=24) | relu @ 2x24x56x56 bf16",
           "conv2d(24,24,k=7,p=3,groups=24) | group_norm(4) | silu @ 2x24x31x33 f32",
           "conv2d(68,68,k=5,p=2,groups=68) | swish @ 2x68x20x19 f16 nhwc",
           "conv2d(40,40,k=3,s=2,p=1,groups=40) | channel_mul | relu @ 3x40x29x32 tf32 nhwc",
           "conv1d(32,32,k=7,d=3,p=9,groups=32) | residual_add | gelu @ 3x32x500 bf16",
           "conv3d(12,12,k=3,p=1,groups=12) | instance_norm(affine=true) @ 2x12x9x10x12 f32",
           "conv3d(16,16,k=3x5x1,s=1x2x3,p=1x2x0,groups=16,bias=false) | mean @ 2x16x7x12x10 f16 nhwc",
           // Several outputs of an input, groups of a few, chunks of inputs, a tile's channels and a part.
           "conv2d(8,24,k=3,p=1,groups=8) | prelu(per=channel) | channel_add(per=sample) @ 2x8x30x28 f32",
           "conv2d(32,48,k=3,p=1,groups=8) | hardswish @ 2x32x28x28 bf16",
           "conv2d(36,24,k=3,p=2,d=2,groups=12) | group_norm(3) | residual_add @ 2x36x17x23 tf32 nhwc",
           "conv2d(96,96,k=3,p=1,groups=4) | relu | group_norm(8) | gelu @ 2x96x14x14 tf32_away",
           "conv2d(64,33,k=3,p=1) | tanh @ 2x64x13x15 f32 strict",
           "conv2d(64,40,k=1) | swish | mean @ 2x64x12x16 bf16 nhwc",
           "conv2d(3,20,k=7,s=2,p=3) | relu @ 2x3x41x40 f16 nhwc",
           "conv2d(1,17,k=4,s=3,d=2,p=4) | channel_add | leaky_relu(0.1) @ 2x1x40x37 bf16 nhwc",
           "conv3d(20,12,k=3,s=2,p=1,groups=2) | relu6 @ 2x20x7x9x11 bf16",
           "conv3d(4,6,k=7,p=3,bias=false) | clamp(-0.5,0.5) @ 1x4x8x9x10 tf32",
           // Transposed: classes with and without taps, output padding, dilation, no stride.
           "conv_transpose2d(24,24,k=4,s=2,p=1,groups=24) | relu @ 2x24x14x16 bf16",
           "conv_transpose2d(16,24,k=3,s=2,p=1,op=1,groups=8) | swish | group_norm(3) @ 2x16x11x12 tf32",
           "conv_transpose2d(12,10,k=2,s=3) | residual_add @ 2x12x9x8 f16 nhwc",
           "conv_transpose2d(30,16,k=5,d=2,p=3,groups=2) | elu(0.5) @ 2x30x12x13 f32",
           "conv_transpose1d(16,16,k=5,s=3,d=2,p=2,op=2,groups=4) | mish @ 3x16x90 f32",
           "conv_transpose3d(8,8,k=3,s=2,p=1,groups=4) | sigmoid @ 2x8x5x6x8 bf16 nhwc",
       }) {
    problems.push_back(Problem::parse(text, device));
  }
  return problems;
}

std::vector<Problem> banded_problems(const Device& device) {
  std::vector<Problem> problems;
  for (const char* const text : {
           "conv2d(24,24,k=3,p=1,groups=24) | relu @ 2x24x56x56 bf16",
           "conv2d(24,24,k=7,p=3,groups=24) | group_norm(4) | silu @ 2x24x31x33 f16",
           "conv2d(68,68,k=5,p=2,groups=68) | swish @ 2x68x20x19 f16 nhwc",
           "conv2d(40,40,k=3,s=2,p=1,groups=40) | channel_mul | relu @ 3x40x29x32 bf16 nhwc",
           "conv1d(32,32,k=7,d=3,p=9,groups=32) | residual_add | gelu @ 3x32x500 bf16",
           "conv3d(12,12,k=3,p=1,groups=12) | instance_norm(affine=true) @ 2x12x9x10x12 f16",
           "conv3d(16,16,k=3x5x1,s=1x2x3,p=1x2x0,groups=16,bias=false) | mean @ 2x16x7x12x10 f16 nhwc",
           "conv2d(8,24,k=3,p=1,groups=8) | prelu(per=channel) | channel_add(per=sample) @ 2x8x30x28 bf16",
           "conv2d(32,48,k=3,p=1,groups=8) | hardswish @ 2x32x28x28 bf16",
           "conv2d(36,24,k=3,p=2,d=2,groups=12) | group_norm(3) | residual_add @ 2x36x17x23 f16 nhwc",
           "conv2d(1,17,k=4,s=3,d=2,p=4) | channel_add | leaky_relu(0.1) @ 2x1x40x37 bf16 nhwc",
           "conv2d(3,20,k=7,s=2,p=3) | relu @ 2x3x41x40 f16 nhwc",
           "conv3d(20,12,k=3,s=2,p=1,groups=2) | relu6 @ 2x20x7x9x11 bf16",
           "conv3d(4,6,k=7,p=3,bias=false) | clamp(-0.5,0.5) @ 1x4x8x9x10 bf16",
           "conv_transpose2d(24,24,k=4,s=2,p=1,groups=24) | relu @ 2x24x14x16 bf16",
           "conv_transpose2d(16,24,k=3,s=2,p=1,op=1,groups=8) | swish | group_norm(3) @ 2x16x11x12 f16",
           "conv_transpose2d(12,10,k=2,s=3) | residual_add @ 2x12x9x8 f16 nhwc",
           "conv_transpose2d(30,16,k=5,d=2,p=3,groups=2) | elu(0.5) @ 2x30x12x13 bf16",
           "conv_transpose1d(16,16,k=5,s=3,d=2,p=2,op=2,groups=4) | mish @ 3x16x90 bf16",
           "conv_transpose3d(8,8,k=3,s=2,p=1,groups=4) | sigmoid @ 2x8x5x6x8 bf16 nhwc",
           "conv2d(64,33,k=3,p=1) | tanh @ 2x64x13x15 bf16",
           "conv2d(5,5,k=11,p=5,groups=5) @ 2x5x24x25 f16 nhwc",
           "conv1d(6,6,k=31,p=15,groups=6) | relu @ 2x6x203 bf16",
           "conv2d(96,96,k=3,p=1,groups=96) | mish @ 1x96x17x18 bf16 nhwc",
           "conv2d(16,16,k=3,p=1,groups=16) | mish @ 2x16x24x35 bf16",
           "conv2d(16,16,k=3,p=1,groups=16) | sigmoid @ 3x16x24x40 f16",
           "conv3d(96,96,k=3,p=1,groups=96) | elu @ 2x96x8x7x9 bf16 nhwc",
           "conv1d(7,7,k=3,p=1,groups=7) | clamp(-0.5,0.5) @ 2x7x411 bf16",
           "conv2d(8,8,k=3,p=1,groups=8) | hardswish @ 2x8x5x150 f16 nhwc",
           "conv2d(24,24,k=3,p=1,groups=24) | residual_add | relu @ 2x24x40x48 bf16",
           "conv3d(8,8,k=3,p=1,groups=8) | relu @ 2x8x9x16x11 bf16 nhwc",
           "conv3d(30,12,k=5,p=2,groups=3) | swish @ 2x30x7x8x9 bf16 nhwc",
       }) {
    problems.push_back(Problem::parse(text, device));
  }
  return problems;
}

std::vector<Problem> scaled_problems(const Device& device) {
  std::vector<Problem> problems;
  for (const char* const text : {
           // Alone: both orders, each type, with a bias and without, transposed, one channel.
           "conv2d(24,24,k=1,groups=24) @ 2x24x56x56 bf16",
           "conv2d(36,36,k=1,groups=36,bias=false) @ 3x36x31x33 f32 nhwc",
           "conv_transpose2d(17,17,k=1,d=2,groups=17) @ 2x17x20x19 f16 nhwc",
           "conv1d(40,40,k=1,groups=40) @ 3x40x501 tf32",
           "conv3d(1,1,k=1) @ 2x1x9x10x11 tf32",
           // With what follows: chains, operands, norms of every tail's row, means.
           "conv2d(64,64,k=1,groups=64) | relu @ 2x64x28x28 tf32 nhwc",
           "conv1d(9,9,k=1,groups=9) | channel_mul | residual_add | gelu @ 3x9x500 tf32",
           "conv2d(16,16,k=1,groups=16) | swish | group_norm(4) | hardswish @ 3x16x31x33 tf32_away",
           "conv2d(32,32,k=1,groups=32,bias=false) | group_norm(8) | elu @ 2x32x40x41 bf16",
           "conv3d(48,48,k=1,groups=48) | hardswish | group_norm(1) | relu6 @ 2x48x7x8x5 tf32 nhwc",
           "conv2d(320,320,k=1,groups=320) | hardsigmoid | group_norm(32) | gelu @ 2x320x14x15 f32 nhwc",
           "conv3d(512,512,k=1,groups=512,bias=false) | group_norm(512) | relu @ 2x512x3x2x5 f16",
           "conv2d(96,96,k=1,groups=96) | relu | sigmoid @ 2x96x12x11 bf16 nhwc",
           "conv2d(64,64,k=1,groups=64) | hardswish | group_norm(16) | gelu | mean @ 3x64x20x16 tf32",
           "conv2d(6,6,k=1,groups=6,bias=false) | group_norm(2) | softplus | mean @ 2x6x40x37 near_f32",
           "conv_transpose3d(8,8,k=1,groups=8) | prelu(per=channel) | instance_norm(affine=true) @ "
           "2x8x9x10x11 f32",
           "conv2d(20,20,k=1,groups=20) | channel_add(per=sample) | mean @ 3x20x9x7 f16 nhwc",
           "conv2d(40,40,k=1,groups=40) | group_norm(4) | channel_mul(per=sample) | silu @ 2x40x16x16 f32 "
           "strict",
       }) {
    problems.push_back(Problem::parse(text, device));
  }
  return problems;
}

std::vector<Problem> narrow_gradients(const Device& device) {
  std::vector<Problem> problems;
  for (const char* const text : {
           // Depthwise: one to three dimensions, both orders, strides, dilation, sizes that fill nothing.
           "conv2d(24,24,k=3,p=1,groups=24) @ 2x24x56x56 bf16",
           "conv2d(36,36,k=7,p=3,groups=36) @ 3x36x31x33 f32 nhwc",
           "conv2d(20,20,k=5,p=2,groups=20,bias=false) @ 2x20x28x40 f16",
           "conv2d(40,40,k=3,s=2,p=1,groups=40) @ 3x40x29x32 tf32 nhwc",
           "conv1d(32,32,k=31,d=2,p=30,groups=32) @ 3x32x500 tf32",
           "conv3d(12,12,k=3,p=1,groups=12) @ 2x12x9x10x12 f32",
           "conv3d(32,32,k=3,p=1,groups=32) @ 2x32x7x9x8 bf16 nhwc",
           "conv3d(6,6,k=3x5x1,s=1x2x3,p=1x2x0,groups=6) @ 2x6x7x12x10 f16",
           "conv2d(5,5,k=11,p=5,groups=5) @ 2x5x24x25 f32",
           // Several outputs of an input, groups of a few, channels in several tiles.
           "conv2d(8,24,k=3,p=1,groups=8) @ 2x8x30x28 bf16 nhwc",
           "conv2d(32,48,k=3,p=1,groups=8) @ 2x32x28x28 tf32",
           "conv2d(36,24,k=3,p=2,d=2,groups=12) @ 2x36x17x23 f16 nhwc",
           "conv2d(64,64,k=1,groups=8) @ 2x64x12x12 f32 nhwc",
           "conv3d(32,32,k=3,s=2,p=1,groups=4) @ 2x32x9x8x10 bf16",
           // Few inputs or few outputs.
           "conv2d(3,20,k=7,s=2,p=3) @ 2x3x41x40 f16 nhwc",
           "conv2d(64,3,k=7,p=3) @ 1x64x20x24 f32",
           "conv2d(70,2,k=1,bias=false) @ 2x70x15x16 tf32 nhwc",
           "conv2d(1,17,k=4,s=3,d=2,p=4) @ 2x1x40x37 bf16",
           // Transposed.
           "conv_transpose2d(24,24,k=4,s=2,p=1,groups=24) @ 2x24x14x16 bf16",
           "conv_transpose2d(16,24,k=3,s=2,p=1,op=1,groups=8) @ 2x16x11x12 f32 nhwc",
           "conv_transpose3d(3,5,k=3,s=2) @ 2x3x4x5x6 tf32",
           "conv_transpose1d(4,8,k=5,s=3,p=2,groups=4) @ 3x4x77 f16",
       }) {
    problems.push_back(Problem::parse(text, device));
  }
  return problems;
}

}  // namespace onepass::testing
