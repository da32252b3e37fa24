// The texts behind --help.
#pragma once

#include <string>

namespace onepass::tool {

extern const char* const general_help;
extern const char* const explain_help;
extern const char* const bench_help;
extern const char* const cases_help;
extern const char* const cache_help;
std::string check_help();

}  // namespace onepass::tool
