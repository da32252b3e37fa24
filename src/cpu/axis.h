// One spatial dimension of a convolution, ordinary or transposed, as a set of dense ones.
//
// An ordinary convolution reads input i = o * stride - padding + k * dilation. A transposed one of stride s
// is s ordinary ones of step 1, its classes. Output o = r + s * j of class r meets only taps k with (r +
// padding - k * dilation) divisible by s. The input is i = j + (r + padding - k * dilation) / s. Both are
//   i = j * step + offset(tap),   o = r + classes * j
// so that no tap is ever multiplied with an inserted zero.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "onepass/block.h"

namespace onepass::cpu {

struct Tap {
  int64_t k = 0;       // index into the kernel
  int64_t offset = 0;  // of the input position it meets at j = 0
};

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

struct Axis {
  int64_t in = 1, out = 1;
  int64_t kernel = 1, stride = 1, padding = 0, dilation = 1;
  bool transposed = false;

  int64_t classes() const { return transposed ? (stride < out ? stride : out) : 1; }
  // Outputs of one class are this far apart; beyond `out` where there are fewer outputs than the stride.
  int64_t class_stride() const { return transposed ? stride : 1; }
  int64_t step() const { return transposed ? 1 : stride; }
  std::vector<Tap> taps(int64_t output_class) const;
  // The input positions that outputs [o.begin, o.end) can meet, padding included; outputs begin at a multiple
  // of class_stride() + class.
  Range window(Range o) const;
  // Outputs times the taps they meet; `inside`: those that meet the input alone.
  int64_t products(bool inside) const;
  // Output o reads input o alone.
  bool is_identity() const { return kernel == 1 && stride == 1 && padding == 0 && in == out; }
};

// Depth, height and width; the first ones of fewer dimensions are single positions.
std::array<Axis, 3> make_axes(const Conv& conv, const Shape& input, const Shape& output);

// Part `i` of `count` parts of [0, size) that differ by at most one.
inline Range even_part(int64_t size, int64_t count, int64_t i) {
  const int64_t small = size / count;
  const int64_t large_count = size % count;
  const int64_t begin = i * small + (i < large_count ? i : large_count);
  return {begin, begin + small + (i < large_count ? 1 : 0)};
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace onepass::cpu
