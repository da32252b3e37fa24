// A progress line on stderr, on a terminal alone. It is wiped before other output.
#pragma once

#include <string>

namespace onepass::tool {

void show_progress(const std::string& line);
void clear_progress();

}  // namespace onepass::tool
