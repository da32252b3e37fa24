// Clock, repeated measurement, and how times and amounts are printed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace onepass::tool {

double seconds_now();

// Seconds of each repeat of one thing.
struct Samples {
  std::vector<double> seconds;  // ascending

  double best() const { return seconds.front(); }
  double median() const { return at(0.5); }
  double at(double fraction) const;
};

// Runs body() until `seconds` are used, at least `least` times.
Samples repeat(double seconds, int least, const std::function<void()>& body);
// Collects what body() says it took.
Samples collect(double seconds, int least, const std::function<double()>& body);

std::string significant(double value, int digits = 3);
std::string milliseconds(double seconds);
std::string percent(double fraction);
std::string byte_text(double bytes);
std::string thread_text(int threads);  // "1 thread", "2 threads"

}  // namespace onepass::tool
