// The cut of a tail into panels of whole slabs, and the tensors of such panels.
#include "cpu/slabs.h"

#include <algorithm>
#include <numeric>
#include <sstream>

namespace onepass::cpu {
namespace {

constexpr int64_t live_floats = 12 * 1024;  // of a L1 of 64 KiB
// Of channels last: a panel has this many columns or more, so that its rows are a few cache lines.
constexpr int64_t least_columns = 32;
constexpr int64_t widest_vector = 16;
constexpr int64_t wanted_panels = 16;
constexpr int64_t least_large_slabs = 4;

int64_t pixels_of(const Problem& problem) { return TensorMap(problem.input).pixels(); }

bool channels_last(const Problem& problem) {
  return orientation_of(TensorMap(problem.input)) == Orientation::interleaved && pixels_of(problem) > 1;
}

}  // namespace

std::string Slabs::refusal(const Problem& problem, const SlabLimits& limits) {
  const int64_t pixels = pixels_of(problem);
  const int64_t channels = problem.input.sizes[1];
  const Norm* norm = problem.block.norm();
  const int64_t slab = norm != nullptr ? channels / norm->group_count(channels) * pixels : pixels;
  if (pixels == 0) return "there are no pixels";
  // Without a norm nothing waits for a whole slab.
  const int64_t most = norm != nullptr ? limits.slab_elements : std::min(limits.slab_elements, live_floats);
  if (slab > most) return "slabs of more than " + std::to_string(most) + " elements";
  // A slab is one task: other rows have more of them for several threads.
  if (slab > stream_task_elements && channels * pixels / slab < least_large_slabs)
    return "a sample has few slabs of more than " + std::to_string(stream_task_elements) + " elements";
  if (channels_last(problem)) {
    if (limits.strided_floats > 0 && std::min(least_columns, channels) * pixels > limits.strided_floats)
      return "panels of more than " + std::to_string(limits.strided_floats) + " elements";
    return pixels > limits.rows ? "more than " + std::to_string(limits.rows) + " pixels of channels last"
                                : "";
  }
  return pixels > limits.repeat ? "more than " + std::to_string(limits.repeat) + " pixels a channel" : "";
}

Slabs::Slabs(const Problem& problem, const SlabLimits& limits, int64_t live_panels,
             int64_t live_column_arrays, int64_t channel_pixels)
    : batch(problem.input.sizes[0]),
      channels(problem.input.sizes[1]),
      pixels(pixels_of(problem)),
      norm(problem.block.norm() != nullptr),
      groups(norm ? problem.block.norm()->group_count(channels) : channels) {
  const bool strided = channels_last(problem);
  repeat = strided ? 1 : pixels;
  rows = strided ? pixels : 1;
  by_channel = !strided && channel_pixels > 0 && pixels >= channel_pixels;
  columns = channels * repeat;
  slab_columns = columns / groups;
  int64_t wanted = live_floats / (rows * live_panels + live_column_arrays);
  // Enough panels for several threads. How a tensor is cut does not change what a slab gives.
  const int64_t share = batch * columns * rows / wanted_panels;
  if (strided)
    wanted = std::max({wanted, least_columns, norm ? std::min(limits.strided_floats, share) / rows : 0});
  // Whole vectors, so that only the last panel of a sample has columns left over.
  const int64_t step = widest_vector / std::gcd(widest_vector, slab_columns);
  const int64_t slabs = wanted / slab_columns;
  panel_slabs = std::clamp<int64_t>(slabs < step ? slabs : slabs - slabs % step, 1, groups);
  panels = ceil_div(groups, panel_slabs);
  panel_floats = round_up(rows * panel_slabs * slab_columns, alignment_floats);
  column_floats = round_up(panel_slabs * slab_columns + Chain::slack(), alignment_floats);
}

std::string Slabs::describe(const Isa& isa) const {
  std::ostringstream out;
  out << "lanes: " << (rows > 1 ? "channels" : "elements") << " (" << isa.name << ", " << isa.lanes << ")\n";
  out << "panels: " << panel_slabs << (norm ? " slabs" : " channels") << " of " << slab_elements()
      << " elements, " << panels << " a sample\n";
  return out.str();
}

SlabTensor::SlabTensor(const TensorSpec& spec, const Slabs& slabs)
    : map_(spec), repeat_(slabs.repeat), rows_(slabs.rows) {
  if (rows_ > 1) return;
  const bool dense =
      map_.uniform && map_.channel_stride == slabs.pixels && (slabs.pixels == 1 || map_.pixel_stride == 1);
  if (!dense) {
    columns_ = repeat_ == 1;
    orientation_ = columns_ ? Orientation::interleaved : Orientation::planar;
    return;
  }
  map_.channel_stride = 1;
  map_.sizes = {1, 1, 1};
  map_.pixel_stride = slabs.columns;
  map_.strides = {0, 0, map_.pixel_stride};
}

Region SlabTensor::region_of(const SlabRegion& region) const {
  if (columns_) return {region.sample, region.columns, {0, rows_}};
  return {region.sample, {region.columns.begin / repeat_, region.columns.end / repeat_}, {0, repeat_}};
}

PanelView SlabTensor::place(const SlabRegion& region, const void* base) const {
  return {reinterpret_cast<const float*>(address(map_, base, region_of(region))), map_.pixel_stride};
}

PanelView SlabTensor::view(const Isa& isa, const SlabRegion& region, const void* base, float* scratch) const {
  if (in_place()) return place(region, base);
  const int64_t stride = region.columns.size();
  transfer(isa, Direction::load, map_, base, region_of(region), orientation_, scratch,
           columns_ ? stride : repeat_);
  return {scratch, stride};
}

void SlabTensor::store(const Isa& isa, const SlabRegion& region, void* base, PanelView panel) const {
  transfer(isa, Direction::store, map_, base, region_of(region), orientation_, const_cast<float*>(panel.data),
           columns_ ? panel.stride : repeat_);
}

void bind_operand(StepArguments& arguments, const Step& step, const Chain& chain,
                  const std::vector<SlabTensor>& tensors, const Isa& isa, const SlabRegion& region,
                  const std::vector<const void*>& parameters, float* scratch) {
  if (step.tensor < 0) return;
  const auto tensor = static_cast<size_t>(step.tensor);
  const void* base = parameters[chain.tensors[tensor].parameter];
  const PanelView operand = tensors[tensor].view(isa, region, base, scratch);
  arguments.operand = operand.data;
  arguments.operand_stride = operand.stride;
}

}  // namespace onepass::cpu
