// The numbers of the row "narrow": tiles, the layout of shared memory and what a tile has to do.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "cuda/direct/cell_tile.h"

namespace onepass::cuda {

// A tile of direct/narrow.cuh and how it lies in shared memory, in floats.
struct NarrowNumbers : CellTile {
  int64_t stage_lanes = 1;  // threads of a row of vectors
  int64_t window_floats = 0;
  int64_t skew = 0;
  int64_t lowest_x = 0;  // the first input that cell 0 reads
  int64_t segment = 1;
  int64_t most_taps_x = 1;
  int64_t weight_t = 1;
  int64_t part_inputs = 0;  // 0: a sum is one chain of additions

  double clocks = 0;      // of a block, where multiprocessors are full; tiles are compared by these
  double all_clocks = 0;  // of the launch

  // What the cost counts.
  struct Work {
    double warps = 0;
    double issued = 0, x_loads = 0, weight_loads = 0;  // instructions of a thread's mainloop
    double copies = 0;                                 // clocks to copy windows, weights and results
    double chunks = 0, batches = 0;                    // of loads, in a chunk
    double resident = 0, blocks = 0;                   // of a multiprocessor, at once and in all
  };
  Work work;

  // `problem` is a convolution, or one with the chain after it.
  NarrowNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu);

  int64_t used_threads() const { return groups * output_slots * slots[0] * slots[1] * slots[2]; }
  int64_t weight_c(const ThinShape& shape) const { return weight_t * shape.taps; }
  int64_t weight_floats(const ThinShape& shape) const { return inputs * weight_c(shape); }
  int64_t shared_bytes(const ThinShape& shape) const;
  // Of the launch, as fitted to measurements.
  double seconds(const Problem& problem, const ThinShape& shape, const Gpu& gpu) const;
  // `struct Numbers` of the kernel.
  std::string source(const ThinShape& shape) const;

 private:
  struct Search;
  // With so many floats behind each row of the window, or behind each position's channels.
  void lay_window(int64_t pad);
  void lay_results(const ThinShape& shape);
  // How many of a warp's addresses in shared memory fall into the same bank, at worst; 1 is no conflict.
  // `place`: where a thread's group, channel and cell lie.
  template <class Place>
  int64_t conflicts(const Place& place) const;
  int64_t load_conflicts(const ThinShape& shape) const;  // from the window
  int64_t keep_conflicts(const ThinShape& shape) const;  // to results
  // The padding with the fewest.
  void pad_window(const ThinShape& shape, int64_t most_bytes);
};

// Found once for a problem.
std::shared_ptr<const NarrowNumbers> narrow_numbers(const Problem& problem);

}  // namespace onepass::cuda
