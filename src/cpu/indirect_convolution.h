// A convolution on the CPU whose positions are read where they lie: each output position has a pointer to the
// input channels that each tap meets.
//
// A task is one segment of output channels and a block of positions, of one or several samples. Register
// tiles multiply rows of input channels by packed weights, in chunks of at most about 256 terms of a sum.
// Inputs in channels last are not staged, whatever the kernel and the stride. Others are first turned into
// channels last, once for all segments of a task. Where one task takes all positions, its tiles pack their
// weights just before they use them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/axis.h"
#include "cpu/convolver.h"
#include "cpu/weight_strides.h"

namespace onepass::cpu {

class IndirectConvolution final : public Convolver {
 public:
  IndirectConvolution(const Problem& problem, const Isa& isa, int64_t cut);
  static std::string refusal(const Problem& problem);

  Lanes lanes() const override { return Lanes::positions; }
  int64_t block_count() const override { return block_count_; }
  int64_t block_pixels(int64_t block) const override { return pixels_of(block).size(); }
  int64_t max_segment_channels() const override { return max_segment_channels_; }
  int64_t max_panel_pixels() const override { return max_panel_pixels_; }
  int64_t padded_channels(int64_t channels) const override { return round_up(channels, isa_.lanes); }
  int64_t segments_per_task() const override { return segments_per_task_; }
  int64_t samples_per_task() const override { return samples_per_task_; }

  int64_t packed_floats() const override { return packed_floats_; }
  int64_t worker_floats() const override { return worker_floats_; }
  double padded_multiply_adds() const override;
  double read_weights() const override;
  double staged_elements() const override;
  const std::vector<Segment>& segments_of_one_thread() const override { return segments_of_one_thread_; }
  bool in_place() const override { return in_place_; }
  // For the cost: positions whose taps are looked up, pointers that tasks write, runs of channels that
  // register tiles multiply, and weights that are packed.
  double positions() const { return is_identity_ ? 0 : static_cast<double>(batch_ * group_count_ * pixels_); }
  double pointers() const;
  double tile_runs() const;
  double packed_weights() const;
  std::string describe() const override;

  void pack(const void* weights, const float* bias, float* packed, Executor& executor) const override;
  bool share_window(size_t segment, size_t other) const override {
    return segments_[segment].group == segments_[other].group;
  }
  void run(const Arguments& arguments, const float* packed, float* worker, const ConvolutionTask& task,
           const std::function<void(const Panel&)>& consume) const override;

 private:
  // Outputs that meet the same taps: all of a dense convolution, or those of a residue class.
  struct OutputClass {
    std::array<int64_t, 3> index{};
    std::array<std::vector<Tap>, 3> taps;
    std::vector<int64_t> kernel;  // index of each tap
    int64_t first_term = 0;       // in what is packed of a tile

    int64_t tap_count() const { return static_cast<int64_t>(kernel.size()); }
  };
  // Outputs along an axis, by the taps they meet inside the input: kinds of a class and a range of its taps.
  struct AxisOutputs {
    std::vector<int64_t> kind;   // of each output
    std::vector<int64_t> first;  // input position that offsets of its taps count from
    std::vector<int64_t> class_of_kind;
  };
  struct Tile {
    int64_t first = 0;  // channel of the segment
    int vectors = 0;
  };
  // Taps and input channels of a chunk, and its first term in a class.
  struct Chunk {
    Range taps;
    Range channels;
    int64_t first_term = 0;
  };
  // The parts of a worker's memory.
  struct Memory {
    float* window = nullptr;
    float* zeros = nullptr;
    float* sums = nullptr;
    float* tile = nullptr;  // weights of one, or of a chunk, where they are packed at their use
    const float** pointers = nullptr;
    int32_t* rows = nullptr;  // of sums, in the order of the pointers
    // Of the positions that meet a tap.
    const float** met_pointers = nullptr;
    int32_t* met_rows = nullptr;
  };
  // Those of a class in a task.
  struct Positions {
    const OutputClass* output_class = nullptr;
    const float* const* pointers = nullptr;
    const int32_t* rows = nullptr;
    int64_t count = 0;
  };

  void choose_blocks(int64_t cut);
  void choose_segments(int64_t cut, int64_t threads);
  void build_classes();
  void build_kinds();
  void lay_out_worker();
  Memory memory_of(float* worker) const;

  Range pixels_of(int64_t block) const { return even_part(pixels_, block_count_, block); }
  std::array<int64_t, 3> place_of(int64_t pixel) const;
  size_t kind_of(const std::array<int64_t, 3>& place) const;
  std::vector<int64_t> kind_sizes(Range pixels) const;
  int64_t tile_count(const Segment& segment) const;
  Tile tile_at(const Segment& segment, int64_t index) const;
  int64_t chunk_count(const OutputClass& output_class) const;
  Chunk chunk_at(const OutputClass& output_class, int64_t index) const;
  // Positions of a sample in the window.
  int64_t window_sample_of(const ConvolutionTask& task) const {
    return is_identity_ ? block_pixels(task.block) : input_.pixels();
  }

  void pack_tile(const void* weights, const Segment& segment, const Tile& tile, float* to) const;
  void copy_rows(const void* weights, const Segment& segment, int64_t k, Range channels, int64_t terms,
                 int64_t first_term, float* to) const;
  void stage(const Arguments& arguments, const ConvolutionTask& task, float* window) const;
  void point(const Arguments& arguments, const ConvolutionTask& task, const std::vector<int64_t>& sizes,
             const std::vector<Positions>& positions, const Memory& memory) const;
  // No chunk of a class has more taps than its first.
  bool picks(const Chunk& chunk) const { return has_border_ && chunk.taps.size() == 1; }
  Positions met_by(const Chunk& chunk, const Positions& positions, const Memory& memory) const;
  void multiply(const Positions& positions, Range part, const Tile& tile, const Chunk& chunk,
                const float* weights, const float* bias, const Memory& memory, int64_t sums_stride) const;
  void fill_with_bias(const Positions& positions, int64_t channels, const float* bias, const Memory& memory,
                      int64_t sums_stride) const;

  const Isa& isa_;
  TensorMap input_;
  DType weight_dtype_;
  bool transposed_ = false;
  int64_t batch_ = 0;
  int64_t pixels_ = 0;
  int64_t group_count_ = 1;
  int64_t group_inputs_ = 0, group_outputs_ = 0;
  int64_t kernel_elements_ = 1;
  WeightStrides weights_;
  std::array<Axis, 3> axes_;
  std::vector<OutputClass> classes_;
  std::array<AxisOutputs, 3> outputs_;
  // Kinds of all axes together, by class: positions that leave out the same taps are neighbours in a tile.
  std::vector<std::vector<size_t>> kinds_;
  int64_t most_taps_ = 0;  // of a class
  int64_t terms_ = 0;      // of all classes

  bool in_place_ = false;
  bool is_identity_ = false;  // each position reads the input position of its own index
  bool has_border_ = false;
  bool packs_at_use_ = false;
  bool outputs_are_rows_ = false;  // weights of output channels lie beside each other, in f32
  int64_t block_count_ = 1, samples_per_task_ = 1;
  std::vector<Segment> segments_of_one_thread_;
  int64_t max_segment_channels_ = 1, segments_per_task_ = 1;
  int64_t max_panel_pixels_ = 1;
  int64_t channel_parts_ = 1;
  int64_t window_pitch_ = 0;  // floats between positions
  int64_t window_floats_ = 0, zero_floats_ = 0, sum_floats_ = 0, tile_floats_ = 0;
  int64_t pointer_count_ = 0, row_count_ = 0;
  int64_t worker_floats_ = 0;
  std::vector<int64_t> segment_at_;  // of its weights, in what is packed
  int64_t bias_at_ = 0;
  int64_t packed_floats_ = 0;
};

}  // namespace onepass::cpu
