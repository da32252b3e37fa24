// onepass: explains, checks and times convolution blocks from the command line.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <new>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "onepass/error.h"
#include "tool/commands.h"
#include "tool/help.h"
#include "tool/progress.h"

namespace onepass::tool {
namespace {

constexpr int most_threads = 1024;
constexpr double most_seconds = 3600;

// A number from `least` to `most`; CLI::Range lets NaN pass.
template <class T>
CLI::Validator range(T least, T most) {
  return CLI::Validator(
      [=](const std::string& text) {
        T value{};
        const bool good = CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
        return good ? std::string()
                    : text + " must be a " + (std::is_integral_v<T> ? "whole " : "") + "number from " +
                          std::to_string(std::lround(least)) + " to " + std::to_string(std::lround(most));
      },
      "");
}

// How many letters must be changed, added or left out to make one word of the other.
size_t distance(const std::string& from, const std::string& to) {
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < from.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < to.size(); ++j) {
      const size_t replaced = diagonal + (from[i] == to[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

void add_problem_options(CLI::App& command, Options& options) {
  command.add_option("block", options.block,
                     "A block, or a whole problem: \"BLOCK @ SIZES [DTYPE] [LAYOUT]\"");
  command.add_option("--input", options.input, "Sizes of the input: batch x channels x space, as 8x3x32x32");
  command.add_option("--dtype", options.dtype, "Type of all tensors: f32 (default), f16, bf16 or f64");
  command.add_option("--layout", options.layout, "nchw (default): channels before space; nhwc: after");
}

void add_plan_options(CLI::App& command, Options& options) {
  command
      .add_option("--device", options.device,
                  "cpu (default), cuda, cuda:1 or, to explain, an architecture: cuda:sm_90a")
      ->type_name("NAME");
  command.add_option("--threads", options.threads, "Threads of the CPU to use, 1 to 1024; default: all")
      ->check(range(1, most_threads))
      ->type_name("N");
  command.add_option("--strategy", options.strategy, "Force this strategy; explain lists them")
      ->type_name("NAME");
  command.add_option("--target", options.target, "Force this SIMD target: neon, avx2, avx3")
      ->type_name("NAME");
  command.add_flag("--tune", options.tune,
                   "On a GPU: time strategies predicted to be close; remembered on disk");
  command.add_flag("--json", options.json, "Print JSON alone");
}

void add_file_option(CLI::App& command, Options& options) {
  command.add_option("--file", options.file, "Problem strings, one a line; '#' opens a comment")
      ->type_name("PATH");
}

void add_seed_option(CLI::App& command, Options& options) {
  command.add_option("--seed", options.seed, "Of the random values; default: 1")->type_name("N");
}

// Parses the command line and runs the command it names.
class Tool {
 public:
  Tool() : app_("onepass: convolution blocks in one pass over memory", "onepass") {
    app_.set_version_flag("--version", "onepass " ONEPASS_VERSION);
    app_.footer(general_help);
    app_.require_subcommand(1);
    add_explain();
    add_check();
    add_bench();
    add_cases();
    add_cache();
  }

  int run(std::vector<std::string> arguments) {
    if (arguments.empty()) arguments = {"--help"};
    if (arguments.front() == "help") {
      arguments.erase(arguments.begin());
      arguments.resize(std::min<size_t>(arguments.size(), 1));
      arguments.emplace_back("--help");
    }
    refuse_unknown_command(arguments.front());
    try {
      app_.parse(std::vector(arguments.rbegin(), arguments.rend()));  // CLI11 takes them from the back
    } catch (const CLI::Success& help_or_version) {
      return app_.exit(help_or_version);
    } catch (const CLI::RequiredError&) {
      throw Error("give a command: " + commands() + " (see onepass --help)");
    } catch (const CLI::ParseError& error) {
      throw Error(std::string(error.what()) + " (see onepass --help)");
    }
    return command_(options_);
  }

 private:
  std::string commands() const {
    std::string names;
    for (const CLI::App* command : app_.get_subcommands({})) {
      names += (names.empty() ? "" : ", ") + command->get_name();
    }
    return names;
  }

  void refuse_unknown_command(const std::string& name) const {
    if (name.starts_with('-')) return;
    for (const char* other : {"doctor", "export", "optimize"}) {
      if (name == other) {
        throw Error(name +
                    " is a command of the PyTorch package: pip install onepass, then python -m onepass " +
                    name);
      }
    }
    std::string nearest;
    size_t least = name.size() / 2 + 1;  // a word of which more is another is no misspelling
    for (const CLI::App* command : app_.get_subcommands({})) {
      const size_t letters = distance(name, command->get_name());
      if (letters == 0) return;
      if (letters < least) {
        least = letters;
        nearest = command->get_name();
      }
    }
    throw Error("unknown command '" + name + "', " +
                (nearest.empty() ? "there are " + commands() : "did you mean " + nearest + "?"));
  }

  CLI::App& add(const char* name, const char* description, int (*command)(const Options&)) {
    CLI::App& added = *app_.add_subcommand(name, description);
    added.callback([this, command] { command_ = command; });
    return added;
  }

  void add_explain() {
    CLI::App& command =
        add("explain", "Which strategy a problem gets, and what the others would cost", &explain);
    add_problem_options(command, options_);
    add_plan_options(command, options_);
    command.footer(explain_help);
  }

  void add_check() {
    CLI::App& command =
        add("check", "Run on random values and compare every element with the reference", &check);
    add_problem_options(command, options_);
    add_file_option(command, options_);
    add_plan_options(command, options_);
    add_seed_option(command, options_);
    command.footer(check_help());
  }

  void add_bench() {
    CLI::App& command = add("bench", "Time a block beside what this machine can do at most", &bench);
    add_problem_options(command, options_);
    add_file_option(command, options_);
    add_plan_options(command, options_);
    add_seed_option(command, options_);
    command
        .add_option("--seconds", options_.seconds,
                    "Time for the repeats of one problem, 0 to 3600; default: 1.5")
        ->check(range(0.0, most_seconds))
        ->type_name("S");
    command.add_flag("--small-pages", options_.small_pages,
                     "Keep tensors of the CPU out of huge pages, as most programs allocate them");
    command.add_flag("--peaks", options_.peaks, "Print the measured peaks; alone: nothing else");
    command.footer(bench_help);
  }

  void add_cases() {
    CLI::App& command = add("cases", "List the problem strings of a file", &cases);
    add_file_option(command, options_);
    add_plan_options(command, options_);
    command.footer(cases_help);
  }

  void add_cache() {
    CLI::App& command = add("cache", "The compiled GPU kernels kept on disk", &cache);
    command.add_option("action", options_.action, "list or clear")->check(CLI::IsMember({"list", "clear"}));
    command.add_flag("--json", options_.json, "Print JSON");
    command.footer(cache_help);
  }

  Options options_;
  CLI::App app_;
  int (*command_)(const Options&) = nullptr;
};

int report(const std::string& sentence) {
  clear_progress();
  std::cout.flush();
  std::string line = sentence;
  for (char& c : line) c = c == '\n' ? ' ' : c;
  std::fprintf(stderr, "onepass: %s\n", line.c_str());
  return bad_request;
}

}  // namespace
}  // namespace onepass::tool

int main(int argc, char** argv) {
  try {
    const int status = onepass::tool::Tool().run({argv + 1, argv + argc});
    if (!std::cout.flush()) throw onepass::Error("standard output cannot be written");
    return status;
  } catch (const std::bad_alloc&) {
    return onepass::tool::report("the problem needs more memory than this machine has");
  } catch (const std::exception& error) {
    return onepass::tool::report(error.what());
  }
}
