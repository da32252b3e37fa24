// What the environment says about tests: ONEPASS_SEED, ONEPASS_TEST_SCALE, ONEPASS_TEST_TURN and
// ONEPASS_TEST_COMPILE_ONLY.
#include "support/settings.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "onepass/error.h"

namespace onepass::testing {
namespace {

constexpr uint64_t default_seed = 20240607;
// More than tests add to the seed.
constexpr uint64_t seeds_of_a_turn = 100'000'000;

uint64_t read_seed() {
  const char* text = std::getenv("ONEPASS_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 0)
                                        : default_seed + seeds_of_a_turn * static_cast<uint64_t>(turn());
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

int64_t turn() {
  const char* text = std::getenv("ONEPASS_TEST_TURN");
  if (text == nullptr) return 0;
  char* end = nullptr;
  const int64_t value = std::strtoll(text, &end, 10);
  if (end == text || *end != '\0' || value < 0)
    throw Error("ONEPASS_TEST_TURN is \"" + std::string(text) + "\", must be a number from 0 on");
  return value;
}

bool compiles_only() {
  const char* text = std::getenv("ONEPASS_TEST_COMPILE_ONLY");
  return text != nullptr && std::string(text) == "1";
}

}  // namespace onepass::testing
