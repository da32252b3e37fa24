// What a block needs of its convolution on the CPU: the cut into tasks, and panels of finished sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cpu/axis.h"
#include "cpu/isa.h"
#include "cpu/tensor_map.h"
#include "onepass/plan.h"
#include "onepass/problem.h"

namespace onepass::cpu {

// Terms of one accumulator: one chain over K = 1728 has 6-7x PyTorch's error, chains of about 200
// have 1.2-1.6x.
inline constexpr int64_t max_chain_terms = 256;

// What the SIMD lanes of a convolution are. Those of planes are pixels of an input that is read in place,
// those of positions are output channels of positions that are read by pointers. Those of runs are terms that
// are read in place.
enum class Lanes : uint8_t { channels, pixels, terms, groups, planes, positions, runs };
inline bool has_pixel_lanes(Lanes lanes) { return lanes == Lanes::pixels || lanes == Lanes::planes; }

// Output channels that one task computes: within one group of the convolution, unless lanes are groups.
struct Segment {
  int64_t group = 0;
  Range channels;
};

// All channels of so many groups in segments of at most `most` channels, none across a multiple of `cut`.
// Each is a multiple of `unit` long, a divisor of `most`, but for the last of a group or cut.
inline std::vector<Segment> segments_of(int64_t groups, int64_t group_channels, int64_t cut, int64_t most,
                                        int64_t unit = 1) {
  std::vector<Segment> segments;
  for (int64_t first = 0; first < groups * group_channels;) {
    const int64_t group = first / group_channels;
    const int64_t stop = std::min((group + 1) * group_channels, (first / cut + 1) * cut);
    const int64_t parts = ceil_div(stop - first, most);
    for (int64_t i = 0; i < parts; ++i) {
      const Range part = even_part(ceil_div(stop - first, unit), parts, i);
      segments.push_back({group, {first + part.begin * unit, std::min(stop, first + part.end * unit)}});
    }
    first = stop;
  }
  return segments;
}
inline int64_t most_channels(const std::vector<Segment>& segments) {
  int64_t most = 1;
  for (const Segment& segment : segments) most = std::max(most, segment.channels.size());
  return most;
}

// A panel of finished sums, bias included, and the part of the output it is.
struct Panel {
  float* data = nullptr;
  int64_t stride = 0;
  Region region;
  // Of the magnitude of its values, from those of the inputs and the weights; infinite where none is wanted.
  float bound = 0;
};

// One task of a convolution: a block of pixels of one segment, for one or more samples.
struct ConvolutionTask {
  Range samples;
  size_t segment = 0;
  int64_t block = 0;
  bool window_is_staged = false;  // by the worker's task before
};

// A class with virtual functions whose objects are not copied.
class Uncopied {
 public:
  Uncopied() = default;
  Uncopied(const Uncopied&) = delete;
  Uncopied& operator=(const Uncopied&) = delete;
  virtual ~Uncopied() = default;
};

// A row builds a convolver from a problem and `cut`: no segment crosses a multiple of `cut` channels, those
// of a slab or all. The static function `refusal` of each class says why it cannot be built.
class Convolver : public Uncopied {
 public:
  virtual Lanes lanes() const = 0;
  Orientation orientation() const {
    return has_pixel_lanes(lanes()) ? Orientation::planar : Orientation::interleaved;
  }
  const std::vector<Segment>& segments() const { return segments_; }
  virtual int64_t block_count() const = 0;
  virtual int64_t block_pixels(int64_t block) const = 0;
  virtual int64_t max_segment_channels() const = 0;
  virtual int64_t max_panel_pixels() const = 0;
  // Channels of a panel in memory: whole vectors where panels are interleaved.
  virtual int64_t padded_channels(int64_t channels) const = 0;
  // Segments that make a task long enough to be worth handing out.
  virtual int64_t segments_per_task() const { return 1; }
  // Samples whose positions a task takes together.
  virtual int64_t samples_per_task() const { return 1; }

  virtual int64_t packed_floats() const = 0;
  virtual int64_t worker_floats() const = 0;
  // Multiply-adds with those on lanes that hold no channel or pixel and those that wait for one another, for
  // the cost.
  virtual double padded_multiply_adds() const = 0;
  // Weights that the tasks read, for the cost: all of them for each block of each sample, or of some samples.
  virtual double read_weights() const { return 0; }
  // Input elements that the tasks stage, for the cost: once for each block and for the segments of a task.
  virtual double staged_elements() const = 0;
  // Segments that one thread would have, for the cost: threads must not change which row is chosen.
  virtual const std::vector<Segment>& segments_of_one_thread() const { return segments(); }
  // Whether nothing is staged.
  virtual bool in_place() const = 0;
  virtual std::string describe() const = 0;

  // What the tasks read of weights and bias (null: none), as f32 in their order.
  virtual void pack(const void* weights, const float* bias, float* packed, Executor& executor) const = 0;
  // Whether the window that one segment left with its worker is that of the other too.
  virtual bool share_window(size_t /*segment*/, size_t /*other*/) const { return false; }
  // Convolves and hands on the panels, samples one after another, of each in order of pixels.
  virtual void run(const Arguments& arguments, const float* packed, float* worker,
                   const ConvolutionTask& task, const std::function<void(const Panel&)>& consume) const = 0;

 protected:
  std::vector<Segment> segments_;
};

}  // namespace onepass::cpu
