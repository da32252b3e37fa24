// Element types, layouts, shapes and strides: their names, their text and their checked arithmetic.
#include "onepass/tensor.h"

#include <algorithm>
#include <array>

#include "block/checked.h"
#include "block/text.h"
#include "onepass/error.h"

namespace onepass {
namespace {

constexpr size_t max_dimensions = 5;  // batch, channels and three spatial dimensions

struct DTypeRow {
  std::string_view name;
  int64_t bytes;
};
constexpr std::array<DTypeRow, 4> dtype_rows{{{"f32", 4}, {"f16", 2}, {"bf16", 2}, {"f64", 8}}};
constexpr std::array<std::string_view, 2> layout_names{"nchw", "nhwc"};

[[noreturn]] void fail_shape(std::string_view text, std::string_view why) {
  throw Error("shape " + excerpt(text) + ": " + std::string(why) + ", as in 8x3x32x32");
}

// Dimensions from the outermost in memory to the innermost.
std::vector<size_t> memory_order(size_t dimensions, Layout layout) {
  std::vector<size_t> order;
  for (size_t d = 0; d < dimensions; ++d) {
    if (d != 1 || layout == Layout::nchw) order.push_back(d);
  }
  if (layout == Layout::nhwc && dimensions > 1) order.push_back(1);
  return order;
}

std::string describe(const TensorSpec& spec) {
  return std::string(name(spec.dtype)) + " tensor of " + to_string(spec.sizes);
}

}  // namespace

std::string_view name(DType dtype) { return dtype_rows[static_cast<size_t>(dtype)].name; }

int64_t byte_size(DType dtype) { return dtype_rows[static_cast<size_t>(dtype)].bytes; }

DType parse_dtype(std::string_view text) {
  for (size_t i = 0; i < dtype_rows.size(); ++i) {
    if (dtype_rows[i].name == text) return static_cast<DType>(i);
  }
  throw Error("unknown type '" + excerpt(text) + "', accepted are f32, f16, bf16 and f64");
}

std::string_view name(Layout layout) { return layout_names[static_cast<size_t>(layout)]; }

Layout parse_layout(std::string_view text) {
  for (size_t i = 0; i < layout_names.size(); ++i) {
    if (layout_names[i] == text) return static_cast<Layout>(i);
  }
  throw Error("unknown layout '" + excerpt(text) + "', accepted are nchw and nhwc");
}

std::string to_string(const Shape& shape) {
  std::string text;
  for (const int64_t size : shape) {
    if (!text.empty()) text += 'x';
    text += std::to_string(size);
  }
  return text;
}

Shape parse_shape(std::string_view text) {
  const auto parts = split(text, 'x');
  if (parts.size() > max_dimensions) fail_shape(text, "at most 5 sizes");
  Shape shape;
  for (const std::string_view part : parts) {
    const std::string_view digits = trim(part);
    const auto size = parse_whole(digits);
    if (!size) fail_shape(text, "size '" + excerpt(digits) + "' " + std::string(whole_number_rule(digits)));
    if (*size < 0) fail_shape(text, "size " + std::to_string(*size) + " must not be negative");
    shape.push_back(*size);
  }
  return shape;
}

int64_t element_count(const Shape& shape) {
  for (const int64_t size : shape) {
    if (size < 0) throw Error("shape " + to_string(shape) + ": sizes must not be negative");
  }
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t count = 1;
  for (const int64_t size : shape) {
    const auto product = checked_multiply(count, size);
    if (!product) throw Error("shape " + to_string(shape) + " has more than 2^63-1 elements");
    count = *product;
  }
  return count;
}

TensorSpec TensorSpec::dense(DType dtype, Shape sizes, Layout layout) {
  TensorSpec spec{dtype, std::move(sizes), {}};
  spec.strides.resize(spec.sizes.size());
  auto order = memory_order(spec.sizes.size(), layout);
  std::reverse(order.begin(), order.end());
  int64_t stride = 1;
  for (const size_t d : order) {
    if (spec.sizes[d] < 0) throw Error("shape " + to_string(spec.sizes) + ": sizes must not be negative");
    spec.strides[d] = stride;
    // An empty batch has the strides of a batch of one, as in PyTorch.
    const auto next = checked_multiply(stride, std::max<int64_t>(spec.sizes[d], 1));
    if (!next || !checked_multiply(*next, byte_size(dtype))) {
      throw Error(describe(spec) + " has more than 2^63-1 bytes");
    }
    stride = *next;
  }
  return spec;
}

int64_t TensorSpec::byte_span() const {
  if (sizes.size() != strides.size()) {
    throw Error(describe(*this) + " has " + std::to_string(strides.size()) + " strides");
  }
  if (element_count(sizes) == 0) return 0;
  std::optional<int64_t> elements = 1;
  for (size_t d = 0; d < sizes.size() && elements; ++d) {
    const auto reach = checked_multiply(sizes[d] - 1, strides[d]);
    elements = reach ? checked_add(*elements, *reach) : std::nullopt;
  }
  const auto bytes = elements ? checked_multiply(*elements, byte_size(dtype)) : std::nullopt;
  if (!bytes)
    throw Error(describe(*this) + " with strides " + to_string(strides) + " spans more than 2^63-1 bytes");
  return *bytes;
}

}  // namespace onepass
