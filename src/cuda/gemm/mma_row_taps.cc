// Taps along x as rows of a product instead of terms.
#include "cuda/gemm/mma_row_taps.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <sstream>

namespace onepass::cuda {

RowTaps::RowTaps(const ThinAxis& x) {
  // A transposed convolution has step 1. Every period-th tap moves by whole columns: with a stride the taps
  // between them stay terms.
  const int64_t period = x.step / std::gcd(x.step, std::abs(x.delta));
  outputs = std::ssize(x.classes);
  axis = x;
  axis.classes.assign(1, {0, 0, std::min(period, x.kernel), 0});
  axis.tap_step = 1;
  taps.resize(static_cast<size_t>(divide_up(x.kernel, period)));
  int64_t low = 0, high = 0;
  bool is_first = true;
  const auto each = [&](const auto& take) {
    for (int64_t r = 0; r < outputs; ++r) {
      const ThinAxis::Class& own = x.classes[static_cast<size_t>(r)];
      for (int64_t m = 0; m < own.count; m += period)
        take(taps[static_cast<size_t>((own.first + m * x.tap_step) / period)], r, own.base + m * x.delta);
    }
  };
  each([&](Tap&, int64_t, int64_t place) {
    low = is_first ? place : std::min(low, place);
    high = is_first ? place : std::max(high, place);
    is_first = false;
  });
  each([&](Tap& tap, int64_t r, int64_t place) { tap = {r, (place - low) / x.step}; });
  halo = (high - low) / x.step;
  axis.classes[0].base = low;
  for (const ThinAxis::Class& own : x.classes)
    axis.classes[0].positions = std::max(axis.classes[0].positions, own.positions);
  axis.delta = std::abs(x.delta);  // of taps that stay terms
}

RowTaps RowTaps::aligned(int64_t run) const {
  RowTaps other = *this;
  int64_t& base = other.axis.classes[0].base;
  const int64_t before = (base % run + run) % run;
  base -= before;
  for (Tap& tap : other.taps) tap.shift += before;
  other.halo = round_up(halo + before, run);
  return other;
}

ThinShape RowTaps::product(const ThinShape& shape) const {
  ThinShape other = shape;
  if (!taps.empty()) other.axes[2] = axis;
  return other;
}

std::string RowTaps::source() const {
  const auto table = [&](const char* name, int64_t Tap::*member) {
    std::ostringstream out;
    out << "  static constexpr __device__ int " << name << "(int a) { return ";
    for (size_t a = 0; a < taps.size(); ++a) out << "a == " << a << " ? " << taps[a].*member << " : ";
    out << "0; }\n";
    return out.str();
  };
  return table("tap_output", &Tap::output) + table("tap_shift", &Tap::shift);
}

}  // namespace onepass::cuda
