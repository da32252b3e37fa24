// Clock, repeated measurement, and how times and amounts are printed.
#include "tool/timing.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>

namespace onepass::tool {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Samples::at(double fraction) const {
  return seconds[static_cast<size_t>(std::lround(fraction * static_cast<double>(seconds.size() - 1)))];
}

Samples collect(double seconds, int least, const std::function<double()>& body) {
  Samples samples;
  const double end = seconds_now() + seconds;
  while (static_cast<int>(samples.seconds.size()) < least || seconds_now() < end) {
    samples.seconds.push_back(body());
  }
  std::sort(samples.seconds.begin(), samples.seconds.end());
  return samples;
}

Samples repeat(double seconds, int least, const std::function<void()>& body) {
  return collect(seconds, least, [&] {
    const double begin = seconds_now();
    body();
    return seconds_now() - begin;
  });
}

std::string significant(double value, int digits) {
  const double magnitude = value == 0 || !std::isfinite(value) ? 0 : std::floor(std::log10(std::abs(value)));
  const bool plain = magnitude >= -4 && magnitude < 7;
  std::array<char, 64> text{};
  if (plain) {
    std::snprintf(text.data(), text.size(), "%.*f", std::max(0, digits - 1 - static_cast<int>(magnitude)),
                  value);
  } else {
    std::snprintf(text.data(), text.size(), "%.*e", digits - 1, value);
  }
  return text.data();
}

std::string milliseconds(double seconds) { return significant(seconds * 1e3) + " ms"; }

std::string percent(double fraction) { return significant(fraction * 100, 2) + "%"; }

std::string byte_text(double bytes) {
  static constexpr std::array units{"bytes", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < units.size(); ++unit) bytes /= 1024;
  return (unit == 0 ? std::to_string(static_cast<int64_t>(bytes)) : significant(bytes)) + ' ' + units[unit];
}

std::string thread_text(int threads) {
  return std::to_string(threads) + (threads == 1 ? " thread" : " threads");
}

}  // namespace onepass::tool
