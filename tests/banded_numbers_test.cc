// The search for tiles of the row "banded": what it promises, without a GPU.
#include "cuda/direct/banded_numbers.h"

#include <gtest/gtest.h>

#include <string>

#include "onepass/problem.h"

namespace onepass::cuda {
namespace {

Problem parse(const std::string& text, const char* architecture = "sm_90a") {
  return Problem::parse(text, Device::cuda_architecture(architecture));
}

BandedNumbers numbers_of_bands(const Problem& problem) {
  return {problem, banded_shape(problem), gpu_of(problem.device)};
}

// The order of a sum's terms follows the dimension that segments run along.
TEST(BandedNumbers, TheDimensionDoesNotFollowTheBatch) {
  for (const char* const sizes : {"x96x21x18x17", "x96x8x7x40", "x96x17x17x17"}) {
    const std::string block = "conv3d(96,96,k=3,p=1,groups=96) | relu @ ";
    const ThinShape one = banded_shape(parse(block + "1" + sizes + " bf16 nhwc"));
    for (const char* const batch : {"2", "8", "64", "4096"})
      EXPECT_EQ(banded_shape(parse(block + batch + sizes + " bf16 nhwc")).order, one.order) << batch << sizes;
  }
}

// 17 cells are three segments of eight, 24 are as many; contiguous rows run along x.
TEST(BandedNumbers, SegmentsRunAlongTheDimensionTheyFill) {
  const std::string block = "conv3d(32,32,k=3,p=1,groups=32) @ 2x32x24x18x17 bf16";
  EXPECT_EQ(banded_shape(parse(block + " nhwc")).axes[2].out, 24);
  EXPECT_EQ(banded_shape(parse(block)).axes[2].out, 17);
  // A stride takes two products.
  EXPECT_EQ(banded_shape(parse("conv2d(32,32,k=3,s=1x2,p=1,groups=32) @ 2x32x17x32 bf16 nhwc")).axes[2].out,
            17);
}

TEST(BandedNumbers, ARunOfSixteenHasTheTapsOfAKernelOfNine) {
  const auto products = [](const std::string& kernel) {
    return numbers_of_bands(parse("conv1d(8,8,groups=8," + kernel + ") @ 2x8x500 bf16")).products_x;
  };
  EXPECT_EQ(products("k=3"), 1);
  EXPECT_EQ(products("k=9"), 1);
  EXPECT_EQ(products("k=10"), 2);
  EXPECT_EQ(products("k=3,d=4"), 1);
  EXPECT_EQ(products("k=3,s=2"), 2);
}

TEST(BandedNumbers, BlocksFitTheMultiprocessor) {
  for (const char* const architecture : {"sm_80", "sm_86", "sm_90a", "sm_120"}) {
    const Gpu& gpu = gpu_of(Device::cuda_architecture(architecture));
    for (const char* const text : {"conv3d(320,64,k=5,p=2,groups=32) | tanh @ 256x320x13x10x17 bf16 nhwc",
                                   "conv2d(4,4,k=5,p=2,groups=4) @ 1x4x1344x9525 bf16 nhwc",
                                   "conv1d(640,640,k=5,groups=640) @ 16x640x25801 f16",
                                   "conv2d(3,96,k=5,p=2) | relu @ 1x3x1125x1200 bf16",
                                   "conv3d(12,12,k=7,groups=12) | mish @ 64x12x56x32x40 bf16 nhwc",
                                   "conv2d(64,64,k=3,p=1,groups=64) | residual_add @ 128x64x113x80 bf16"}) {
      const BandedNumbers numbers = numbers_of_bands(parse(text, architecture));
      ASSERT_GT(numbers.threads, 0) << architecture << ' ' << text;
      EXPECT_LE(numbers.shared, gpu.shared_bytes_per_block) << architecture << ' ' << text;
      EXPECT_LE(numbers.blocks_wanted * (numbers.shared + 1024), gpu.shared_bytes_per_multiprocessor)
          << architecture << ' ' << text;
      EXPECT_LE(numbers.threads * numbers.blocks_wanted, 2048) << architecture << ' ' << text;
      EXPECT_GE(numbers.items(), numbers.threads / 32) << architecture << ' ' << text;
    }
  }
}

// A larger batch and a larger kernel: what a cost must not get wrong.
TEST(BandedNumbers, SecondsFollowTheWork) {
  const auto seconds = [](const std::string& text) {
    const Problem problem = parse(text);
    return numbers_of_bands(problem).seconds(problem, banded_shape(problem), gpu_of(problem.device));
  };
  double before = 0;
  for (const char* const batch : {"1", "16", "256", "4096"}) {
    const double of_batch =
        seconds("conv2d(32,32,k=7,p=3,groups=32) | relu @ " + std::string(batch) + "x32x56x56 bf16");
    EXPECT_GE(of_batch, before) << batch;
    before = of_batch;
  }
  EXPECT_GT(seconds("conv3d(32,32,k=7,p=3,groups=32) @ 8x32x40x40x40 bf16"),
            1.5 * seconds("conv3d(32,32,k=3,p=1,groups=32) @ 8x32x40x40x40 bf16"));
}

}  // namespace
}  // namespace onepass::cuda
