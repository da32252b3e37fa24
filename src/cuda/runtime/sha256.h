// SHA-256. It names cached files and detects damaged ones.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace onepass::cuda {

class Sha256 {
 public:
  Sha256& add(std::string_view bytes);
  // As add, with the length before the bytes: "ab" + "c" and "a" + "bc" differ.
  Sha256& add_field(std::string_view bytes);
  std::string hex();  // 64 digits; ends the sum

 private:
  void block(const unsigned char* bytes);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> pending_{};
  uint64_t bytes_ = 0;
};

}  // namespace onepass::cuda
