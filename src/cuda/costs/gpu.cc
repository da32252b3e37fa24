// Sizes and rates of GPUs. Each line says where its figures come from.
#include "cuda/costs/gpu.h"

#include <array>

namespace onepass::cuda {
namespace {

constexpr int64_t kib = 1024;
constexpr int64_t mib = 1024 * kib;

struct CopyRate {
  std::string_view name;  // a part of the GPU's name
  double bytes_per_second;
};

// Measured by copies of gigabytes between buffers of the device.
constexpr std::array copy_rates{
    CopyRate{"H200", 4.22e12},  // 2026-11-15, driver 13.0
};

}  // namespace

// Sizes are the data sheets'. The copy rate of the H200 is measured; others are copy_share of the data
// sheet's.
std::span<const Gpu> typical_gpus() {
  static const std::array list{
      Gpu{"sm_80", "A100 (typical)", 8, 0, 108, 163 * kib, 164 * kib, 40 * mib, 1.4e12, 19.5e12},
      Gpu{"sm_86", "RTX 3090 (typical)", 8, 6, 82, 99 * kib, 100 * kib, 6 * mib, 8.2e11, 35.6e12},
      Gpu{"sm_89", "L40S (typical)", 8, 9, 142, 99 * kib, 100 * kib, 96 * mib, 7.6e11, 91.6e12},
      Gpu{"sm_90a", "H200 (typical)", 9, 0, 132, 227 * kib, 228 * kib, 50 * mib, 4.22e12, 66.9e12},
      Gpu{"sm_100", "B200 (typical)", 10, 0, 148, 227 * kib, 228 * kib, 126 * mib, 7.0e12, 74.5e12},
      Gpu{"sm_120", "RTX 5090 (typical)", 12, 0, 170, 99 * kib, 100 * kib, 96 * mib, 1.58e12, 104.8e12},
  };
  return list;
}

const Gpu* typical_gpu(std::string_view architecture) {
  for (const Gpu& gpu : typical_gpus()) {
    if (gpu.architecture == architecture) return &gpu;
  }
  return nullptr;
}

double measured_copy_rate(std::string_view name) {
  for (const CopyRate& rate : copy_rates) {
    if (name.find(rate.name) != std::string_view::npos) return rate.bytes_per_second;
  }
  return 0;
}

}  // namespace onepass::cuda
