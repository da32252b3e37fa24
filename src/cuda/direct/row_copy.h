// How boxes of tensors are copied to shared memory: vectors, and threads of a row of them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/source.h"

namespace onepass::cuda {

inline constexpr int64_t vector_elements = 4;

inline int64_t floor_divide(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// Whether each element of another dimension begins on a vector's boundary.
inline bool is_aligned_except(const TensorSpec& spec, size_t along) {
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    if (d != along && spec.sizes[d] > 1 && spec.strides[d] % vector_elements != 0) return false;
  }
  return spec.strides[along] == 1;
}

inline bool lies_interleaved(const TensorSpec& spec) { return spec.sizes[1] > 1 && spec.strides[1] == 1; }

// How threads copy rows of vectors: `lanes` threads a row. In instructions of a thread.
struct RowCopy {
  int64_t lanes = 1;
  int64_t batches = 0;  // of eight loads of a thread
  double instructions = 0;

  RowCopy(int64_t vectors, int64_t rows, int64_t vector_bytes, int64_t threads, double row_cost,
          double vector_cost) {
    constexpr int64_t most_steps = 8;
    for (int64_t steps = 1; steps <= most_steps || lanes_of(vectors, steps - 1) > threads; ++steps) {
      const int64_t own = lanes_of(vectors, steps);
      if (own > threads) continue;
      // Lanes of a row that fill no sector wait for as many more accesses.
      const double sector = std::max(1.0, 32.0 / static_cast<double>(own * vector_bytes));
      const double cost = static_cast<double>(divide_up(rows, threads / own)) *
                          (row_cost + static_cast<double>(divide_up(vectors, own)) * vector_cost * sector);
      if (instructions > 0 && cost >= instructions) continue;
      lanes = own;
      instructions = cost;
    }
    batches = divide_up(rows, threads / lanes * std::max<int64_t>(1, 8 / divide_up(vectors, lanes)));
  }

  static int64_t lanes_of(int64_t vectors, int64_t steps) {
    return divide_up(vectors, std::max<int64_t>(1, steps));
  }
};

// How many of a warp's addresses in shared memory, of floats, fall into the same bank, at worst; equal ones
// are one access.
inline int64_t most_in_a_bank(std::array<int64_t, 32>& addresses, size_t used) {
  std::sort(addresses.begin(), addresses.begin() + static_cast<std::ptrdiff_t>(used));
  std::array<int64_t, 32> banks{};
  int64_t most = 1;
  for (size_t i = 0; i < used; ++i) {
    if (i > 0 && addresses[i] == addresses[i - 1]) continue;
    most = std::max(most, ++banks[static_cast<size_t>(addresses[i] % 32)]);
  }
  return most;
}

// Counts to try: powers of two, and all.
inline std::vector<int64_t> slot_counts(int64_t cells, int64_t of_thread, int64_t most) {
  const int64_t all = divide_up(cells, of_thread);
  std::vector<int64_t> counts;
  for (int64_t count = 1; count < all && count <= most; count *= 2) counts.push_back(count);
  if (all <= most) counts.push_back(all);
  return counts;
}

}  // namespace onepass::cuda
