// The gradient of the weights of a convolution in groups of few channels on the CPU, with lanes along
// channels.
//
//   dw[c,f,k] = sum over samples n and positions q of coarse[n,c,q] fine[n,f,q stride - padding + k dilation]
// Coarse is the output's gradient and fine the input; of a transposed convolution it is the other way round.
// A task takes a segment of coarse channels over a part of the windows (GroupWindows). A chain of additions
// has at most 256 positions. Parts are summed in double and in order; their number depends on the problem
// alone.
#pragma once

#include <cstdint>
#include <string>

#include "cpu/group_windows.h"
#include "cpu/weight_sums.h"
#include "onepass/backward.h"

namespace onepass::cpu {

class GroupWeightGradient final : public WeightSums {
 public:
  // Why it cannot be built; empty where it can.
  static std::string refusal(const BackwardProblem& problem);
  // For a block that is a convolution alone.
  GroupWeightGradient(const BackwardProblem& problem, const Isa& isa);

  Lanes lanes() const override { return Lanes::groups; }
  void run(const void* coarse, const void* fine, void* gradient, float* workspace,
           Executor& executor) const override;
  std::string describe() const override;
  double staged_elements() const override;
  double padded_multiply_adds() const override;

 private:
  void choose_parts();

  // Rows of one plane of a block, some columns of each.
  struct Chunk {
    int64_t depth = 0;
    Range rows;
    Range cols;
  };
  int64_t unit_count() const { return batch_ * windows_.block_count(); }
  // [row of taps][channel of a group][tap][lane]
  float* partial(float* workspace, int64_t part, int64_t segment) const;
  void run_task(const void* coarse, const void* fine, int64_t part, int64_t segment, float* sums,
                float* worker) const;
  void add_chunk(const Chunk& chunk, const GroupBlock& block, const Range& channels, const float* window,
                 const float* gradients, float* sums) const;
  void reduce(float* workspace, int64_t segment, void* gradient) const;

  const Isa& isa_;
  TensorMap coarse_;
  DType gradient_dtype_ = DType::f32;
  int64_t batch_ = 0;
  GroupWindows windows_;
  int64_t taps_ = 1;
  int64_t parts_ = 1;
  int64_t partial_floats_ = 0;
  int64_t workers_at_ = 0, worker_floats_ = 0;
};

}  // namespace onepass::cpu
