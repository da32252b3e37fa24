// A tile of cells times channels, as direct/narrow/tile.cuh has it, and what searches for one share.
#pragma once

#include <array>
#include <cstdint>
#include <sstream>

#include "cuda/thin/thin.h"

namespace onepass::cuda {

// Nothing here changes the order of a sum, so tiles may follow the batch.
struct CellTile {
  // --- The tile ---
  int64_t threads = 0;  // 0 where nothing fits
  int64_t groups = 1;   // of the convolution
  int64_t outputs = 1;  // channels of a thread, or of a warp
  int64_t output_slots = 1;
  int64_t positions = 1;  // cells of a thread, or of a warp, along x
  int64_t rows = 1;       // and along y
  std::array<int64_t, 3> slots{1, 1, 1};
  int64_t inputs = 1;  // channels of a group that are staged together

  // --- How many of them ---
  std::array<int64_t, 3> tiles{1, 1, 1};
  int64_t group_tiles = 1;
  int64_t output_tiles = 1;
  int64_t classes = 1;  // of z and y, a tile each

  // --- Shared memory, in elements ---
  bool input_interleaved = false;
  bool output_interleaved = false;
  int64_t input_vector = 1;
  int64_t output_vector = 1;
  int64_t store_lanes = 1;  // threads of a row of vectors
  std::array<int64_t, 3> window{1, 1, 1};
  std::array<int64_t, 3> window_strides{1, 1, 1};
  int64_t window_c = 1, window_g = 1;
  int64_t first_x = 0;  // the first input of the window, of cell 0
  std::array<int64_t, 3> result_strides{1, 1, 1};
  int64_t result_c = 1;
  int64_t result_skew = 0;
  int64_t result_floats = 0;

  int64_t blocks_wanted = 1;  // that a multiprocessor should have room for

  // Bytes of the launch: each once; with halos and parts of sectors.
  struct Traffic {
    double bytes = 0, read = 0, written = 0, stored = 0;
  };
  Traffic traffic;

  int64_t tile_outputs() const { return outputs * output_slots; }  // of each group
  int64_t channels() const { return groups * tile_outputs(); }
  int64_t cells(size_t d) const {
    return d == 0 ? slots[0] : d == 1 ? slots[1] * rows : slots[2] * positions;
  }
  int64_t tiles_of_sample() const {
    return tiles[0] * tiles[1] * tiles[2] * group_tiles * output_tiles * classes;
  }
  // Of memory's, L2's and stores' share of the launch.
  double moving_seconds(const Problem& problem, const Gpu& gpu) const;
  // What every kernel of such tiles is told of `struct Numbers`.
  Constants constants() const;
};

// A line of explain: "tile: ...".
void describe_tile(std::ostringstream& out, const CellTile& tile);

// What a cell of an axis reads.
struct CellReach {
  int64_t lowest = 0, highest = 0;  // offsets of inputs, over all classes
  int64_t distance = 0;             // between the first and last of a class, at most
  int64_t most_taps = 0;
  double taps = 0;  // of a class, on average

  explicit CellReach(const ThinAxis& axis);
};

struct CellSearch {
  const Problem& problem;
  const ThinShape& shape;
  const Gpu& gpu;
  int64_t samples;  // that tiles are cut for
  std::array<CellReach, 3> reach;
  std::array<int64_t, 3> cells{};
  int64_t x_classes;
  bool input_aligned, output_aligned;
  double chain_stages;

  CellSearch(const Problem& of, const ThinShape& its_shape, const Gpu& on);

  void set_counts(CellTile& own) const;
  // Elements of a vector along the input's channels, of so many at most, where they lie side by side; the
  // same of the output's.
  int64_t channel_vector(const CellTile& own, int64_t most) const;
  int64_t output_channel_vector(const CellTile& own, int64_t most) const;
  int64_t output_vector(const CellTile& own) const;
  // `staged`: elements of x that a block reads.
  void count_traffic(CellTile& own, double staged, double blocks) const;

 private:
  // `own` of a tile, `all` of the tensor.
  static int64_t channel_vector(const TensorSpec& spec, int64_t own, int64_t all, int64_t most);
  double bytes_of(const TensorSpec& spec) const;  // of all samples that tiles are cut for
};

}  // namespace onepass::cuda
