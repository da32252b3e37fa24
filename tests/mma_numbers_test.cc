// The search for tiles of the row "gemm_mma": what it promises, without a GPU.
#include "cuda/gemm/mma_numbers.h"

#include <gtest/gtest.h>

#include <string>

#include "onepass/problem.h"
#include "support/lists.h"

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

// Few inputs and many outputs: moving f32 values both ways takes longer than computing them twice. A mean has
// another order of its sum then, so that this must not follow the batch.
TEST(MmaNumbers, ValuesAreComputedTwiceWhereTheyAreMost) {
  const std::string block = "conv2d(16,256,k=2) | hardswish | group_norm(8) | tanh | mean @ ";
  for (const char* const batch : {"1", "8", "64", "4096"})
    EXPECT_TRUE(numbers_of_tiles(block + batch + "x16x343x223 tf32").recomputes) << batch;
  for (const char* const text :
       {"conv2d(24,512,k=1,bias=false) | group_norm(1) | elu @ 1x24x579x1015 bf16 nhwc",
        "conv_transpose2d(8,128,k=2,s=2) | group_norm(8) | gelu @ 2x8x12x13 bf16",
        "conv1d(4,144,k=3) | group_norm(3) | swish @ 3x4x600 tf32"})
    EXPECT_TRUE(numbers_of_tiles(text).recomputes) << text;
  for (const char* const text :
       {"conv2d(256,256,k=3,p=1) | relu | group_norm(32) | relu @ 16x256x56x56 bf16 nhwc",
        "conv2d(16,256,k=2) | hardswish | tanh | mean @ 8x16x343x223 tf32",
        "conv2d(16,256,k=2) | hardswish | group_norm(8) | mean @ 8x16x343x223 tf32",
        "conv2d(16,256,k=2) | hardswish @ 8x16x343x223 tf32"})
    EXPECT_FALSE(numbers_of_tiles(text).recomputes) << text;
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

// Taps along x share a vector that one of them would leave half empty, so that there are fewer products.
TEST(MmaNumbers, FewInputsFillVectorsWithTaps) {
  const auto span = [](const std::string& text) { return numbers_of_tiles(text).span; };
  EXPECT_EQ(span("conv2d(1,96,k=7,p=3) | relu @ 2x1x471x291 bf16"), 7);
  EXPECT_EQ(span("conv3d(2,192,k=7,p=3) | relu @ 32x2x32x16x24 bf16 nhwc"), 4);
  EXPECT_EQ(span("conv2d(8,256,k=7,groups=2) | relu @ 8x8x96x96 tf32"), 2);
  EXPECT_EQ(span("conv2d(5,96,k=7) | relu @ 2x5x471x291 bf16"), 1);
  EXPECT_EQ(span("conv2d(2,96,k=7x1) | relu @ 2x2x471x291 bf16"), 1);
}

// Taps along x are rows where outputs are few: with one output, 1 of 16 rows would be more than zeros.
TEST(MmaNumbers, TapsAreRowsWhereOutputsAreFew) {
  for (const Problem& problem : testing::row_tap_problems(Device::cuda_architecture("sm_90a"))) {
    const ThinShape shape(problem);
    const GemmMmaNumbers numbers(problem, shape, gpu_of(problem.device));
    EXPECT_GT(numbers.row_taps.count(), 1) << problem.text();
    EXPECT_EQ(numbers.channel_tiles, 1) << problem.text();
    EXPECT_LT(numbers.padding, 9) << problem.text();
    // Every output is in one tile.
    EXPECT_GE(numbers.boxes[2] * numbers.own_columns() * numbers.row_taps.outputs, shape.axes[2].out)
        << problem.text();
    EXPECT_GE(numbers.output_positions(),
              numbers.box[0] * numbers.box[1] * numbers.own_columns() * numbers.row_taps.outputs)
        << problem.text();
  }
  for (const char* const text :
       {"conv2d(64,64,k=3,p=1) | relu @ 8x64x56x56 bf16", "conv2d(64,3,k=1) @ 8x64x99x99"})
    EXPECT_EQ(numbers_of_tiles(text).row_taps.count(), 1) << text;
}

// Copies of the next window have arrived after as many groups of taps as weights are ahead.
TEST(MmaNumbers, OperandsOf16BitsAreCopiedAsTheyLie) {
  for (const Problem& problem : testing::copied_problems(Device::cuda_architecture("sm_90a"))) {
    const GemmMmaNumbers numbers(problem, ThinShape(problem), gpu_of(problem.device));
    const bool interleaved = problem.input.strides[1] == 1;
    EXPECT_EQ(numbers.copies_vectors, interleaved) << problem.text();
    EXPECT_EQ(numbers.copied_run > 0, !interleaved) << problem.text();
    if (numbers.copied_run > 0) {
      EXPECT_EQ(problem.input.sizes.back() % numbers.copied_run, 0) << problem.text();
      EXPECT_EQ(numbers.box[2] % 8, 0) << problem.text();
      EXPECT_EQ(numbers.own_columns() % numbers.copied_run, 0) << problem.text();
      EXPECT_EQ(numbers.row_taps.halo % numbers.copied_run, 0) << problem.text();
      EXPECT_EQ(numbers.window_pitch / 8 % 2, 1) << problem.text();
    }
    if (numbers.chunks > 1) {
      EXPECT_LE(numbers.stages - 1, (numbers.least_joints + numbers.group_joints - 1) / numbers.group_joints)
          << problem.text();
    }
  }
  for (const char* const text : {"conv2d(96,24,k=1) @ 8x96x99x31 bf16", "conv2d(96,3,k=3) @ 8x96x99x30 tf32",
                                 "conv2d(20,24,k=3) @ 8x20x99x30 bf16 nhwc"})
    EXPECT_FALSE(numbers_of_tiles(text).copies()) << text;
}

// Taps and outputs of a column, by hand.
TEST(MmaNumbers, RowTapsAddNeighbouringColumns) {
  const auto taps_of = [](const char* text) {
    return RowTaps(ThinShape(Problem::parse(text, Device::cuda_architecture("sm_90a"))).axes[2]);
  };
  const auto list = [](const RowTaps& taps) {
    std::string out;
    for (const RowTaps::Tap& tap : taps.taps)
      out += std::to_string(tap.output) + ":" + std::to_string(tap.shift) + " ";
    return out;
  };
  const RowTaps dense = taps_of("conv1d(16,1,k=3,p=1) @ 1x16x9");
  EXPECT_EQ(list(dense), "0:0 0:1 0:2 ");
  EXPECT_EQ(dense.axis.classes[0].base, -1);
  // Taps 0 and 1, 2 and 3, 4 read columns two apart.
  const RowTaps strided = taps_of("conv1d(16,1,k=5,s=2) @ 1x16x99");
  EXPECT_EQ(list(strided), "0:0 0:1 0:2 ");
  EXPECT_EQ(strided.axis.classes[0].count, 2);
  EXPECT_EQ(list(taps_of("conv1d(16,1,k=3,s=2,d=4) @ 1x16x99")), "0:0 0:2 0:4 ");
  EXPECT_EQ(list(taps_of("conv1d(16,1,k=4,s=6,d=4) @ 1x16x99")), "0:0 0:2 ");
  // Output 2 j is tap 1 of x[j], output 2 j + 1 tap 0 of x[j + 1] and tap 2 of x[j].
  const RowTaps transposed = taps_of("conv_transpose1d(16,1,k=3,s=2,p=1) @ 1x16x9");
  EXPECT_EQ(list(transposed), "1:1 0:0 1:0 ");
  EXPECT_EQ(transposed.outputs, 2);
  EXPECT_EQ(transposed.halo, 1);
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
