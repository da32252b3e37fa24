// Tensors and problems: dense layouts, spans, problem strings, validation and the count of multiply-adds.
#include "onepass/problem.h"

#include <gtest/gtest.h>

#include <limits>

#include "onepass/error.h"

namespace onepass {
namespace {

constexpr int64_t max_int64 = std::numeric_limits<int64_t>::max();

// The sentence a call is refused with, or "accepted".
template <class F>
std::string refusal(F&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

std::string refusal_of(const Problem& problem) {
  return refusal([&] { problem.validate(); });
}

TEST(Tensor, NamesAndSizesOfTypes) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
    EXPECT_EQ(parse_dtype(name(dtype)), dtype);
  }
  EXPECT_EQ(byte_size(DType::f32), 4);
  EXPECT_EQ(byte_size(DType::f16), 2);
  EXPECT_EQ(byte_size(DType::bf16), 2);
  EXPECT_EQ(byte_size(DType::f64), 8);
  EXPECT_EQ(refusal([] { parse_dtype("fp32"); }), "unknown type 'fp32', accepted are f32, f16, bf16 and f64");
  EXPECT_EQ(refusal([] { parse_layout("nwhc"); }), "unknown layout 'nwhc', accepted are nchw and nhwc");
}

TEST(Tensor, ShapesParseAndPrint) {
  EXPECT_EQ(parse_shape("8x3x16x32x32"), (Shape{8, 3, 16, 32, 32}));
  EXPECT_EQ(to_string(Shape{8, 3, 16}), "8x3x16");
  EXPECT_EQ(parse_shape("0x3"), (Shape{0, 3}));
  EXPECT_EQ(refusal([] { parse_shape("8xx3"); }),
            "shape 8xx3: size '' must be a whole number, as in 8x3x32x32");
  EXPECT_EQ(refusal([] { parse_shape("8x-3"); }),
            "shape 8x-3: size -3 must not be negative, as in 8x3x32x32");
  EXPECT_EQ(refusal([] { parse_shape("1x1x1x1x1x1"); }),
            "shape 1x1x1x1x1x1: at most 5 sizes, as in 8x3x32x32");
  EXPECT_EQ(refusal([] { parse_shape("2147483648"); }),
            "shape 2147483648: size '2147483648' must be at most 2147483647, as in 8x3x32x32");
}

TEST(Tensor, ElementCountThatDoesNotFitIsRefused) {
  EXPECT_EQ(element_count({2, 3, 4}), 24);
  EXPECT_EQ(element_count({}), 1);
  EXPECT_EQ(element_count({max_int64, max_int64, 0}), 0);
  EXPECT_EQ(refusal([] {
              element_count({1LL << 32, 1LL << 31});
            }),
            "shape 4294967296x2147483648 has more than 2^63-1 elements");
  EXPECT_EQ(refusal([] { element_count({2, -1}); }), "shape 2x-1: sizes must not be negative");
}

TEST(Tensor, DenseStridesArePyTorchs) {
  EXPECT_EQ(TensorSpec::dense(DType::f32, {2, 3, 4, 5}).strides, (Shape{60, 20, 5, 1}));
  EXPECT_EQ(TensorSpec::dense(DType::f32, {2, 3, 4, 5}, Layout::nhwc).strides, (Shape{60, 1, 15, 3}));
  EXPECT_EQ(TensorSpec::dense(DType::f32, {2, 3, 4, 5, 6}, Layout::nhwc).strides, (Shape{360, 1, 90, 18, 3}));
  EXPECT_EQ(TensorSpec::dense(DType::f32, {2, 3}, Layout::nhwc).strides, (Shape{3, 1}));
  EXPECT_EQ(TensorSpec::dense(DType::f32, {7}, Layout::nhwc).strides, (Shape{1}));
  EXPECT_EQ(TensorSpec::dense(DType::f32, {0, 3, 4}).strides, (Shape{12, 4, 1}));
}

TEST(Tensor, DenseBeyondTheAddressSpaceIsRefused) {
  EXPECT_EQ(TensorSpec::dense(DType::f16, {1LL << 31, (1LL << 31) - 1}).byte_span(), 9223372032559808512LL);
  EXPECT_EQ(refusal([] {
              TensorSpec::dense(DType::f32, {1LL << 31, 1LL << 30});
            }),
            "f32 tensor of 2147483648x1073741824 has more than 2^63-1 bytes");
}

TEST(Tensor, ByteSpanReachesTheLastElement) {
  EXPECT_EQ(TensorSpec::dense(DType::f64, {2, 3, 4}).byte_span(), 24 * 8);
  EXPECT_EQ((TensorSpec{DType::f32, {2, 3}, {10, 2}}.byte_span()), (10 + 4 + 1) * 4);
  EXPECT_EQ((TensorSpec{DType::f32, {5, 3}, {0, 1}}.byte_span()), 12);
  EXPECT_EQ((TensorSpec{DType::f32, {0, 3}, {3, 1}}.byte_span()), 0);
  EXPECT_EQ(refusal([] {
              TensorSpec{DType::f32, {2, 3}, {max_int64, 1}}.byte_span();
            }),
            "f32 tensor of 2x3 with strides 9223372036854775807x1 spans more than 2^63-1 bytes");
  EXPECT_EQ(refusal([] {
              TensorSpec{DType::f32, {2, 3}, {1}}.byte_span();
            }),
            "f32 tensor of 2x3 has 1 strides");
}

TEST(ProblemText, DefaultsAreF32AndNchw) {
  const Problem problem = Problem::parse("conv2d(3,8) | relu @ 2x3x9x9");
  EXPECT_EQ(problem.input, TensorSpec::dense(DType::f32, {2, 3, 9, 9}));
  EXPECT_EQ(problem.output, TensorSpec::dense(DType::f32, {2, 8, 7, 7}));
  EXPECT_EQ(problem.text(), "conv2d(3,8,k=3) | relu @ 2x3x9x9 f32");
}

TEST(ProblemText, TypeAndLayoutComeInAnyOrder) {
  const Problem problem = Problem::parse("conv2d(3,8) | relu @ 2x3x9x9 bf16 nhwc");
  EXPECT_EQ(problem, Problem::parse("conv2d(3,8)|relu@2x3x9x9  nhwc\tbf16 "));
  EXPECT_EQ(problem, Problem(Block::parse("conv2d(3,8) | relu"), {2, 3, 9, 9}, DType::bf16, Device::cpu(),
                             Layout::nhwc));
  EXPECT_EQ(problem.text(), "conv2d(3,8,k=3) | relu @ 2x3x9x9 bf16 nhwc");
}

TEST(ProblemText, LayoutIsForTensorsNotForSmallParameters) {
  const Problem problem =
      Problem::parse("conv2d(3,8) | channel_add(per=sample) | residual_add | mean @ 2x3x9x9 nhwc");
  EXPECT_EQ(problem.parameters[0], TensorSpec::dense(DType::f32, {8, 3, 3, 3}, Layout::nchw));
  EXPECT_EQ(problem.parameters[2], TensorSpec::dense(DType::f32, {2, 8}));
  EXPECT_EQ(problem.parameters[3], TensorSpec::dense(DType::f32, {2, 8, 7, 7}, Layout::nhwc));
  EXPECT_EQ(problem.output, TensorSpec::dense(DType::f32, {2, 8}));
}

TEST(ProblemText, LayoutOfAnInputThatIsBothIsReadFromTheOutput) {
  const Problem problem = Problem::parse("conv_transpose1d(1,2) @ 1x1x1 nhwc");
  EXPECT_EQ(problem.text(), "conv_transpose1d(1,2,k=3) @ 1x1x1 f32 nhwc");
}

TEST(ProblemText, WhatIsNotDenseOrOfAnotherTypeIsShown) {
  Problem problem = Problem::parse("group_norm(1) @ 2x3x4");
  problem.input.strides = {100, 10, 2};
  problem.output.dtype = DType::f16;
  problem.parameters[1].dtype = DType::f64;
  EXPECT_EQ(problem.text(), "group_norm(1) @ 2x3x4 f32 (input strides 100x10x2, output f16, norm_bias f64)");
}

TEST(ProblemText, Tf32IsAPrecisionOfF32OnAGpu) {
  const std::string text = "conv2d(3,8,k=3) @ 2x3x9x9 tf32 nhwc";
  const Problem problem = Problem::parse(text, Device::cuda_architecture("sm_90a"));
  EXPECT_EQ(problem.precision, Precision::tf32);
  EXPECT_EQ(problem.input.dtype, DType::f32);
  EXPECT_EQ(problem.text(), text);
  EXPECT_EQ(refusal([&] { Problem::parse(text); }),
            "conv2d(3,8,k=3): tf32 is a precision of f32 convolutions on a GPU, cpu f32 has none");
  EXPECT_NE(
      refusal([] { Problem::parse("relu @ 2x3 tf32", Device::cuda_architecture("sm_90a")); }).find("tf32"),
      std::string::npos);
}

TEST(ProblemText, Tf32AwayIsAPrecisionOfF32OnAGpu) {
  const std::string text = "conv2d(3,8,k=3) @ 2x3x9x9 tf32_away nhwc";
  const Problem problem = Problem::parse(text, Device::cuda_architecture("sm_90a"));
  EXPECT_EQ(problem.precision, Precision::tf32_away);
  EXPECT_TRUE(problem.rounds_to_tf32());
  EXPECT_EQ(problem.input.dtype, DType::f32);
  EXPECT_EQ(problem.text(), text);
  EXPECT_NE(problem,
            Problem::parse("conv2d(3,8,k=3) @ 2x3x9x9 tf32 nhwc", Device::cuda_architecture("sm_90a")));
  EXPECT_EQ(refusal([&] { Problem::parse(text); }),
            "conv2d(3,8,k=3): tf32_away is a precision of f32 convolutions on a GPU, cpu f32 has none");
  Problem other = Problem::parse("conv2d(3,8,k=3) @ 2x3x9x9 bf16", Device::cuda_architecture("sm_90a"));
  other.precision = Precision::tf32_away;
  EXPECT_NE(refusal([&] { other.validate(); }).find("bf16 has none"), std::string::npos);
}

TEST(ProblemText, NearF32IsAPrecisionOfF32OnAGpu) {
  const std::string text = "conv2d(3,8,k=3) @ 2x3x9x9 near_f32";
  const Problem problem = Problem::parse(text, Device::cuda_architecture("sm_90a"));
  EXPECT_EQ(problem.precision, Precision::near_f32);
  EXPECT_EQ(problem.input.dtype, DType::f32);
  EXPECT_EQ(problem.text(), text);
  EXPECT_EQ(refusal([&] { Problem::parse(text); }),
            "conv2d(3,8,k=3): near_f32 is a precision of f32 convolutions on a GPU, cpu f32 has none");
}

TEST(ProblemText, NumericsComeAfterTypeAndLayout) {
  const Device gpu = Device::cuda_architecture("sm_90a");
  for (const std::string words :
       {"f32 strict", "f32 nhwc strict", "f16 strict", "bf16 nhwc fast", "tf32 fast", "tf32 nhwc fast"}) {
    const std::string text = "conv2d(3,8,k=3) | relu @ 2x3x9x9 " + words;
    const Problem problem = Problem::parse(text, gpu);
    EXPECT_EQ(problem.numerics, words.ends_with("fast") ? Numerics::fast : Numerics::strict) << text;
    EXPECT_EQ(problem.text(), text);
  }
  const Problem plain = Problem::parse("relu @ 2x3x9 pytorch");
  EXPECT_EQ(plain, Problem::parse("relu @ 2x3x9"));
  EXPECT_EQ(plain.text(), "relu @ 2x3x9 f32");
  EXPECT_NE(plain, Problem::parse("relu @ 2x3x9 strict"));
  EXPECT_EQ(Problem::parse("relu @ 2x3x9 strict nhwc f16").text(), "relu @ 2x3x9 f16 nhwc strict");
}

TEST(ProblemText, NumericsThatContradictThePrecisionAreRefused) {
  const auto said = [](const std::string& words) {
    return refusal(
        [&] { Problem::parse("conv2d(3,8,k=3) @ 2x3x9x9 " + words, Device::cuda_architecture("sm_90a")); });
  };
  const std::string strict = "conv2d(3,8,k=3): strict computes in f32 throughout, write f32 instead of ";
  EXPECT_EQ(said("tf32 strict"), strict + "tf32");
  EXPECT_EQ(said("tf32_away strict"), strict + "tf32_away");
  EXPECT_EQ(said("near_f32 strict"), strict + "near_f32");
  const std::string fast = "conv2d(3,8,k=3): fast is coarser than tf32, write tf32 instead of ";
  EXPECT_EQ(said("fast"), fast + "f32");
  EXPECT_EQ(said("tf32_away fast"), fast + "tf32_away");
  EXPECT_EQ(said("near_f32 fast"), fast + "near_f32");
  EXPECT_EQ(said("f64 fast"), fast + "f64");
}

TEST(ModeText, WordsAreReadAndPrinted) {
  for (const std::string text : {"f32", "tf32", "tf32_away", "near_f32", "f16", "bf16", "f64", "tf32 fast",
                                 "f32 strict", "bf16 strict", "f16 fast"}) {
    EXPECT_EQ(Mode::parse(text).text(), text);
  }
  EXPECT_EQ(Mode::parse(""), Mode{});
  EXPECT_EQ(Mode::parse("strict"), Mode::parse("f32 strict"));
  EXPECT_EQ(Mode::parse("fast tf32 "), Mode::parse("tf32 fast"));
  EXPECT_EQ(Mode::parse("bf16 pytorch").text(), "bf16");
  EXPECT_EQ(refusal([] { Mode::parse("tf32 nhwc"); }),
            "mode 'tf32 nhwc': 'nhwc' is not accepted, only one of f32, tf32, tf32_away, near_f32, f16, bf16 "
            "and f64 and "
            "one of pytorch, strict and fast");
}

TEST(ProblemText, StringsThatAreNoProblemAreRefused) {
  EXPECT_EQ(refusal([] { Problem::parse("relu"); }),
            "problem 'relu': the sizes are missing, write BLOCK @ SIZES as in \"relu @ 2x3x9x9\"");
  EXPECT_EQ(refusal([] { Problem::parse("relu @ "); }),
            "problem 'relu @': the sizes are missing, write BLOCK @ SIZES as in \"relu @ 2x3x9x9\"");
  const std::string rule =
      " is not accepted after the sizes, only one of f32, tf32, tf32_away, near_f32, f16, bf16 and f64, one "
      "of nchw and "
      "nhwc and one of pytorch, strict and fast";
  EXPECT_EQ(refusal([] { Problem::parse("relu @ 2x3 f8"); }), "problem 'relu @ 2x3 f8': 'f8'" + rule);
  EXPECT_EQ(refusal([] { Problem::parse("relu @ 2x3 strict fast"); }),
            "problem 'relu @ 2x3 strict fast': 'fast'" + rule);
  EXPECT_EQ(refusal([] { Problem::parse("relu @ 2x3 tf32 near_f32"); }),
            "problem 'relu @ 2x3 tf32 near_f32': 'near_f32'" + rule);
  EXPECT_EQ(refusal([] { Problem::parse("relu @ 2x3 f32 f16"); }),
            "problem 'relu @ 2x3 f32 f16': 'f16'" + rule);
  EXPECT_EQ(refusal([] { Problem::parse("conv2d(3,8) @ 2x4x9x9"); }),
            "conv2d(3,8,k=3): the input 2x4x9x9 has 4 channels, must have 3");
  EXPECT_EQ(refusal([] { Problem::parse("relu @ 2147483647x2147483647x2"); }),
            "f32 tensor of 2147483647x2147483647x2 has more than 2^63-1 bytes");
}

TEST(ProblemValidation, ExpandedAndStridedInputsAreFine) {
  Problem problem = Problem::parse("conv2d(3,8) | residual_add @ 2x3x9x9");
  problem.input.strides = {0, 81, 9, 1};
  problem.parameters[2].strides = {0, 0, 7, 1};
  EXPECT_EQ(refusal_of(problem), "accepted");
  problem.output.strides = {1000, 1, 80, 8};
  EXPECT_EQ(refusal_of(problem), "accepted");
}

TEST(ProblemValidation, OutputsThatOverlapAreRefused) {
  Problem problem = Problem::parse("relu @ 2x3x4");
  problem.output.strides = {0, 4, 1};
  EXPECT_EQ(refusal_of(problem),
            "output: the strides 0x4x1 of sizes 2x3x4 overlap, each element must have its own place");
  problem.output.strides = {12, 3, 1};
  EXPECT_NE(refusal_of(problem), "accepted");
  problem.output.strides = {11, 4, 1};
  EXPECT_NE(refusal_of(problem), "accepted");
  problem.output.strides = {1, 2, 6};
  EXPECT_EQ(refusal_of(problem), "accepted");
  Problem single = Problem::parse("relu @ 1x3x4");
  single.output.strides = {0, 4, 1};
  EXPECT_EQ(refusal_of(single), "accepted");
}

TEST(ProblemValidation, SpecsThatDoNotBelongToTheBlockAreRefused) {
  const Problem good = Problem::parse("conv1d(3,8) | relu @ 2x3x9");
  Problem problem = good;
  problem.output.sizes = {2, 8, 9};
  EXPECT_EQ(refusal_of(problem), "output: the sizes are 2x8x9, must be 2x8x7");
  problem = good;
  problem.input.strides = {27, 9};
  EXPECT_EQ(refusal_of(problem), "input: 2 strides, must be 3");
  problem = good;
  problem.input.strides = {27, 9, -1};
  EXPECT_EQ(refusal_of(problem), "input: stride -1 must not be negative");
  problem = good;
  problem.input.strides = {max_int64, 9, 1};
  EXPECT_NE(refusal_of(problem).find("spans more than 2^63-1 bytes"), std::string::npos);
  problem = good;
  problem.parameters.pop_back();
  EXPECT_EQ(refusal_of(problem), "conv1d(3,8,k=3) | relu: 1 parameters, must be 2");
  problem = good;
  problem.parameters[1].sizes = {9};
  EXPECT_EQ(refusal_of(problem), "conv_bias: the sizes are 9, must be 8");
  problem = good;
  problem.parameters[0].strides = {12, 4, 1};
  EXPECT_EQ(refusal_of(problem), "conv_weight: the strides are 12x4x1, must be contiguous: 9x3x1");
}

TEST(ProblemValidation, StrideOfASingleElementDoesNotMatter) {
  Problem problem = Problem::parse("conv1d(1,8,k=3) @ 2x1x9");
  problem.parameters[0].strides = {3, 1, 1};
  EXPECT_EQ(refusal_of(problem), "accepted");
}

TEST(ProblemValidation, ThreadsOutOfRangeAreRefused) {
  EXPECT_EQ(refusal([] { Problem::parse("relu @ 2x3", Device::cpu(0)); }),
            "device: threads is 0, must be 1 to 1024");
  EXPECT_EQ(refusal([] { Problem::parse("relu @ 2x3", Device::cpu(1025)); }),
            "device: threads is 1025, must be 1 to 1024");
}

// The definition: each output element and tap of a dimension, one at a time.
int64_t counted_taps(const Conv& conv, size_t d, int64_t input, int64_t output) {
  int64_t count = 0;
  for (int64_t o = 0; o < output; ++o) {
    for (int64_t t = 0; t < conv.kernel[d]; ++t) {
      const int64_t shifted = conv.transposed
                                  ? o + conv.padding_before[d] - t * conv.dilation[d]
                                  : o * conv.stride[d] + t * conv.dilation[d] - conv.padding_before[d];
      const int64_t divisor = conv.transposed ? conv.stride[d] : 1;
      if (shifted >= 0 && shifted % divisor == 0 && shifted / divisor < input) ++count;
    }
  }
  return count;
}

TEST(MultiplyAdds, AgreeWithCountingOneByOne) {
  int checked = 0;
  for (const std::string name : {"conv1d", "conv_transpose1d"}) {
    for (int code = 0; code < 6 * 5 * 5 * 4 * 9; ++code) {
      const int k = code % 6 + 1, s = code / 6 % 5 + 1, p = code / 30 % 5, d = code / 150 % 4 + 1;
      const int size = code / 600 + 1;
      const std::string text = name + "(6,4,groups=2,k=" + std::to_string(k) + ",s=" + std::to_string(s) +
                               ",p=" + std::to_string(p) + ",d=" + std::to_string(d) + ")";
      const Block block = Block::parse(text);
      const Shape input{2, 6, size};
      if (refusal([&] { block.output_shape(input); }) != "accepted") continue;
      const int64_t output = block.output_shape(input)[2];
      // 2 samples, 4 output channels, 3 input channels per group.
      const int64_t expected = int64_t{24} * counted_taps(*block.conv(), 0, size, output);
      ASSERT_EQ(Problem(block, input).conv_multiply_adds(), expected) << text << " @ " << to_string(input);
      ++checked;
    }
  }
  EXPECT_GT(checked, 5000);
}

TEST(MultiplyAdds, DimensionsMultiplyAndUnevenPaddingCounts) {
  // k=4, p=same on 3 elements: taps inside are 2 + 3 + 3 = 8 after padding 1 before and 2 after.
  EXPECT_EQ(Problem::parse("conv1d(1,1,k=4,p=same) @ 1x1x3").conv_multiply_adds(), 8);
  EXPECT_EQ(Problem::parse("conv2d(1,1,k=4x1,p=same) @ 1x1x3x5").conv_multiply_adds(), 40);
  EXPECT_EQ(Problem::parse("conv3d(3,16,k=4) @ 128x3x16x32x32").conv_multiply_adds(),
            128LL * 16 * 13 * 29 * 29 * 3 * 64);
  // Every input element meets every tap of a transposed convolution that cuts nothing off.
  EXPECT_EQ(Problem::parse("conv_transpose2d(3,5,k=3,s=2) @ 2x3x4x6").conv_multiply_adds(),
            2LL * 24 * 3 * 5 * 9);
  EXPECT_EQ(Problem::parse("relu @ 2x3").conv_multiply_adds(), 0);
  EXPECT_EQ(Problem::parse("conv1d(1,1) @ 0x1x9").conv_multiply_adds(), 0);
}

TEST(MultiplyAdds, AbsurdSizesAreCountedAtOnceOrRefused) {
  // 2^30 positions and taps: sum over outputs of the taps inside, all of them.
  EXPECT_EQ(Problem::parse("conv1d(1,1,k=1073741824) @ 1x1x2147483647").conv_multiply_adds(), 1LL << 60);
  EXPECT_EQ(Problem::parse("conv1d(1,1,k=1000000,p=same) @ 1x1x1000000").conv_multiply_adds(), 750000000000);
  EXPECT_EQ(Problem::parse("conv_transpose1d(1,1,k=2000000000,s=147483) @ 1x1x1000").conv_multiply_adds(),
            2000000000000);
  EXPECT_NE(refusal([] {
              Problem::parse("conv1d(64,64,k=1073741824) @ 1x64x2147483647").conv_multiply_adds();
            }).find("more than 2^63-1 multiply-adds"),
            std::string::npos);
}

}  // namespace
}  // namespace onepass
