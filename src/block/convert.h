// Conversions between numbers and the bits of each element type. Loading is exact, storing rounds once.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "onepass/tensor.h"

namespace onepass {

// The two 16-bit formats: a sign, the exponent, the mantissa without its leading one.
struct F16Format {
  static constexpr int mantissa_bits = 10;
  static constexpr int exponent_bias = 15;
};
struct Bf16Format {
  static constexpr int mantissa_bits = 7;
  static constexpr int exponent_bias = 127;
};

// The nearest value of the format, ties to even; beyond its range infinity. A NaN stays NaN, quiet.
template <class Format>
inline uint16_t round_to_bits(double value) {
  constexpr int mantissa_bits = Format::mantissa_bits;
  constexpr int exponent_bias = Format::exponent_bias;
  constexpr int least_exponent = 1 - exponent_bias;
  constexpr unsigned infinity = (2u * exponent_bias + 1) << mantissa_bits;
  constexpr int double_mantissa_bits = 52;
  constexpr uint64_t leading_one = uint64_t{1} << double_mantissa_bits;

  const uint64_t bits = std::bit_cast<uint64_t>(value);
  const unsigned sign = static_cast<unsigned>(bits >> 48) & 0x8000u;
  const uint64_t mantissa = bits & (leading_one - 1);
  if (std::isnan(value)) {
    const unsigned payload = static_cast<unsigned>(mantissa >> (double_mantissa_bits - mantissa_bits));
    return static_cast<uint16_t>(sign | infinity | 1u << (mantissa_bits - 1) | payload);
  }
  const int exponent = static_cast<int>(bits >> double_mantissa_bits & 0x7ff) - 1023;
  if (exponent > exponent_bias) return static_cast<uint16_t>(sign | infinity);

  // Bits to drop: more for a denormal result. 53 leaves only the rounding, 54 nothing at all.
  const int dropped = double_mantissa_bits - mantissa_bits + std::max(0, least_exponent - exponent);
  if (dropped > double_mantissa_bits + 1) return static_cast<uint16_t>(sign);
  const uint64_t significand = leading_one | mantissa;
  const uint64_t kept = significand >> dropped;
  const uint64_t rest = significand - (kept << dropped);
  const uint64_t half = uint64_t{1} << (dropped - 1);
  const bool round_up = rest > half || (rest == half && kept % 2 == 1);
  // A normal result keeps its leading one, which adds one to the exponent field, as does a carry.
  const int exponent_field = std::max(exponent, least_exponent) - least_exponent;
  return static_cast<uint16_t>(sign + (static_cast<unsigned>(exponent_field) << mantissa_bits) +
                               static_cast<unsigned>(kept) + (round_up ? 1u : 0u));
}

inline uint16_t f16_bits(double value) { return round_to_bits<F16Format>(value); }
inline uint16_t bf16_bits(double value) { return round_to_bits<Bf16Format>(value); }

inline float f16_value(uint16_t bits) {
  constexpr uint32_t exponent_rebias = uint32_t{127 - 15} << 23;
  constexpr float least_denormal = 0x1p-24f;
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t exponent = bits & 0x7c00u;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * least_denormal;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | (((exponent | mantissa) << 13) + exponent_rebias));
}

inline float bf16_value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// The element at `address`, which need not be aligned.
inline double load_element(DType dtype, const void* address) {
  if (dtype == DType::f64) {
    double value;
    std::memcpy(&value, address, sizeof value);
    return value;
  }
  if (dtype == DType::f32) {
    float value;
    std::memcpy(&value, address, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, address, sizeof bits);
  return dtype == DType::f16 ? f16_value(bits) : bf16_value(bits);
}

// Rounds once, from double to the element type.
inline void store_element(DType dtype, double value, void* address) {
  if (dtype == DType::f64) {
    std::memcpy(address, &value, sizeof value);
  } else if (dtype == DType::f32) {
    const float rounded = static_cast<float>(value);
    std::memcpy(address, &rounded, sizeof rounded);
  } else {
    const uint16_t bits = dtype == DType::f16 ? f16_bits(value) : bf16_bits(value);
    std::memcpy(address, &bits, sizeof bits);
  }
}

// To 10 bits in the range of f32; `round` gives an integer.
template <class Round>
double at_bits_of_tf32(double value, Round round) {
  if (!std::isfinite(value) || value == 0) return value;
  constexpr int bits = 11;              // with the leading one
  constexpr int least_exponent = -125;  // of a normal number, as frexp has it
  int exponent = 0;
  std::frexp(value, &exponent);
  const int unit = std::max(exponent, least_exponent) - bits;
  return static_cast<float>(std::ldexp(round(std::ldexp(value, -unit)), unit));
}

// To nearest even, as a convolution in tf32 rounds its operands.
inline double round_to_tf32(double value) {
  return at_bits_of_tf32(value, [](double x) { return std::nearbyint(x); });
}

// To nearest, ties away from zero, as a convolution in tf32_away rounds its operands.
inline double round_to_tf32_away(double value) {
  return at_bits_of_tf32(value, [](double x) { return std::round(x); });
}

inline double round_to(DType dtype, double value) {
  switch (dtype) {
    case DType::f32:
      return static_cast<float>(value);
    case DType::f16:
      return f16_value(f16_bits(value));
    case DType::bf16:
      return bf16_value(bf16_bits(value));
    case DType::f64:
      break;
  }
  return value;
}

}  // namespace onepass
