// Facts about stages that parsing, printing, validation and shapes share.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "onepass/block.h"

namespace onepass {

// One row of pointwise.def without its formula. A default that the text must give is NaN.
struct PointwiseRow {
  std::string_view name;
  int constants;
  std::array<double, 2> defaults;
  ArgumentKind argument;
};

const PointwiseRow& pointwise_row(Op op);

// Whether its constants are limits, which may be infinite.
inline bool has_limits(Op op) { return constant_count(op) == 2; }

// What `per` is when the text does not say: one slope, one value per channel.
Per default_per(ArgumentKind argument);
std::string_view per_name(Per per);

std::string stage_name(const Stage& stage);  // "conv_transpose2d", "group_norm", "relu"
std::string conv_name(const Conv& conv);
std::string extents_text(const Extents& extents, int rank);  // "3" or, where they differ, "3x3x1"

// Zeros before and after that keep the size at stride 1, PyTorch's rule: the odd one comes after.
struct SamePadding {
  Extents before{0, 0, 0};
  Extents after{0, 0, 0};
};
SamePadding same_padding(const Conv& conv);

// Elements from the first tap of the kernel to the last one in a dimension.
inline int64_t kernel_span(const Conv& conv, size_t dimension) {
  return conv.dilation[dimension] * (conv.kernel[dimension] - 1) + 1;
}

// Throws Error unless the norm's groups divide the channels.
void check_norm_groups(const Norm& norm, int64_t channels);

}  // namespace onepass
