// Element types, sizes and strides: how a tensor lies in memory, without the memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "onepass/export.h"

namespace onepass {

enum class DType : uint8_t { f32, f16, bf16, f64 };

ONEPASS_API std::string_view name(DType dtype);
ONEPASS_API int64_t byte_size(DType dtype);
// "f32", "f16", "bf16" or "f64"; throws Error for anything else.
ONEPASS_API DType parse_dtype(std::string_view text);

// Sizes of a tensor: batch, channels, then up to three spatial dimensions.
using Shape = std::vector<int64_t>;

ONEPASS_API std::string to_string(const Shape& shape);  // "8x3x16x32x32"
ONEPASS_API Shape parse_shape(std::string_view text);
// The product of the sizes; throws Error when it does not fit.
ONEPASS_API int64_t element_count(const Shape& shape);

enum class Layout : uint8_t { nchw, nhwc };  // channels before, or after, the spatial dimensions

ONEPASS_API std::string_view name(Layout layout);
ONEPASS_API Layout parse_layout(std::string_view text);

// Where each element of a tensor lies: strides count elements, in the order of sizes (N, C, spatial...).
struct ONEPASS_API TensorSpec {
  DType dtype = DType::f32;
  Shape sizes;
  Shape strides;

  // The dense tensor of this layout. Throws Error when it would not fit in 2^63 bytes.
  static TensorSpec dense(DType dtype, Shape sizes, Layout layout = Layout::nchw);

  // Bytes from the first element to the end of the last one (0 for an empty tensor).
  int64_t byte_span() const;
  bool operator==(const TensorSpec&) const = default;
};

}  // namespace onepass
