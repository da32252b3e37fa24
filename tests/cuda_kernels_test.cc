// Every CUDA row compiled for each architecture it names, without a GPU: registers, spills, refusals.
//
// Each row is compiled once for every architecture of its own, and in all its shapes for sm_90a, where it was
// tuned. NVRTC is needed and never skipped.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "cuda/runtime/gpu.h"
#include "onepass/backward.h"
#include "onepass/cuda.h"
#include "onepass/error.h"
#include "onepass/executor.h"
#include "onepass/onepass.h"
#include "plan/choice.h"
#include "plan/strategy.h"

namespace onepass {
namespace {

const std::vector<std::string> all{"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"};
const std::vector<std::string> with_clusters{"sm_90a", "sm_100"};
const std::vector<std::string> tuned{"sm_90a"};
const std::vector<std::string> tuned_and_oldest{"sm_80", "sm_90a"};

struct Kernel {
  std::string row;
  std::string text;
  std::vector<std::string> architectures;
};

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> list{
      // A slab in a warp, a block, a cluster.
      {"tail_resident", "swish | group_norm(4) | hardswish @ 4x16x31", tuned_and_oldest},
      {"tail_resident", "swish | group_norm(4) | hardswish @ 8x16x31x31", all},
      {"tail_resident", "gelu | group_norm(8) | residual_add @ 8x64x33x35 bf16", tuned},
      {"tail_resident", "relu | group_norm(8) @ 4x128x17x17x17", with_clusters},
      // The tails of the workloads, staged.
      {"tail_staged", "swish | group_norm(4) | hardswish @ 128x16x31x63x63", with_clusters},
      {"tail_staged", "gelu | group_norm(8) @ 128x64x258x258", tuned},
      // Means; slabs of more blocks than a cluster has, and of several blocks a multiprocessor.
      {"tail_staged", "leaky_relu | group_norm(16) | gelu | mean @ 10x128x291x229", tuned},
      {"tail_staged", "elu | group_norm(4) | swish | mean @ 148x4x712x576 bf16", with_clusters},
      {"tail_staged", "group_norm(2) | channel_mul | sigmoid @ 24x2x2759x2201 bf16", tuned},
      {"tail_staged", "softplus | group_norm(4) | swish @ 12x128x272x216", with_clusters},
      {"tail_staged", "swish | group_norm(2048) @ 9x4096x55x82 bf16", tuned},
      {"tail_staged", "gelu | group_norm(32) | channel_mul(per=sample) | silu @ 8x320x32x32 f16", tuned},
      // The same in 16 bits, moments exchanged while the next slab is begun; rows shorter than a warp's part.
      {"tail_staged", "swish | group_norm(4) | hardswish @ 128x16x31x63x63 bf16", with_clusters},
      {"tail_staged", "relu | group_norm(8) @ 16x128x34x34x34 bf16", tuned},
      {"tail_staged", "swish | group_norm(4) | hardswish @ 128x16x31x63x63 bf16 strict", tuned},
      {"tail_staged", "gelu | group_norm(1) | channel_mul(per=sample) | silu @ 8x320x16x16 f16", tuned},
      // Several slabs a warp, a slab a block; rows that are no whole vectors; means; operands.
      {"tail_slabs", "swish | group_norm(4096) | elu @ 512x4096x30", all},
      {"tail_slabs", "relu | group_norm(8) | swish | mean @ 256x64x28x28 bf16", tuned_and_oldest},
      {"tail_slabs", "mish | group_norm(4096) | sigmoid | mean @ 56x4096x8x7x11", tuned},
      {"tail_slabs", "prelu(per=channel) | group_norm(2) | channel_mul | residual_add @ 8x24x20x21 f16",
       tuned},
      // Channels after space: a strip in a block, a cluster; vectors of several slabs, and across them.
      {"tail_strips", "group_norm(32) | residual_add | relu @ 64x1024x14x14 bf16 nhwc", all},
      {"tail_strips", "group_norm(32) | relu @ 64x64x56x56 bf16 nhwc", with_clusters},
      {"tail_strips",
       "prelu(per=channel) | group_norm(32) | channel_mul(per=sample) | silu @ 2x320x64x64 f16 nhwc", tuned},
      {"tail_strips", "swish | instance_norm(affine=true) | hardswish @ 8x64x31x31 nhwc", tuned_and_oldest},
      {"tail_strips", "mish | group_norm(64) | gelu | mean @ 8x512x31x31 bf16 nhwc", with_clusters},
      // Channels before and after space, means, without a norm.
      {"tail_streamed", "swish | group_norm(4) | hardswish @ 128x16x31x63x63", all},
      {"tail_streamed", "gelu | group_norm(8) @ 16x64x258x258 bf16 nhwc", tuned_and_oldest},
      {"tail_streamed", "hardswish | group_norm(4) | mean @ 1024x16x13x29x29", tuned_and_oldest},
      {"tail_streamed", "prelu(per=channel) | instance_norm(affine=true) | mish | mean @ 8x24x40x41 f16 nhwc",
       tuned},
      {"tail_streamed", "channel_add(per=sample) | gelu_tanh | residual_add @ 8x17x101x99", tuned},
      // Units of several tiles: parts of slabs by teams that are no power of two, sums of channels; no
      // channels.
      {"tail_streamed", "leaky_relu | group_norm(1) | mean @ 8x1280x60x35 nhwc", tuned_and_oldest},
      {"tail_streamed", "softplus | group_norm(1) | sigmoid | mean @ 4x1280x12x21x17 bf16 nhwc", all},
      {"tail_streamed", "prelu(per=channel) | group_norm(20) | channel_mul | silu @ 2x640x64x64 f16 nhwc",
       tuned},
      {"tail_streamed", "elu | residual_add | tanh @ 1x24x192x192x8 bf16 nhwc", tuned_and_oldest},
      {"tail_backward", "swish | group_norm(4) | hardswish @ 128x16x31x63x63", all},
      {"tail_backward", "gelu | group_norm(8) @ 16x64x258x258 bf16 nhwc", tuned_and_oldest},
      {"tail_backward", "hardswish | group_norm(4) | mean @ 1024x16x13x29x29", tuned_and_oldest},
      {"tail_backward", "hardtanh | elu | group_norm(4) | clamp(0,inf) | relu6 @ 8x24x40x41",
       tuned_and_oldest},
      {"tail_backward",
       "prelu(per=channel) | group_norm(2) | channel_mul(per=sample) | residual_add @ 8x24x40x41", tuned},
      {"tail_backward", "residual_add | group_norm(3) | mish | prelu @ 8x24x7x9 f16 nhwc", tuned},
      // Means and classes of a transposed convolution, operands rounded, split and as they are; several row
      // tiles; a convolution alone.
      {"thin_backward", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 tf32", tuned},
      {"thin_backward", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 tf32 fast",
       tuned},
      {"thin_backward",
       "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32 bf16 strict",
       tuned},
      {"thin_backward",
       "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32 tf32", tuned},
      {"thin_backward",
       "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32", tuned},
      {"thin_backward",
       "conv2d(3,64,k=3,p=1) | prelu(per=channel) | group_norm(8) | residual_add @ 4x3x65x64 bf16 nhwc",
       tuned_and_oldest},
      {"thin_backward", "conv1d(4,5,k=9,d=2) @ 8x4x300 f16", all},
      // Weights that stay and that do not, windows of planes, both orders; channels that fill no tile.
      {"gemm_backward", "conv_transpose2d(64,64,k=3) @ 128x64x256x256 tf32", tuned},
      {"gemm_backward", "conv_transpose3d(64,128,k=3,bias=false) @ 16x64x32x32x32 bf16", tuned},
      {"gemm_backward", "conv2d(320,640,k=3,p=1) @ 8x320x32x32 f16 nhwc", tuned},
      {"gemm_backward", "conv1d(17,33,k=9,d=3,p=4) @ 3x17x80 tf32", tuned},
      {"gemm_backward", "conv2d(1024,1024,k=3,p=1,groups=32) @ 32x1024x14x14 tf32", tuned},
      {"gemm_backward", "conv_transpose2d(51,60,k=3,p=1,groups=3) @ 2x51x13x11 bf16 nhwc", tuned},

      {"narrow_backward", "conv2d(64,64,k=3,p=1,groups=64) @ 64x64x56x56 bf16", all},
      {"narrow_backward", "conv2d(384,384,k=7,p=3,groups=384) @ 16x384x28x28 f16 nhwc", tuned},
      {"narrow_backward", "conv3d(32,32,k=3,s=2,p=1,groups=32) @ 4x32x17x16x15", tuned},
      {"narrow_backward", "conv2d(32,64,k=3,p=1,groups=8) @ 16x32x33x35 tf32 nhwc", tuned},
      {"narrow_backward", "conv2d(3,64,k=7,s=2,p=3) @ 8x3x64x64 tf32_away", tuned},
      {"narrow_backward", "conv_transpose2d(16,24,k=4,s=2,p=1,groups=8) @ 8x16x19x18 bf16", tuned},
      // Several slabs a block and several warps a slab; rows that are no whole vectors; a mean; operands.
      {"tail_backward_slabs", "group_norm(32) | relu @ 64x2048x7x7", all},
      {"tail_backward_slabs", "group_norm(32) | swish @ 16x1280x16x16 bf16", tuned_and_oldest},
      {"tail_backward_slabs", "instance_norm(affine=true) | leaky_relu(0.01) @ 2x256x16x16x16 bf16", tuned},
      {"tail_backward_slabs", "instance_norm | gelu @ 8x24x41x41 f16", tuned},
      {"tail_backward_slabs", "hardswish | group_norm(4) | mean @ 1024x16x8x8", tuned},
      {"tail_backward_slabs",
       "prelu(per=channel) | group_norm(2) | channel_mul | residual_add @ 8x24x20x21 f16", tuned},
      // Channels last: a block, a cluster; f32, whose dz takes the place of dy; a mean; operands.
      {"tail_backward_strips", "group_norm(32) | relu @ 64x1024x14x14 bf16 nhwc", all},
      {"tail_backward_strips", "mish | group_norm(8) | gelu @ 63x256x16x32x24 f16 nhwc", with_clusters},
      {"tail_backward_strips", "mish | group_norm(256) | sigmoid @ 228x8192x6x7 nhwc", tuned},
      {"tail_backward_strips", "swish | group_norm(2048) | softplus | mean @ 61x2048x53x55 f16 nhwc", tuned},
      {"tail_backward_strips",
       "prelu(per=channel) | group_norm(2) | channel_mul | residual_add @ 8x24x20x21 f16 nhwc", tuned},
      // A slab on 16 multiprocessors, on 8, on one; operands of channels and tensors.
      {"tail_backward_resident", "swish | group_norm(4) | hardswish @ 128x16x31x63x63", with_clusters},
      {"tail_backward_resident", "gelu | group_norm(8) @ 128x64x258x258", tuned},
      {"tail_backward_resident", "relu | group_norm(8) @ 16x128x34x34x34", tuned},
      {"tail_backward_resident", "swish | group_norm(4) | hardswish @ 128x16x31x63x63 bf16", tuned},
      {"tail_backward_resident", "hardswish | group_norm(4) | mean @ 1024x16x13x29x29", tuned},
      {"tail_backward_resident",
       "prelu(per=channel) | group_norm(2) | channel_mul | residual_add @ 8x24x40x41 f16", tuned},
      // Means in one pass, two passes over classes of a transposed convolution, no norm; chunks of channels.
      {"thin_cores", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 tf32", all},
      {"thin_cores", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 tf32_away",
       tuned_and_oldest},
      {"thin_cores", "conv_transpose3d(3,16,k=3,s=2) | swish | group_norm(4) | hardswish @ 128x3x16x32x32",
       tuned_and_oldest},
      {"thin_cores", "conv2d(3,64,k=7,s=2,p=3) | prelu(per=channel) | residual_add @ 4x3x65x64 bf16 nhwc",
       tuned_and_oldest},
      {"thin_cores",
       "conv1d(4,5,k=9,d=2) | channel_mul(per=sample) | group_norm(5) | gelu | mean @ 8x4x300 f16", tuned},
      // Each way to split elements; strides, terms that do not fill a product, several row tiles, two passes.
      {"thin_samples", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 tf32", all},
      {"thin_samples", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32",
       tuned_and_oldest},
      {"thin_samples", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 near_f32",
       tuned_and_oldest},
      {"thin_samples", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 bf16",
       tuned_and_oldest},
      {"thin_samples", "conv2d(5,33,k=3,s=2,p=1) | swish | group_norm(3) | gelu | mean @ 64x5x37x41 f16",
       tuned},
      // Each way to split elements; lanes of one sample, of some, of eight; products that are filled up,
      // several channel tiles, two passes, strides and dilation, more units than producers hold.
      {"thin_wgmma", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 tf32", tuned},
      {"thin_wgmma", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32", tuned},
      {"thin_wgmma", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 tf32 fast",
       tuned},
      {"thin_wgmma", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 near_f32", tuned},
      {"thin_wgmma", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 16x3x16x32x32 near_f32", tuned},
      {"thin_wgmma", "conv2d(4,40,k=3,p=1) | silu | group_norm(8) | mean @ 64x4x40x41 near_f32 nhwc", tuned},
      {"thin_wgmma", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 64x3x8x9x8 near_f32", tuned},
      {"thin_wgmma", "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 bf16", tuned},
      {"thin_wgmma", "conv2d(5,33,k=3,s=2,p=1) | swish | group_norm(3) | gelu | mean @ 64x5x37x41 f16",
       tuned},
      {"thin_wgmma", "conv1d(2,64,k=9,p=4) | instance_norm(affine=true) | mean @ 64x2x300 tf32", tuned},
      {"thin_wgmma",
       "conv3d(4,12,k=3x8x2,d=1x2x1,s=1x1x2) | channel_mul(per=sample) | mean @ 8x4x9x31x23 nhwc", tuned},
      // Weights in registers and in shared memory, operands rounded, split and as they are; whole rows and
      // pieces of rows, channels after space; a chain that begins with a sigmoid, one that reads values of
      // channels, none.
      {"thin_mma",
       "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32 tf32", tuned},
      {"thin_mma", "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32",
       tuned},
      {"thin_mma",
       "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32 tf32_away",
       tuned_and_oldest},
      {"thin_mma", "conv2d(3,32,k=5,s=2,p=2) | prelu(per=channel) | group_norm(8) @ 4x3x65x64 bf16 nhwc",
       tuned},
      {"thin_mma",
       "conv1d(4,5,k=9,d=2) | sigmoid | channel_mul(per=sample) | group_norm(5) | gelu @ 8x4x9000 f16", all},
      {"thin_mma", "conv_transpose2d(6,20,k=4,s=2,p=1) | relu @ 8x6x33x35", tuned},
      {"thin_mma", "conv2d(8,64,k=4,p=2) | hardswish | group_norm(4) | silu @ 16x8x256x256 tf32", tuned},
      {"thin_mma",
       "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32 bf16 strict",
       tuned},
      {"thin_mma", "conv2d(1,64,k=5,p=2) | hardswish | group_norm(4) | silu @ 16x1x256x256", tuned},
      // On every GPU a slab in a block; sets of channels on clusters, operands split, channels after space,
      // classes of a transposed convolution, a tensor that a stage reads.
      {"thin_resident",
       "conv1d(4,5,k=9,d=2) | sigmoid | channel_mul(per=sample) | group_norm(5) | gelu @ 8x4x900 f16", all},
      {"thin_resident", "conv2d(8,64,k=5,p=2) | hardswish | group_norm(4) | silu @ 8x8x128x128 tf32",
       with_clusters},
      {"thin_resident", "conv2d(8,64,k=5,p=2) | hardswish | group_norm(4) | silu @ 8x8x64x64", tuned},
      {"thin_resident", "conv2d(8,64,k=5,p=2) | hardswish | group_norm(4) | silu @ 8x8x64x64 tf32_away nhwc",
       tuned},
      {"thin_resident", "conv2d(3,32,k=5,s=2,p=2) | prelu(per=channel) | group_norm(8) @ 4x3x65x64 bf16 nhwc",
       tuned},
      {"thin_resident",
       "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | residual_add | relu @ 8x3x8x16x16 tf32",
       tuned},
      // Rows in pieces, whole rows of classes, neighbours stored at once, channels after space; operands of
      // channels and tensors after the norm.
      {"thin_inplace", "conv2d(8,64,k=4,p=2) | hardswish | group_norm(4) | silu @ 16x8x256x256 tf32", all},
      {"thin_inplace",
       "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32", tuned},
      {"thin_inplace", "conv2d(8,64,k=5,p=2) | hardswish | group_norm(4) | silu @ 16x8x256x256", tuned},
      {"thin_inplace", "conv2d(8,64,k=4,p=2) | hardswish | group_norm(4) | silu @ 16x8x256x256 tf32_away",
       tuned},
      {"thin_inplace",
       "conv2d(3,32,k=5,s=2,p=2) | prelu(per=channel) | group_norm(8) | residual_add | relu @ 4x3x65x64 nhwc",
       tuned},
      {"thin_inplace", "conv2d(8,64,k=5,p=2) | hardswish | group_norm(4) | silu @ 16x8x256x256 bf16", tuned},
      {"thin_inplace",
       "conv1d(4,5,k=9,d=2) | sigmoid | channel_mul(per=sample) | group_norm(5) | gelu @ 8x4x9000 tf32",
       tuned_and_oldest},
      // Units held in registers and computed twice, weights that stay and that stream, both ways to share a
      // tile; one tap, channels that fill nothing, groups across tiles, a mean, tensors that stages read.
      {"gemm_wgmma", "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 128x64x256x256 tf32", tuned},
      {"gemm_wgmma", "conv_transpose3d(64,128,k=3,bias=false) | relu | group_norm(8) @ 16x64x32x32x32 tf32",
       tuned},
      {"gemm_wgmma", "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 128x64x256x256 bf16", tuned},
      {"gemm_wgmma", "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 128x64x256x256 bf16 strict",
       tuned},
      // Values that leave while the next tile is multiplied.
      {"gemm_wgmma", "conv_transpose3d(64,128,k=3,bias=false) | relu | group_norm(8) @ 16x64x32x32x32 bf16",
       tuned},
      {"gemm_wgmma", "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 128x64x256x256", tuned},
      {"gemm_wgmma", "conv2d(320,320,k=3,p=1) | silu | group_norm(32) @ 4x320x64x64 f16", tuned},
      {"gemm_wgmma", "conv3d(32,40,k=3,p=1) | leaky_relu | instance_norm @ 2x32x96x96x96 tf32", tuned},
      {"gemm_wgmma", "conv2d(64,128,k=3,s=2,p=1) | relu | group_norm(8) @ 8x64x65x66 tf32", tuned},
      {"gemm_wgmma", "conv2d(16,32,k=3,s=2,p=1) | relu @ 2x16x31x30 bf16", tuned},
      {"gemm_wgmma", "conv2d(17,70,k=1) | residual_add | group_norm(7) | gelu | mean @ 4x17x33x35 bf16 nhwc",
       tuned},
      // Values that leave by rows and by columns; planes of a window, rows too short to be staged, few copies
      // of x.
      {"gemm_pingpong", "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 128x64x256x256 f16", tuned},
      {"gemm_pingpong", "conv3d(16,32,k=3,p=1) | leaky_relu | instance_norm @ 3x16x9x10x24 bf16", tuned},
      {"gemm_pingpong", "conv3d(16,16,k=1) | group_norm(4) @ 8x16x8x8x8 bf16", tuned},
      {"gemm_pingpong", "conv1d(40,16,k=9,d=2) | hardswish | group_norm(1) @ 7x40x2000 bf16", tuned},
      // Rounded, values held as integers; an odd number of fours, channels that fill no tile.
      {"gemm_pingpong", "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 128x64x256x256 tf32", tuned},
      {"gemm_pingpong", "conv2d(17,20,k=5,p=2) | swish | group_norm(5) @ 5x17x31x48 tf32", tuned},
      {"gemm_pingpong", "conv3d(16,32,k=3,p=1) | leaky_relu(0.1) | instance_norm @ 3x16x9x10x24 tf32", tuned},
      // Each mode; both orders, classes of a transposed convolution as tiles and as rows, strides; values in
      // the output and in the workspace, means of both kinds.
      {"gemm_mma", "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 128x64x256x256 tf32", all},
      {"gemm_mma", "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 128x64x256x256", tuned_and_oldest},
      {"gemm_mma", "conv_transpose3d(64,128,k=3,bias=false) | relu | group_norm(8) @ 16x64x32x32x32 bf16",
       tuned_and_oldest},
      {"gemm_mma", "conv2d(320,320,k=3,p=1) | silu | group_norm(32) @ 4x320x64x64 f16 nhwc",
       tuned_and_oldest},
      {"gemm_mma", "conv_transpose3d(32,20,k=3,s=2,p=1,op=1) | silu | residual_add @ 2x32x9x8x7 tf32", tuned},
      {"gemm_mma", "conv_transpose2d(64,32,k=2,s=2) | leaky_relu | instance_norm @ 2x64x33x35 bf16", tuned},
      {"gemm_mma", "conv2d(17,70,k=1,s=2) | residual_add | group_norm(7) | gelu | mean @ 4x17x33x35 f16 nhwc",
       tuned},
      {"gemm_mma", "conv1d(16,16,k=9,d=3) | mean @ 4x16x3000", tuned},
      // Few channels: taps in pairs, of one vector and of three, an odd number of them; classes; rows that
      // only fill a tile, as neighbours in memory too; groups of taps that are not whole.
      {"gemm_mma", "conv2d(8,80,k=3,s=2,p=1) | relu | group_norm(8) @ 16x8x64x64 bf16", tuned_and_oldest},
      {"gemm_mma", "conv2d(7,24,k=7,p=3) | gelu | group_norm(8) | mean @ 16x7x64x64", tuned},
      {"gemm_mma", "conv2d(20,4,k=3,p=1) | tanh @ 16x20x64x64 tf32 nhwc", tuned_and_oldest},
      {"gemm_mma", "conv_transpose2d(4,12,k=3,s=2,p=1) | swish | group_norm(3) @ 4x4x33x35 f32 nhwc", tuned},
      {"gemm_mma", "conv_transpose2d(64,8,k=3,s=2,p=1,op=1) | tanh @ 16x64x64x64 bf16 nhwc", tuned},
      {"gemm_mma", "conv2d(64,64,k=5,p=2,groups=8) | relu | group_norm(8) @ 16x64x64x64 f16", tuned},
      // Computed twice.
      {"gemm_mma", "conv2d(24,512,k=1,bias=false) | group_norm(1) | elu @ 1x24x579x1015 bf16 nhwc", all},
      {"gemm_mma", "conv2d(16,256,k=2) | hardswish | group_norm(8) | tanh | mean @ 8x16x343x223 tf32",
       tuned_and_oldest},
      {"gemm_packed", "conv2d(1280,1280,k=3,p=1) | group_norm(32) | silu @ 8x1280x16x16 tf32", tuned},
      {"gemm_packed", "conv3d(320,320,k=3,p=1) | instance_norm | leaky_relu @ 2x320x8x8x8 bf16", tuned},
      {"gemm_packed", "conv2d(64,128,k=3,p=1) | group_norm(8) | silu @ 64x64x32x32 bf16", tuned},
      {"gemm_packed", "conv_transpose2d(24,20,k=2,s=2) | swish | mean @ 3x24x9x11 f16 nhwc", tuned},
      // Boxes: all taps in a window of neighbours or of 8 x 8 positions, planes and rows and single taps in
      // windows of their own; few channels; strides, classes, tensors that chains read, a tail.
      {"gemm_apart", "conv2d(512,256,k=7,p=3,groups=32) | sigmoid | group_norm(8) @ 16x512x28x28 bf16", all},
      {"gemm_apart",
       "conv3d(64,96,k=3,p=1,groups=4) | relu | group_norm(2) | gelu | mean @ 4x64x8x9x10 tf32 nhwc", tuned},
      {"gemm_boxes", "conv2d(256,256,k=3,p=1) | gelu @ 8x256x64x64 bf16 nhwc", tuned},
      {"gemm_boxes", "conv2d(512,320,k=1) | channel_mul | residual_add @ 8x512x33x35 f16 nhwc", tuned},
      {"gemm_boxes", "conv2d(80,48,k=3,s=2,p=1) | relu @ 16x80x57x55 bf16 nhwc", tuned},
      {"gemm_boxes", "conv3d(24,40,k=3,p=1) | group_norm(8) | silu @ 2x24x17x33x35 bf16 nhwc", tuned},
      {"gemm_boxes", "conv2d(256,256,k=3,p=1) | relu | group_norm(32) | silu @ 8x256x64x64 bf16 nhwc", tuned},
      {"gemm_boxes", "conv1d(128,128,k=7,d=16) | relu @ 8x128x4000 bf16 nhwc", tuned},
      {"gemm_boxes", "conv_transpose2d(128,64,k=2,s=2) | swish @ 8x128x32x32 bf16 nhwc", tuned},
      {"gemm_boxes", "conv2d(96,1280,k=3,s=2) | gelu | residual_add @ 8x96x30x31 tf32", tuned},
      {"gemm_boxes", "conv2d(65,97,k=3,p=1) | channel_add(per=sample) @ 8x65x30x31 f16 nhwc", tuned},
      {"gemm_boxes", "conv2d(256,256,k=3,p=1) | relu | group_norm(32) | silu @ 8x256x64x64 bf16", tuned},
      {"gemm_boxes", "conv_transpose3d(32,32,k=7,s=2,p=3,op=1) @ 32x32x22x29x14 tf32 nhwc", tuned},
      {"gemm_boxes", "conv_transpose2d(64,32,k=2,s=2) | mish | mean @ 8x64x32x32 bf16", tuned},
      {"gemm_boxes", "conv3d(640,320,k=7,p=3,groups=16) | relu @ 4x640x8x8x8 tf32", tuned},
      // In groups.
      {"gemm_wgmma", "conv2d(1024,1024,k=3,p=1,groups=32) | group_norm(32) | relu @ 32x1024x14x14 tf32",
       tuned},
      {"gemm_wgmma", "conv2d(51,60,k=3,s=2,p=1,groups=3) | channel_mul | group_norm(6) | mean @ 4x51x33x35",
       tuned},
      {"gemm_mma", "conv2d(448,448,k=3,p=1,groups=4) | group_norm(32) | relu @ 32x448x28x28 bf16 nhwc",
       tuned_and_oldest},
      {"gemm_mma", "conv_transpose2d(34,36,k=4,s=2,p=1,groups=2) | swish | group_norm(4) @ 2x34x7x9 tf32",
       tuned},
      {"gemm_packed", "conv2d(1024,1024,k=3,p=1,groups=32) | group_norm(32) | relu @ 32x1024x14x14 bf16",
       tuned},
      {"gemm_packed", "conv_transpose2d(48,36,k=2,s=2,groups=2) | relu | group_norm(6) @ 2x48x9x11 tf32",
       tuned},
      // Depthwise and groups of a few, both orders, classes of transposed ones, long sums; a tail after it.
      {"narrow", "conv2d(64,64,k=3,p=1,groups=64) | relu @ 64x64x56x56 bf16", all},
      {"narrow", "conv2d(512,512,k=7,p=3,groups=512) | group_norm(32) @ 16x512x28x28 bf16 nhwc", tuned},
      {"narrow", "conv2d(96,96,k=5,s=2,p=2,groups=96) | channel_mul | residual_add @ 32x96x57x55 f16", tuned},
      {"narrow", "conv2d(64,64,k=3,p=1) | swish @ 16x64x56x56", tuned_and_oldest},
      {"narrow", "conv2d(32,64,k=3,p=1,groups=4) | silu @ 16x32x33x35 tf32 nhwc", tuned},
      {"narrow", "conv3d(32,32,k=7,p=3,groups=32) | gelu @ 4x32x16x16x16 f16", tuned},
      {"narrow", "conv_transpose3d(16,24,k=3,s=2,p=1,op=1,groups=8) | relu | mean @ 8x16x9x8x7 tf32_away",
       tuned},
      // The same on tensor cores: both orders, chains that read tensors, long sums, several products for x.
      {"banded", "conv2d(64,64,k=3,p=1,groups=64) | relu @ 64x64x56x56 bf16", all},
      {"banded", "conv2d(512,512,k=7,p=3,groups=512) | group_norm(32) @ 16x512x28x28 bf16 nhwc", tuned},
      {"banded", "conv2d(96,96,k=5,s=2,p=2,groups=96) | channel_mul | residual_add @ 32x96x57x55 f16",
       tuned_and_oldest},
      {"banded", "conv3d(320,64,k=5,p=2,groups=32) | tanh @ 16x320x13x10x17 bf16 nhwc", tuned},
      {"banded", "conv3d(32,32,k=7,p=3,groups=32) | gelu @ 4x32x16x16x16 f16", tuned},
      {"banded", "conv_transpose3d(16,24,k=3,s=2,p=1,op=1,groups=8) | relu | mean @ 8x16x9x8x7 bf16", tuned},
      // A product and a sum with a value of the channel, rounded and not, in a tail of every kind.
      {"scaled", "conv2d(64,64,k=1,groups=64) | relu @ 64x64x56x56 tf32", all},
      {"scaled", "conv2d(512,512,k=1,groups=512) | hardswish | group_norm(16) | gelu | mean @ 256x512x56x32",
       tuned_and_oldest},
      {"scaled", "conv3d(128,128,k=1,groups=128) | group_norm(128) | relu @ 8x128x8x8x22 bf16 nhwc", tuned},
      {"scaled", "conv_transpose2d(64,64,k=1,groups=64) | gelu | group_norm(8) @ 8x64x258x258 tf32_away",
       tuned},
      {"scaled_backward", "conv2d(64,64,k=1,groups=64) @ 64x64x56x56 tf32", all},
      {"scaled_backward", "conv2d(64,64,k=1,groups=64) | swish | group_norm(8) @ 16x64x56x56 bf16 nhwc",
       tuned_and_oldest},
      {"scaled_backward", "conv2d(32,32,k=1,groups=32,bias=false) | group_norm(8) | elu @ 8x32x40x41", tuned},
      {"direct", "conv_transpose3d(3,16,k=3,s=2,p=1) @ 8x3x16x32x32", all},
      {"direct", "conv2d(64,96,k=3,p=1) @ 8x64x33x35 tf32_away nhwc", tuned_and_oldest},
      {"direct", "conv2d(64,32,k=3,p=same,d=2,groups=4,bias=false) @ 8x64x33x35 bf16 nhwc", tuned},
  };
  return list;
}

struct Assembled {
  int registers = 0;  // of a thread
  int spilled_bytes = 0;
};

// The most registers: what lets as many threads be resident as the row counts on (65,536 registers a
// multiprocessor). Nothing is spilled, but where the assembler itself trades values of a row, loaded once in
// hundreds of instructions, for a step of occupancy: those of s19's backward with 64 registers.
const std::map<std::string, Assembled> limits{
    {"tail_slabs", {128, 0}},                // 512, or 1,024 with 64
    {"tail_resident", {128, 0}},             // 512 threads
    {"tail_staged", {128, 64}},              // 512; values of a row, where rows are short
    {"tail_strips", {128, 0}},               // 512, or 1,024 with 64
    {"tail_streamed", {128, 64}},            // 512
    {"tail_backward", {128, 192}},           // 512
    {"tail_backward_slabs", {128, 320}},     // 512, or 768 with 80; where vectors do not lie on 16 bytes
    {"tail_backward_strips", {128, 0}},      // 512, or 768 with 80
    {"tail_backward_resident", {128, 704}},  // 512; values of a row, once for hundreds of instructions
    {"thin_samples", {128, 256}},            // 512; spilled and loaded outside the loops over products
    {"thin_wgmma", {168, 512}},              // 384, of which those that multiply have 216
    {"thin_cores", {128, 16}},               // 512
    {"thin_backward", {255, 640}},           // 256, or 512; on sm_80, outside the loops over products
    {"gemm_backward", {168, 0}},             // 512 of the first kernel, 384 of the second
    {"thin_mma", {128, 704}},         // 512; nothing in the loops: tickets, addresses, calls of careful tiles
    {"thin_resident", {255, 704}},    // 512, or 256; as thin_mma
    {"thin_inplace", {128, 704}},     // 512; as thin_mma
    {"gemm_packed", {168, 0}},        // 384
    {"gemm_boxes", {168, 0}},         // 384
    {"gemm_wgmma", {168, 1536}},      // 384; once a tile: places of a row in outputs that are not contiguous
    {"gemm_pingpong", {128, 512}},    // 512, of which those that multiply have 152 or 160; once a tile
    {"gemm_mma", {255, 400}},         // 256; most 392 on sm_100 (s19 in tf32), elsewhere 256
    {"gemm_apart", {255, 256}},       // its product is gemm_mma
    {"narrow", {168, 0}},             // 256, or fewer with more
    {"banded", {255, 0}},             // 256, or fewer with more
    {"narrow_backward", {255, 256}},  // 256, or fewer with more; places of vectors that are staged
    {"scaled", {128, 64}},            // as the tails
    {"scaled_backward", {128, 320}},  // as theirs
    {"direct", {64, 0}},              // 1,024
};

// The number that stands before `words` where they first follow one; -1 where they never do.
int number_before(const std::string& text, const std::string& words) {
  for (size_t end = text.find(words); end != std::string::npos; end = text.find(words, end + 1)) {
    size_t begin = end;
    while (begin > 0 && text[begin - 1] >= '0' && text[begin - 1] <= '9') --begin;
    if (begin < end) return std::stoi(text.substr(begin, end - begin));
  }
  return -1;
}

// From "256 of 512 threads, 40 registers and 8 spilled bytes, ..." of explain.
Assembled assembled(const std::string& explanation) {
  const int registers = number_before(explanation, " registers");
  if (registers < 0) throw Error("no registers in:\n" + explanation);
  return {registers, std::max(0, number_before(explanation, " spilled bytes"))};
}

// Plans, which compiles.
std::string explained(const std::string& row, const std::string& text, const std::string& architecture) {
  const Problem problem = Problem::parse(text, Device::cuda_architecture(architecture));
  if (row.find("backward") != std::string::npos) {
    return plan_backward(BackwardProblem(problem), {row, ""}).explain();
  }
  return plan(problem, {row, ""}).explain();
}

TEST(CudaKernels, FitTheirRegistersOnEveryArchitecture) {
  struct Task {
    const Kernel* kernel;
    std::string architecture;
  };
  std::vector<Task> tasks;
  for (const Kernel& kernel : kernels()) {
    for (const std::string& architecture : kernel.architectures) tasks.push_back({&kernel, architecture});
  }
  std::mutex output;
  std::map<std::string, int> most;
  ThreadExecutor executor(std::max(2, static_cast<int>(std::thread::hardware_concurrency())));
  executor.for_each(std::ssize(tasks), [&](int64_t index, int) {
    const auto& [kernel, architecture] = tasks[static_cast<size_t>(index)];
    const std::string what = kernel->row + " on " + architecture + ": " + kernel->text;
    try {
      const Assembled code = assembled(explained(kernel->row, kernel->text, architecture));
      const std::lock_guard lock(output);
      EXPECT_LE(code.registers, limits.at(kernel->row).registers) << what;
      EXPECT_LE(code.spilled_bytes, limits.at(kernel->row).spilled_bytes) << what;
      most[kernel->row] = std::max(most[kernel->row], code.registers);
    } catch (const std::exception& error) {
      const std::lock_guard lock(output);
      ADD_FAILURE() << what << "\n  " << error.what();
    }
  });
  for (const auto& [row, registers] : most) ::testing::Test::RecordProperty("registers_of_" + row, registers);
}

// Nothing is left out of the test above.
TEST(CudaKernels, EveryRowIsCompiledForEveryArchitectureItTakes) {
  std::vector<std::string> rows;
  for (const Strategy* row : strategies(Device::Kind::cuda)) rows.emplace_back(row->name);
  for (const BackwardStrategy* row : backward_strategies(Device::Kind::cuda)) rows.emplace_back(row->name);
  EXPECT_EQ(all, cuda::known_architectures());
  for (const std::string& row : rows) {
    EXPECT_TRUE(limits.contains(row)) << row;
    const std::vector<std::string>& wanted =
        row == "thin_wgmma" || (row.starts_with("gemm_") && row != "gemm_mma" && row != "gemm_apart") ? tuned
        : row == "tail_staged" || row == "tail_backward_resident" ? with_clusters
                                                                  : all;
    const bool compiled = std::any_of(kernels().begin(), kernels().end(), [&](const Kernel& kernel) {
      return kernel.row == row && kernel.architectures == wanted;
    });
    EXPECT_TRUE(compiled) << row;
  }
}

// A row whose numbers follow the batch by other means than Number is not exported: export_plan compares its
// formulas with plans for other batches.
TEST(CudaKernels, EveryRowIsExportedForEveryBatch) {
  for (const auto& [row, text, architectures] : kernels()) {
    SCOPED_TRACE(row + ": " + text);
    const Problem problem = Problem::parse(text, Device::cuda_architecture("sm_90a"));
    cuda::ExportedPlan exported;
    if (row.find("backward") != std::string::npos) {
      ASSERT_NO_THROW(exported = cuda::export_plan(plan_backward(BackwardProblem(problem), {row, ""})));
    } else {
      ASSERT_NO_THROW(exported =
                          cuda::export_plan(plan(problem, {row, ""}), problem.block.norm() != nullptr));
    }
    ASSERT_FALSE(exported.steps.empty());
    EXPECT_FALSE(exported.kernels.empty());
    // The batch reaches a kernel as a word (others may know it by what follows from it).
    EXPECT_TRUE(std::any_of(exported.steps.begin(), exported.steps.end(), [](const auto& step) {
      return std::any_of(step.words.begin(), step.words.end(),
                         [](const std::string& word) { return word.find("batch") != std::string::npos; });
    }));
  }
}

void expect_refusal(const std::string& row, const std::string& text, const std::string& architecture,
                    const std::string& reason) {
  try {
    explained(row, text, architecture);
    ADD_FAILURE() << row << " takes " << text << " on " << architecture;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(reason), std::string::npos)
        << row << " on " << architecture << ": " << error.what();
  }
}

// Nothing else bounds the rows that a thread unrolls where the input's gradient is not wanted.
TEST(CudaKernels, GradientsOfFarTapsAreRefused) {
  const std::string text = "conv1d(1,32,k=3,d=2000,p=2000) @ 4x1x9000";
  BackwardProblem problem(Problem::parse(text, Device::cuda_architecture("sm_90a")));
  problem.wanted[0] = false;
  try {
    plan_backward(problem, {"narrow_backward", ""});
    ADD_FAILURE() << "narrow_backward takes " << text;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("the window of a tile is too large"), std::string::npos)
        << error.what();
  }
}

TEST(CudaKernels, RowsRefuseArchitecturesTheyDoNotHave) {
  for (const std::string architecture : {"sm_80", "sm_86", "sm_89", "sm_120"}) {
    expect_refusal("tail_staged", "swish | group_norm(4) | hardswish @ 128x16x31x63x63", architecture,
                   "it needs bulk copies and clusters");
    // 123,039 elements: more than the registers of one block hold, and there are no clusters.
    expect_refusal("tail_resident", "swish | group_norm(4) | hardswish @ 8x16x31x31x32", architecture,
                   "does not fit the registers of 1 block");
    expect_refusal("tail_strips", "group_norm(8) | relu @ 2x64x128x128 bf16 nhwc", architecture,
                   "fits the shared memory of one block");
    expect_refusal("thin_resident", "conv2d(3,16,p=1) | group_norm(2) @ 2x3x128x128", architecture,
                   "do not fit the shared memory of 1 block");
  }
  for (const std::string& architecture : all) {
    if (architecture != "sm_90a") {
      expect_refusal("thin_wgmma", "conv2d(3,8) | mean @ 2x3x9x9", architecture, "of sm_90a alone");
      continue;
    }
    expect_refusal("thin_wgmma", "conv2d(3,8) | relu @ 2x3x9x9", architecture, "does not end in a mean");
    expect_refusal("thin_wgmma", "conv_transpose2d(3,8) | mean @ 2x3x9x9", architecture, "transposed");
    expect_refusal("thin_wgmma", "conv3d(3,8,s=2,d=1) | mean @ 2x3x9x9x9", architecture,
                   "no dimension is without stride");
    expect_refusal("thin_wgmma", "conv3d(2,8,k=5) | mean @ 2x2x9x9x9", architecture, "at most four taps");
  }
  expect_refusal("tail_resident", "relu @ 2x3x4x5", "sm_75", "architecture \"sm_75\" is unknown");
  for (const std::string& architecture : all) {
    expect_refusal("tail_resident", "relu @ 2x3x4x5", architecture, "no norm");
    expect_refusal("tail_strips", "group_norm(2) @ 2x16x9x9 bf16", architecture, "channels lie before space");
    expect_refusal("tail_resident", "group_norm(2) | mean @ 2x16x9x9", architecture, "ends in a mean");
    expect_refusal("tail_slabs", "relu | group_norm(2) | mean @ 2x16x9x9", architecture,
                   "the mean follows the norm");
    expect_refusal("tail_strips", "relu | group_norm(2) | mean @ 2x16x9x9 bf16 nhwc", architecture,
                   "the mean follows the norm");
    expect_refusal("tail_strips", "group_norm(3) @ 2x9x9x9 bf16 nhwc", architecture,
                   "an odd number of channels");
    expect_refusal("tail_streamed", "conv2d(3,4) @ 2x3x4x5", architecture, "has a convolution");
    expect_refusal("tail_backward", "conv2d(3,4) @ 2x3x4x5", architecture, "has a convolution");
    expect_refusal("thin_backward", "relu @ 2x3x4x5", architecture, "no convolution");
    if (architecture == "sm_90a") {
      // 2^31 + 4.2 million elements of a sample that are values of a mean.
      expect_refusal("gemm_boxes",
                     "conv_transpose2d(256,128,k=2,s=2) | relu | mean @ 1x256x2050x2050 bf16 nhwc",
                     architecture, "a sample of the convolution's output has 2^31 elements or more");
      expect_refusal("gemm_backward", "conv2d(16,16,k=3x7,d=1x3,p=1x9) @ 2x16x5x3 tf32", architecture,
                     "the kernel reaches beyond rows of the input");
      expect_refusal("gemm_backward", "conv2d(16,16,k=3) @ 2x16x9x9", architecture, "strict f32");
      expect_refusal("gemm_backward", "conv2d(16,16,k=3,s=2) @ 2x16x9x9 bf16", architecture, "a stride");
      expect_refusal("gemm_backward", "conv2d(32,32,groups=4) @ 2x32x9x9 bf16", architecture,
                     "fewer than 16 channels in a group");
    }
    expect_refusal("thin_backward", "conv2d(3,65) @ 2x3x9x9", architecture, "more than 64 output channels");
    expect_refusal("thin_backward", "conv_transpose3d(5,5,k=2x4x3,s=1x4x3,p=2x0x0) @ 2x5x4x5x7", architecture,
                   "padding cuts off all outputs");
    expect_refusal("thin_cores", "relu @ 2x3x4x5", architecture, "no convolution");
    expect_refusal("thin_cores", "conv2d(4,8,groups=2) @ 2x4x9x9", architecture, "has groups");
    expect_refusal("thin_cores", "conv2d(60,8) @ 2x60x9x9", architecture, "more than 512 terms");
    expect_refusal("thin_cores", "conv2d(3,65) @ 2x3x9x9", architecture, "more than 64 output channels");
    expect_refusal("thin_cores", "conv2d(3,8) @ 2x3x9x9 f64", architecture, "f64");
    expect_refusal("thin_samples", "conv2d(3,8) | relu @ 2x3x9x9", architecture, "does not end in a mean");
    expect_refusal("thin_samples", "conv_transpose2d(3,8) | mean @ 2x3x9x9", architecture, "transposed");
    expect_refusal("thin_mma", "conv2d(3,8) | mean @ 2x3x9x9", architecture, "ends in a mean");
    expect_refusal("thin_mma", "conv2d(3,8) | residual_add @ 2x3x9x9", architecture, "reads a tensor");
    expect_refusal("thin_mma", "conv2d(3,65) @ 2x3x9x9", architecture, "more than 64 output channels");
    expect_refusal("thin_mma", "conv_transpose3d(1,64,k=2,s=8) @ 2x1x9x9x9", architecture, "eight cells");
    expect_refusal("thin_resident", "conv2d(3,8) | relu @ 2x3x9x9", architecture, "no norm");
    expect_refusal("thin_resident", "conv2d(3,8) | group_norm(2) | mean @ 2x3x9x9", architecture,
                   "ends in a mean");
    expect_refusal("thin_resident", "conv2d(3,8) | residual_add | group_norm(2) @ 2x3x9x9", architecture,
                   "a stage before the norm reads a tensor");
    expect_refusal("thin_resident", "conv2d(3,16,p=1) | group_norm(2) @ 2x3x512x512", architecture,
                   "16 channels of 262144 elements, which are whole slabs, do not fit the shared memory of ");
    expect_refusal("thin_inplace", "relu @ 2x3x4x5", architecture, "no convolution");
    expect_refusal("thin_inplace", "conv2d(3,8) | relu @ 2x3x9x9", architecture, "no norm");
    expect_refusal("thin_inplace", "conv2d(3,8) | group_norm(2) | mean @ 2x3x9x9", architecture,
                   "ends in a mean");
    expect_refusal("thin_inplace", "conv2d(3,8) | residual_add | group_norm(2) @ 2x3x9x9", architecture,
                   "before the norm reads a tensor");
    expect_refusal("thin_inplace", "conv2d(3,65) | group_norm(5) @ 2x3x9x9", architecture,
                   "more than 64 output channels");
    expect_refusal("gemm_packed", "relu @ 2x3x4x5", architecture, "no convolution");
    if (architecture == "sm_90a") {
      expect_refusal("gemm_packed", "conv2d(32,32) | relu @ 2x32x9x9", architecture, "strict f32");
      expect_refusal("gemm_packed", "conv2d(32,32,s=2) | relu @ 2x32x9x9 tf32", architecture, "a stride");
      expect_refusal("gemm_packed", "conv2d(32,32) @ 2x32x9x9 tf32", architecture, "nothing follows");
    }
    if (architecture == "sm_90a") {
      expect_refusal("gemm_boxes", "conv2d(32,32) @ 2x32x9x9 nhwc", architecture, "strict f32");
      expect_refusal("gemm_boxes", "conv2d(8,32) @ 2x8x9x9 bf16 nhwc", architecture,
                     "fewer than 16 channels");
      expect_refusal("gemm_boxes", "conv2d(32,32,s=9) @ 2x32x29x29 bf16 nhwc", architecture, "more than 8");
    }
    expect_refusal("gemm_wgmma", "relu @ 2x3x4x5", architecture, "no convolution");
    expect_refusal("gemm_wgmma", "conv2d(32,64,groups=4) @ 2x32x9x9", architecture,
                   "fewer than 16 channels in a group");
    expect_refusal("gemm_wgmma", "conv2d(64,64,groups=4) | group_norm(2) @ 2x64x9x9", architecture,
                   "a group of the norm has channels of several groups of the convolution");
    if (architecture != "sm_90a") {
      expect_refusal("gemm_wgmma", "conv2d(32,32) @ 2x32x9x9 tf32", architecture, "it needs wgmma");
    } else {
      expect_refusal("gemm_wgmma", "conv2d(8,32) @ 2x8x9x9 tf32", architecture, "fewer than 16 channels");
      expect_refusal("gemm_wgmma", "conv_transpose2d(32,32,s=2) @ 2x32x9x9 tf32", architecture,
                     "by its stride");
    }
    expect_refusal("gemm_pingpong", "relu @ 2x3x4x5 bf16", architecture, "no convolution");
    if (architecture != "sm_90a") {
      expect_refusal("gemm_pingpong", "conv2d(32,32) | group_norm(4) @ 2x32x9x16 bf16", architecture,
                     "it needs wgmma");
    } else {
      for (const char* const mode : {"f32", "near_f32"}) {
        expect_refusal("gemm_pingpong", std::string("conv2d(32,32) | group_norm(4) @ 2x32x9x16 ") + mode,
                       architecture, "not rounded");
      }
      for (const char* const mode : {"f32 strict", "f16 strict", "bf16 strict"}) {
        expect_refusal("gemm_pingpong", std::string("conv2d(32,32) | group_norm(4) @ 2x32x9x16 ") + mode,
                       architecture, "strict: values before the norm are held as f32");
      }
      expect_refusal("gemm_pingpong", "conv2d(32,32) | relu @ 2x32x9x16 bf16", architecture, "a norm");
      expect_refusal("gemm_pingpong", "conv2d(32,32,groups=2) | group_norm(4) @ 2x32x9x16 bf16", architecture,
                     "has groups");
      expect_refusal("gemm_pingpong", "conv2d(32,80) | group_norm(4) @ 2x32x9x16 bf16", architecture,
                     "more than 64 output channels");
      expect_refusal("gemm_pingpong", "conv2d(32,32,s=2) | group_norm(4) @ 2x32x9x16 bf16", architecture,
                     "a stride");
      expect_refusal("gemm_pingpong", "conv2d(32,48) | group_norm(2) @ 2x32x9x16 bf16", architecture,
                     "within 16 channels");
      expect_refusal("gemm_pingpong", "conv1d(16,32) | group_norm(4) @ 2x16x96 bf16", architecture,
                     "too small to be shared");
      expect_refusal("gemm_pingpong", "conv2d(32,32) | group_norm(4) @ 2x32x9x15 bf16", architecture,
                     "whole vectors");
      expect_refusal("gemm_pingpong", "conv2d(64,64,k=3) | group_norm(8) @ 2x64x512x512 bf16", architecture,
                     "too large to be held");
    }
    expect_refusal("gemm_mma", "relu @ 2x3x4x5", architecture, "no convolution");
    expect_refusal("gemm_mma", "conv2d(64,64,groups=64) @ 2x64x9x9 bf16", architecture,
                   "56 times as many with zeros");
    expect_refusal("gemm_mma", "conv2d(2,4,k=1) @ 2x2x9x9", architecture, "32 times as many with zeros");
    expect_refusal("gemm_mma", "conv1d(16,16,k=16000,p=9000) @ 2x16x900", architecture, "too large");
    expect_refusal("narrow", "relu @ 2x3x4x5", architecture, "no convolution");
    expect_refusal("narrow_backward", "conv2d(3,8) | relu @ 2x3x9x9", architecture, "stages follow");
    expect_refusal("narrow_backward", "conv2d(65,66) @ 2x65x9x9", architecture,
                   "more than 64 input and output");
    expect_refusal("narrow_backward", "conv2d(3,80,p=1) @ 2x3x9x9", architecture,
                   "more than 64 input channels");
    expect_refusal("narrow_backward", "conv1d(4,4,k=49) @ 2x4x900", architecture, "more than 48 taps");
    expect_refusal("narrow_backward", "conv_transpose1d(4,4,k=3,d=9,op=1) @ 2x4x90", architecture,
                   "output padding");
    expect_refusal("narrow", "conv2d(3,8) @ 2x3x9x9 f64", architecture, "f64");
    expect_refusal("banded", "relu @ 2x3x4x5 bf16", architecture, "no convolution");
    expect_refusal("banded", "conv2d(8,8,groups=8) @ 2x8x9x9 tf32", architecture, "16 bits");
    expect_refusal("banded", "conv1d(4,4,k=70) @ 2x4x900 bf16", architecture, "more than 64 inputs");
    expect_refusal("narrow", "conv2d(65,8) @ 2x65x9x9", architecture, "more than 64 input channels");
    expect_refusal("narrow", "conv1d(4,4,k=3,d=90000,p=90000) @ 2x4x900", architecture, "too large");
    expect_refusal("direct", "relu @ 2x3x4x5 f64", architecture, "f64");
  }
}

// Those of the forward pass take ties away from zero; gradients are rounded to even.
TEST(CudaKernels, ForwardRowsRoundTiesBothWays) {
  const std::string mean = "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 64x3x16x32x32 ";
  const std::string wide = "conv2d(32,32,k=3,p=1) | relu | group_norm(4) @ 2x32x32x32 ";
  const std::string alone = "conv2d(32,32,k=3,p=1) @ 2x32x32x32 ";
  const std::pair<std::string, std::string> rows[]{
      {"thin_wgmma", mean}, {"thin_samples", mean}, {"thin_backward", mean},  {"gemm_pingpong", wide},
      {"gemm_wgmma", wide}, {"gemm_packed", wide},  {"gemm_backward", alone}, {"gemm_mma", wide}};
  for (const auto& [row, text] : rows) {
    EXPECT_NO_THROW(explained(row, text + "tf32", "sm_90a")) << row;
    if (row.ends_with("_backward")) {
      expect_refusal(row, text + "tf32_away", "sm_90a", "tf32_away: it rounds ties to even");
    } else {
      EXPECT_NE(explained(row, text + "tf32_away", "sm_90a").find("ties away from zero"), std::string::npos)
          << row;
    }
  }
  EXPECT_NO_THROW(explained("thin_samples", mean + "tf32_away", "sm_80"));
  EXPECT_NO_THROW(explained("gemm_mma", wide + "tf32_away", "sm_80"));
  expect_refusal("thin_backward", mean + "tf32_away", "sm_80", "tf32_away: it rounds ties to even");
}

// The lines of explain that say what a plan computes more coarsely than f32 throughout.
std::vector<std::string> numerics_of(const std::string& row, const std::string& text) {
  std::vector<std::string> lines;
  const std::string begin = "  numerics: ";
  std::istringstream words(explained(row, text, "sm_90a"));
  for (std::string line; std::getline(words, line);) {
    if (line.starts_with(begin)) lines.push_back(line.substr(begin.size()));
  }
  return lines;
}

TEST(CudaKernels, ExplainNamesWhatIsCoarserThanF32) {
  const std::string mean = "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 ";
  const std::string wide = "conv_transpose2d(64,64,k=3) | swish | group_norm(8) @ 128x64x256x256 ";
  const std::string tail = "swish | group_norm(4) | hardswish @ 128x16x31x63x63 ";
  const std::string thin = "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) @ 128x3x16x32x32 ";
  const std::string rounded = "operands of the convolution are rounded to tf32";
  const std::string input = "the convolution's input is rounded to tf32";
  const std::string dithered = "weights are dithered: tf32 values that are right on average";
  const std::string redone = "samples that leave f16's range are computed again on CUDA cores";
  const std::string in_20_bits = "values before the norm are held as integers of 20 bits";
  const std::string as_f16 = "values before the norm are held as f16";
  const std::string approximate = "activations are approximate: by tanh.approx, off by up to 6e-6";
  const std::string swish = "swish is approximate: off by less than rounding its argument to 16 bits takes";
  using Lines = std::vector<std::string>;
  EXPECT_EQ(numerics_of("thin_wgmma", mean), Lines{redone});
  EXPECT_EQ(numerics_of("thin_wgmma", mean + "near_f32"), (Lines{input, redone}));
  EXPECT_EQ(numerics_of("thin_wgmma", mean + "tf32"), (Lines{rounded, redone}));
  EXPECT_EQ(numerics_of("thin_wgmma", mean + "tf32 fast"), (Lines{input, dithered, redone}));
  EXPECT_EQ(numerics_of("thin_samples", mean + "near_f32"), (Lines{input, redone}));
  EXPECT_EQ(numerics_of("thin_backward", mean + "near_f32"), Lines{});
  EXPECT_EQ(numerics_of("thin_cores", mean + "tf32"), Lines{rounded});
  const std::string away = rounded + ", ties away from zero";
  for (const std::string row : {"thin_cores", "narrow", "direct"})
    EXPECT_EQ(numerics_of(row, mean + "tf32_away"), Lines{away}) << row;
  for (const std::string row : {"thin_mma", "thin_inplace"})
    EXPECT_EQ(numerics_of(row, thin + "tf32_away"), Lines{away}) << row;
  EXPECT_EQ(numerics_of("gemm_pingpong", wide + "tf32"), (Lines{rounded, in_20_bits, redone, approximate}));
  EXPECT_EQ(numerics_of("gemm_pingpong", wide + "bf16"), (Lines{as_f16, approximate}));
  EXPECT_EQ(numerics_of("gemm_pingpong", wide + "f16"),
            (Lines{as_f16 + ", and normalised in f16", approximate}));
  EXPECT_EQ(numerics_of("gemm_wgmma", wide + "bf16"), Lines{approximate});
  EXPECT_EQ(numerics_of("gemm_wgmma", wide + "bf16 strict"), Lines{});
  EXPECT_EQ(numerics_of("gemm_wgmma", wide + "near_f32"), Lines{redone});
  EXPECT_EQ(numerics_of("tail_staged", tail + "bf16"), (Lines{as_f16, approximate}));
  EXPECT_EQ(numerics_of("tail_staged", tail + "bf16 strict"), Lines{});
  EXPECT_EQ(numerics_of("tail_backward_resident", tail + "bf16"), Lines{approximate});
  EXPECT_EQ(numerics_of("tail_backward_resident", tail + "bf16 strict"), Lines{});
  const std::string depthwise = "conv2d(64,64,k=3,p=1,groups=64) | swish @ 2x64x56x56 ";
  for (const std::string row : {"narrow", "banded"}) {
    EXPECT_EQ(numerics_of(row, depthwise + "bf16"), Lines{approximate}) << row;
    EXPECT_EQ(numerics_of(row, depthwise + "bf16 strict"), Lines{}) << row;
  }
  EXPECT_EQ(numerics_of("narrow", depthwise + "tf32"), Lines{rounded});
  const std::string scaled = "conv2d(64,64,k=1,groups=64) | swish @ 2x64x56x56 ";
  EXPECT_EQ(numerics_of("scaled", scaled + "bf16"), Lines{approximate});
  EXPECT_EQ(numerics_of("scaled", scaled + "near_f32"), Lines{});
  EXPECT_EQ(numerics_of("scaled", scaled + "tf32_away"), Lines{away});
  EXPECT_EQ(numerics_of("scaled_backward", scaled + "tf32"), Lines{rounded});
  const std::string convolution = "conv2d(64,64,k=3,p=1,groups=64) @ 2x64x56x56 ";
  EXPECT_EQ(numerics_of("narrow_backward", convolution + "tf32"), Lines{rounded});
  EXPECT_EQ(numerics_of("narrow_backward", convolution + "bf16"), Lines{});
  EXPECT_EQ(numerics_of("thin_mma", thin + "bf16"), Lines{swish});
  EXPECT_EQ(numerics_of("thin_mma", thin + "bf16 strict"), Lines{});
}

// The fewest products that a precision asks for: what a mean averages out is not computed.
TEST(CudaKernels, MeansHaveTheProductsOfTheirPrecision) {
  const std::string many = "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 8x3x16x32x32 ";
  const std::string few = "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 8x3x8x9x8 ";
  for (const std::string row : {"thin_wgmma", "thin_samples"}) {
    const auto products = [&](const std::string& text) {
      return number_before(explained(row, text, "sm_90a"), " products of 16-bit parts");
    };
    EXPECT_EQ(products(many + "f32"), 3) << row;
    EXPECT_EQ(products(many + "f32 strict"), 3) << row;
    EXPECT_EQ(products(many + "near_f32"), 2) << row;
    EXPECT_EQ(products(few + "near_f32"), 3) << row;
    EXPECT_EQ(products(many + "tf32"), 1) << row;
    EXPECT_EQ(products(many + "tf32 fast"), 1) << row;
    EXPECT_EQ(products(few + "tf32 fast"), 1) << row;
    EXPECT_EQ(products(many + "bf16"), 1) << row;
  }
}

// By wgmma where there is one, else by mma.sync; on an A100 in place of PyTorch's convolution. (In strict f32
// CUDA cores may be faster: three products of tensor cores for one of theirs.)
TEST(CudaKernels, WideConvolutionsAreProductsOnEveryArchitecture) {
  for (const char* const text :
       {"conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 128x64x256x256 tf32",
        "conv_transpose3d(64,128,k=3,bias=false) | relu | group_norm(8) @ 16x64x32x32x32 bf16",
        "conv2d(320,320,k=3,p=1) | silu | group_norm(32) @ 8x320x64x64 f16",
        "conv3d(64,64,k=3,p=1) | leaky_relu | instance_norm @ 2x64x64x64x64 tf32",
        "conv2d(64,128,k=3,s=2,p=1) | relu | group_norm(8) | silu | mean @ 32x64x257x258 tf32"}) {
    for (const std::string& architecture : all) {
      const Problem problem = Problem::parse(text, Device::cuda_architecture(architecture));
      const std::vector<Candidate> candidates = consider(strategies(Device::Kind::cuda), problem, {});
      const std::string chosen = choose(candidates, "").strategy;
      EXPECT_TRUE(chosen.starts_with("gemm_")) << architecture << ": " << text;
      EXPECT_EQ(chosen == "gemm_mma", architecture != "sm_90a") << architecture << ": " << text;
    }
    EXPECT_TRUE(cuda::is_worth_fusing(Problem::parse(text, Device::cuda_architecture("sm_80")))) << text;
  }
}

// The largest f32 is a limit of its own: infinity is beyond it.
TEST(CudaKernels, LimitsAreWrittenAsTheyAre) {
  const Problem problem = Problem::parse("clamp(-3.4028234663852886e38,inf) | hardtanh(-inf,0.1) @ 2x4x9x11",
                                         Device::cuda_architecture("sm_90a"));
  const std::string source = cuda::export_plan(plan(problem), false).kernels.at(0).source;
  for (const char* const literals :
       {", -3.40282347e+38f, __int_as_float(0x7f800000))", ", __int_as_float(0xff800000), 0.100000001f)"}) {
    EXPECT_NE(source.find(literals), std::string::npos) << literals << " is not in\n" << source;
  }
}

TEST(CudaKernels, ScaleAndShiftIsCompiledForEveryArchitecture) {
  for (const std::string& architecture : all) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      const cuda::ScaleAndShift kernel(dtype, Device::cuda_architecture(architecture));
      float value = 0;
      EXPECT_THROW(kernel.run({&value, &value, nullptr, nullptr, &value, &value, 1, 1e-5}, Stream{}), Error)
          << "it was compiled for an architecture, not for a GPU";
    }
  }
  EXPECT_THROW(cuda::ScaleAndShift(DType::f64, Device::cuda_architecture("sm_90a")), Error);
}

TEST(CudaKernels, PlanForAnArchitectureDoesNotRun) {
  const Plan p = plan(
      Problem::parse("swish | group_norm(4) | hardswish @ 8x16x31x31", Device::cuda_architecture("sm_90a")),
      {"tail_resident", ""});
  try {
    p.run({nullptr, nullptr, {nullptr, nullptr}}, nullptr, Stream{});
    ADD_FAILURE() << "it ran";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("not for a GPU"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace onepass
