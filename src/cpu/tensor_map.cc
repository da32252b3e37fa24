// Regions of tensors as panels.
#include "cpu/tensor_map.h"

#include <algorithm>

namespace onepass::cpu {

TensorMap::TensorMap(const TensorSpec& spec)
    : dtype(spec.dtype), sample_stride(spec.strides[0]), channel_stride(spec.strides[1]) {
  const size_t rank = spec.sizes.size() - 2;
  for (size_t i = 0; i < rank; ++i) {
    sizes[3 - rank + i] = spec.sizes[2 + i];
    strides[3 - rank + i] = spec.strides[2 + i];
  }
  // A dimension of one element can have any stride: give it the one that makes the rest uniform.
  if (sizes[2] == 1) strides[2] = sizes[1] > 1 ? strides[1] : sizes[0] > 1 ? strides[0] : 1;
  pixel_stride = strides[2];
  uniform = (sizes[1] == 1 || strides[1] == sizes[2] * pixel_stride) &&
            (sizes[0] == 1 || strides[0] == sizes[1] * sizes[2] * pixel_stride);
  if (sizes[1] == 1) strides[1] = sizes[2] * pixel_stride;
}

int64_t TensorMap::pixel_offset(int64_t pixel) const {
  if (uniform) return pixel * pixel_stride;
  const int64_t w = pixel % sizes[2];
  const int64_t h = pixel / sizes[2] % sizes[1];
  const int64_t d = pixel / sizes[2] / sizes[1];
  return d * strides[0] + h * strides[1] + w * strides[2];
}

char* address(const TensorMap& map, const void* base, const Region& region) {
  const int64_t element = region.sample * map.sample_stride + region.channels.begin * map.channel_stride +
                          map.pixel_offset(region.pixels.begin);
  return const_cast<char*>(static_cast<const char*>(base)) + element * byte_size(map.dtype);
}

void transfer(const Isa& isa, Direction direction, const TensorMap& map, const void* base,
              const Region& region, Orientation orientation, float* panel, int64_t panel_stride) {
  const bool planar = orientation == Orientation::planar;
  Region run = region;
  while (run.pixels.begin < region.pixels.end) {
    const int64_t in_row = map.sizes[2] - run.pixels.begin % map.sizes[2];
    run.pixels.end = map.uniform ? region.pixels.end : std::min(region.pixels.end, run.pixels.begin + in_row);
    const int64_t done = run.pixels.begin - region.pixels.begin;
    TransferArguments t;
    t.panel = panel + (planar ? done : done * panel_stride);
    t.panel_stride = panel_stride;
    t.rows = run.rows(orientation);
    t.cols = run.cols(orientation);
    t.tensor = address(map, base, run);
    t.dtype = map.dtype;
    t.row_stride = planar ? map.channel_stride : map.pixel_stride;
    t.col_stride = planar ? map.pixel_stride : map.channel_stride;
    direction == Direction::load ? isa.load(t) : isa.store(t);
    run.pixels.begin = run.pixels.end;
  }
}

PanelView panel_view(const Isa& isa, const TensorMap& map, const void* base, const Region& region,
                     Orientation orientation, float* scratch) {
  if (map.is_panel(orientation)) {
    return {reinterpret_cast<const float*>(address(map, base, region)), map.panel_stride(orientation)};
  }
  const int64_t stride = region.cols(orientation);
  transfer(isa, Direction::load, map, base, region, orientation, scratch, stride);
  return {scratch, stride};
}

}  // namespace onepass::cpu
