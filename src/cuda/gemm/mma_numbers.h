// The numbers of the row "gemm_mma": tiles, stages and predicted clocks.
#pragma once

#include <array>
#include <vector>

#include "cuda/gemm/gemm.h"

namespace onepass::cuda {

// The entries of one dimension of a box's window (gemm/mma.cuh).
struct WindowAxis {
  int64_t entries = 1;
  int64_t width = 1;
  int64_t unit = 1;
  bool compact = false;  // each tap has entries of its own

  WindowAxis() = default;
  WindowAxis(const ThinAxis& axis, int64_t box);
};

// How a sample is cut into tiles. Nothing here depends on the batch.
struct GemmMmaNumbers {
  using Box = FlatGeometry::Box;
  struct Tile {
    int64_t row_tiles, column_tiles, warps_m, warps_n;
    int64_t rows() const { return 16 * row_tiles * warps_m; }
    int64_t positions() const { return 8 * column_tiles * warps_n; }
    int64_t threads() const { return 32 * warps_m * warps_n; }
  };

  Tile tile{};
  int64_t conv_groups = 1;  // each with weights of its own
  bool merges_classes = false;
  Box box{}, boxes{1, 1, 1};
  std::array<WindowAxis, max_spatial_rank> axes;
  int64_t position_tiles = 1, channel_tiles = 1;
  bool halves = false;  // f32 operands are rounded to f16, or split in two of it
  int64_t parts = 1;
  int64_t vectors = 4, of_vector = 8, chunks = 1;
  int64_t windows = 2;  // in shared memory
  // A joint is a tap, or two taps that fill products together where each has an odd number of vectors.
  int64_t joint_taps = 1;
  int64_t stages = 4;
  int64_t group_joints = 1;  // of a stage
  int64_t batch_vectors = 1, group_batches = 1;
  int64_t window_pitch = 0;
  int64_t staged_vectors = 0;  // of a chunk, rounded up to a vector for each thread
  int64_t all_joints = 0, most_joints = 0, least_joints = 0, common_joints = 0;  // of classes
  int64_t most_taps = 0;                                                         // of a class
  bool odd_taps = false;  // some class has a joint of a single tap
  double padding = 1;     // products with those of zeros that fill vectors and rows, to those of the problem
  int64_t shared_bytes = 0;    // 0 where nothing fits
  int64_t blocks_wanted = 2;   // of a multiprocessor
  double clocks = 0;           // of a multiprocessor, for a sample; tiles are compared by these
  double measured_clocks = 0;  // the same, as fitted to measurements

  GemmMmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu);

  int64_t classes(const ThinShape& shape) const { return merges_classes ? 1 : shape.classes(); }
  int64_t rows(const ThinShape& shape) const {
    return shape.channels * (merges_classes ? shape.classes() : 1);
  }
  int64_t tiles(const ThinShape& shape) const { return classes(shape) * channel_tiles * position_tiles; }
  int64_t window() const { return axes[0].entries * axes[1].entries * axes[2].entries; }
  int64_t chunk_channels() const { return vectors * of_vector; }
  // Whether the row was not made for so few channels: tiles are small, so that few samples fill the GPU.
  static bool has_few_channels(const ThinShape& shape);
  int64_t joint_vectors() const { return joint_taps * vectors; }
  // Some class has a last group of fewer joints.
  bool has_partial_groups() const { return common_joints % group_joints != 0; }
  int64_t weight_bytes() const {
    return conv_groups * all_joints * channel_tiles * chunks * parts * joint_vectors() * tile.rows() * 16;
  }
  int64_t spans(const ThinShape& shape) const {
    const int64_t group_rows = rows(shape) / shape.groups;
    return tile.rows() % group_rows == 0 ? 1 : (group_rows - 1) / tile.rows() + 2;
  }

 private:
  static int64_t positions_of(const ThinAxis& axis);

  // Boxes of at most `most` positions that cover the output evenly.
  static std::vector<Box> boxes_of(const ThinShape& shape, int64_t most);

  GemmMmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu, const Tile& wanted,
                 const Box& tried);

  // The taps of each class that is a product of its own.
  std::vector<int64_t> class_taps(const ThinShape& shape) const;
  // Sets vectors, chunks and joints.
  void cut_terms(const ThinShape& shape);
  // Sets groups of joints, and batches of loads of x.
  void cut_stages(const Problem& problem);

  // What tiles are compared by: clocks of some samples on the whole GPU. It does not follow the batch.
  double score(const ThinShape& shape, const Gpu& gpu) const;

  // sizeof(GemmMmaShared).
  int64_t bytes_of_shared() const;

  // Outputs of a class lie a stride apart: the sectors that are written, to those of neighbours.
  double sectors_of_class(const Problem& problem, const ThinShape& shape) const;

  // Clocks of a tile.
  struct Parts {
    double multiplied = 0, read_weights = 0, read_x = 0, moved = 0;  // beside each other
    double staged = 0, finished = 0;
  };
  Parts parts_of(const Problem& problem, const ThinShape& shape, const Gpu& gpu) const;
  // Whether blocks of a multiprocessor hide a part of what each does outside of the mainloop.
  bool has_many_blocks() const { return blocks_wanted >= 4 && blocks_wanted * tile.threads() >= 512; }
  // How often a matrix of x is read, on average: once without bank conflicts.
  double matrix_conflicts() const;
  double predict(const Problem& problem, const ThinShape& shape, const Gpu& gpu) const;
  // Of few channels: 33 measurements (docs/lab/gemm_mma.md).
  double predict_few(const Problem& problem, const ThinShape& shape, const Gpu& gpu) const;
};

}  // namespace onepass::cuda
