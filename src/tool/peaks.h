// What this machine can do at most, measured: multiply-adds per second and bytes per second.
#pragma once

#include <string>

#include "tool/buffers.h"
#include "tool/output.h"

namespace onepass::tool {

struct Peaks {
  int threads = 1;
  double flops_one_thread = 0;  // f32, a multiply-add counts two
  double flops = 0;             // all threads at once
  double write = 0;             // bytes per second, memory that no cache holds
  double read = 0;
  double copy = 0;  // bytes read plus bytes written

  std::string text() const;
  Json json() const;
};

// Takes about a second.
Peaks measure_peaks(int threads);

// Seconds to overwrite the buffer with all threads: what storing an output takes at least.
double seconds_to_write(const Buffer& buffer, int threads);

}  // namespace onepass::tool
