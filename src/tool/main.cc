// onepass: explains, checks and times convolution blocks from the command line.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <new>

#include "onepass/error.h"
#include "tool/commands.h"
#include "tool/help.h"
#include "tool/progress.h"

namespace onepass::tool {
namespace {

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
  command.add_option("--threads", options.threads, "Threads of the CPU to use; default: all")
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
  command.add_option("--strategy", options.strategy, "Force this strategy; explain lists them")
      ->type_name("NAME");
  command.add_option("--target", options.target, "Force this SIMD target: neon, avx2, avx3")
      ->type_name("NAME");
  command.add_flag(
      "--tune", options.tune,
      "On a GPU: time the strategies predicted to be close and take the fastest; remembered on disk");
  command.add_flag("--json", options.json, "Print JSON");
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

  int run(int argc, char** argv) {
    try {
      app_.parse(argc, argv);
    } catch (const CLI::Success& help_or_version) {
      return app_.exit(help_or_version);
    } catch (const CLI::RequiredError&) {
      throw Error("give a command: explain, check, bench, cases or cache (see onepass --help)");
    } catch (const CLI::ParseError& error) {
      throw Error(std::string(error.what()) + " (see onepass --help)");
    }
    return command_(options_);
  }

 private:
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
    command.add_option("--seconds", options_.seconds, "Time for the repeats of one problem; default: 1.5")
        ->check(CLI::Range(0.0, 3600.0))
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
    return onepass::tool::Tool().run(argc, argv);
  } catch (const std::bad_alloc&) {
    return onepass::tool::report("the problem needs more memory than this machine has");
  } catch (const std::exception& error) {
    return onepass::tool::report(error.what());
  }
}
