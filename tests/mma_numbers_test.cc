// The search for tiles of the row "gemm_mma": what it promises, without a GPU.
#include "cuda/gemm/mma_numbers.h"

#include <gtest/gtest.h>

#include <string>

#include "onepass/problem.h"

namespace onepass::cuda {
namespace {

GemmMmaNumbers numbers_of_tiles(const std::string& text, const char* architecture = "sm_90a") {
  const Problem problem = Problem::parse(text, Device::cuda_architecture(architecture));
  return {problem, ThinShape(problem), gpu_of(problem.device)};
}

int64_t warps_of_multiprocessor(const GemmMmaNumbers& numbers) {
  return numbers.blocks_wanted * numbers.tile.threads() / 32;
}

// Statistics are merged tile by tile: a sample's bits would follow its neighbours.
TEST(MmaNumbers, TilesOfASampleDoNotFollowTheBatch) {
  for (const char* const rest : {"x640x488 tf32", "x640x61 tf32", "x640x488 bf16", "x640x7 f32"}) {
    const std::string block = "conv1d(640,64,k=5,s=2) | softplus | group_norm(16) | mean @ ";
    const GemmMmaNumbers one = numbers_of_tiles(block + "1" + rest);
    for (const char* const batch : {"2", "8", "64", "4096"}) {
      const GemmMmaNumbers many = numbers_of_tiles(block + batch + rest);
      EXPECT_EQ(many.box, one.box) << batch << rest;
      EXPECT_EQ(many.tile.rows(), one.tile.rows()) << batch << rest;
      EXPECT_EQ(many.tile.threads(), one.tile.threads()) << batch << rest;
      EXPECT_EQ(many.vectors, one.vectors) << batch << rest;
      EXPECT_EQ(many.group_joints, one.group_joints) << batch << rest;
    }
  }
}

// One block of four warps waits for memory, for barriers and for products in turn: it took 1.3 to 1.7 times
// as long as these do.
TEST(MmaNumbers, LargeWindowsLeaveRoomForWarps) {
  for (const char* const text :
       {"conv3d(6,16,k=5,s=2,p=2) | mish | hardswish @ 256x6x56x40x48 tf32 nhwc",
        "conv2d(128,64,k=3,s=2,p=1) | swish | group_norm(1) @ 32x128x119x125 tf32 nhwc",
        "conv3d(24,16,k=5,p=2,bias=false) | group_norm(16) | gelu | mean @ 4x24x30x35x34 tf32"})
    EXPECT_GE(warps_of_multiprocessor(numbers_of_tiles(text)), 12) << text;
  EXPECT_GE(
      warps_of_multiprocessor(numbers_of_tiles("conv2d(96,8,k=7,s=3,p=3) | swish @ 2x96x733x830 bf16 nhwc")),
      8);
}

TEST(MmaNumbers, BlocksFitTheMultiprocessor) {
  for (const char* const architecture : {"sm_80", "sm_86", "sm_90a", "sm_120"}) {
    const Gpu& gpu = gpu_of(Device::cuda_architecture(architecture));
    for (const char* const text :
         {"conv3d(48,320,k=7,s=2,p=3) | tanh @ 32x48x19x16x23 bf16 nhwc",
          "conv2d(16,8,k=3) | relu @ 8x16x9x9", "conv_transpose2d(24,8,k=7,s=2,p=3) | mish @ 1x24x68x79 tf32",
          "conv1d(1,192,k=4,s=2) @ 4x1x2015 tf32", "conv1d(17,70,k=1) | relu @ 8x17x1000 f16",
          "conv2d(256,48,k=3,groups=8) @ 2x256x56x56 f32"}) {
      const GemmMmaNumbers numbers = numbers_of_tiles(text, architecture);
      EXPECT_GT(numbers.shared_bytes, 0) << architecture << ' ' << text;
      EXPECT_LE(numbers.shared_bytes, gpu.shared_bytes_per_block) << architecture << ' ' << text;
      EXPECT_LE(numbers.blocks_wanted * (numbers.shared_bytes + 1024), gpu.shared_bytes_per_multiprocessor)
          << architecture << ' ' << text;
      EXPECT_LE(warps_of_multiprocessor(numbers), 32) << architecture << ' ' << text;
      EXPECT_LE(numbers.box[0] * numbers.box[1] * numbers.box[2], numbers.tile.positions())
          << architecture << ' ' << text;
    }
  }
}

// A slower GPU, more samples, more channels: what a cost must not get wrong.
TEST(MmaNumbers, SecondsFollowTheWork) {
  const Problem problem =
      Problem::parse("conv2d(32,64,k=3,p=1) | relu @ 8x32x56x56 tf32", Device::cuda_architecture("sm_90a"));
  const ThinShape shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const GemmMmaNumbers numbers(problem, shape, gpu);
  double before = 0;
  for (const int64_t samples : {1, 16, 256, 4096}) {
    const double seconds = numbers.seconds(problem, shape, gpu, samples);
    EXPECT_GT(seconds, before);
    before = seconds;
  }
  Gpu slow = gpu;
  slow.flops /= 4;
  EXPECT_GT(numbers.seconds(problem, shape, slow, 256), 1.5 * numbers.seconds(problem, shape, gpu, 256));
}

}  // namespace
}  // namespace onepass::cuda
