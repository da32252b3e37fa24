// Copies between a tensor in memory, of any element type and strides, and its values as dense NCHW doubles.
#include "reference/tensor_access.h"

#include <cstddef>

#include "block/convert.h"

namespace onepass {
void load_tensor(const TensorSpec& spec, const void* memory, std::span<double> values) {
  const auto* bytes = static_cast<const std::byte*>(memory);
  size_t next = 0;
  for_each_element(spec, [&](int64_t offset) { values[next++] = load_element(spec.dtype, bytes + offset); });
}

std::vector<double> load_tensor(const TensorSpec& spec, const void* memory) {
  std::vector<double> values(static_cast<size_t>(element_count(spec.sizes)));
  load_tensor(spec, memory, values);
  return values;
}

void store_tensor(const TensorSpec& spec, std::span<const double> values, void* memory) {
  auto* bytes = static_cast<std::byte*>(memory);
  size_t next = 0;
  for_each_element(spec, [&](int64_t offset) { store_element(spec.dtype, values[next++], bytes + offset); });
}

}  // namespace onepass
