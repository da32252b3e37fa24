// Sizes and rates of GPUs. Each line says where its figures come from.
#include "cuda/costs/gpu.h"

#include <array>

namespace onepass::cuda {
namespace {

constexpr int64_t kib = 1024;
constexpr int64_t mib = 1024 * kib;

struct MeasuredRates {
  std::string_view name;  // a part of the GPU's name
  double bytes_per_second;
  double tensor_flops;
};

// Measured by copies of gigabytes between buffers of the device, and by PyTorch's matrix product of 8192 x
// 8192 in TF32 on random data (bf16: 753e12). Its clock falls under that load: tensor cores could do 535e12.
constexpr std::array measured_rates{
    MeasuredRates{"H200", 4.22e12, 400e12},  // 2026-11-15, driver 13.0
};

const MeasuredRates* measured_of(std::string_view name) {
  for (const MeasuredRates& rates : measured_rates) {
    if (name.find(rates.name) != std::string_view::npos) return &rates;
  }
  return nullptr;
}

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
  const MeasuredRates* const found = measured_of(name);
  return found == nullptr ? 0 : found->bytes_per_second;
}

double reached_tensor_flops(const Gpu& gpu) {
  const MeasuredRates* const found = measured_of(gpu.name);
  return found == nullptr ? gpu.tensor_flops() : found->tensor_flops;
}

}  // namespace onepass::cuda
