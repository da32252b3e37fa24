// Fuzzer of the block language: any bytes are refused in a sentence or make a block that prints canonically.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "block_properties.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const std::string broken = onepass::broken_property(text);
  if (!broken.empty()) {
    std::fprintf(stderr, "%s\n", broken.c_str());
    std::abort();
  }
  return 0;
}
