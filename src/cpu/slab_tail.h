// A tail of small slabs on the CPU: a panel of whole slabs goes through all steps while L1 holds it.
//   steps up to the norm -> mean and variance of each slab -> norm and the steps after it -> output or means
// The input is read once and the output written once. Nothing is kept per slab but in L1.
#pragma once

#include <string>
#include <vector>

#include "cpu/slabs.h"
#include "plan/strategy.h"

namespace onepass::cpu {

class SlabTail final : public Kernel {
 public:
  SlabTail(const Problem& problem, const Isa& isa);

  size_t workspace_bytes() const override { return static_cast<size_t>(workspace_floats_) * sizeof(float); }
  std::string describe() const override;
  void run(const Arguments& arguments, void* workspace, Executor& executor) const override;

  const Slabs& slabs() const { return slabs_; }

 private:
  // Values of a worker for each column of a panel. `zeros` is the shift of a norm without a bias.
  enum Row : int { centre, scale, zeros, mean, m2, row_count };
  struct Moments {
    double mean = 0;
    double m2 = 0;
  };
  struct Work {
    const Arguments& arguments;
    float* floats;  // the workspace
    float* own;     // the worker's part of it
    SlabRegion region;
    PanelView values;     // as far as they are
    const float* weight;  // the norm's, of the panel's columns; null: none
    const float* shift;
  };

  float* row(const Work& work, Row which) const;
  void run_panel(Work& work) const;
  void apply(Work& work, const Step& step, bool last) const;
  void begin(Work& work, const SlabRegion& region) const;
  void normalise(const Work& work) const;
  Moments merge(const float* means, const float* spreads) const;
  void finish_slab(const Work& work, int64_t slab, const Moments& moments) const;
  void finish_means(const Work& work, int64_t slab, const Moments& moments, double rstd) const;
  void store_means(const Work& work) const;

  Problem problem_;
  const Isa& isa_;
  Slabs slabs_;
  Chain chain_;
  SlabTensor input_;
  SlabTensor output_;
  std::vector<SlabTensor> tensors_;  // operands, as Chain::tensors
  TensorMap means_;                  // the output of a block with a mean
  bool mean_ = false;
  bool mean_of_norm_ = false;  // the mean of a norm's output follows from the statistics
  // Statistics are taken of each row of a slab at once, not of its columns. That takes 15 ns a row of a slab
  // instead of 4 a column.
  bool sums_whole_slabs_ = false;
  double eps_ = 0;
  int64_t task_panels_ = 1;
  int64_t workers_at_ = 0, worker_floats_ = 0, workspace_floats_ = 0;
};

}  // namespace onepass::cpu
