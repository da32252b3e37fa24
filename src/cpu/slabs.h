// How a tail of small slabs is cut: panels of some whole slabs of a sample, which L1 holds from the first
// step to the last.
//
// A panel is rows of columns. In channels last a row is a pixel and a column is a channel. In contiguous
// tensors the pixels of a channel are too few for vectors. There a sample is one row, and its columns are all
// elements: each channel's value is repeated for its pixels. Either way columns of a slab lie together, and
// lanes are columns.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "cpu/chain.h"
#include "cpu/grid.h"
#include "cpu/isa.h"
#include "cpu/tensor_map.h"
#include "onepass/problem.h"

namespace onepass::cpu {

// The sum of f(i) over i < count, in four chains.
template <class F>
double sum_of(int64_t count, F&& f) {
  double sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int64_t k = 0; k < 4; ++k) sums[k] += f(i + k);
  }
  for (; i < count; ++i) sums[0] += f(i);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Columns of one sample.
struct SlabRegion {
  int64_t sample = 0;
  Range slabs;
  Range columns;
};

// Which tails a kernel cuts so, and how large its panels are.
struct SlabLimits {
  int64_t slab_elements;   // of the largest slab
  int64_t repeat;          // pixels of a channel in contiguous tensors
  int64_t rows;            // pixels of channels last
  int64_t strided_floats;  // of a panel of channels last; 0: as many as L1 holds
};

struct Slabs {
  int64_t batch = 0, channels = 0, pixels = 0;
  bool norm = false;
  int64_t groups = 1;        // slabs of a sample; without a norm its channels
  int64_t repeat = 1;        // columns of a channel
  bool by_channel = false;   // parameters are one value a channel, not one a column
  int64_t rows = 1;          // of a sample
  int64_t columns = 0;       // of a sample
  int64_t slab_columns = 0;  // of a slab
  int64_t panel_slabs = 1;   // of a panel; the last of a sample may have fewer
  int64_t panels = 1;        // of a sample
  int64_t panel_floats = 0;  // memory of a panel, and of one value for each of its columns
  int64_t column_floats = 0;

  // So many panels, and so many values for each of their columns, are live at a time. Channels of at least
  // `channel_pixels` have one value of each parameter; 0: none have.
  Slabs(const Problem& problem, const SlabLimits& limits, int64_t live_panels, int64_t live_column_arrays,
        int64_t channel_pixels = 0);

  static std::string refusal(const Problem& problem, const SlabLimits& limits);

  // Values of a parameter for each channel.
  int64_t parameter_repeat() const { return by_channel ? 1 : repeat; }

  int64_t slab_elements() const { return rows * slab_columns; }
  SlabRegion region(int64_t sample, int64_t panel) const {
    const Range slabs{panel * panel_slabs, std::min(groups, (panel + 1) * panel_slabs)};
    return {sample, slabs, {slabs.begin * slab_columns, slabs.end * slab_columns}};
  }
  std::string describe(const Isa& isa) const;
};

// A tensor of such panels.
class SlabTensor {
 public:
  SlabTensor() = default;
  SlabTensor(const TensorSpec& spec, const Slabs& slabs);

  // Panels lie in memory as they are: no copy is needed.
  bool in_place() const { return map_.is_panel(orientation_) && columns_; }
  PanelView place(const SlabRegion& region, const void* base) const;
  // In place, or gathered into `scratch`.
  PanelView view(const Isa& isa, const SlabRegion& region, const void* base, float* scratch) const;
  void store(const Isa& isa, const SlabRegion& region, void* base, PanelView panel) const;

 private:
  Region region_of(const SlabRegion& region) const;

  TensorMap map_;
  Orientation orientation_ = Orientation::interleaved;
  bool columns_ = true;  // the map's channels are columns
  int64_t repeat_ = 1;
  int64_t rows_ = 1;  // of a panel
};

// Gives a step the panel of the tensor that it reads, if it reads one: in place, or gathered into `scratch`.
void bind_operand(StepArguments& arguments, const Step& step, const Chain& chain,
                  const std::vector<SlabTensor>& tensors, const Isa& isa, const SlabRegion& region,
                  const std::vector<const void*>& parameters, float* scratch);

}  // namespace onepass::cpu
