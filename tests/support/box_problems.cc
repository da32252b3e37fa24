// Problems for the row "gemm_boxes".
#include "support/lists.h"

namespace onepass::testing {

std::vector<Problem> box_problems(const Device& device) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv2d(64,64,k=1) @ 1x64x16x16 bf16 nhwc",
        "conv2d(64,64,k=3,p=1) | relu @ 2x64x13x11 f16 nhwc",
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
        "conv2d(64,64,k=3,p=1) | residual_add | group_norm(4) | relu @ 3x64x13x17 bf16 nhwc"}) {
    problems.push_back(Problem::parse(text, device));
  }
  return problems;
}

}  // namespace onepass::testing
