// Taps and windows of one spatial dimension of a convolution.
#include "cpu/axis.h"

#include <algorithm>

namespace onepass::cpu {
namespace {

int64_t floor_div(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return quotient * b > a ? quotient - 1 : quotient;
}

int64_t round_up_div(int64_t a, int64_t b) { return -floor_div(-a, b); }

}  // namespace

std::array<Axis, 3> make_axes(const Conv& conv, const Shape& input, const Shape& output) {
  std::array<Axis, 3> axes;
  const auto rank = static_cast<size_t>(conv.rank);
  for (size_t i = 0; i < rank; ++i) {
    Axis& axis = axes[3 - rank + i];
    axis.in = input[2 + i];
    axis.out = output[2 + i];
    axis.kernel = conv.kernel[i];
    axis.stride = conv.stride[i];
    axis.padding = conv.padding_before[i];
    axis.dilation = conv.dilation[i];
    axis.transposed = conv.transposed;
  }
  return axes;
}

std::vector<Tap> Axis::taps(int64_t output_class) const {
  std::vector<Tap> result;
  for (int64_t k = 0; k < kernel; ++k) {
    if (!transposed) {
      result.push_back({k, k * dilation - padding});
      continue;
    }
    const int64_t distance = output_class + padding - k * dilation;
    if (distance % stride == 0) result.push_back({k, distance / stride});
  }
  return result;
}

int64_t Axis::products(bool inside) const {
  int64_t count = 0;
  for (int64_t c = 0; c < classes(); ++c) {
    const int64_t outputs = ceil_div(out - c, class_stride());
    for (const Tap& tap : taps(c)) {
      // Output j of the class meets position j * step + offset.
      const int64_t first = inside ? std::clamp<int64_t>(round_up_div(-tap.offset, step()), 0, outputs) : 0;
      const int64_t end =
          inside ? std::clamp<int64_t>(round_up_div(in - tap.offset, step()), 0, outputs) : outputs;
      count += std::max<int64_t>(0, end - first);
    }
  }
  return count;
}

Range Axis::window(Range o) const {
  const int64_t span = (kernel - 1) * dilation;
  if (!transposed) return {o.begin * stride - padding, (o.end - 1) * stride - padding + span + 1};
  return {round_up_div(o.begin + padding - span, stride), floor_div(o.end - 1 + padding, stride) + 1};
}

}  // namespace onepass::cpu
