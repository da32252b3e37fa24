// Compares the vector math of src/cpu/math-inl.h with the double functions of <cmath> on every target the
// machine runs: over every 251st float (one second), over all of them with ONEPASS_EXHAUSTIVE=1 (minutes).
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/math_test.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstddef>

#include "cpu/math-inl.h"

#ifndef ONEPASS_MATH_TEST_FUNCTIONS
#define ONEPASS_MATH_TEST_FUNCTIONS
namespace onepass {

enum class Function {
  exp,
  expm1,
  log1p,
  log1p_of_exp,
  tanh,
  erf,
  sigmoid,
  swish,
  small_sigmoid,
  small_swish,
  tiny_sigmoid,
  tiny_swish,
  gelu,
  minimum,
  maximum,
  where_positive,
};

}  // namespace onepass
#endif

HWY_BEFORE_NAMESPACE();
namespace onepass {
namespace HWY_NAMESPACE {

template <class V>
HWY_INLINE V value_of(Function function, V x) {
  switch (function) {
    case Function::exp:
      return exp(x);
    case Function::expm1:
      return expm1(x);
    case Function::log1p:
      return log1p(x);
    case Function::log1p_of_exp:
      return log1p(Exponential<V>{x});
    case Function::tanh:
      return tanh(x);
    case Function::erf:
      return erf(x);
    case Function::sigmoid:
      return sigmoid(x);
    case Function::swish:
      return x * deferred::sigmoid(x);
    case Function::small_sigmoid:
      return small::sigmoid(x);
    case Function::small_swish:
      return x * small::sigmoid(x);
    case Function::tiny_sigmoid:
      return tiny::sigmoid(x);
    case Function::tiny_swish:
      return x * tiny::sigmoid(x);
    case Function::gelu:
      return hn::Mul(x, normal_cdf(x));
    case Function::minimum:
      return minimum(x, constant<V>(1.0));
    case Function::maximum:
      return maximum(x, constant<V>(1.0));
    case Function::where_positive:
      return where_positive(x, constant<V>(2.0), constant<V>(3.0));
  }
  return x;
}

// count is a multiple of every target's vector.
void evaluate(Function function, const float* x, float* y, size_t count) {
  const hn::ScalableTag<float> d;
  for (size_t i = 0; i < count; i += hn::Lanes(d))
    hn::StoreU(value_of(function, hn::LoadU(d, x + i)), d, y + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "support/settings.h"

namespace onepass {
namespace {

HWY_EXPORT(evaluate);

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr uint64_t kFloats = uint64_t{1} << 32;
constexpr uint64_t kStride = 251;  // a prime, so that every pattern of low bits occurs
constexpr size_t kBatch = 1 << 12;

// The distance between the floats around y, the smallest denormal at least.
double ulp(double y) {
  if (y == 0.0) return 0x1p-149;
  return std::ldexp(1.0, std::max(std::ilogb(y) - 23, -149));
}

double sigmoid_of(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double swish_of(double x) { return x * sigmoid_of(x); }

// A function, its judge and the unit in which its error is measured.
struct Subject {
  Function function;
  const char* name;
  double (*judge)(double x);
  double (*unit)(double x, double y);
  const char* unit_name;
  double limit;
  float range = kInfinity;  // arguments beyond it are left out
};

double in_ulp(double, double y) { return ulp(y); }
double absolute(double, double) { return 1.0; }
double relative_to_argument(double x, double) { return std::max(1.0, std::fabs(x)); }

const Subject kSubjects[] = {
    {Function::exp, "exp", [](double x) { return std::exp(x); }, in_ulp, "ulp", 2.0},
    {Function::expm1, "expm1", [](double x) { return std::expm1(x); }, in_ulp, "ulp", 2.0},
    {Function::log1p, "log1p", [](double x) { return std::log1p(x); }, in_ulp, "ulp", 2.0},
    {Function::log1p_of_exp, "log(1 + e^x)",
     [](double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }, in_ulp, "ulp", 2.5},
    {Function::tanh, "tanh", [](double x) { return std::tanh(x); }, in_ulp, "ulp", 2.0},
    {Function::erf, "erf", [](double x) { return std::erf(x); }, in_ulp, "ulp", 2.0},
    {Function::sigmoid, "sigmoid", sigmoid_of, absolute, "absolute", 2e-7},
    {Function::swish, "swish", swish_of, relative_to_argument, "of max(1, |x|)", 2e-7},
    {Function::small_sigmoid, "sigmoid up to 2", sigmoid_of, absolute, "absolute", 2e-7, 2},
    {Function::small_swish, "swish up to 2", swish_of, relative_to_argument, "of max(1, |x|)", 2e-7, 2},
    {Function::tiny_sigmoid, "sigmoid up to 1", sigmoid_of, absolute, "absolute", 1.2e-7, 1},
    {Function::tiny_swish, "swish up to 1", swish_of, absolute, "absolute", 1.2e-7, 1},
    {Function::gelu, "gelu", [](double x) { return 0.5 * x * (1.0 + std::erf(x * std::sqrt(0.5))); },
     relative_to_argument, "of max(1, |x|)", 2e-7},
};

struct Worst {
  double error = 0.0;
  float x = 0.0f, y = 0.0f;
  double expected = 0.0;
};

double error_of(const Subject& subject, float x, float y, double expected) {
  if (std::isnan(expected)) return std::isnan(y) ? 0.0 : HUGE_VAL;
  const double rounded = static_cast<float>(expected);
  if (y == rounded) return 0.0;  // infinities, and what is too small for a denormal, included
  if (std::isnan(y) || std::isinf(expected)) return HUGE_VAL;
  const double got = std::isinf(y) ? std::copysign(0x1p128, y) : y;
  return std::fabs(got - expected) / subject.unit(x, expected);
}

// The floats whose bits are first, first + stride, ... below last.
Worst worst_of(const Subject& subject, uint64_t first, uint64_t last, uint64_t stride, bool progress) {
  Worst worst;
  std::vector<float> x(kBatch), y(kBatch);
  uint64_t batches = 0;
  for (uint64_t bits = first; bits < last;) {
    size_t count = 0;
    for (; count < kBatch && bits < last; bits += stride)
      x[count++] = std::bit_cast<float>(static_cast<uint32_t>(bits));
    std::fill(x.begin() + static_cast<std::ptrdiff_t>(count), x.end(), 0.0f);
    HWY_DYNAMIC_DISPATCH(evaluate)(subject.function, x.data(), y.data(), kBatch);
    for (size_t i = 0; i < count; ++i) {
      if (subject.range < kInfinity && !(std::fabs(x[i]) <= subject.range)) continue;
      const double expected = subject.judge(x[i]);
      const double error = error_of(subject, x[i], y[i], expected);
      if (error > worst.error) worst = {error, x[i], y[i], expected};
    }
    if (progress && ++batches % (1 << 14) == 0) {
      std::fprintf(stderr, "%s: %.0f%%\n", subject.name,
                   100.0 * static_cast<double>(bits - first) / static_cast<double>(last - first));
    }
  }
  return worst;
}

bool exhaustive() {
  const char* setting = std::getenv("ONEPASS_EXHAUSTIVE");
  return setting != nullptr && std::string(setting) == "1";
}

Worst worst_over_floats(const Subject& subject) {
  // Odd, for the same reason.
  const uint64_t stride = kFloats / static_cast<uint64_t>(testing::scaled(kFloats / kStride)) | 1;
  if (!exhaustive()) return worst_of(subject, 0, kFloats, stride, false);
  const uint64_t threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<Worst> worst(threads);
  std::vector<std::thread> pool;
  for (uint64_t i = 0; i < threads; ++i) {
    pool.emplace_back([&, i] { worst[i] = worst_of(subject, i, kFloats, threads, i == 0); });
  }
  for (std::thread& thread : pool) thread.join();
  return *std::max_element(worst.begin(), worst.end(),
                           [](const Worst& a, const Worst& b) { return a.error < b.error; });
}

float at(Function function, float x) {
  std::vector<float> xs(64, x), ys(64);
  HWY_DYNAMIC_DISPATCH(evaluate)(function, xs.data(), ys.data(), xs.size());
  return ys[0];
}

// Runs the test once for each compiled target that this machine has.
class MathTest : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

INSTANTIATE_TEST_SUITE_P(Targets, MathTest, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) { return std::string(hwy::TargetName(target.param)); });

TEST_P(MathTest, ErrorStaysWithinTheStatedLimits) {
  for (const Subject& subject : kSubjects) {
    const Worst worst = worst_over_floats(subject);
    std::ostringstream text;
    text.precision(9);
    text << subject.name << ": worst error " << worst.error << " " << subject.unit_name
         << " at x = " << worst.x << " (" << std::hexfloat << worst.x << std::defaultfloat << "): got "
         << worst.y << ", expected " << worst.expected;
    if (exhaustive()) std::printf("%s\n", text.str().c_str());
    EXPECT_LE(worst.error, subject.limit) << text.str();
  }
}

TEST_P(MathTest, InfinitiesGiveTheLimits) {
  EXPECT_EQ(at(Function::exp, kInfinity), kInfinity);
  EXPECT_EQ(at(Function::exp, -kInfinity), 0.0f);
  EXPECT_EQ(at(Function::expm1, kInfinity), kInfinity);
  EXPECT_EQ(at(Function::expm1, -kInfinity), -1.0f);
  EXPECT_EQ(at(Function::log1p, kInfinity), kInfinity);
  EXPECT_EQ(at(Function::log1p, -1.0f), -kInfinity);
  EXPECT_TRUE(std::isnan(at(Function::log1p, -kInfinity)));
  EXPECT_TRUE(std::isnan(at(Function::log1p, std::nextafter(-1.0f, -2.0f))));
  EXPECT_EQ(at(Function::log1p_of_exp, kInfinity), kInfinity);
  EXPECT_EQ(at(Function::log1p_of_exp, -kInfinity), 0.0f);
  for (Function function : {Function::tanh, Function::erf}) {
    EXPECT_EQ(at(function, kInfinity), 1.0f);
    EXPECT_EQ(at(function, -kInfinity), -1.0f);
  }
  EXPECT_EQ(at(Function::sigmoid, kInfinity), 1.0f);
  EXPECT_EQ(at(Function::sigmoid, -kInfinity), 0.0f);
}

// PyTorch's swish and gelu are products, so -infinity gives -infinity * 0.
TEST_P(MathTest, ActivationsOfMinusInfinityAreNaN) {
  EXPECT_TRUE(std::isnan(at(Function::swish, -kInfinity)));
  EXPECT_TRUE(std::isnan(at(Function::gelu, -kInfinity)));
  EXPECT_EQ(at(Function::sigmoid, -105.0f), 0.0f);
  EXPECT_EQ(at(Function::gelu, -100.0f), 0.0f);
}

TEST_P(MathTest, NaNComesOut) {
  for (float nan : {kNaN, -kNaN}) {
    for (const Subject& subject : kSubjects)
      EXPECT_TRUE(std::isnan(at(subject.function, nan))) << subject.name;
    EXPECT_TRUE(std::isnan(at(Function::minimum, nan)));
    EXPECT_TRUE(std::isnan(at(Function::maximum, nan)));
    EXPECT_EQ(at(Function::where_positive, nan), 3.0f);
  }
}

TEST_P(MathTest, DenormalsAreNotFlushed) {
  for (float x : {0x1p-149f, -0x1p-149f, 0x1.8p-140f, -0x1.fffffcp-127f}) {
    EXPECT_EQ(at(Function::expm1, x), x);
    EXPECT_EQ(at(Function::log1p, x), x);
    EXPECT_EQ(at(Function::tanh, x), x);
    EXPECT_EQ(at(Function::erf, x), static_cast<float>(std::erf(static_cast<double>(x))));
    EXPECT_EQ(at(Function::exp, x), 1.0f);
  }
  EXPECT_EQ(at(Function::exp, -103.9f), 0x1p-149f);
  EXPECT_EQ(at(Function::exp, -104.0f), 0.0f);
}

TEST_P(MathTest, ExponentialsOverflowWhereTheyShould) {
  const float last = 88.72283172607421875f;  // the largest x with a finite e^x
  for (Function function : {Function::exp, Function::expm1}) {
    EXPECT_TRUE(std::isfinite(at(function, last)));
    EXPECT_EQ(at(function, std::nextafter(last, 100.0f)), kInfinity);
  }
}

TEST_P(MathTest, MinimumMaximumAndChoiceOfNumbers) {
  EXPECT_EQ(at(Function::minimum, 0.5f), 0.5f);
  EXPECT_EQ(at(Function::minimum, 2.0f), 1.0f);
  EXPECT_EQ(at(Function::maximum, 0.5f), 1.0f);
  EXPECT_EQ(at(Function::maximum, 2.0f), 2.0f);
  EXPECT_EQ(at(Function::minimum, kInfinity), 1.0f);
  EXPECT_EQ(at(Function::maximum, -kInfinity), 1.0f);
  EXPECT_EQ(at(Function::where_positive, 0x1p-149f), 2.0f);
  EXPECT_EQ(at(Function::where_positive, 0.0f), 3.0f);
  EXPECT_EQ(at(Function::where_positive, -1.0f), 3.0f);
}

}  // namespace
}  // namespace onepass

#endif  // HWY_ONCE
