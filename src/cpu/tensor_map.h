// Where the elements of a tensor lie, by sample, channel and flat pixel, and the way of a region to a panel.
#pragma once

#include <array>
#include <cstdint>

#include "cpu/axis.h"
#include "cpu/isa.h"
#include "onepass/tensor.h"

namespace onepass::cpu {

// A tensor of up to three spatial dimensions with its pixels numbered 0 .. depth * height * width.
struct TensorMap {
  DType dtype = DType::f32;
  int64_t sample_stride = 0;
  int64_t channel_stride = 0;
  std::array<int64_t, 3> sizes{1, 1, 1};  // depth, height, width
  std::array<int64_t, 3> strides{0, 0, 0};
  // All pixels lie at pixel * pixel_stride.
  bool uniform = false;
  int64_t pixel_stride = 0;

  TensorMap() = default;
  explicit TensorMap(const TensorSpec& spec);

  int64_t pixels() const { return sizes[0] * sizes[1] * sizes[2]; }
  int64_t pixel_offset(int64_t pixel) const;
  // Whether a region is a panel as it lies in memory: no copy is needed.
  bool is_panel(Orientation orientation) const {
    return dtype == DType::f32 && uniform &&
           (orientation == Orientation::planar ? pixel_stride == 1 : channel_stride == 1);
  }
  int64_t panel_stride(Orientation orientation) const {
    return orientation == Orientation::planar ? channel_stride : pixel_stride;
  }
};

// Pixels and channels of one sample.
struct Region {
  int64_t sample = 0;
  Range channels;
  Range pixels;

  int64_t rows(Orientation o) const { return o == Orientation::planar ? channels.size() : pixels.size(); }
  int64_t cols(Orientation o) const { return o == Orientation::planar ? pixels.size() : channels.size(); }
};

// The address of the region's first element.
char* address(const TensorMap& map, const void* base, const Region& region);

enum class Direction : uint8_t { load, store };

// Moves a region between tensor memory at `base` and a panel, changing type and orientation as needed.
void transfer(const Isa& isa, Direction direction, const TensorMap& map, const void* base,
              const Region& region, Orientation orientation, float* panel, int64_t panel_stride);

// A panel that is only read.
struct PanelView {
  const float* data = nullptr;
  int64_t stride = 0;
};

// The arguments of a norm's gradient over panels of its input and of its output's gradient.
inline NormGradientArguments norm_over(PanelView x, PanelView gradient) {
  NormGradientArguments arguments;
  arguments.x = x.data;
  arguments.x_stride = x.stride;
  arguments.gradient = gradient.data;
  arguments.gradient_stride = gradient.stride;
  return arguments;
}

// The region as a panel: in place where it lies as one, else gathered into `scratch`.
PanelView panel_view(const Isa& isa, const TensorMap& map, const void* base, const Region& region,
                     Orientation orientation, float* scratch);

}  // namespace onepass::cpu
