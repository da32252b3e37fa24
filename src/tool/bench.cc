// onepass bench: times a plan and compares it with the machine's peak. Only correct results are timed.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <optional>

#include "onepass/error.h"
#include "tool/call.h"
#include "tool/commands.h"
#include "tool/compare.h"
#include "tool/executor.h"
#include "tool/expected.h"
#include "tool/floor.h"
#include "tool/peaks.h"
#include "tool/progress.h"
#include "tool/timing.h"

namespace onepass::tool {
namespace {

constexpr double most_reference_seconds = 2;
constexpr int least_repeats = 5;

// What was compared with the reference before the timing, and how that went.
struct Verification {
  std::string what;
  Comparison comparison;
  std::string fault;  // what else is wrong; empty where nothing is

  bool passed() const { return comparison.passed() && fault.empty(); }
};

struct Measurement {
  double plan_seconds = 0;
  double first_run_seconds = 0;
  Verification verification;
  std::optional<Samples> samples;  // none for a wrong result
  Floor floor;
  Pages pages = Pages::small;
};

const char* name(Pages pages) { return pages == Pages::huge ? "huge" : "small"; }

bool has_large_tensor(const Problem& problem) {
  const auto large = [](const TensorSpec& spec) {
    return static_cast<size_t>(spec.byte_span()) >= least_huge_bytes;
  };
  return large(problem.input) || large(problem.output) ||
         std::any_of(problem.parameters.begin(), problem.parameters.end(), large);
}

Shape with_batch_of_one(Shape sizes) {
  sizes[0] = std::min<int64_t>(sizes[0], 1);
  return sizes;
}

Problem resized(const Problem& problem, const Shape& sizes) {
  const bool nhwc =
      problem.input.strides != TensorSpec::dense(problem.input.dtype, problem.input.sizes).strides;
  return {problem.block, sizes, problem.input.dtype, problem.device, nhwc ? Layout::nhwc : Layout::nchw};
}

// Halves the longest spatial dimension until the reference is quick, or the block takes no smaller input.
Problem cut_for_reference(const Problem& problem) {
  Problem cut = resized(problem, with_batch_of_one(problem.input.sizes));
  while (reference_seconds(cut) > most_reference_seconds) {
    Shape sizes = cut.input.sizes;
    const auto longest = std::max_element(sizes.begin() + 2, sizes.end());
    if (longest == sizes.end() || *longest < 2) break;
    *longest = (*longest + 1) / 2;
    try {
      cut = resized(problem, sizes);
    } catch (const Error&) {
      break;
    }
  }
  return cut;
}

bool has_nan(const TensorSpec& spec, const Buffer& output) {
  for (int64_t n = 0; n < spec.sizes[0]; ++n) {
    const std::vector<double> values = sample_values(spec, output.data(), n);
    if (std::any_of(values.begin(), values.end(), [](double value) { return std::isnan(value); }))
      return true;
  }
  return false;
}

// The last sample of this very run where the reference is quick enough, else a smaller input for the same
// block.
Verification verify(const Plan& timed, const Tensors& tensors, const Options& options, Executor& executor) {
  const Problem& problem = timed.problem();
  const int64_t batch = problem.input.sizes[0];
  const Problem cut = cut_for_reference(problem);
  if (cut.input.sizes == with_batch_of_one(problem.input.sizes)) {
    return {batch == 1 ? "this run" : "the last sample of this run",
            compare_samples(timed, tensors, batch - 1, batch, executor), ""};
  }
  const Plan cut_plan = plan(cut, {.strategy = timed.strategy(), .target = options.target});
  Call call(cut_plan, options.seed, executor);
  call.run();
  call.fetch_output();
  return {"the same block and strategy @ " + to_string(cut.input.sizes) +
              " (this one takes the reference too long)",
          compare_samples(cut_plan, call.tensors(), 0, 1, executor),
          has_nan(problem.output, tensors.output) ? "the timed problem's output has NaN" : ""};
}

Measurement measure(const Plan& timed, double plan_seconds, const Options& options, Executor& executor) {
  if (element_count(timed.problem().output.sizes) == 0)
    throw Error("the output is empty, there is nothing to time");
  Measurement measurement;
  measurement.plan_seconds = plan_seconds;
  measurement.pages = given_pages(options.small_pages ? Pages::small : Pages::huge);
  Call call(timed, options.seed, executor, measurement.pages);
  const Tensors& tensors = call.tensors();
  const auto run = [&] { return call.timed_run(); };
  measurement.first_run_seconds = repeat(0, 1, [&] { call.run_and_wait(); }).best();
  call.fetch_output();
  measurement.verification = verify(timed, tensors, options, executor);
  if (!measurement.verification.passed()) return measurement;
  const uint64_t verified = tensors.output_hash();
  show_progress("timing " + timed.problem().text());
  collect(options.seconds / 10, 1, run);
  const Samples samples = collect(options.seconds, least_repeats, run);
  clear_progress();
  call.fetch_output();
  if (tensors.output_hash() != verified) {
    measurement.verification.fault = "the last run gave other bits than the first";
    return measurement;
  }
  measurement.samples = samples;
  const bool on_gpu = timed.problem().device.kind == Device::Kind::cuda;
  measurement.floor =
      on_gpu ? gpu_floor(timed.problem()) : measure_floor(timed.problem(), tensors.output, options.target);
  return measurement;
}

// Rates of a measurement, and the share each is of what the machine can do.
struct Rates {
  double flops;
  double flops_share;
  double bytes;
  double bytes_share;

  Rates(const Problem& problem, double seconds, const Peaks& peaks)
      : flops(2 * static_cast<double>(problem.conv_multiply_adds()) / seconds),
        flops_share(flops / peaks.flops),
        bytes(static_cast<double>(tensor_bytes(problem)) / seconds),
        bytes_share((static_cast<double>(input_bytes(problem)) / peaks.read +
                     static_cast<double>(problem.output.byte_span()) / peaks.write) /
                    seconds) {}
};

void print(const Plan& timed, const Measurement& m, const Peaks& peaks) {
  const Problem& problem = timed.problem();
  std::cout << problem.text() << " -> " << to_string(problem.output.sizes) << '\n'
            << "  strategy     " << timed.strategy() << ", " << place_text(problem.device)
            << "\n               planned in " << milliseconds(m.plan_seconds) << ", first run "
            << milliseconds(m.first_run_seconds) << ", workspace "
            << byte_text(static_cast<double>(timed.workspace_bytes())) << '\n'
            << "  compared     " << m.verification.what << "\n               "
            << m.verification.comparison.text() << '\n';
  if (!m.samples) {
    std::cout << "  WRONG RESULT "
              << (m.verification.fault.empty() ? "no speed is given" : m.verification.fault) << '\n';
    return;
  }
  const Samples& samples = *m.samples;
  const Rates rates(problem, samples.median(), peaks);
  std::cout << "  time         " << milliseconds(samples.median()) << " median, 10% to 90% "
            << significant(samples.at(0.1) * 1e3) << " to " << milliseconds(samples.at(0.9))
            << "\n               best " << milliseconds(samples.best()) << ", " << samples.seconds.size()
            << " runs\n"
            << "  convolution  " << significant(rates.flops * 1e-9) << " GFLOP/s, "
            << percent(rates.flops_share) << " of the peak of " << significant(peaks.flops * 1e-9) << '\n'
            << "  memory       " << significant(rates.bytes * 1e-9) << " GB/s for the tensors once, "
            << percent(rates.bytes_share) << " of the peak: " << peaks.memory_text() << '\n'
            << "  floor        " << m.floor.text() << "\n               the median is "
            << significant(samples.median() / m.floor.seconds()) << " times that\n";
  if (problem.device.kind == Device::Kind::cpu && has_large_tensor(problem)) {
    std::cout << "  pages        tensors of " << byte_text(static_cast<double>(least_huge_bytes))
              << " or more lie in " << name(m.pages) << " pages\n";
  }
}

Json to_json(const Plan& timed, const Measurement& m, const Peaks& peaks) {
  const Problem& problem = timed.problem();
  Json verification = m.verification.comparison.json();
  verification["passed"] = m.verification.passed();
  verification["what"] = m.verification.what;
  verification["fault"] = m.verification.fault;
  Json json{{"problem", problem.text()},
            {"output", to_string(problem.output.sizes)},
            {"strategy", timed.strategy()},
            {"device", problem.device.text()},
            {"threads", problem.device.threads},
            {"plan_seconds", m.plan_seconds},
            {"first_run_seconds", m.first_run_seconds},
            {"workspace_bytes", timed.workspace_bytes()},
            {"verification", verification}};
  if (!m.samples) return json;
  const Samples& samples = *m.samples;
  const Rates rates(problem, samples.median(), peaks);
  json["seconds"] = {{"median", samples.median()},
                     {"p10", samples.at(0.1)},
                     {"p90", samples.at(0.9)},
                     {"best", samples.best()},
                     {"runs", samples.seconds.size()}};
  json["gflops"] = rates.flops * 1e-9;
  json["gflops_share"] = rates.flops_share;
  json["gb_per_s"] = rates.bytes * 1e-9;
  json["gb_per_s_share"] = rates.bytes_share;
  json["floor"] = m.floor.json();
  if (problem.device.kind == Device::Kind::cpu) json["pages"] = name(m.pages);
  json["times_floor"] = samples.median() / m.floor.seconds();
  return json;
}

// Prints as it goes; in JSON, one object or, for a file, an array when all is done.
class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        device_(runnable_device(options)),
        executor_(make_executor(requested_threads(options))) {}

  void print_peaks() {
    if (options_.json) std::cout << peaks().json().dump(2) << '\n';
    if (!options_.json) std::cout << peaks().text();
  }

  int run(const std::vector<Problem>& problems) {
    Json list = Json::array();
    for (const Problem& problem : problems) {
      try {
        list.push_back(run_one(problem));
      } catch (const Error& error) {
        if (problems.size() == 1) throw;
        if (refused_++ == 0) first_refusal_ = error.what();
        list.push_back({{"problem", problem.text()}, {"refused", error.what()}});
        if (!options_.json) std::cout << problem.text() << "\n  left out     " << error.what() << '\n';
      }
      if (!options_.json) std::cout << std::flush;
    }
    if (timed_ + wrong_ == 0) throw Error(first_refusal_);
    if (options_.json) {
      std::cout << (options_.file.empty() ? list.front() : list).dump(2) << '\n';
    } else if (problems.size() > 1) {
      std::cout << "\n" << timed_ << " timed, " << wrong_ << " wrong";
      if (refused_ > 0) std::cout << ", " << refused_ << " left out";
      std::cout << '\n';
    }
    return wrong_ == 0 ? good : wrong_result;
  }

 private:
  Json run_one(const Problem& problem) {
    const double begin = seconds_now();
    const Plan timed = plan(problem, options_.plan_options());
    const Measurement measurement = measure(timed, seconds_now() - begin, options_, *executor_);
    ++(measurement.samples ? timed_ : wrong_);
    if (!options_.json) print(timed, measurement, peaks());
    Json json = to_json(timed, measurement, peaks());
    json["peaks"] = peaks().json();
    return json;
  }

  // Measured when first needed, after a request has shown that it can be served.
  const Peaks& peaks() {
    if (!peaks_) {
      show_progress("measuring the peaks of this machine");
      peaks_ = device_.kind == Device::Kind::cpu ? measure_peaks(device_.threads) : gpu_peaks(device_.index);
      clear_progress();
    }
    return *peaks_;
  }

  const Options& options_;
  Device device_;
  std::unique_ptr<Executor> executor_;
  std::optional<Peaks> peaks_;
  int timed_ = 0;
  int wrong_ = 0;
  int refused_ = 0;
  std::string first_refusal_;
};

}  // namespace

int bench(const Options& options) {
  if (options.peaks && options.block.empty() && options.file.empty()) {
    Bench(options).print_peaks();
    return good;
  }
  Bench bench(options);
  const std::vector<Problem> problems = requested_problems(options);
  if (options.peaks && !options.json) bench.print_peaks();
  return bench.run(problems);
}

}  // namespace onepass::tool
