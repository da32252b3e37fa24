// How streaming passes cut a tensor into waves, units, tasks and panels, and the parts of their workspace.
//
// All of it depends on the problem alone, never on the thread count, so results do not depend on it either.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/axis.h"
#include "cpu/isa.h"
#include "cpu/tensor_map.h"

namespace onepass::cpu {

// Floats of a panel streamed from a tensor: 32 KiB, read and written a few times while in L1.
inline constexpr int64_t stream_panel_floats = 8 * 1024;
// Elements of a streaming task: long enough to hide the hand-out, short enough to balance.
inline constexpr int64_t stream_task_elements = 32 * 1024;
// What a second pass should find in the last-level cache.
inline constexpr int64_t wave_cache_floats = 2 * 1024 * 1024;
inline constexpr int64_t alignment_floats = 16;  // 64 bytes

// The orientation in which the tensor's elements are contiguous, or planar.
inline Orientation orientation_of(const TensorMap& map) {
  return map.channel_stride == 1 && map.pixel_stride != 1 ? Orientation::interleaved : Orientation::planar;
}

// The orientation of panels that steps take. Rows of fewer channels than a vector has lanes are taken
// together where no gap is between them (Fold in panel-inl.h), else they are turned: one by one they take up
// to 12 ns.
inline Orientation step_orientation(const TensorMap& map, int64_t channels, int64_t lanes) {
  const bool narrow = channels < lanes && map.pixel_stride != channels;
  return narrow ? Orientation::planar : orientation_of(map);
}

// How a tensor is cut into tasks and panels of these steps: along pixels where channels alternate, so that
// turned ones are read and written together.
inline Orientation cut_orientation(const TensorMap& map, Orientation steps) {
  return steps == Orientation::planar ? orientation_of(map) : steps;
}

// The channels of one sample that are processed together: all of them, or those of a slab.
struct Unit {
  int64_t sample = 0;
  Range channels;
};

// How samples are cut into units of equally many channels.
struct Units {
  int64_t per_sample = 1;
  int64_t channels = 0;

  Unit at(int64_t unit) const {
    const int64_t part = unit % per_sample;
    return {unit / per_sample, {part * channels, (part + 1) * channels}};
  }
};

// Offsets of aligned parts of a workspace, in floats.
class WorkspaceLayout {
 public:
  explicit WorkspaceLayout(int64_t taken) : end_(taken) {}
  // The offset of the next part.
  int64_t take(int64_t floats) {
    const int64_t begin = round_up(end_, alignment_floats);
    end_ = begin + floats;
    return begin;
  }
  int64_t floats() const { return end_; }

 private:
  int64_t end_;
};

// A unit's channels and pixels cut into tasks.
struct Grid {
  int64_t channels = 0, pixels = 0;
  int64_t channel_parts = 1, pixel_parts = 1;

  int64_t count() const { return channel_parts * pixel_parts; }
  Range channel_range(int64_t task) const { return even_part(channels, channel_parts, task / pixel_parts); }
  Range pixel_range(int64_t task) const { return even_part(pixels, pixel_parts, task % pixel_parts); }
};

// Channels of a strip of interleaved pixels. Statistics of a strip are merged for each of its panels and
// parts: with 4096 channels in one, panels have two pixels.
inline constexpr int64_t strip_channels = 512;

// Cuts for streaming: whole channels of pixels (planar) or pixels of strips of channels (interleaved).
inline Grid make_grid(int64_t channels, int64_t pixels, Orientation orientation) {
  Grid grid{channels, pixels, 1, 1};
  if (orientation == Orientation::interleaved) {
    grid.channel_parts = ceil_div(channels, strip_channels);
    const int64_t strip = ceil_div(channels, grid.channel_parts);
    grid.pixel_parts = std::min(pixels, ceil_div(strip * pixels, stream_task_elements));
    return grid;
  }
  grid.pixel_parts = ceil_div(pixels, stream_task_elements);
  grid.channel_parts =
      std::min(channels, ceil_div(channels * ceil_div(pixels, grid.pixel_parts), stream_task_elements));
  return grid;
}

// A panel is a run of pixels of a few channels (planar) or a few pixels of all of a task's channels.
struct PanelExtent {
  int64_t channels = 1;
  int64_t pixels = 1;

  PanelExtent(Orientation orientation, int64_t task_channels, int64_t task_pixels, int64_t panel_floats) {
    const bool planar = orientation == Orientation::planar;
    pixels = planar ? std::min(task_pixels, panel_floats)
                    : std::clamp<int64_t>(panel_floats / task_channels, 1, task_pixels);
    channels = planar ? std::clamp<int64_t>(panel_floats / pixels, 1, task_channels) : task_channels;
  }
};

}  // namespace onepass::cpu
