// The lines of ONEPASS_VERBOSE.
#include "plan/verbose.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iomanip>
#include <sstream>
#include <string_view>

namespace onepass {
namespace {

thread_local bool is_printed = true;

int level_of(const char* text) {
  const std::string_view level = text == nullptr ? "" : text;
  if (level.empty() || level == "0") return 0;
  if (level == "1" || level == "2") return level == "1" ? 1 : 2;
  std::fprintf(stderr, "onepass: warning: ONEPASS_VERBOSE is \"%s\", must be 0, 1 or 2; no call is printed\n",
               text);
  return 0;
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string milliseconds(double seconds) {
  std::ostringstream out;
  out << std::setprecision(3) << seconds * 1e3 << " ms";
  return out.str();
}

std::string place(const Device& device) {
  if (device.kind == Device::Kind::cuda) return "cuda:" + std::to_string(device.index);
  return "cpu, " + std::to_string(device.threads) + (device.threads == 1 ? " thread" : " threads");
}

}  // namespace

int verbosity() {
  static const int level = level_of(std::getenv("ONEPASS_VERBOSE"));
  return level;
}

Unprinted::Unprinted() : before_(is_printed) { is_printed = false; }

Unprinted::~Unprinted() { is_printed = before_; }

CallLine::CallLine(const Device& device, std::optional<Stream> stream) : device_(device), stream_(stream) {
  if (verbosity() < 2 || !is_printed) return;
  is_captured_ = stream_ && cuda::is_captured(device_.index, *stream_);
  is_measured_ = !is_captured_;
  if (is_measured_ && stream_) {
    timer_ = std::make_unique<cuda::Timer>(device_.index);
    timer_->start(*stream_);
  }
  start_ = seconds_now();
}

double CallLine::elapsed() { return timer_ ? timer_->stop(*stream_) : seconds_now() - start_; }

void CallLine::print(const std::string& problem, const std::string& strategy,
                     const std::vector<Candidate>& candidates) {
  if (!is_printed) return;
  const double measured = is_measured_ ? elapsed() : 0;
  std::string line = "onepass verbose: " + problem + "; " + place(device_) + "; " + strategy;
  for (const Candidate& candidate : candidates) {
    if (candidate.strategy == strategy) line += "; predicted " + milliseconds(candidate.seconds);
  }
  if (is_measured_) line += "; measured " + milliseconds(measured);
  if (is_captured_) line += "; captured, not measured";
  line += '\n';
  std::fwrite(line.data(), 1, line.size(), stderr);  // at once: other threads print too
}

}  // namespace onepass
