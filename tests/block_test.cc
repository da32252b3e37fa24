// The block language: what it accepts, how it prints, what it refuses and in which words, shapes, parameters.
#include "onepass/block.h"

#include <gtest/gtest.h>

#include <limits>

#include "onepass/error.h"

namespace onepass {
namespace {

std::string canonical(std::string_view text) { return Block::parse(text).text(); }

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

std::string refusal_of(std::string_view text) {
  return refusal([&] { Block::parse(text); });
}

std::string refusal_of(std::string_view text, const Shape& input) {
  return refusal([&] { Block::parse(text).output_shape(input); });
}

const Conv& conv_of(const Block& block) { return *block.conv(); }

Shape output_of(std::string_view text, const Shape& input) { return Block::parse(text).output_shape(input); }

TEST(BlockText, DefaultsAreLeftOutButKernelIsPrinted) {
  EXPECT_EQ(canonical("conv2d(3,16)"), "conv2d(3,16,k=3)");
  EXPECT_EQ(canonical("conv3d(3,16,k=3,s=1,p=0,d=1,groups=1,op=0,bias=true)"), "conv3d(3,16,k=3)");
  EXPECT_EQ(canonical("group_norm(4,eps=0.00001,affine=true)"), "group_norm(4)");
  EXPECT_EQ(canonical("instance_norm(affine=false,eps=1e-5)"), "instance_norm");
  EXPECT_EQ(canonical("leaky_relu(0.010)"), "leaky_relu");
  EXPECT_EQ(canonical("elu(1.0)"), "elu");
  EXPECT_EQ(canonical("prelu(per=tensor)"), "prelu");
  EXPECT_EQ(canonical("channel_mul(per=channel)"), "channel_mul");
  EXPECT_EQ(canonical("relu()"), "relu");
}

TEST(BlockText, EveryNonDefaultIsPrinted) {
  const std::string_view conv =
      "conv_transpose3d(4,8,k=3x3x1,s=2,p=1x1x0,d=2x1x1,groups=2,op=1x1x0,bias=false)";
  EXPECT_EQ(canonical(conv), conv);
  EXPECT_EQ(canonical("group_norm(4,affine=false,eps=1e-3)"), "group_norm(4,eps=0.001,affine=false)");
  EXPECT_EQ(canonical("instance_norm(affine=true)"), "instance_norm(affine=true)");
  EXPECT_EQ(canonical("leaky_relu(0.2)"), "leaky_relu(0.2)");
  EXPECT_EQ(canonical("clamp(-1,6)"), "clamp(-1,6)");
  EXPECT_EQ(canonical("clamp(-inf,6) | clamp(0, inf)"), "clamp(-inf,6) | clamp(0,inf)");
  EXPECT_EQ(canonical("hardtanh | hardtanh(-1,1) | hardtanh(0,1)"), "hardtanh | hardtanh | hardtanh(0)");
  EXPECT_EQ(canonical("mul(0) | add(0)"), "mul(0) | add(0)");
  EXPECT_EQ(canonical("prelu(per=channel)"), "prelu(per=channel)");
  EXPECT_EQ(canonical("channel_add(per=sample)"), "channel_add(per=sample)");
}

TEST(BlockText, EveryPointwiseRowParsesByItsName) {
  for (int i = 0; i < op_count; ++i) {
    const Op op = static_cast<Op>(i);
    std::string text(name(op));
    if (constant_count(op) == 1) text += "(0.5)";
    if (constant_count(op) == 2) text += "(0.5,1.5)";
    const Block block = Block::parse(text);
    EXPECT_EQ(std::get<Pointwise>(block.stages()[0]).op, op);
    EXPECT_EQ(block.text(), text);
  }
}

TEST(BlockText, AliasesBecomeWhatTheyMean) {
  EXPECT_EQ(Block::parse("silu"), Block::parse("swish"));
  EXPECT_EQ(canonical("layer_norm"), "group_norm(1)");
  EXPECT_EQ(canonical("layer_norm(eps=0,affine=false)"), "group_norm(1,eps=0,affine=false)");
}

TEST(BlockText, WhitespaceIsFree) {
  EXPECT_EQ(canonical(" conv3d ( 3 , 16 , k = 4 x 4 x 2 )|hardswish\t|\n group_norm( 4 ) | mean "),
            "conv3d(3,16,k=4x4x2) | hardswish | group_norm(4) | mean");
}

TEST(BlockText, EqualExtentsPrintOnce) {
  EXPECT_EQ(canonical("conv3d(3,16,k=4x4x4,s=2x2x2,p=1x1x1)"), "conv3d(3,16,k=4,s=2,p=1)");
  EXPECT_EQ(canonical("conv1d(3,16,k=5)"), "conv1d(3,16,k=5)");
}

TEST(BlockText, SamePaddingIsPyTorchsAndPrintsAsNumberWhereSymmetric) {
  EXPECT_EQ(canonical("conv2d(3,8,k=3,p=same)"), "conv2d(3,8,k=3,p=1)");
  EXPECT_EQ(canonical("conv2d(3,8,k=3x5,d=2,p=same)"), "conv2d(3,8,k=3x5,p=2x4,d=2)");
  const Block even = Block::parse("conv2d(3,8,k=4x3,p=same)");
  EXPECT_EQ(conv_of(even).padding_before, (Extents{1, 1, 0}));
  EXPECT_EQ(conv_of(even).padding_after, (Extents{2, 1, 0}));
  EXPECT_EQ(even.text(), "conv2d(3,8,k=4x3,p=same)");
  EXPECT_EQ(even.output_shape({2, 3, 7, 9}), (Shape{2, 8, 7, 9}));
}

TEST(BlockText, DoublesPrintShortestAndMinusZeroIsZero) {
  EXPECT_EQ(canonical("mul(0.1000000000000000055511151231257827)"), "mul(0.1)");
  EXPECT_EQ(canonical("add(1e22)"), "add(1e+22)");
  EXPECT_EQ(canonical("mul(-0)"), "mul(0)");
  EXPECT_EQ(canonical("group_norm(2,eps=-0.0)"), "group_norm(2,eps=0)");
  EXPECT_EQ(Block({Pointwise{Op::mul, -0.0}}), Block::parse("mul(0)"));
}

TEST(BlockValue, EntriesBeyondTheRankAreNeutral) {
  Conv conv;
  conv.rank = 1;
  conv.kernel = {3, 7, 7};
  conv.stride = {2, 9, 9};
  conv.padding_before = conv.padding_after = {1, 5, 5};
  EXPECT_EQ(Block({conv}), Block::parse("conv1d(1,1,k=3,s=2,p=1)"));
}

TEST(BlockValue, WhatTheTextCannotSayDoesNotMakeBlocksDiffer) {
  EXPECT_EQ(Block({Pointwise{Op::relu, 5.0, 6.0}}), Block::parse("relu"));
  EXPECT_EQ(Block({Norm{Norm::Kind::instance, 7, 1e-5, false}}), Block::parse("instance_norm"));
}

TEST(BlockValue, EqualBlocksHashEqualAndOthersDiffer) {
  const Block block = Block::parse("conv2d(3,8) | silu");
  EXPECT_EQ(block.hash(), Block::parse(" conv2d(3, 8, k=3)|swish").hash());
  EXPECT_NE(block, Block::parse("conv2d(3,8) | relu"));
  EXPECT_NE(block.hash(), Block::parse("conv2d(3,8) | relu").hash());
  EXPECT_EQ(std::hash<Block>{}(block), block.hash());
}

TEST(BlockValue, RolesAreFound) {
  const Block whole = Block::parse("conv2d(3,8) | relu | group_norm(2) | relu | mean");
  ASSERT_TRUE(whole.conv() && whole.norm());
  EXPECT_EQ(whole.conv()->out_channels, 8);
  EXPECT_EQ(whole.norm()->groups, 2);
  EXPECT_TRUE(whole.has_mean());
  const Block tail = Block::parse("relu");
  EXPECT_TRUE(!tail.conv() && !tail.norm() && !tail.has_mean());
}

TEST(BlockRefusal, NumbersOutOfRangeNameStageValueAndBound) {
  EXPECT_EQ(refusal_of("conv2d(3,16,k=0)"), "conv2d(3,16,k=0): k is 0, must be at least 1");
  EXPECT_EQ(refusal_of("conv2d(0,16)"), "conv2d(0,16,k=3): in is 0, must be at least 1");
  EXPECT_EQ(refusal_of("conv2d(3,-1)"), "conv2d(3,-1,k=3): out is -1, must be at least 1");
  EXPECT_EQ(refusal_of("conv2d(3,16,s=2x0)"), "conv2d(3,16,k=3,s=2x0): s is 2x0, must be at least 1");
  EXPECT_EQ(refusal_of("conv2d(3,16,p=-1)"), "conv2d(3,16,k=3,p=-1): p is -1, must be at least 0");
  EXPECT_EQ(refusal_of("conv2d(3,16,d=0)"), "conv2d(3,16,k=3,d=0): d is 0, must be at least 1");
  EXPECT_EQ(refusal_of("conv2d(3,16,groups=0)"),
            "conv2d(3,16,k=3,groups=0): groups is 0, must be at least 1");
  EXPECT_EQ(refusal_of("conv2d(3,2147483648)"),
            "conv2d(3,2147483648): out is 2147483648, must be at most 2147483647");
  EXPECT_EQ(refusal_of("conv1d(3,9,k=99999999999999999999)"),
            "conv1d(3,9,k=99999999999999999999): k is 99999999999999999999, must be at most 2147483647");
  EXPECT_EQ(refusal_of("group_norm(0)"), "group_norm(0): groups is 0, must be at least 1");
  EXPECT_EQ(refusal_of("group_norm(2,eps=-1)"),
            "group_norm(2,eps=-1): eps is -1, must be finite and at least 0");
  EXPECT_EQ(refusal_of("conv1d(1,1,k=65536,d=65536)"),
            "conv1d(1,1,k=65536,d=65536): k and d span 4294901761 elements, must be at most 2147483647");
}

TEST(BlockRefusal, NumbersThatAreNoneNameTheirKey) {
  EXPECT_EQ(refusal_of("conv2d(3,16,k=3.5)"), "conv2d(3,16,k=3.5): k is 3.5, must be a whole number");
  EXPECT_EQ(refusal_of("conv2d(a,16)"), "conv2d(a,16): in is a, must be a whole number");
  EXPECT_EQ(refusal_of("conv2d(3,16,k=3x3x3)"),
            "conv2d(3,16,k=3x3x3): k is 3x3x3, must be one number or 2 joined by x");
  EXPECT_EQ(refusal_of("conv1d(3,16,k=3x3)"), "conv1d(3,16,k=3x3): k is 3x3, must be one number");
  EXPECT_EQ(refusal_of("conv2d(3,16,k=3x)"), "conv2d(3,16,k=3x): k is , must be a whole number");
  EXPECT_EQ(refusal_of("mul(inf)"), "mul(inf): the constant is inf, must be a finite number");
  EXPECT_EQ(refusal_of("mul(1e999)"), "mul(1e999): the constant is 1e999, must be a finite number");
  EXPECT_EQ(refusal_of("group_norm(1,eps=nan)"),
            "group_norm(1,eps=nan): eps is nan, must be a finite number");
  EXPECT_EQ(refusal_of("mul(inf)"), "mul(inf): the constant is inf, must be a finite number");
  EXPECT_EQ(refusal_of("clamp(0,nan)"), "clamp(0,nan): the limit is nan, must be a number, inf or -inf");
  EXPECT_EQ(refusal_of("clamp(0,1e400)"),
            "clamp(0,1e400): the limit is 1e400, must be a number, inf or -inf");
  EXPECT_EQ(refusal_of("hardtanh(2,-1)"),
            "hardtanh(2,-1): the lower limit is 2, must be at most the upper limit -1");
  EXPECT_EQ(refusal_of("conv2d(3,8,bias=1)"), "conv2d(3,8,bias=1): bias is 1, must be true or false");
  EXPECT_EQ(refusal_of("prelu(per=sample)"), "prelu(per=sample): per is sample, must be tensor or channel");
  EXPECT_EQ(refusal_of("channel_mul(per=tensor)"),
            "channel_mul(per=tensor): per is tensor, must be channel or sample");
}

TEST(BlockRefusal, ArgumentsThatTheStageDoesNotTake) {
  EXPECT_EQ(refusal_of("conv2d(3,8,kernel=3)"),
            "conv2d(3,8,kernel=3): unknown key 'kernel', accepted are k, s, p, d, groups, op and bias");
  EXPECT_EQ(refusal_of("conv2d(3)"),
            "conv2d(3): 1 value without a name, must be 2: write "
            "conv2d(in,out,k=3,s=1,p=0,d=1,groups=1,op=0,bias=true)");
  EXPECT_EQ(refusal_of("clamp(1)"),
            "clamp(1): 1 value without a name, must be 2: write clamp(number,number)");
  EXPECT_EQ(refusal_of("leaky_relu(1,2)"),
            "leaky_relu(1,2): 2 values without a name, must be 0 to 1: write leaky_relu(0.01)");
  EXPECT_EQ(refusal_of("relu(1)"), "relu(1): 1 value without a name, must be 0: write relu");
  EXPECT_EQ(refusal_of("relu(a=1)"), "relu(a=1): unknown key 'a', write relu");
  EXPECT_EQ(refusal_of("conv2d(3,8,k=3,k=5)"), "conv2d(3,8,k=3,k=5): k is given twice");
  EXPECT_EQ(refusal_of("group_norm(eps=1,4)"),
            "group_norm(eps=1,4): '4' must come before the arguments with a name");
}

TEST(BlockRefusal, BrokenSyntax) {
  EXPECT_EQ(refusal_of("conv2d(3,8"), "conv2d(3,8: the closing parenthesis is missing");
  EXPECT_EQ(refusal_of("conv2d(3,8) relu"), "conv2d(3,8) relu: after ')' must come '|' or the end");
  EXPECT_EQ(refusal_of("conv2d((3,8)"), "conv2d((3,8): parentheses must not nest");
  EXPECT_EQ(refusal_of("(3)"), "(3): the name is missing");
  EXPECT_EQ(refusal_of("relu |"), "a stage is empty, a name must stand between '|'");
  EXPECT_EQ(refusal_of("conv2d(3,8,)"), "conv2d(3,8,): an argument is empty");
  EXPECT_EQ(refusal_of("conv2d(3,8,k=)"), "conv2d(3,8,k=): 'k=' must be a key and a value");
  EXPECT_EQ(refusal_of(" "), "a block needs at least one stage, as in \"conv2d(3,8) | relu\"");
}

TEST(BlockRefusal, UnknownStageNamesItsNeighboursOrAll) {
  EXPECT_EQ(refusal_of("conv4d(3,8)"), "unknown stage 'conv4d', nearest in name: conv1d, conv2d and conv3d");
  EXPECT_EQ(refusal_of("Relu"), "unknown stage 'Relu', nearest in name: relu, elu and gelu");
  const std::string all = refusal_of("batch_normalisation");
  EXPECT_TRUE(all.starts_with("unknown stage 'batch_normalisation', accepted are conv1d, ")) << all;
  EXPECT_TRUE(all.ends_with(", residual_add and silu")) << all;
}

TEST(BlockRefusal, StagesOutOfOrder) {
  EXPECT_EQ(refusal_of("mean | relu"), "mean must be the last stage: relu follows it");
  EXPECT_EQ(refusal_of("mean | mean"), "mean must be the last stage: mean follows it");
  EXPECT_EQ(refusal_of("relu | conv2d(3,8)"), "conv2d must be the first stage: relu precedes it");
  EXPECT_EQ(refusal_of("conv2d(3,8) | conv2d(8,8)"),
            "a block has at most one convolution: conv2d(8,8,k=3) follows conv2d(3,8,k=3)");
  EXPECT_EQ(refusal_of("group_norm(2) | relu | instance_norm"),
            "a block has at most one norm: instance_norm follows group_norm(2)");
}

TEST(BlockRefusal, ChannelsThatGroupsDoNotDivide) {
  EXPECT_EQ(refusal_of("conv2d(3,16) | group_norm(5)"),
            "group_norm(5): 16 channels are not divisible into 5 groups");
  EXPECT_EQ(refusal_of("conv2d(3,16,groups=2)"),
            "conv2d(3,16,k=3,groups=2): 3 input channels are not divisible into 2 groups");
  EXPECT_EQ(refusal_of("conv2d(4,9,groups=2)"),
            "conv2d(4,9,k=3,groups=2): 9 output channels are not divisible into 2 groups");
  EXPECT_EQ(refusal_of("group_norm(5)"), "accepted");
  EXPECT_EQ(refusal_of("group_norm(5)", {2, 16, 4}),
            "group_norm(5): 16 channels are not divisible into 5 groups");
}

TEST(BlockRefusal, PaddingThatTheConvolutionCannotHave) {
  EXPECT_EQ(refusal_of("conv2d(3,8,s=2x1,p=same)"),
            "conv2d(3,8,s=2x1,p=same): p is same, which needs stride 1: s is 2x1");
  EXPECT_EQ(refusal_of("conv_transpose2d(3,8,p=same)"),
            "conv_transpose2d(3,8,p=same): p is same, must be a number for a transposed convolution");
  EXPECT_EQ(refusal_of("conv2d(3,8,s=2,op=1)"),
            "conv2d(3,8,k=3,s=2,op=1): op is 1, must be 0: only a transposed convolution has output padding");
  EXPECT_EQ(refusal_of("conv_transpose2d(3,8,s=2x3,op=2)"),
            "conv_transpose2d(3,8,k=3,s=2x3,op=2): op is 2, must be less than the stride or the dilation");
  EXPECT_EQ(refusal_of("conv_transpose2d(3,8,s=1,d=3,op=2)"), "accepted");
  Conv conv;
  conv.kernel = {4, 4, 1};
  conv.padding_after = {1, 0, 0};
  EXPECT_EQ(
      refusal([&] { Block({conv}); }),
      "conv2d(1,1,k=4,p=same): padding before is 0 and after 1x0, may differ only as p=same of an ordinary "
      "convolution of stride 1");
}

TEST(BlockRefusal, StagesBuiltInCodeThatMeanNothing) {
  Conv conv;
  conv.rank = 4;
  EXPECT_EQ(refusal([&] { Block({conv}); }), "a convolution of rank 4: must be 1, 2 or 3");
  conv.rank = 2;
  conv.kernel = {std::numeric_limits<int64_t>::max(), 1, 1};
  EXPECT_NE(refusal([&] { Block({conv}); }).find("must be at most 2147483647"), std::string::npos);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(refusal([&] { Block({Pointwise{Op::mul, nan}}); }), "mul(nan): the constant nan must be finite");
  EXPECT_EQ(refusal([&] {
              Block({Pointwise{Op::clamp, 0, nan}});
            }),
            "clamp(0,nan): the limit is nan, must be a number, inf or -inf");
  EXPECT_EQ(refusal([&] {
              Block({Norm{Norm::Kind::group, 1, nan, true}});
            }),
            "group_norm(1,eps=nan): eps is nan, must be finite and at least 0");
  EXPECT_EQ(refusal([&] { Block({Pointwise{Op::channel_mul}}); }),
            "channel_mul(per=tensor): per is tensor, must be channel or sample");
  EXPECT_EQ(refusal([&] {
              Block({Pointwise{Op::relu, 0, 0, Per::channel}});
            }),
            "relu(per=channel): per is channel, must be tensor (it takes no vector)");
}

TEST(BlockRefusal, TextsAndListsWithoutBound) {
  EXPECT_EQ(refusal_of(std::string(70000, ' ')), "a block text of 70000 bytes: must be at most 65536");
  std::string stages = "relu";
  for (int i = 0; i < 256; ++i) stages += "|relu";
  EXPECT_EQ(refusal_of(stages), "a block of 257 stages: must be at most 256");
  EXPECT_LT(refusal_of(std::string(60000, 'z')).size(), 1000u);
}

TEST(BlockShape, OutputSizesArePyTorchs) {
  EXPECT_EQ(output_of("conv3d(3,16,k=4)", {128, 3, 16, 32, 32}), (Shape{128, 16, 13, 29, 29}));
  EXPECT_EQ(output_of("conv2d(3,8,k=3,s=2,p=1)", {1, 3, 10, 9}), (Shape{1, 8, 5, 5}));
  EXPECT_EQ(output_of("conv1d(3,8,k=3,d=4,s=3,p=2)", {5, 3, 20}), (Shape{5, 8, 6}));
  EXPECT_EQ(output_of("conv_transpose3d(3,16,k=3,s=2,p=1)", {128, 3, 16, 32, 32}),
            (Shape{128, 16, 31, 63, 63}));
  EXPECT_EQ(output_of("conv_transpose2d(3,8,k=3x4,s=2,p=1x0,d=2x1,op=1x0)", {2, 3, 5, 6}),
            (Shape{2, 8, 12, 14}));
  EXPECT_EQ(output_of("conv2d(3,8,k=3) | relu | mean", {4, 3, 9, 9}), (Shape{4, 8}));
  EXPECT_EQ(output_of("relu", {4, 3}), (Shape{4, 3}));
  EXPECT_EQ(Block::parse("conv2d(3,8) | mean").conv_output_shape({4, 3, 9, 9}), (Shape{4, 8, 7, 7}));
  EXPECT_EQ(Block::parse("relu | mean").conv_output_shape({4, 3, 9, 9}), (Shape{4, 3, 9, 9}));
}

TEST(BlockShape, EmptyBatchIsAccepted) {
  EXPECT_EQ(output_of("conv2d(3,8) | group_norm(2) | mean", {0, 3, 9, 9}), (Shape{0, 8}));
}

TEST(BlockShape, InputsTheBlockCannotTake) {
  EXPECT_EQ(refusal_of("conv2d(3,8)", {3, 9, 9}),
            "conv2d(3,8,k=3): the input 3x9x9 has 3 dimensions, must have 4: batch, channels and 2 of space");
  EXPECT_EQ(refusal_of("conv2d(3,8)", {1, 4, 9, 9}),
            "conv2d(3,8,k=3): the input 1x4x9x9 has 4 channels, must have 3");
  EXPECT_EQ(refusal_of("relu", {7}),
            "relu: the input 7 has 1 dimensions, must have 2 to 5: batch, channels and space");
  EXPECT_EQ(refusal_of("relu | mean", {2, 7}),
            "mean: the input 2x7 has no spatial dimension, must have at least one");
  EXPECT_EQ(refusal_of("relu", {2, 0, 4}),
            "relu: the input 2x0x4 has size 0 in dimension 1, must be 1 to 2147483647");
  EXPECT_EQ(refusal_of("relu", {-1, 2, 4}),
            "relu: the input -1x2x4 has size -1 in dimension 0, must be 0 to 2147483647");
  EXPECT_EQ(refusal_of("relu", {2147483647, 2147483647, 2147483647}),
            "shape 2147483647x2147483647x2147483647 has more than 2^63-1 elements");
}

TEST(BlockShape, EmptyOutputSaysWhichDimensionAndWhy) {
  EXPECT_EQ(
      refusal_of("conv2d(3,8,k=5,p=0x1)", {1, 3, 9, 2}),
      "conv2d(3,8,k=5,p=0x1): the output is empty in spatial dimension 1: the padded input has 4 elements, "
      "the kernel spans 5");
  EXPECT_EQ(refusal_of("conv_transpose1d(3,8,k=3,p=2)", {1, 3, 1}),
            "conv_transpose1d(3,8,k=3,p=2): the output is empty in spatial dimension 0: the padding cuts off "
            "4 of 3 "
            "elements (input 1, kernel span 3)");
}

TEST(BlockShape, OutputTooLargeIsRefused) {
  EXPECT_EQ(refusal_of("conv_transpose1d(1,1,k=1,s=2147483647)", {1, 1, 2147483647}),
            "conv_transpose1d(1,1,k=1,s=2147483647): the output has size 4611686011984936963 in spatial "
            "dimension 0, "
            "must be at most 2147483647");
}

TEST(BlockParameters, AreListedInOrderOfStagesWithPyTorchsShapes) {
  const Block block = Block::parse(
      "conv2d(4,8,k=3x5,groups=2) | prelu | channel_mul | group_norm(2) | prelu(per=channel) | "
      "channel_add(per=sample) | residual_add | residual_add | mean");
  using Role = Parameter::Role;
  const std::vector<Parameter> expected{{"conv_weight", Role::conv_weight, 0, {8, 2, 3, 5}},
                                        {"conv_bias", Role::conv_bias, 0, {8}},
                                        {"prelu", Role::operand, 1, {1}},
                                        {"channel_mul", Role::operand, 2, {8}},
                                        {"norm_weight", Role::norm_weight, 3, {8}},
                                        {"norm_bias", Role::norm_bias, 3, {8}},
                                        {"prelu_2", Role::operand, 4, {8}},
                                        {"channel_add", Role::operand, 5, {6, 8}},
                                        {"residual_add", Role::operand, 6, {6, 8, 7, 5}},
                                        {"residual_add_2", Role::operand, 7, {6, 8, 7, 5}}};
  EXPECT_EQ(block.parameters({6, 4, 9, 9}), expected);
}

TEST(BlockParameters, TransposedWeightHasInputChannelsFirst) {
  const auto parameters =
      Block::parse("conv_transpose3d(4,6,k=3,groups=2,bias=false)").parameters({1, 4, 2, 2, 2});
  ASSERT_EQ(parameters.size(), 1u);
  EXPECT_EQ(parameters[0].sizes, (Shape{4, 3, 3, 3, 3}));
}

TEST(BlockParameters, NormWithoutAffineHasNone) {
  EXPECT_TRUE(Block::parse("instance_norm | relu").parameters({2, 3, 4}).empty());
  EXPECT_EQ(Block::parse("instance_norm(affine=true)").parameters({2, 3, 4}).size(), 2u);
  EXPECT_NE(refusal([] { Block::parse("group_norm(2)").parameters({2, 3, 4}); }), "accepted");
}

}  // namespace
}  // namespace onepass
