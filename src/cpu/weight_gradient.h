// The gradient of a convolution's weights on the CPU.
//
//   dw[c,f,k] = sum over samples n and positions q of coarse[n,c,q] fine[n,f,q stride - padding + k dilation]
// with coarse the output's gradient and fine the input; of a transposed convolution it is the other way
// round.
//
// With channels last on both sides it is the forward's channel tile under other names. Lanes are coarse
// channels. The tile's pixels are the contiguous fine channels of a row of taps, and the terms of a sum are
// positions. A task takes a segment, some coarse and some fine channels of a group, over a part of the
// positions. It stages windows of the fine side in f32, with zeros beside the rows. Blocks have at most 256
// coarse positions, which ends a chain of additions. Parts are summed in double and in order; their number
// depends on the problem alone, so that the bits do not depend on threads.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/axis.h"
#include "cpu/isa.h"
#include "cpu/tensor_map.h"
#include "cpu/weight_sums.h"
#include "onepass/backward.h"

namespace onepass::cpu {

class WeightGradient final : public WeightSums {
 public:
  // For a block that is a convolution alone.
  WeightGradient(const BackwardProblem& problem, const Isa& isa);

  Lanes lanes() const override { return Lanes::channels; }
  double padded_multiply_adds() const override;
  double staged_elements() const override;
  std::string describe() const override;

  // Why it cannot be built; empty where it can.
  static std::string refusal(const BackwardProblem& problem);

  void run(const void* coarse, const void* fine, void* gradient, float* workspace,
           Executor& executor) const override;

 private:
  // One spatial dimension: coarse position q meets fine position q * stride - padding + k * dilation.
  struct Span {
    int64_t coarse = 1, fine = 1;
    int64_t kernel = 1, stride = 1, padding = 0, dilation = 1;

    int64_t reach() const { return (kernel - 1) * dilation + 1; }
    int64_t first_fine(int64_t q) const { return q * stride - padding; }
    int64_t window(int64_t coarse_count) const { return (coarse_count - 1) * stride + reach(); }
    bool is_inside(int64_t position) const { return position >= 0 && position < fine; }
    // The coarse positions at which tap k lies inside.
    Range met_by(int64_t k) const;
    // Whether a tap meets the fine position this far behind a window's first.
    bool is_used(int64_t relative) const;
  };
  struct Segment {
    Range coarse;  // channels of the tensor
    Range fine;
  };
  // Positions whose window is staged at once: some rows of one plane, and of those a run of columns.
  struct Unit {
    int64_t sample = 0;
    int64_t depth = 0;
    Range rows;
    Range cols;
  };
  // The memory of one worker.
  struct Worker {
    float* window = nullptr;
    float* block = nullptr;
    int64_t* staged = nullptr;  // what each slot of the window holds: the fine depth
  };
  struct Call {
    const void* coarse = nullptr;
    const void* fine = nullptr;
    float* floats = nullptr;
  };

  void choose_segments();
  void choose_windows();
  void choose_parts();
  void lay_out_workspace();

  int64_t unit_count() const;
  Unit unit_at(int64_t index) const;
  int64_t tile_width() const { return isa_.max_tile_vectors * isa_.lanes; }
  int64_t tile_count(const Segment& segment) const { return ceil_div(segment.coarse.size(), tile_width()); }
  int64_t width_of_tile(const Segment& segment, int64_t tile) const;
  int64_t outer_taps() const { return spans_[0].kernel * spans_[1].kernel; }
  int64_t block_rows(int64_t width) const;
  float* partial(const Call& call, int64_t part, int64_t segment) const;
  Worker worker_at(const Call& call, int worker) const;

  void run_task(const Call& call, int64_t part, int64_t segment, const Worker& worker) const;
  void stage_window(const Call& call, const Segment& segment, const Unit& unit, const Worker& worker) const;
  void stage_plane(const Call& call, const Segment& segment, const Unit& unit, int64_t depth,
                   float* to) const;
  void stage_pixels(const Call& call, const Segment& segment, const Unit& unit, int64_t depth, int64_t row,
                    Range cols, int64_t count, float* to) const;
  void stage_block(const Call& call, const Segment& segment, const Unit& unit, Range rows,
                   const Worker& worker) const;
  void add_block(const Segment& segment, const Unit& unit, Range rows, const Worker& worker, bool add,
                 float* sums) const;
  void add_row_of_taps(const Segment& segment, const float* window, const int32_t* offsets, Range terms,
                       const float* block, bool add, float* sums) const;
  void reduce(const Call& call, int64_t segment, int64_t tile, double* totals, void* gradient) const;

  const Isa& isa_;
  TensorMap coarse_;
  TensorMap fine_;
  DType gradient_dtype_ = DType::f32;
  std::array<Span, 3> spans_;
  int64_t threads_ = 1;
  int64_t batch_ = 0;
  int64_t groups_ = 1, group_coarse_ = 0, group_fine_ = 0;
  double multiply_adds_ = 0;

  std::vector<Segment> segments_;
  int64_t max_coarse_ = 0;  // channels of a segment, rounded up to vectors
  int64_t max_fine_ = 0;
  int64_t col_parts_ = 1, row_parts_ = 1, parts_ = 1;

  int64_t pitch_ = 0;  // floats between the pixels of a window
  int64_t slots_ = 1;  // planes of a window
  int64_t row_pixels_ = 0, plane_pixels_ = 0;
  std::array<std::vector<int32_t>, 2>
      offsets_;  // of the positions of a block, for the wider and the narrower
  int64_t partial_floats_ = 0, window_floats_ = 0, block_floats_ = 0;
  int64_t workers_at_ = 0, worker_floats_ = 0;
};

}  // namespace onepass::cpu
