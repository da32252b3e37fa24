// A line on stderr that says what is going on: only on a terminal, wiped when there is something to print.
#pragma once

#include <string>

namespace onepass::tool {

void show_progress(const std::string& line);
void clear_progress();

}  // namespace onepass::tool
