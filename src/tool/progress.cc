// A progress line on stderr, on a terminal alone. It is wiped before other output.
#include "tool/progress.h"

#include <unistd.h>

#include <cstdio>

namespace onepass::tool {
namespace {

constexpr size_t line_columns = 79;

bool on_terminal() {
  static const bool answer = isatty(STDERR_FILENO) == 1;
  return answer;
}

}  // namespace

void show_progress(const std::string& line) {
  if (!on_terminal()) return;
  const std::string text = line.size() > line_columns ? line.substr(0, line_columns - 3) + "..." : line;
  std::fprintf(stderr, "\r\033[K%s", text.c_str());
  std::fflush(stderr);
}

void clear_progress() {
  if (!on_terminal()) return;
  std::fprintf(stderr, "\r\033[K");
  std::fflush(stderr);
}

}  // namespace onepass::tool
