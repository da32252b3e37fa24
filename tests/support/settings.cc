// What the environment says about random tests: ONEPASS_SEED and ONEPASS_TEST_SCALE.
#include "support/settings.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace onepass::testing {
namespace {

constexpr uint64_t default_seed = 20240607;

uint64_t read_seed() {
  const char* text = std::getenv("ONEPASS_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 0) : default_seed;
  std::printf("ONEPASS_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace

uint64_t base_seed() {
  static const uint64_t seed = read_seed();
  return seed;
}

int64_t scaled(int64_t count) {
  const char* text = std::getenv("ONEPASS_TEST_SCALE");
  const double scale = text != nullptr ? std::strtod(text, nullptr) : 1;
  return std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(count) * scale));
}

}  // namespace onepass::testing
