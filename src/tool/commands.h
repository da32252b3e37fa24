// The commands of the tool: each returns the exit code and throws Error for a request it cannot serve.
#pragma once

#include "tool/request.h"

namespace onepass::tool {

enum ExitCode { good = 0, wrong_result = 1, bad_request = 2 };

int explain(const Options& options);
int check(const Options& options);
int bench(const Options& options);
int cases(const Options& options);
int cache(const Options& options);

}  // namespace onepass::tool
