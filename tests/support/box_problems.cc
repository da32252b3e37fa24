// Problems for the row "gemm_boxes".
#include "support/lists.h"

namespace onepass::testing {

std::vector<Problem> box_problems(const Device& device) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv2d(64,64,k=1) @ 1x64x16x16 bf16 nhwc", "conv2d(64,64,k=3,p=1) | relu @ 2x64x13x11 f16 nhwc",
        "conv2d(128,256,k=3,p=1) @ 2x128x24x40 bf16 nhwc",
        "conv2d(80,160,k=3,p=1) | gelu @ 3x80x20x23 bf16 nhwc",
        "conv2d(24,40,k=5,p=2) | channel_mul | channel_add(per=sample) @ 2x24x17x19 bf16 nhwc",
        "conv2d(16,16,k=3,bias=false) | relu @ 2x16x20x31 f16 nhwc",
        "conv2d(64,72,k=3,s=2,p=1) | relu @ 2x64x21x23 bf16 nhwc",
        "conv2d(40,64,k=3,p=2,d=2) | prelu(per=channel) @ 2x40x21x23 bf16 nhwc",
        "conv2d(48,96,k=5,p=2) | relu | residual_add @ 2x48x30x30 f16 nhwc",
        "conv3d(32,32,k=3,p=1) | leaky_relu @ 2x32x9x10x11 bf16 nhwc",
        "conv3d(64,48,k=2x3x1,s=1x2x1,p=1x0x0) | tanh @ 2x64x6x9x10 bf16 nhwc",
        "conv1d(128,64,k=7,p=3) | swish @ 3x128x200 bf16 nhwc",
        "conv_transpose2d(64,64,k=2,s=2) | relu @ 2x64x15x13 bf16 nhwc",
        "conv_transpose2d(64,32,k=3,p=1) | relu @ 2x64x15x13 bf16 nhwc",
        "conv2d(136,64,k=3,p=1) | sigmoid @ 9x136x7x7 bf16 nhwc",
        "conv2d(64,64,k=3,p=1) | group_norm(8) | silu @ 2x64x30x31 bf16 nhwc",
        "conv2d(32,48,k=3) | relu | group_norm(6) | mean @ 5x32x12x13 f16 nhwc",
        "conv2d(40,320,k=1) | instance_norm(affine=true) | leaky_relu @ 5x40x18x20 bf16 nhwc",
        "conv2d(64,96,k=3,p=1) | channel_add(per=sample) | group_norm(1) | gelu @ 9x64x20x21 bf16 nhwc",
        "conv2d(48,80,k=3,p=1) | relu | group_norm(16) | residual_add @ 7x48x24x25 f16 nhwc",
        "conv3d(16,32,k=3,p=1) | swish | group_norm(4) | residual_add @ 5x16x9x12x13 bf16 nhwc",
        "conv2d(32,512,k=3,p=1) | group_norm(2) | tanh @ 3x32x9x10 f16 nhwc",
        "conv2d(64,64,k=3,p=1) | residual_add | group_norm(4) | relu @ 3x64x13x17 bf16 nhwc",
        // x that is copied first: f32, channels before space, channels that make no vectors. Outputs of which
        // positions or channels are neighbours. Values held in registers, in any of these.
        "conv2d(64,72,k=3,s=2,p=1) | relu @ 2x64x21x23 tf32 nhwc",
        "conv2d(40,48,k=3,s=2,p=1) | relu @ 2x40x13x15 bf16",
        "conv2d(36,40,k=3,p=1) | gelu | residual_add @ 2x36x11x13 bf16",
        "conv2d(33,41,k=3,p=1) | channel_add(per=sample) @ 2x33x12x13 tf32 nhwc",
        "conv2d(33,41,k=3,p=1) | group_norm(1) | silu @ 2x33x12x13 tf32",
        "conv2d(64,64,k=3,p=1) | relu | group_norm(4) | tanh @ 3x64x13x17 tf32",
        "conv2d(64,96,k=3,p=1) | group_norm(8) @ 3x64x13x7 f16",
        "conv2d(32,512,k=3,p=1) | group_norm(2) | tanh @ 3x32x9x10 f16",
        "conv2d(64,64,k=3,p=1) | group_norm(8) | silu | residual_add @ 2x64x20x21 bf16",
        "conv2d(64,64,k=3,p=1) | group_norm(8) | silu @ 2x64x20x21 tf32 nhwc",
        "conv1d(17,33,k=9,d=3,p=4) | instance_norm(affine=true) | mean @ 3x17x80 f16",
        "conv3d(20,24,k=3x3x1,s=1x2x1,p=1) | relu | group_norm(3) @ 2x20x5x9x7 tf32",
        "conv2d(136,40,k=3,p=1) | channel_mul | channel_add(per=sample) @ 9x136x5x7 tf32",
        "conv2d(136,41,k=1) | channel_mul(per=sample) @ 9x136x5x7 bf16 nhwc",
        // Classes that meet different elements, that have no taps, that are neighbours in the output.
        "conv_transpose2d(32,48,k=3,s=2,p=1,op=1) | relu | group_norm(4) | silu @ 3x32x9x11 tf32",
        "conv_transpose2d(40,72,k=4,s=2,p=1) | gelu | residual_add @ 2x40x8x13 bf16",
        "conv_transpose2d(64,130,k=5,s=3,p=1,op=2) | swish | group_norm(2) | mean @ 2x64x7x6 f16",
        "conv_transpose3d(24,20,k=5,s=2,p=2,bias=false) | group_norm(5) | relu @ 2x24x4x5x6 bf16",
        "conv_transpose3d(16,32,k=3,s=2,p=1,op=1) | instance_norm(affine=true) | prelu @ 2x16x3x4x5 tf32 "
        "nhwc",
        "conv_transpose1d(48,24,k=7,s=3,p=2,op=1) | swish | group_norm(3) @ 3x48x87 f16 nhwc",
        "conv_transpose2d(16,24,k=2,s=3) | channel_add | group_norm(2) | tanh @ 2x16x9x8 bf16",
        "conv_transpose2d(64,64,k=3,s=2,p=1,op=1) | relu @ 2x64x15x13 bf16 nhwc",
        "conv_transpose2d(64,72,k=5,s=4,d=2,p=3) | swish | residual_add @ 9x64x4x5 f16 nhwc",
        "conv_transpose2d(24,20,k=2,s=2) | leaky_relu(0.1) | instance_norm(affine=true) | relu @ 2x24x9x11 "
        "tf32",
        "conv_transpose2d(24,20,k=2,s=2) | channel_add(per=sample) @ 2x24x9x11 bf16",
        "conv_transpose2d(16,72,k=2x3,s=2x1,p=0x1) | channel_add | group_norm(8) | tanh @ 2x16x8x30 bf16",
        // Groups; kernels whose weights are packed in parts.
        "conv2d(64,128,k=3,p=1,groups=2) | relu | group_norm(8) | silu @ 3x64x14x15 tf32",
        "conv2d(51,60,k=3,p=1,groups=3,bias=false) | gelu @ 2x51x13x11 f16",
        "conv2d(72,96,k=3,s=2,p=1,groups=3) | channel_add(per=sample) | channel_mul @ 9x72x7x5 bf16 nhwc",
        "conv_transpose2d(48,72,k=4,s=2,p=1,groups=3) | relu | group_norm(6) | channel_add @ 2x48x7x9 bf16 "
        "nhwc",
        "conv2d(64,64,k=7,p=3) | relu @ 2x64x12x11 tf32 nhwc", "conv3d(32,32,k=5,p=2) @ 2x32x5x6x7 tf32",
        // Values computed twice; means of sums, also of outputs without a tap.
        "conv2d(16,64,k=2,s=2,p=1) | gelu | group_norm(1) | mean @ 2x16x46x42 bf16 nhwc",
        "conv_transpose2d(24,80,k=5,s=3,p=2) | relu | group_norm(2) | tanh | mean @ 2x24x14x17 tf32 nhwc",
        "conv_transpose2d(64,32,k=2,s=2) | mish | mean @ 3x64x12x13 bf16",
        "conv_transpose2d(64,32,k=3,s=2,p=1,op=1) | channel_mul(per=sample) | mean @ 3x64x12x13 tf32",
        "conv_transpose2d(48,64,k=3,s=2,p=1,op=1) | group_norm(1) | relu @ 1x48x50x51 bf16 nhwc",
        "conv2d(40,64,k=1,s=2) | mean @ 3x40x31x33 bf16",
        "conv_transpose2d(24,64,k=2,s=3,op=1) | swish | mean @ 2x24x9x11 bf16"}) {
    problems.push_back(Problem::parse(text, device));
  }
  return problems;
}

}  // namespace onepass::testing
