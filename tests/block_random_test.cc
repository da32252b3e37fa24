// Random blocks and randomly damaged texts: what parses prints canonically, the rest is refused in a
// sentence. ONEPASS_SEED chooses another seed; each test prints the one it ran with.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <random>

#include "block_properties.h"

namespace onepass {
namespace {

uint64_t chosen_seed() {
  const char* text = std::getenv("ONEPASS_SEED");
  return text ? std::strtoull(text, nullptr, 10) : 20240607;
}

// The same numbers on every platform: the standard's distributions are not.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool coin() { return between(0, 1) == 1; }

  template <class Choices>
  auto one_of(const Choices& choices) {
    return choices[static_cast<size_t>(between(0, static_cast<int64_t>(std::size(choices)) - 1))];
  }

  // Any finite double: all bit patterns are equally likely.
  double real() {
    while (true) {
      const double value = std::bit_cast<double>(engine_());
      if (std::isfinite(value)) return value;
    }
  }
  double constant() {
    constexpr std::array<double, 6> usual{0.0, -0.0, 1.0, 0.01, -2.5, 1e-5};
    return coin() ? one_of(usual) : real();
  }

 private:
  std::mt19937_64 engine_;
};

void add_padding(Random& random, Conv& conv) {
  const bool same = !conv.transposed && conv.stride == Extents{1, 1, 1} && random.coin();
  for (size_t d = 0; d < static_cast<size_t>(conv.rank); ++d) {
    const int64_t total = conv.dilation[d] * (conv.kernel[d] - 1);
    conv.padding_before[d] = same ? total / 2 : random.between(0, 3);
    conv.padding_after[d] = same ? total - total / 2 : conv.padding_before[d];
    if (!conv.transposed) continue;
    conv.output_padding[d] = random.between(0, std::max(conv.stride[d], conv.dilation[d]) - 1);
  }
}

Conv random_conv(Random& random) {
  Conv conv;
  conv.rank = static_cast<int>(random.between(1, 3));
  conv.transposed = random.coin();
  conv.groups = random.between(1, 4);
  conv.in_channels = conv.groups * random.between(1, 5);
  conv.out_channels = conv.groups * random.between(1, 5);
  conv.bias = random.coin();
  const bool strided = random.coin();
  for (size_t d = 0; d < static_cast<size_t>(conv.rank); ++d) {
    conv.kernel[d] = random.between(1, 5);
    conv.stride[d] = strided ? random.between(1, 4) : 1;
    conv.dilation[d] = random.coin() ? 1 : random.between(1, 3);
  }
  add_padding(random, conv);
  return conv;
}

Pointwise random_pointwise(Random& random) {
  Pointwise pointwise;
  pointwise.op = static_cast<Op>(random.between(0, op_count - 1));
  if (constant_count(pointwise.op) > 0) pointwise.a = random.constant();
  if (constant_count(pointwise.op) > 1) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    pointwise.b = random.between(0, 3) == 0 ? infinity : random.constant();
    if (random.between(0, 3) == 0) pointwise.a = -infinity;
    if (pointwise.op == Op::hardtanh) pointwise.b = std::max(pointwise.a, pointwise.b);
  }
  const ArgumentKind kind = argument_kind(pointwise.op);
  if (kind == ArgumentKind::slope) pointwise.per = random.coin() ? Per::tensor : Per::channel;
  if (kind == ArgumentKind::channel) pointwise.per = random.coin() ? Per::channel : Per::sample;
  return pointwise;
}

Norm random_norm(Random& random, int64_t channels) {
  Norm norm;
  norm.kind = random.coin() ? Norm::Kind::group : Norm::Kind::instance;
  norm.affine = random.coin();
  norm.groups = random.coin() ? 1 : channels;
  if (random.coin()) norm.eps = std::abs(random.constant());
  return norm;
}

Block random_block(Random& random) {
  std::vector<Stage> stages;
  int64_t channels = random.between(1, 8);
  const auto add_pointwise = [&] {
    for (int64_t i = random.between(0, 3); i > 0; --i) stages.emplace_back(random_pointwise(random));
  };
  if (random.coin()) {
    const Conv conv = random_conv(random);
    channels = conv.out_channels;
    stages.emplace_back(conv);
  }
  add_pointwise();
  if (random.coin()) {
    stages.emplace_back(random_norm(random, channels));
    add_pointwise();
  }
  if (stages.empty() || random.coin()) stages.emplace_back(Mean{});
  return Block(std::move(stages));
}

// Sizes that most blocks take; the rest are refused, for an empty output or channels that do not divide.
Shape random_input(Random& random, const Block& block) {
  const Conv* conv = block.conv();
  const int64_t rank = conv ? conv->rank : random.between(0, max_spatial_rank);
  const int64_t free_channels = block.norm() ? block.norm()->groups : random.between(1, 8);
  Shape sizes{random.between(0, 3), conv ? conv->in_channels : free_channels};
  for (int64_t d = 0; d < rank; ++d) sizes.push_back(random.between(1, 12));
  return sizes;
}

DType random_dtype(Random& random) {
  return random.one_of(std::array{DType::f32, DType::f16, DType::bf16, DType::f64});
}

// Some of these are refused: strict tf32, precisions of what is no f32 convolution.
void set_random_numerics(Random& random, Problem& problem) {
  if (random.coin()) return;
  problem.device = Device::cuda_architecture("sm_90a");
  problem.precision =
      random.one_of(std::array{Precision::f32, Precision::tf32, Precision::near_f32, Precision::tf32_away});
  problem.numerics = random.one_of(std::array{Numerics::pytorch, Numerics::strict, Numerics::fast});
  problem.validate();
}

Layout random_layout(Random& random) { return random.coin() ? Layout::nchw : Layout::nhwc; }

std::string damaged(Random& random, std::string text) {
  constexpr std::string_view letters = "()|,=x@.-+e 0123456789abcdefgklmnoprstu_\t\n";
  constexpr std::array<std::string_view, 16> pieces{"same",         "per=sample",
                                                    "p=same",       "k=",
                                                    "999999999999", "2147483647",
                                                    "1e400",        "group_norm",
                                                    "nan",          "mean",
                                                    " | ",          "conv_transpose3d",
                                                    "-0",           "@ 2x3x9x9 bf16 nhwc",
                                                    " tf32 fast",   " near_f32 strict"};
  for (int64_t edits = random.between(1, 4); edits > 0; --edits) {
    const auto at = static_cast<size_t>(random.between(0, static_cast<int64_t>(text.size())));
    switch (random.between(0, 4)) {
      case 0:
        text.insert(at, 1, random.one_of(letters));
        break;
      case 1:
        text.insert(at, random.one_of(pieces));
        break;
      case 2:
        text.erase(at, static_cast<size_t>(random.between(1, 6)));
        break;
      case 3:
        text.insert(at, 1, static_cast<char>(random.between(-128, 127)));
        break;
      default:
        if (at < text.size()) text[at] = random.one_of(letters);
    }
  }
  return text;
}

TEST(RandomBlock, ValidBlockComesBackFromItsText) {
  const uint64_t seed = chosen_seed();
  std::cout << "ONEPASS_SEED=" << seed << '\n';
  Random random(seed);
  for (int i = 0; i < 5000; ++i) ASSERT_EQ(broken_round_trip(random_block(random)), "");
}

TEST(RandomBlock, ValidProblemComesBackFromItsText) {
  const uint64_t seed = chosen_seed();
  std::cout << "ONEPASS_SEED=" << seed << '\n';
  Random random(seed);
  int accepted = 0;
  for (int i = 0; i < 3000; ++i) {
    const Block block = random_block(random);
    const Shape sizes = random_input(random, block);
    try {
      Problem problem(block, sizes, random_dtype(random), Device::cpu(), random_layout(random));
      set_random_numerics(random, problem);
      ++accepted;
      ASSERT_EQ(broken_round_trip(problem), "");
      ASSERT_GE(problem.conv_multiply_adds(), 0);
    } catch (const Error& error) {
      ASSERT_EQ(broken_refusal(error), "");
    }
  }
  EXPECT_GT(accepted, 1000);
}

TEST(RandomBlock, DamagedTextNeitherCrashesNorPrintsAnotherBlock) {
  const uint64_t seed = chosen_seed();
  std::cout << "ONEPASS_SEED=" << seed << '\n';
  Random random(seed);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::string text = damaged(random, random_block(random).text());
    ASSERT_EQ(broken_property(text), "") << text;
    try {
      Block::parse(text);
      ++accepted;
    } catch (const Error&) {
    }
  }
  // A test that only ever sees refusals would check nothing about round trips.
  EXPECT_GT(accepted, 200);
}

}  // namespace
}  // namespace onepass
