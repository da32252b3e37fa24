// How the row "thin_wgmma" cuts a unit of samples into tiles.
#pragma once

#include <string>
#include <utility>

#include "cuda/thin/thin.h"

namespace onepass::cuda::wgmma {

inline constexpr int64_t lanes = 8;
inline constexpr int64_t strips = 4;       // of a tile: two of a warpgroup
inline constexpr int64_t consumers = 256;  // threads that multiply
inline constexpr int64_t producers = 128;  // threads that load
inline constexpr int64_t block_rows = 16;  // of the accumulators: a warp's
inline constexpr int64_t product_blocks = 4;
// Of dithered weights: these are off by a twelfth of a unit at most.
inline constexpr int64_t least_versions = 6;

// How a unit (8 / row_groups samples) is cut into tiles. Only the sharing of a unit by a cluster, for few
// units, depends on the batch.
struct WgmmaNumbers {
  int64_t row_groups = lanes;  // lanes of a sample
  int64_t lane_rows = 1;       // output rows of a lane
  int64_t tile_rows = strips;  // of a lane, in a tile: 1, 2 or 4
  int64_t columns = 1;         // of a strip
  int64_t column_tiles = 1;
  int64_t tiles = 1;
  int64_t core_rows = 1;  // taps of the middle dimension in eight terms
  int64_t core_columns = lanes;
  int64_t core_channels = 1;
  int64_t starts = 1;  // rows of the window that a core begins at
  int64_t window_columns = 1;
  int64_t row_units = 1;         // that a row of the window takes
  bool columns_lie_near = true;  // nearest in memory
  int64_t row_bytes = 0;         // of the input's rows along lanes, where they are vectors
  bool loads_rows = false;       // a thread loads a whole one
  int64_t planes = 4;            // of the ring
  int64_t channel_blocks = 1;
  bool paired = false;  // two warps finish a plane's outputs; A is kept for every turn
  int64_t input_parts = 1;
  int64_t weight_parts = 1;
  bool may_dither = false;  // weights of tf32, in "fast" numerics
  bool dithers = false;     // weights are halves that are right on average
  int64_t weight_sets = 1;  // that strips have: dithered weights of other versions
  int64_t slots = 1;
  int64_t tile_parts = 1;   // a cluster's blocks have some of the tiles,
  int64_t plane_parts = 1;  // and some planes of the output
  int64_t weight_rows = 0;  // of a product's A, for all turns and versions
  int64_t shared_bytes = 0;
  double clocks = 0;        // of a sample's pass, by one block
  double plane_clocks = 0;  // of a tile's plane

  WgmmaNumbers(const Problem& problem, const ThinShape& shape);

  int64_t samples() const { return lanes / row_groups; }
  int64_t parts() const { return tile_parts * plane_parts; }

  // The batch that a plan for few samples is made for: neighbouring batches have the same kernel and bits. 0
  // for many samples.
  static int64_t representative(int64_t batch);

  // Clocks of all units, one after the other on each cluster.
  double all_clocks(const ThinShape& shape, int64_t batch, const Gpu& gpu) const;

  // Clocks saved on a plane where a round of the slots is one of the ring: operand addresses are constants.
  double spared_clocks(const ThinShape& shape, int64_t window_planes) const;

  // By this orders of the dimensions are compared. Like the kernel, it is the same for neighbouring batches.
  double cost(const ThinShape& shape, const Problem& problem) const;

  // A cluster for each unit, of as many blocks as pay.
  void share_units(const Problem& problem, const ThinShape& shape, int64_t batch, WgmmaNumbers& best) const;
  int64_t threads() const { return consumers + producers; }
  int64_t products() const { return weight_parts + input_parts - 1; }

  // A launch of 384 threads has 168 registers for each. Partial sums need more of them, and leave fewer for
  // elements in flight. Two rows of f32 elements in flight need more.
  int64_t consumer_registers() const { return input_parts == 2 ? 208 : has_long_rows() ? 192 : 200; }
  int64_t producer_registers() const { return 3 * 168 - 2 * consumer_registers(); }
  int64_t most_elements() const { return input_parts == 2 ? 18 : 36; }
  int64_t most_row_words() const { return input_parts == 2 ? 32 : has_long_rows() ? 64 : 48; }
  // With few columns, so that consumers need no more registers.
  bool has_long_rows() const { return loads_rows && row_bytes > 96 && columns <= 13; }

  // Whether samples may have to be computed again. f32 elements may overflow f16, and values that are not
  // finite must not meet the zeros that pad a product.
  bool guards(const Problem& problem, const ThinShape& shape) const;

  // Whether dithered weights are right on average. The planes that a strip completes take every version of
  // its turns, with counts that differ by one. With four of each, weights are off by a sixteenth of a unit of
  // the last place (half a unit when rounded to nearest). The difference between positions, 0.4 units a term,
  // averages out to a fiftieth over enough positions.
  static bool averages_out(const ThinShape& shape);

  // Bytes of rows along lanes where a thread can load them by vectors into 32 registers; else 0.
  static int64_t vector_row_bytes(const Problem& problem, const ThinShape& shape);

  // Copies of a unit in a plane, as bits of a word.
  int64_t copies(const ThinShape& shape) const;

  // Chooses the fewest cores, then the fewest rows stored. Columns of a core are neighbours.
  void choose_core(const ThinShape& shape);
  static int64_t cores_with(const ThinShape& shape, int64_t channels, int64_t rows, int64_t columns);

  void cut(const ThinShape& shape, int64_t most_bytes, int64_t of_sample, int64_t rows, int64_t width);

  // sizeof(ThinWgmma::Shared) with so many rows of A, and of slots that blocks of a cluster exchange.
  int64_t bytes_of_shared(const ThinShape& shape, int64_t rows, int64_t part_slots) const;

  std::string source() const;
};

// Rows of products are taps of the first dimension, columns lanes of the second and positions of the third:
// whichever order of the block's dimensions wastes least of them.
struct WgmmaPlan {
  ThinShape shape;
  WgmmaNumbers numbers;

  explicit WgmmaPlan(const Problem& problem);

  std::string refusal(const Problem& problem) const;

 private:
  WgmmaPlan(const Problem& problem, ThinShape of) : shape(std::move(of)), numbers(problem, shape) {}
};

}  // namespace onepass::cuda::wgmma
