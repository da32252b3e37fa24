// The numbers of the row "banded": tiles, the layout of shared memory and what a tile has to do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cuda/direct/cell_tile.h"

namespace onepass::cuda {

// A tile of direct/banded.cuh: a warp has 16 segments of eight cells along x, each of `rows` rows and
// `outputs` channels. The window is of 16-bit elements, in rows of chunks of eight.
struct BandedNumbers : CellTile {
  static constexpr int64_t most_products_x = 4;

  int64_t products_x = 1;     // of 16 inputs, that have all taps of x
  int64_t window_chunks = 1;  // of a row
  int64_t items_of_warp = 1;  // one where results lie in the window's place
  int64_t bands_at = 0;       // bytes from the start of shared memory
  int64_t results_at = 0;
  int64_t shared = 0;           // bytes
  int64_t shift = -1;           // of chunks from 16 bytes of memory, in bytes; -1 where rows begin anywhere
  bool is_late = false;         // the chain runs when results leave
  bool rows_aligned = false;    // of the output: each begins on 16 bytes where the first does
  int64_t sample_elements = 0;  // that a sample of the input spans
  int64_t conflicts = 1;        // rows of a matrix that lie in the same banks
  int64_t keep_conflicts = 1;   // the same of results
  double clocks = 0;            // of the launch; tiles are compared by these

  // What the cost counts.
  struct Work {
    double warps = 0;
    double tensor = 0, shared = 0, issued = 0;  // clocks of a block
    double stage = 0, weights = 0, store = 0, kept = 0;
    double copies() const { return stage + weights + store + kept; }
    double chunks = 0, batches = 0;   // of loads, in a chunk
    double resident = 0, blocks = 0;  // of a multiprocessor, at once and in all
  };
  Work work;

  // `problem` is a convolution, or one with the chain after it.
  BandedNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu);

  int64_t segments() const { return slots[0] * slots[1] * slots[2]; }
  int64_t items() const { return groups * output_slots * divide_up(segments(), 16); }
  int64_t shared_bytes(const ThinShape&) const { return shared; }
  // Of the launch.
  double seconds(const Problem& problem, const ThinShape& shape, const Gpu& gpu) const;
  // `struct Numbers` of the kernel.
  std::string source(const ThinShape&) const;

 private:
  struct Search;
};

// The convolution with the dimension last that segments run along: where channels lie side by side any may
// be. It does not follow the batch, since the order of terms does.
ThinShape banded_shape(const Problem& problem);

}  // namespace onepass::cuda
