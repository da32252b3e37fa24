// What the rows that multiply by mma.sync share: how a sample is cut into tiles, and the kernel's source.
#pragma once

#include "cuda/thin/thin.h"

namespace onepass::cuda {

// Where values wait until the statistics of the norm are known: a parameter of the kernel in thin/mma.cuh.
enum class Hold : uint8_t {
  recompute,  // nowhere: both passes compute them
  in_output,  // in the output, or in a ring of the workspace
  in_cluster  // in the shared memory of a cluster
};

bool is_dense(const TensorSpec& tensor, Layout layout);

// How a sample is cut into tiles; nothing here depends on the batch.
struct MmaNumbers {
  int64_t threads = 256;
  int64_t spans_y = 1, spans_x = 1;  // of 8 cells in an item: rows of cells, or neighbours of a row
  int64_t tile_y = 1, tile_x = 0;
  int64_t tiles_y = 1, tiles_x = 1, tiles = 1;
  int64_t stage_y = 1;                         // rows of cells put together at a time
  int64_t chunk_pitch = 0, channel_pitch = 0;  // in elements
  int64_t window_z = 1, window_y = 1, window_x = 1;
  int64_t lead = 0, row_pitch = 0, plane = 0;  // of the window, in elements
  int64_t products = 0, row_tiles = 1;
  int64_t stage_bytes = 0, shared_bytes = 0;
  int64_t piece = 0;  // neighbouring outputs that are stored as they are computed; 0: rows are put together
  bool prefetches = false;   // the next window has a place of its own
  bool overlaps = false;     // the earlier tile writes a shared sector
  bool interleaved = false;  // the output has its channels after space
  bool vectors = false;      // rows of the input are
  bool is_short = false;     // the input has 16 bits
  bool weights_in_registers = false;
  bool holds_weights = false;  // in registers, for a class of z, instead of several spans
  bool splits = false;
  bool pairs = false;
  bool begins_with_swish = false;
  bool swish_alone = false;
  bool strict = false;         // 16-bit outputs have the functions of f32
  bool computes_once = false;  // outputs are computed once and wait in memory
  int64_t most_tile_cells = int64_t{1} << 31;
  // Values that are computed once and do not wait in the output: pitch of padded rows (0: not padded), and
  // elements of a sample.
  int64_t kept_pitch = 0, kept_length = 0;

  MmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu, Hold hold);

  int64_t warps() const { return threads / 32; }
  int64_t weight_bytes() const;
  int64_t window_bytes(const ThinShape& shape) const;

  // `struct Numbers` with `more` constants, and the before-chain without its first stage.
  std::string source(const std::string& more = "") const;
  std::string rest_source(const Problem& problem, const ThinShape& shape) const;

  // The first line of a description: what is multiplied and how.
  std::string describe_convolution(const Problem& problem, const ThinShape& shape) const;
  // What is coarser than f32, for explain.
  std::vector<std::string> notes(const Problem& problem) const;

  double before_instructions(const ThinShape& shape) const;
  // Outputs of a span that a lane has.
  static double span_outputs(const ThinShape& shape);
  // Instructions of their chains, norm and stores.
  double output_instructions(const ThinShape& shape) const;

  // Instructions of the products of a span (8 cells, 16 channels), and of taking a window, about.
  double span_instructions(const ThinShape& shape) const;
  double window_instructions(const ThinShape& shape) const;
  // Instructions of a warp for a tile in all passes, counted in compiled code.
  double tile_instructions(const ThinShape& shape) const;
  // Outputs of a tile, padding included.
  int64_t tile_outputs(const ThinShape& shape) const;

 protected:
  // The window of a tile of `rows` rows of cells, and what follows from window_y.
  void lay_window(const ThinShape& shape, int64_t rows, int64_t cells_x);
  void lay_planes(const ThinShape& shape);

 private:
  // Tiles, and their place in shared memory. tile_x stays 0 where not even one item fits a warp's share.
  void cut(const ThinShape& shape, int64_t bytes, int64_t budget);

  // Whether tiles of `cells_x` cells of a row fit. `several`: as many rows as fit are put together at a time.
  // `overlapping`: pieces of rows are whole sectors.
  bool cut_rows(const ThinShape& shape, int64_t bytes, int64_t budget, int64_t cells_x, bool several,
                bool overlapping);
};

// The kernel with this hold. `tail`: source of its chains and types; `more`: constants of the hold; `blocks`:
// residents of a multiprocessor.
Source mma_source(Hold hold, const Problem& problem, const ThinShape& shape, const MmaNumbers& numbers,
                  const std::string& tail, const std::string& more, int64_t blocks);

// Why such a row cannot take a thin problem whose output is stored; empty where it can.
std::string mma_refusal(const Problem& problem, const MmaNumbers& numbers);
// Why values that wait for their norm cannot be computed once; empty where they can.
std::string computed_once_refusal(const ThinShape& shape);
// Seconds of a launch that moves its bytes in `moved` seconds.
double mma_seconds(const Problem& problem, const ThinShape& shape, const MmaNumbers& numbers, double moved);

}  // namespace onepass::cuda
