// Loops and positions that the forward and the backward reference share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "reference/reference.h"

namespace onepass::reference {

inline size_t index_of(int64_t index) { return static_cast<size_t>(index); }

// Calls visit(position, its flat index) for each position of a spatial box, the last dimension fastest.
template <class Visit>
void for_each_position(const Extents& box, Visit&& visit) {
  int64_t index = 0;
  for (int64_t z = 0; z < box[0]; ++z)
    for (int64_t y = 0; y < box[1]; ++y)
      for (int64_t x = 0; x < box[2]; ++x) visit(Extents{z, y, x}, index++);
}

// The fine side is the input of a convolution and the output of a transposed one; the coarse side is the
// other. Tap k, applied at position q of the coarse side, lies at q * stride + k * dilation - padding of the
// fine side. Calls visit(first coarse, first fine, count) for each row of coarse positions whose tap lies
// inside. Coarse positions follow each other; fine ones are a stride apart.
template <class Visit>
void for_each_row_of_tap(const Conv& conv, const Extents& k, const Extents& coarse, const Extents& fine,
                         Visit&& visit) {
  Extents offset;
  for (size_t d = 0; d < offset.size(); ++d) offset[d] = k[d] * conv.dilation[d] - conv.padding_before[d];
  const int64_t step = conv.stride[2];
  const auto first_at_least = [&](int64_t p) {
    return p <= offset[2] ? 0 : (p - offset[2] + step - 1) / step;
  };
  const int64_t begin = first_at_least(0);
  const int64_t end = std::min(coarse[2], first_at_least(fine[2]));
  if (begin >= end) return;
  for (int64_t z = 0; z < coarse[0]; ++z) {
    const int64_t fine_z = z * conv.stride[0] + offset[0];
    if (fine_z < 0 || fine_z >= fine[0]) continue;
    for (int64_t y = 0; y < coarse[1]; ++y) {
      const int64_t fine_y = y * conv.stride[1] + offset[1];
      if (fine_y < 0 || fine_y >= fine[1]) continue;
      visit((z * coarse[1] + y) * coarse[2] + begin,
            (fine_z * fine[1] + fine_y) * fine[2] + begin * step + offset[2], end - begin);
    }
  }
}

inline int64_t tap_count(const Conv& conv) { return conv.kernel[0] * conv.kernel[1] * conv.kernel[2]; }

struct Moments {
  double mean = 0;
  double variance = 0;
};

inline Moments moments(Values slab) {
  const auto count = static_cast<double>(slab.size());
  double sum = 0;
  for (const double x : slab) sum += x;
  const double mean = sum / count;
  double squares = 0;
  for (const double x : slab) squares += (x - mean) * (x - mean);
  return {mean, squares / count};
}

}  // namespace onepass::reference
