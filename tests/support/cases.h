// The problem strings of tests/cases.txt, and shorter lists for tests of one kind.
#pragma once

#include <string>
#include <vector>

#include "onepass/block.h"

namespace onepass::testing {

// One string a case, comments and empty lines left out. Throws Error when the file cannot be read.
std::vector<std::string> read_cases();

// Every operation with constants at which corners lie, limits also on one side, equal and, where they may be,
// reversed.
std::vector<Pointwise> corner_stages();
// Those corners, and values far beyond.
std::vector<double> corner_values();

// Small blocks for data of every distribution, on which a careless implementation loses its digits.
inline constexpr const char* hard_blocks[] = {
    "conv2d(3,8,k=3,p=1) | relu | group_norm(2) @ 2x3x9x13",
    "conv2d(3,8,k=3,p=1) | group_norm(2) | silu @ 2x3x9x13 nhwc",
    "conv_transpose3d(3,8,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 1x3x3x4x5",
    "conv3d(3,8,k=2) | hardswish | group_norm(4) | mean @ 2x3x4x5x6",
    "conv1d(4,6,k=3,groups=2) | instance_norm(affine=true) | gelu | mean @ 2x4x40 bf16",
    "group_norm(4) @ 3x8x11x7",
    "gelu | group_norm(1) | tanh @ 2x5x300 f16",
    "softplus | instance_norm | mish @ 2x5x17x3 nhwc",
    "elu | group_norm(3,eps=1e-12) | mean @ 2x6x31",
    "group_norm(2,eps=0) | residual_add @ 2x4x9x9 bf16 nhwc",
    "conv2d(8,8,k=3,groups=8,p=1) | relu6 | group_norm(8) @ 2x8x7x7",
};

// The same without convolutions, for gradients.
inline constexpr const char* hard_tails[] = {
    "swish | group_norm(4) | hardswish @ 2x8x9x13",  "group_norm(4) @ 3x8x11x7",
    "gelu | group_norm(1) | tanh @ 2x5x300 f16",     "softplus | instance_norm | mish @ 2x5x17x3 nhwc",
    "elu | group_norm(3,eps=1e-12) | mean @ 2x6x31", "group_norm(2,eps=0) | residual_add @ 2x4x9x9 bf16 nhwc",
    "relu | group_norm(8) | relu6 @ 2x8x7x7",        "prelu | channel_mul | clamp(-1,1) @ 2x7x19",
    "group_norm(1) | gelu_tanh | mean @ 1x1x1",
};

// More than one panel, block, task and wave, in both orders of channels and space.
inline constexpr const char* large_tails[] = {
    "swish | group_norm(4) | hardswish @ 2x16x5x63x63",
    "gelu | group_norm(2) | mish @ 3x4x150x151",
    "group_norm(8) | residual_add | relu @ 2x64x33x35 nhwc",
    "channel_add(per=sample) | group_norm(4) | silu @ 3x24x61x40 nhwc",
    "prelu(per=channel) | instance_norm(affine=true) | gelu | mean @ 2x5x211x199",
    "prelu | channel_mul | tanh @ 4x6x120x90 nhwc",
    "group_norm(1) | mean @ 5x260x17x9 nhwc",
    "residual_add | group_norm(3) | prelu | residual_add @ 2x6x70001 bf16",
    "group_norm(5) @ 2x2100x7 nhwc",
    "mean @ 3x5x70x700",
    "group_norm(300) | swish @ 40x600x11",
};

}  // namespace onepass::testing
