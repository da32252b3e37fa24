// The numbers of the row "gemm_mma": tiles, stages and predicted clocks.
#pragma once

#include <array>
#include <vector>

#include "cuda/gemm/gemm.h"
#include "cuda/gemm/mma_row_taps.h"

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
  // The norm waits for other tiles: its values wait in memory, or are computed again.
  bool recomputes = false;
  bool merges_classes = false;
  bool halves = false;      // f32 operands are rounded to f16, or split in two of it
  int64_t conv_groups = 1;  // each with weights of its own
  RowTaps row_taps;
  int64_t classes = 1;        // that are tiles of their own
  int64_t rows = 1;           // with outputs, of a group
  Box box{}, boxes{1, 1, 1};  // of the product's columns: with the halo of row taps
  std::array<WindowAxis, max_spatial_rank> axes;
  int64_t position_tiles = 1, channel_tiles = 1;
  int64_t parts = 1;
  int64_t vectors = 4, of_vector = 8, chunks = 1;
  int64_t windows = 2;  // in shared memory
  // A joint is a tap, or two taps that fill products together where each has an odd number of vectors.
  int64_t joint_taps = 1;
  // Neighbouring taps along x whose channels share a vector, where one tap would leave half of it empty. The
  // kernel then sees `span` times the channels and that much fewer taps, `span` times as far apart.
  int64_t span = 1;
  int64_t stages = 4;
  int64_t group_joints = 1;  // of a stage
  int64_t batch_vectors = 1, group_batches = 1;
  // x by asynchronous copies: runs of so many elements along x, or whole vectors of channels.
  int64_t copied_run = 0;
  bool copies_vectors = false;
  bool odd_taps = false;  // some class has a joint of a single tap
  int64_t window_pitch = 0;
  int64_t staged_vectors = 0;  // of a chunk, rounded up to a vector for each thread
  int64_t all_joints = 0, most_joints = 0, least_joints = 0, common_joints = 0;  // of classes
  int64_t most_taps = 0;        // of a class, as the mainloop sees them
  int64_t most_whole_taps = 0;  // of a class
  double padding = 1;  // products with those of zeros that fill vectors and rows, to those of the problem
  int64_t shared_bytes = 0;   // 0 where nothing fits
  int64_t blocks_wanted = 2;  // of a multiprocessor
  double score = 0;           // tiles are compared by these

  GemmMmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu);

  int64_t product_rows() const { return rows * row_taps.count(); }
  int64_t tiles() const { return classes * channel_tiles * position_tiles; }
  int64_t own_columns() const { return box[2] - row_taps.halo; }
  // How threads have a tile's outputs: `team` lanes share a row.
  struct Outputs {
    int64_t row_tiles, column_tiles, team;
  };
  Outputs outputs() const;
  // Of a tile, with those that only fill it.
  int64_t output_positions() const { return tile.warps_n * 2 * outputs().team * outputs().column_tiles; }
  int64_t window() const { return axes[0].entries * axes[1].entries * axes[2].entries; }
  int64_t chunk_channels() const { return vectors * of_vector; }
  // The convolution as the kernel's mainloop sees it.
  ThinShape spanned(ThinShape shape) const;
  // Whether the row was not made for so few channels: tiles are small, so that few samples fill the GPU.
  static bool has_few_channels(const ThinShape& shape);
  int64_t joint_vectors() const { return joint_taps * vectors; }
  bool copies() const { return copies_vectors || copied_run > 0; }
  // Some class has a last group of fewer joints.
  bool has_partial_groups() const { return common_joints % group_joints != 0; }
  int64_t weight_bytes() const {
    return conv_groups * all_joints * channel_tiles * chunks * parts * joint_vectors() * tile.rows() * 16;
  }
  // Seconds of the kernel, of both its launches where it recomputes, without launches before and after it;
  // fitted to measurements on an H200 (docs/lab/gemm_mma.md).
  double seconds(const Problem& problem, const ThinShape& shape, const Gpu& gpu, int64_t samples) const;
  // Of the launch that reads values in memory; 0 where there is none. `samples`: each group of the
  // convolution is one.
  double finish_seconds(const Problem& problem, const ThinShape& shape, const Gpu& gpu,
                        int64_t samples) const;
  // Whether the norm waits for other tiles.
  static bool has_second(const ThinShape& shape) {
    return shape.parts.norm != nullptr && !shape.parts.mean_follows_norm();
  }
  // The means of rows are sums over tiles.
  bool sums_rows(const ThinShape& shape) const {
    return shape.parts.mean && (!has_second(shape) || recomputes);
  }
  int64_t spans(const ThinShape& shape) const {
    const int64_t group_rows = rows / shape.groups;
    return tile.rows() % group_rows == 0 ? 1 : (group_rows - 1) / tile.rows() + 2;
  }

 private:
  static int64_t positions_of(const ThinAxis& axis);

  // How many taps fill a vector, evenly; 1 where a tap's channels fill half of it.
  static int64_t widest_span(const ThinShape& shape, int64_t of_vector);

  // Boxes of at most `most` positions that cover the output evenly; of less than half as many too where
  // `half_empty`, or where the output has no more.
  static std::vector<Box> boxes_of(const ThinShape& shape, int64_t halo, int64_t multiple, int64_t most,
                                   bool half_empty);

  // From here on `shape` is that of the product. `most_vectors`: of a chunk.
  GemmMmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu, const RowTaps& taken,
                 const Tile& wanted, const Box& tried, int64_t most_vectors, int64_t run, bool spans);
  // Keeps the best tile, and in `again` the best of those that compute values twice. `run`: x is copied in
  // runs of so many elements; 0 where it is not.
  void search(const Problem& problem, const ThinShape& shape, const Gpu& gpu, const RowTaps& taken,
              bool half_empty, int64_t run, GemmMmaNumbers& again);

  // The taps of each class that is a product of its own.
  std::vector<int64_t> class_taps(const ThinShape& shape) const;
  // Sets vectors, chunks and joints.
  void cut_terms(const ThinShape& whole, int64_t most_vectors);
  // Sets groups of joints, and batches of loads of x.
  void cut_stages(const Problem& problem);

  // Sets how many blocks share a multiprocessor, stages, and loads of x that one block has in flight.
  void fill_multiprocessor(const Gpu& gpu);
  // That a thread takes, about, with all that lives beside its sums.
  int64_t registers() const;

  // sizeof(GemmMmaShared).
  int64_t bytes_of_shared() const;

  // What a tile takes, in clocks of a multiprocessor: of its parts that work beside each other, and of
  // waiting.
  struct Work {
    double issued = 0, shared = 0, moved = 0, multiplied = 0;
    double block_waits = 0;  // of all warps: for x, for each other
    double warp_waits = 0;   // of each warp: for matrices, products, stores
    double busy = 0;         // of all parts beside each other

    void set_busy();
    // Of so many blocks at a time.
    double clocks(double blocks, double warps) const;
  };
  // What a launch leaves, and what a tile takes of it.
  struct Launched {
    bool norms = false;       // it knows the norm's statistics: the chain after the norm follows
    bool moments = false;     // or sums that are moments
    bool row_sums = false;    // of means
    double stored_bytes = 0;  // of an output
    Work work{};
  };
  // What every launch does.
  Work product_work(const Problem& problem, const ThinShape& shape, const Gpu& gpu) const;
  // The kernel's launches: one, or two where it recomputes.
  std::vector<Launched> launches(const Work& product, const Problem& problem, const ThinShape& shape) const;
  double seconds(const std::vector<Launched>& launches, const Problem& problem, const ThinShape& shape,
                 const Gpu& gpu, int64_t samples) const;
  double launch_seconds(const Launched& launched, const Problem& problem, const ThinShape& shape,
                        const Gpu& gpu, int64_t samples) const;
  // What tiles are compared by. It does not follow the batch.
  double score_of(const Work& product, const Problem& problem, const ThinShape& shape, const Gpu& gpu) const;
  // The same with the launch that reads values; of the problem's shape.
  double whole_score(const Problem& problem, const ThinShape& shape, const Gpu& gpu) const;
  void add_mainloop(Work& found, const Gpu& gpu) const;
  void add_source(Work& found, const Problem& problem, const ThinShape& shape) const;
  void add_row_taps(Work& found) const;
  void add_epilogue(Work& found, const Problem& problem, const ThinShape& shape,
                    const Launched& launched) const;
  void add_stores(Work& found, const Problem& problem, const ThinShape& shape,
                  const Launched& launched) const;
  // Runs of rows whose moments a warp leaves (gemm/mma/epilogue.cuh).
  double runs_of_moments(const ThinShape& shape) const;
  // Whether a store takes 16 bytes of neighbouring channels.
  bool stores_vectors(const Problem& problem, double bytes) const;
  // Of the last block of a sample, which merges the tiles' statistics, or adds up means.
  double merging_clocks(const ThinShape& shape, const Launched& launched) const;
  // How often a matrix of x is read, on average: once without bank conflicts.
  double matrix_conflicts() const;
};

}  // namespace onepass::cuda
