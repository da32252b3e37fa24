// onepass cases: the problem strings of a file, with the strategy each one gets and the shape it gives.
#include <filesystem>
#include <iomanip>
#include <iostream>

#include "onepass/error.h"
#include "tool/commands.h"
#include "tool/output.h"

namespace onepass::tool {
namespace {

std::string path_of(const Options& options) {
  if (!options.file.empty()) return options.file;
  if (std::filesystem::exists(default_cases)) return default_cases;
  throw Error(std::string("--file is needed: there is no ") + default_cases + " in the working directory");
}

}  // namespace

int cases(const Options& options) {
  Json list = Json::array();
  Options of_file = options;
  of_file.file = path_of(options);
  for (const Problem& problem : requested_problems(of_file)) {
    const std::string strategy = plan(problem, options.plan_options()).strategy();
    const std::string output = to_string(problem.output.sizes);
    if (options.json) {
      list.push_back({{"problem", problem.text()}, {"output", output}, {"strategy", strategy}});
    } else {
      std::cout << std::left << std::setw(18) << strategy << ' ' << problem.text() << "  ->  " << output
                << '\n';
    }
  }
  if (options.json) std::cout << list.dump(2) << '\n';
  return good;
}

}  // namespace onepass::tool
