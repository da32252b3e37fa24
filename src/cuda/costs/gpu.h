// Sizes and rates of GPUs as data: what costs are computed from.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

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
  // tf32 multiply-adds of a multiprocessor per clock by mma.sync. In 16 bits it does twice as many.
  int tensor_products() const {
    if (compute_major == 8) return compute_minor == 0 ? 512 : compute_minor == 9 ? 256 : 128;
    return compute_major == 12 ? 128 : 512;
  }
  // By the instructions of warp groups, which cuDNN's kernels use where there are any.
  int most_tensor_products() const { return tensor_products() * (has_clusters() ? 2 : 1); }
  // tf32 operations a second on tensor cores, a multiply-add counted as two.
  double tensor_flops() const { return 2.0 * most_tensor_products() * multiprocessors * clock(); }

  bool has_clusters() const { return compute_major >= 9 && compute_major != 12; }
  // Blocks in the largest cluster that kernels ask for; 1 where there are no clusters.
  int largest_cluster() const { return compute_major == 9 || compute_major == 10 ? 16 : 1; }
};

// One GPU for each known architecture, oldest first: plans are made for it where no GPU is present.
std::span<const Gpu> typical_gpus();
// The one of an architecture; null where it has none.
const Gpu* typical_gpu(std::string_view architecture);

// The copy rate of a GPU by its name; 0 where none was measured.
double measured_copy_rate(std::string_view name);
// tf32 operations a second of a large matrix product: measured, or what the tensor cores could do.
double reached_tensor_flops(const Gpu& gpu);

// A large copy reaches this share of what memory clock and bus width give: 0.88 on an H200 (2026-11-15).
inline constexpr double copy_share = 0.88;

// Guesses for a GPU that hides its clocks and has an unknown architecture: a cost must not be infinite.
inline constexpr double guessed_bytes_per_second = 5e11;
inline constexpr double guessed_flops = 2e13;

}  // namespace onepass::cuda
