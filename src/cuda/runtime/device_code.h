// The device code inside the library: the text of src/cuda/**/*.cuh and of the table of activations.
#pragma once

#include <set>
#include <span>
#include <string_view>

namespace onepass::cuda {

struct DeviceFile {
  std::string_view name;  // as kernels include it: "tail/tail.cuh", "pointwise.def"
  std::string_view text;  // ends with a null character, which is not counted
};

// Always in the same order. Written at build time by cmake/embed.cmake.
std::span<const DeviceFile> device_files();
// Those that a text includes, directly or not, in that order.
std::set<const DeviceFile*> included_files(std::string_view text);

}  // namespace onepass::cuda
