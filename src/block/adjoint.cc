// The convolution that takes the gradient of another one's output to that of its input.
#include "block/adjoint.h"

#include <utility>

namespace onepass {

std::string adjoint_refusal(const Conv& conv) {
  if (conv.padding_before != conv.padding_after) return "the padding is uneven";
  for (size_t d = 0; conv.transposed && d < static_cast<size_t>(conv.rank); ++d) {
    // It reaches beyond what a plain convolution of the gradient sees.
    if (conv.output_padding[d] >= conv.stride[d]) return "the output padding is not below the stride";
  }
  return "";
}

Conv adjoint(const Conv& conv, const Shape& input_sizes, const Shape& output_sizes) {
  Conv back = conv;
  back.transposed = !conv.transposed;
  std::swap(back.in_channels, back.out_channels);
  back.bias = false;
  back.output_padding = {0, 0, 0};
  // A strided convolution ignores the remainder at the far end. Output padding restores it.
  for (size_t d = 0; back.transposed && d < static_cast<size_t>(conv.rank); ++d) {
    const int64_t span = conv.dilation[d] * (conv.kernel[d] - 1) + 1;
    const int64_t seen = (output_sizes[d + 2] - 1) * conv.stride[d] + span - 2 * conv.padding_before[d];
    back.output_padding[d] = input_sizes[d + 2] - seen;
  }
  return back;
}

}  // namespace onepass
