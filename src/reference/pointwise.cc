// The formulas of pointwise.def compiled for double.
#include <cmath>

#include "reference/reference.h"

namespace onepass::reference {
namespace {

using std::exp;
using std::expm1;
using std::log1p;
using std::tanh;

constexpr double K(double number) { return number; }
// NaN in the first operand comes out: comparisons with it are false.
double minimum(double x, double limit) { return x > limit ? limit : x; }
double maximum(double x, double limit) { return x < limit ? limit : x; }
double where_positive(double t, double yes, double no) { return t > 0 ? yes : no; }
double where_at_most(double t, double limit, double yes, double no) { return t <= limit ? yes : no; }
double where_below(double t, double limit, double yes, double no) { return t < limit ? yes : no; }
double sigmoid(double x) { return 1 / (1 + exp(-x)); }
double ramp(double x) { return minimum(maximum(x + 3, 0), 6) / 6; }
double normal_density(double x) { return 0.39894228040143267794 * exp(-0.5 * x * x); }
double normal_cdf(double x) { return 0.5 * (1 + std::erf(x * 0.70710678118654752440)); }

}  // namespace

double pointwise_value(const Pointwise& pointwise, double x, [[maybe_unused]] double p) {
  const double a = pointwise.a;
  const double b = pointwise.b;
  switch (pointwise.op) {
#define ONEPASS_POINTWISE(name, constants, a_default, b_default, argument, value, ...) \
  case Op::name:                                                                       \
    return value;
#include "onepass/pointwise.def"
#undef ONEPASS_POINTWISE
  }
  return x;
}

PointwiseGradient pointwise_gradient(const Pointwise& pointwise, double x, [[maybe_unused]] double p,
                                     double g) {
  const double a = pointwise.a;
  const double b = pointwise.b;
  switch (pointwise.op) {
#define ONEPASS_POINTWISE(name, constants, a_default, b_default, argument, value, gradient, \
                          argument_gradient)                                                \
  case Op::name:                                                                            \
    return {gradient, argument_gradient};
#include "onepass/pointwise.def"
#undef ONEPASS_POINTWISE
  }
  return {};
}

}  // namespace onepass::reference
