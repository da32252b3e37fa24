// Loops and positions that the forward and the backward reference share.
#pragma once

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

inline bool is_inside(const Extents& position, const Extents& box) {
  for (size_t d = 0; d < position.size(); ++d)
    if (position[d] < 0 || position[d] >= box[d]) return false;
  return true;
}

inline int64_t flat_index(const Extents& position, const Extents& box) {
  return (position[0] * box[1] + position[1]) * box[2] + position[2];
}

// Where tap k, applied at position q of the coarse side, lies on the fine side: the fine side is the input of
// a convolution and the output of a transposed one.
inline Extents tap_position(const Conv& conv, const Extents& q, const Extents& k) {
  Extents p;
  for (size_t d = 0; d < p.size(); ++d)
    p[d] = q[d] * conv.stride[d] + k[d] * conv.dilation[d] - conv.padding_before[d];
  return p;
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
