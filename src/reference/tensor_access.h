// Copies between a tensor in memory, of any element type and strides, and its values as dense NCHW doubles.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "onepass/tensor.h"

namespace onepass {

// Calls visit(byte offset) for each element, the last dimension fastest.
template <class Visit>
void for_each_element(const TensorSpec& spec, Visit&& visit) {
  constexpr size_t max_rank = 5;
  std::array<int64_t, max_rank> sizes{1, 1, 1, 1, 1};
  std::array<int64_t, max_rank> bytes{};  // from one index to the next
  const size_t missing = max_rank - spec.sizes.size();
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    sizes[missing + d] = spec.sizes[d];
    bytes[missing + d] = spec.strides[d] * byte_size(spec.dtype);
  }
  for (int64_t i = 0; i < sizes[0]; ++i)
    for (int64_t j = 0; j < sizes[1]; ++j)
      for (int64_t k = 0; k < sizes[2]; ++k)
        for (int64_t l = 0; l < sizes[3]; ++l)
          for (int64_t m = 0; m < sizes[4]; ++m)
            visit(i * bytes[0] + j * bytes[1] + k * bytes[2] + l * bytes[3] + m * bytes[4]);
}

void load_tensor(const TensorSpec& spec, const void* memory, std::span<double> values);
std::vector<double> load_tensor(const TensorSpec& spec, const void* memory);

// Rounds each value once, to the element type. Memory between the elements is left as it is.
void store_tensor(const TensorSpec& spec, std::span<const double> values, void* memory);

}  // namespace onepass
