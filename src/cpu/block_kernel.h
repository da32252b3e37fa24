// A block on the CPU. The convolution or the input feeds panels to the chain; a slab is normalised while in
// cache.
//
// The work goes in waves of units. A unit is a sample, or one slab of it where values before the norm are
// kept in the workspace.
//   first pass   panels of the convolution (or of the input) -> steps up to the norm -> statistics -> middle
//   finish       statistics of a unit's blocks, merged in a fixed order -> centre, scale and shift per
//   channel second pass  middle -> norm and the steps after it -> output, or sums for the mean
// A wave is small enough that the second pass finds the middle in a cache.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cpu/chain.h"
#include "cpu/convolver.h"
#include "cpu/grid.h"
#include "cpu/isa.h"
#include "cpu/tensor_map.h"
#include "plan/strategy.h"

namespace onepass::cpu {

// Where the values before the norm wait for its statistics.
enum class Middle : uint8_t {
  none,    // no second pass: nothing follows, or only sums are needed
  output,  // in the f32 output itself
  slab,    // in a f32 slab of the workspace: the output is of another type, or reduced
  input,   // nowhere: the second pass reads the input again
};

// One way over all panels of a unit.
struct Pass {
  Orientation orientation = Orientation::planar;
  Orientation cut = Orientation::planar;  // how tasks and panels are cut
  Grid grid;                              // of streaming tasks; the first pass of a convolution has its own
  std::vector<Step> steps;
  int64_t statistics_blocks = 0;  // partial statistics per channel, merged in this order
  // How the statistics of each block join those before it: their share of the mean, and what the squared
  // distance of the means counts.
  struct Join {
    double share = 0;
    double spread = 0;
  };
  std::vector<Join> joins;
};

class BlockKernel final : public Kernel {
 public:
  // `lanes` of the convolution, for a block that has one.
  BlockKernel(const Problem& problem, const Isa& isa, std::optional<Lanes> lanes);

  size_t workspace_bytes() const override { return static_cast<size_t>(workspace_floats_) * sizeof(float); }
  size_t packed_bytes() const override;
  uint64_t packing() const override;
  std::string describe() const override;
  void run(const Arguments& arguments, void* workspace, Executor& executor) const override;
  void pack(const std::vector<const void*>& parameters, void* packed, Executor& executor) const override;

  const Convolver* convolution() const { return convolution_.get(); }
  // Weights of the convolution that are copied before, for the cost.
  int64_t copied_weights() const { return copied_weights_; }
  // Panels of the convolution change orientation before the steps.
  bool turns_panels() const {
    return convolution_ != nullptr && first_.orientation != convolution_->orientation();
  }

 private:
  // The parts of the workspace of one call.
  struct Call {
    const Arguments& arguments;
    float* floats;
    int64_t first_unit = 0;  // of the wave
  };
  // A tensor that a pass reads or writes, from this channel on; without a map: nothing.
  struct Endpoint {
    const TensorMap* map = nullptr;
    const void* base = nullptr;
    int64_t first_channel = 0;

    Region local(const Region& region) const {
      return {region.sample,
              {region.channels.begin - first_channel, region.channels.end - first_channel},
              region.pixels};
    }
  };
  // A place for running statistics while a block is processed, and how far they are.
  struct Running {
    float* mean = nullptr;
    float* m2 = nullptr;
    int64_t pixels = 0;
  };
  struct Moments {
    double mean = 0;
    double m2 = 0;
  };
  // Means of neighbouring channels in the output.
  struct Means {
    DType dtype = DType::f32;
    char* first = nullptr;
    int64_t stride_bytes = 0;

    void store(int64_t channel, double value) const;
  };

  // Of some slabs of a unit, from the first one's first channel on: the norm's parameters, and where the norm
  // of each channel goes.
  struct SlabNorms {
    const float *weight = nullptr, *bias = nullptr;
    float *centre = nullptr, *scale = nullptr, *shift = nullptr;
    float* statistics = nullptr;                  // of each slab; null where nobody asks
    double channel_share = 1, element_share = 1;  // of a slab
    Means means;
  };

  void choose_middle();
  void choose_passes();
  void choose_joins(Pass& pass) const;
  Orientation first_orientation() const;
  bool stores_turned() const;
  void choose_wave();
  void lay_out_workspace();
  void copy_weights(const void* weights, float* to, Executor& executor) const;
  // What is kept: what the convolver packs, and behind it the weights where they are copied.
  int64_t kept_weights_at() const;
  void run_waves(const Arguments& arguments, void* workspace, Executor& executor) const;

  int64_t unit_count() const { return batch_ * units_.per_sample; }
  Endpoint middle_of(const Call& call, int64_t unit) const;
  float* worker_floats(const Call& call, int worker) const;
  Running running_of(const Call& call, int worker) const;
  float* statistics_of(const Call& call, int64_t unit, int64_t block) const;
  float* coefficients_of(const Call& call, int64_t unit) const;
  int64_t block_pixels(const Pass& pass, int64_t block) const;

  int64_t first_tasks() const;
  // Units that a task of the first pass takes: those of several samples where their convolution wants them.
  int64_t units_per_task() const { return convolution_ ? convolution_->samples_per_task() : 1; }
  void first_pass(const Call& call, Range units, int64_t task, int worker) const;
  void convolve_task(const Call& call, Range units, int64_t task, int worker) const;
  Panel oriented(const Panel& panel, float* scratch) const;
  void second_pass(const Call& call, int64_t unit, int64_t task, int worker) const;
  void stream_task(const Call& call, const Pass& pass, int64_t unit, int64_t task, int worker,
                   const Endpoint& source, const Endpoint& sink, bool statistics) const;

  // One panel of values whose magnitude has this bound: the pass's steps, then statistics and the sink.
  void process(const Call& call, const Pass& pass, int64_t unit, int worker, const Region& region,
               PanelView source, float bound, float* scratch, int64_t scratch_stride, const Endpoint& sink,
               Running* running) const;
  void apply_step(const Call& call, const Step& step, int64_t unit, int worker, const Region& region,
                  Orientation orientation, PanelView source, float bound, float* to, int64_t to_stride,
                  RowSums* sums) const;
  bool norm_stays_raised(const StepArguments& step, int64_t channels) const;
  void keep_statistics(const Call& call, int64_t unit, const Range& channels, int64_t block,
                       const Running& running) const;

  void finish(const Call& call, int64_t unit, Range groups) const;
  void finish_slab(const SlabNorms& norms, int64_t slab, const std::vector<Moments>& moments) const;
  Moments channel_moments(const Pass& pass, const float* first) const;
  void join_blocks(const Pass& pass, const float* first, Moments& total) const;
  Means means_of(const Call& call, int64_t unit, int64_t channel) const;
  void store_means(const Call& call, const Pass& pass, int64_t unit, Range channels) const;

  Problem problem_;
  const Isa& isa_;
  std::optional<Lanes> lanes_;  // of the convolution
  Chain chain_;
  std::unique_ptr<const Convolver> convolution_;
  TensorMap input_;
  TensorMap output_;
  TensorMap slab_;                     // of one unit, where the middle is a slab
  std::vector<size_t> unit_segments_;  // first segment of each part of a sample, and the end
  Middle middle_ = Middle::none;
  Pass first_;
  Pass second_;
  bool mean_ = false;
  bool statistics_ = false;
  bool mean_of_norm_ = false;  // the mean of a norm's output follows from the statistics
  double eps_ = 0;
  int64_t group_count_ = 1;  // slabs of a sample
  int64_t batch_ = 0, channels_ = 0, pixels_ = 0;
  Units units_;
  int64_t wave_units_ = 1;
  int64_t panel_floats_ = 0;
  int64_t copied_weights_ = 0;

  // Offsets into the workspace, in floats.
  int64_t weights_at_ = 0, packed_at_ = 0, statistics_at_ = 0, coefficients_at_ = 0, slab_at_ = 0;
  int64_t workers_at_ = 0, worker_floats_ = 0;
  int64_t workspace_floats_ = 0;
};

}  // namespace onepass::cpu
