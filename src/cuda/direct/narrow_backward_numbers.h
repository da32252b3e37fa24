// The numbers of the row "narrow_backward": the tile of dweight and what it has to do.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "cuda/thin/thin.h"

namespace onepass::cuda {

// The convolution whose gradients are sums over u at its outputs and v at its inputs, with those tensors: the
// forward one, or the adjoint of a transposed one.
Problem weight_gradient_problem(const BackwardProblem& problem);

// How a box of a tensor lies in shared memory, as direct/narrow/staging.cuh reads it. In floats.
struct StagedBox {
  bool interleaved = false;
  int64_t channels = 1;  // of a group
  int64_t vector = 1;
  int64_t lanes = 1;  // threads of a row of vectors
  std::array<int64_t, 3> size{1, 1, 1};
  std::array<int64_t, 3> strides{1, 1, 1};
  int64_t c = 1, g = 1;
  int64_t floats = 0;
  int64_t skew = 0;
  int64_t lowest_x = 0;  // the first position that is read, and the first that is staged
  int64_t first_x = 0;

  // With so many floats behind each row, or behind each position's channels.
  void lay(int64_t groups, int64_t pad);
  int64_t place(int64_t group, int64_t channel, const std::array<int64_t, 3>& at) const;
  int64_t elements(int64_t groups) const { return groups * channels * size[0] * size[1] * size[2]; }
};

// A tile of direct/narrow_backward.cuh.
struct NarrowGradientNumbers {
  static constexpr int64_t sum_threads = 512;
  static constexpr int64_t bias_threads = 256;
  static constexpr int64_t bias_terms = 64;  // of a thread

  // --- A thread ---
  int64_t threads = 0;   // 0 where nothing fits
  int64_t u = 1, v = 1;  // channels
  int64_t taps_z = 1, taps_y = 1;
  int64_t positions = 1, step_rows = 1;  // multiplied together
  int64_t loops_y = 1, loops_z = 1;      // one after the other

  // --- A block ---
  int64_t groups = 1;
  int64_t u_slots = 1, v_slots = 1;
  int64_t tap_slots_z = 1, tap_slots_y = 1;
  std::array<int64_t, 3> slots{1, 1, 1};  // of positions
  int64_t tree = 1;                       // neighbouring lanes whose sums are added by shuffles
  int64_t batch = 1;                      // sums of a thread that pass through shared memory together
  int64_t fold_chunks = 1;                // boxes that are added in one chain

  // --- How many of them ---
  std::array<int64_t, 3> tiles{1, 1, 1};
  int64_t group_tiles = 1, u_tiles = 1, v_tiles = 1;
  int64_t wanted_splits = 1;  // that fill the GPU
  int64_t blocks_wanted = 1;  // that a multiprocessor should have room for

  StagedBox u_box, v_box;
  int64_t segment = 1;
  bool sums_bias = false;
  double seconds = 0;  // of the launch

  // `problem` is the one that weight_gradient_problem gives.
  NarrowGradientNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu, bool adds_bias);

  std::array<int64_t, 3> box() const {
    return {slots[0] * loops_z, slots[1] * step_rows * loops_y, slots[2] * positions};
  }
  int64_t lanes() const { return slots[0] * slots[1] * slots[2]; }
  int64_t items() const { return groups * u_slots * v_slots * tap_slots_z * tap_slots_y; }
  int64_t weight_sums(const ThinShape& shape) const { return u * v * taps_z * taps_y * shape.axes[2].kernel; }
  int64_t sums(const ThinShape& shape) const { return weight_sums(shape) + (sums_bias ? u : 0); }
  int64_t chunks_of_sample() const { return tiles[0] * tiles[1] * tiles[2]; }
  int64_t channel_tiles() const { return group_tiles * u_tiles * v_tiles; }
  int64_t shared_bytes() const { return 4 * (u_box.floats + v_box.floats); }
  // `struct Numbers` of the tile, with v's window, and `struct OutputNumbers` with u's box.
  std::string source(const ThinShape& shape) const;

 private:
  struct Search;
};

inline int64_t weights_of(const ThinShape& shape) {
  return shape.conv_groups * shape.channels * shape.in_channels * shape.taps;
}

// Found once for a problem.
std::shared_ptr<const NarrowGradientNumbers> narrow_gradient_numbers(const BackwardProblem& problem);

}  // namespace onepass::cuda
