// Integer arithmetic that reports overflow, and the largest number of the block language.
#pragma once

#include <cstdint>
#include <optional>

namespace onepass {

// Bounds every size, kernel, stride, padding and group count. Two of them multiply without overflow.
inline constexpr int64_t max_number = 2147483647;

[[nodiscard]] inline std::optional<int64_t> checked_multiply(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

[[nodiscard]] inline std::optional<int64_t> checked_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

}  // namespace onepass
