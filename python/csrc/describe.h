// Blocks and the library itself as JSON, for the Python side.
#pragma once

#include <string>

#include "onepass/block.h"

namespace onepass::torch_binding {

// {"text": canonical, "stages": [every number of every stage], "parameters": [{"name", "stage", "role"}]}.
std::string describe(const Block& block);
// {"version": ..., "cpu_targets": [...]}.
std::string describe_library();

}  // namespace onepass::torch_binding
