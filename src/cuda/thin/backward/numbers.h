// The numbers of the row "thin_backward": how a sample is cut into tiles and tickets.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <string>

#include "cuda/thin/thin.h"

namespace onepass::cuda {

// What is asked of the kernel.
struct ThinBackwardWork {
  BackwardWork tail;
  bool input = false, weight = false, bias = false;
  bool first = false, second = false, sums = false;
  bool may_read_output = false;  // the output may replace pass 1

  ThinBackwardWork(const BackwardProblem& problem, const TailParts& parts);
  int first_sums() const { return tail.first_sums; }
  int second_sums() const { return tail.second_sums + (bias ? 1 : 0) + (may_read_output ? 1 : 0); }
};

// Nothing here but `shape` depends on the batch.
struct ThinBackwardNumbers {
  using Three = std::array<int64_t, 3>;

  static constexpr int64_t threads = 256;
  static constexpr int64_t warps = threads / 32;
  static constexpr int64_t slices = 16;  // of the batch, in sums over it

  ThinShape shape;
  ThinBackwardWork work;
  bool splits = false;  // operands are split in two tf32
  bool halves = false;  // operands are scaled f16: half the space, where that has as many bits
  // A warp's chunk: `spans` of 8 positions in each of `chunk_rows` rows.
  int64_t spans = 4, chunk_rows = 1;
  bool stages_gradient = false;  // dy of a chunk comes by way of shared memory
  // GradientTerms.
  int64_t vector = 4;  // neighbouring input channels in a window
  int64_t steps = 0, fragments = 0, jobs = 0, units = 0, job_parts = 1;
  // Passes 1 and 2.
  Three tile{1, 1, 1}, tiles{1, 1, 1}, window{1, 1, 1}, low{0, 0, 0};
  int64_t dh_pitch = 0, segments = 1, segment_tiles = 1;
  // Pass 3.
  Three back_tile{1, 1, 1}, back_tiles{1, 1, 1}, back_window{1, 1, 1};
  int64_t back_live = 1, back_buffers = 1, back_columns = 1, back_spans = 1, back_spans_at_once = 1,
          back_pitch = 16, product_pitch = 8;
  Three conv_stride{1, 1, 1}, conv_padding{0, 0, 0}, conv_dilation{1, 1, 1};
  int64_t blocks = 2;        // of a multiprocessor
  int64_t shared_bytes = 0;  // 0: nothing fits

  explicit ThinBackwardNumbers(const BackwardProblem& problem);

  int64_t all_tiles() const;
  int64_t all_back_tiles() const;
  int64_t tickets_of_sample() const;
  int64_t ring_bytes() const;
  // `struct Numbers`.
  std::string source(const BackwardProblem& problem) const;

 private:
  bool may_halve() const;
  bool may_stage(const BackwardProblem& problem) const;
  bool slides() const;
  bool has_row_per_warp() const;
  void cut_chunks();
  void find_terms();
  bool cut(int64_t budget);
  bool cut_passes(int64_t budget);
  bool cut_back(int64_t budget);
  void set_window();
  void set_back(int64_t parts, int64_t rows, int64_t at_once, int64_t buffers);
  double tile_cost() const;
  double window_cost() const;
  double fresh_part() const;
  double plane_cost() const;

  int64_t operand_bytes() const { return halves ? 2 : 4; }
  int64_t products() const { return halves ? 1 : vector / 2; }
  int64_t classes_x() const { return std::ssize(shape.axes[2].classes); }
  int64_t components() const { return std::min(shape.in_channels, vector); }
  int64_t window_vectors() const;
  int64_t column_tiles() const { return divide_up(shape.in_channels * shape.axes[2].kernel, 16); }
  int64_t met(size_t d, int64_t inputs) const;
  int64_t back_items() const;
  int64_t back_elements() const;

  // sizeof ThinBackward's structs. `shared_bytes_with` is of Shared, with so many bytes of passes.
  int64_t pass_bytes() const;
  int64_t back_bytes() const;
  int64_t shared_bytes_with(int64_t bytes) const;

  bool transposed_ = false;
  int64_t row_tiles_ = 1;
  Three reach_{0, 0, 0};
};

}  // namespace onepass::cuda
