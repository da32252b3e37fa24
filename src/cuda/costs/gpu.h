// What a plan needs to know of a GPU: its architecture, its sizes and its rates.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "onepass/problem.h"

namespace onepass::cuda {

struct Gpu {
  std::string architecture;  // "sm_90a": what kernels are compiled for
  std::string name;          // "NVIDIA H200"
  int compute_major = 0;
  int compute_minor = 0;
  int multiprocessors = 0;
  int64_t shared_bytes_per_block = 0;  // with the opt-in
  int64_t shared_bytes_per_multiprocessor = 0;
  int64_t l2_bytes = 0;
  double bytes_per_second = 0;  // of a large device-to-device copy, read and written bytes counted
  double flops = 0;             // fp32 multiply-adds on CUDA cores, two operations each

  double clock() const { return flops / 2 / lanes() / multiprocessors; }
  int lanes() const { return compute_major == 8 && compute_minor == 0 ? 64 : 128; }  // of a multiprocessor
  // Multiply-adds of tf32 that a multiprocessor does in a clock by mma.sync; of 16 bits it does twice as
  // many.
  int tensor_products() const {
    if (compute_major == 8) return compute_minor == 0 ? 512 : compute_minor == 9 ? 256 : 128;
    return compute_major == 12 ? 128 : 512;
  }

  bool has_clusters() const { return compute_major >= 9 && compute_major != 12; }
  // Blocks in the largest cluster kernels ask for; 1 where there are none.
  int largest_cluster() const { return compute_major == 9 || compute_major == 10 ? 16 : 1; }
};

// The GPU of a device, or, where the device names an architecture, a typical GPU of it: sm_80, sm_86, sm_89,
// sm_90a, sm_100 and sm_120. Throws Error where there is no such GPU, no driver, or the architecture is
// unknown. Asked once of the driver, then remembered.
const Gpu& gpu_of(const Device& device);

// The architectures with a checked-in typical GPU, oldest first.
const std::vector<std::string>& known_architectures();

}  // namespace onepass::cuda
