// The measured peaks of this machine: multiply-adds per second and bytes per second.
#pragma once

#include <string>

#include "tool/buffers.h"
#include "tool/output.h"

namespace onepass::tool {

struct Peaks {
  std::string gpu;  // empty: those of the CPU
  int threads = 1;
  double flops_one_thread = 0;  // f32, a multiply-add counts two
  double flops = 0;             // all threads at once
  double write = 0;             // bytes per second, memory that no cache holds
  double read = 0;
  double copy = 0;  // bytes read plus bytes written

  std::string text() const;
  std::string memory_text() const;  // the rates a run's memory traffic is compared with
  Json json() const;
};

// Takes about a second.
Peaks measure_peaks(int threads);
// Those that plans of the GPU assume; nothing is measured.
Peaks gpu_peaks(int index);

// Seconds to overwrite the buffer with all threads: what storing an output takes at least.
double seconds_to_write(const Buffer& buffer, int threads);

}  // namespace onepass::tool
