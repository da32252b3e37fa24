// JSON of the tool: keys stay in the order in which they are written.
#pragma once

#include <nlohmann/json.hpp>

namespace onepass::tool {

using Json = nlohmann::ordered_json;

}  // namespace onepass::tool
