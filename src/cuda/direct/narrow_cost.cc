// What the row "narrow" costs, fitted to 45 measurements on an H200 (docs/lab/narrow.md).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <utility>

#include "cuda/direct/narrow_numbers.h"
#include "cuda/direct/row_copy.h"
#include "cuda/gemm/gemm.h"

namespace onepass::cuda {

template <class Place>
int64_t NarrowNumbers::conflicts(const Place& place) const {
  std::array<int64_t, 32> addresses{};
  size_t used = 0;
  for (int64_t lane = 0; lane < std::min<int64_t>(32, used_threads()); ++lane) {
    int64_t rest = lane;
    const auto take = [&](int64_t count) { return std::exchange(rest, rest / count) % count; };
    int64_t group = 0, output = 0;
    const auto take_channels = [&] {
      output = take(output_slots) * outputs;
      group = take(groups);
    };
    if (input_interleaved) take_channels();
    const int64_t x = take(slots[2]) * positions;
    const int64_t y = take(slots[1]) * rows;
    const int64_t z = take(slots[0]);
    if (!input_interleaved) take_channels();
    addresses[used++] = place(group, output, std::array{z, y, x});
  }
  return most_in_a_bank(addresses, used);
}

int64_t NarrowNumbers::load_conflicts(const ThinShape& shape) const {
  return conflicts([&](int64_t group, int64_t, const std::array<int64_t, 3>& at) {
    const auto place = [&](size_t d) { return at[d] * shape.axes[d].step; };
    return group * window_g + place(0) * window_strides[0] + place(1) * window_strides[1] +
           (skew > 0 ? place(2) + place(2) / skew : place(2)) * window_strides[2];
  });
}

int64_t NarrowNumbers::keep_conflicts(const ThinShape& shape) const {
  return conflicts([&](int64_t group, int64_t output, const std::array<int64_t, 3>& at) {
    const int64_t x = at[2] * std::ssize(shape.axes[2].classes);
    return (group * tile_outputs() + output) * result_c + at[0] * result_strides[0] +
           at[1] * result_strides[1] + (result_skew > 0 ? x + x / result_skew : x) * result_strides[2];
  });
}

double NarrowNumbers::seconds(const Problem& problem, const ThinShape& shape, const Gpu& gpu) const {
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  const int64_t sums = outputs * rows * positions * std::ssize(shape.axes[2].classes);
  // Multiply-adds are issued in 65% of the clocks, copies in 90%. An access to shared memory takes as many
  // clocks as addresses fall into one bank: 16 to 4 channels k1 in channels last, where all 32 do so in the
  // mainloop and where sums are kept, took 234 us, and 69 were predicted without.
  const double reading = work.x_loads * number(load_conflicts(shape)) + work.weight_loads;
  const double used_warps = number(used_threads()) / 32;
  const double mainloop = std::max(work.warps * work.issued / 4 / 0.65, used_warps * reading);
  const double kept = used_warps * number(sums * keep_conflicts(shape));
  // softplus twice (6 to 64 channels k2) took 279 us; 132 were predicted with the same for all stages.
  const double chain = work.warps * number(sums) * gemm_chain_instructions(shape.parts.after) / 4;
  const double block = mainloop + kept + (work.copies + chain) / 0.9;
  // Each batch of loads waits for memory, which other blocks fill.
  const double latency = work.chunks * (400 + 600 * work.batches) + 1500;
  const double rounds = std::ceil(work.blocks / work.resident);
  const double computing =
      rounds * std::max(block * work.resident, block / std::min(1.0, work.warps / 6) + latency) / gpu.clock();
  const double moving = moving_seconds(problem, gpu);
  return std::max(computing, moving) + 0.25 * std::min(computing, moving);
}

}  // namespace onepass::cuda
