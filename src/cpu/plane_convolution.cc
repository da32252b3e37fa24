// Blocks, weights and sums of a convolution of one tap over contiguous planes.
#include "cpu/plane_convolution.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "block/convert.h"

namespace onepass::cpu {
namespace {

// Sums of a block stay in L1 beside the planes of a chunk.
constexpr int64_t block_sum_floats = 8 * 1024;
constexpr int64_t least_block_pixels = 256;
constexpr int64_t most_block_pixels = 1024;
constexpr int64_t max_task_channels = block_sum_floats / least_block_pixels;

}  // namespace

std::string PlaneConvolution::refusal(const Problem& problem) {
  const Shape output = problem.block.conv_output_shape(problem.input.sizes);
  for (const Axis& axis : make_axes(*problem.block.conv(), problem.input.sizes, output)) {
    if (!axis.is_identity()) return "the convolution has more than one tap, a stride or padding";
  }
  const TensorMap map(problem.input);
  if (!map.is_panel(Orientation::planar)) return "the input is not f32 in contiguous planes";
  if (map.channel_stride > std::numeric_limits<int32_t>::max() / streams) return "planes lie too far apart";
  return "";
}

PlaneConvolution::PlaneConvolution(const Problem& problem, const Isa& isa, int64_t cut)
    : isa_(isa),
      input_(problem.input),
      weight_dtype_(problem.parameters[0].dtype),
      transposed_(problem.block.conv()->transposed),
      batch_(problem.input.sizes[0]),
      pixels_(input_.pixels()),
      group_count_(problem.block.conv()->groups) {
  const Conv& conv = *problem.block.conv();
  group_inputs_ = conv.in_channels / conv.groups;
  group_outputs_ = conv.out_channels / conv.groups;
  segments_ = segments_of(group_count_, group_outputs_, cut, max_task_channels);
  max_segment_channels_ = most_channels(segments_);
  const int64_t block =
      std::clamp(block_sum_floats / max_segment_channels_, least_block_pixels, most_block_pixels);
  block_count_ = std::max<int64_t>(1, ceil_div(pixels_, block));
  chunk_count_ = ceil_div(group_inputs_, streams);
  for (size_t i = 0; i < streams; ++i) {
    offsets_[i] = static_cast<int32_t>(static_cast<int64_t>(i) * input_.channel_stride);
    edge_offsets_[i] = static_cast<int32_t>(static_cast<int64_t>(i) * isa.lanes);
  }
  edge_floats_ = round_up(streams * isa.lanes, 16);
  // A tile writes back what is behind a row: a vector.
  sum_floats_ = round_up(max_segment_channels_ * max_panel_pixels() + isa.lanes, 16);
  bias_at_ = group_count_ * group_outputs_ * group_inputs_;
}

double PlaneConvolution::padded_multiply_adds() const {
  return static_cast<double>(batch_ * round_up(pixels_, isa_.lanes)) *
         static_cast<double>(group_count_ * group_outputs_ * group_inputs_);
}

double PlaneConvolution::staged_elements() const {
  return static_cast<double>(batch_ * pixels_) *
         static_cast<double>(static_cast<int64_t>(segments_.size()) * group_inputs_);
}

double PlaneConvolution::calls() const {
  int64_t tiles = 0;
  for (const Segment& segment : segments_) tiles += tile_count(segment);
  return static_cast<double>(batch_ * block_count_) * static_cast<double>(tiles * chunk_count_);
}

std::string PlaneConvolution::describe() const {
  std::ostringstream out;
  out << "lanes: pixels (" << isa_.name << ", " << isa_.lanes << ")\n";
  out << "blocks per sample: " << block_count() << " of at most " << max_panel_pixels() << " pixels\n";
  out << "segments: " << segments_.size() << " of at most " << max_segment_channels() << " channels\n";
  out << "input: in place, " << inputs_of(0).size() << " planes at a time\n";
  out << "packed weights: " << packed_floats() * 4 << " bytes\n";
  out << "per thread: sums " << sum_floats_ * 4 << " bytes\n";
  return out.str();
}

// [segment][chunk][tile][input][output of the tile].
void PlaneConvolution::pack(const void* weights, const float* bias, float* packed, Executor& executor) const {
  const int64_t outputs = group_count_ * group_outputs_;
  if (bias != nullptr) {
    std::copy_n(bias, outputs, packed + bias_at_);
  } else {
    std::fill_n(packed + bias_at_, outputs, 0.0f);
  }
  executor.for_each(static_cast<int64_t>(segments_.size()), [&](int64_t index, int) {
    const Segment& segment = segments_[static_cast<size_t>(index)];
    float* to = packed + segment.channels.begin * group_inputs_;
    for (int64_t chunk = 0; chunk < chunk_count_; ++chunk) {
      for (int64_t tile = 0; tile < tile_count(segment); ++tile) {
        const Range part = even_part(segment.channels.size(), tile_count(segment), tile);
        const Range inputs = inputs_of(chunk);
        for (int64_t i = inputs.begin; i < inputs.end; ++i) {
          for (int64_t o = segment.channels.begin + part.begin; o < segment.channels.begin + part.end; ++o) {
            const int64_t element =
                transposed_ ? (segment.group * group_inputs_ + i) * group_outputs_ + o % group_outputs_
                            : o * group_inputs_ + i;
            *to++ = static_cast<float>(load_element(
                weight_dtype_, static_cast<const char*>(weights) + element * byte_size(weight_dtype_)));
          }
        }
      }
    }
  });
}

void PlaneConvolution::copy_edge(const float* from, int64_t planes, int64_t count, float* edge) const {
  for (int64_t i = 0; i < planes; ++i) {
    float* to = std::copy_n(from + i * input_.channel_stride, count, edge + i * isa_.lanes);
    std::fill_n(to, isa_.lanes - count, 0.0f);
  }
}

void PlaneConvolution::run(const Arguments& arguments, const float* packed, float* worker,
                           const ConvolutionTask& task,
                           const std::function<void(const Panel&)>& consume) const {
  const Segment& segment = segments_[task.segment];
  const Range pixels = pixels_of(task.block);
  const int64_t sample = task.samples.begin;
  float* edge = worker;
  float* sums = worker + edge_floats_;
  // A tile reads whole vectors: the last plane of the last sample has nothing behind its last pixel.
  const int64_t rest = pixels.end == pixels_ ? pixels.size() % isa_.lanes : 0;
  const int64_t whole = pixels.size() - rest;
  const float* weights = packed + segment.channels.begin * group_inputs_;
  const float* plane = static_cast<const float*>(arguments.input) + sample * input_.sample_stride +
                       segment.group * group_inputs_ * input_.channel_stride + pixels.begin;
  PixelTileArguments t;
  t.channel_stride = pixels.size();
  t.pixel_stride = 1;
  for (int64_t chunk = 0; chunk < chunk_count_; ++chunk) {
    const int64_t planes = inputs_of(chunk).size();
    if (rest > 0) copy_edge(plane + whole, planes, rest, edge);
    t.add = chunk > 0;
    for (int64_t tile = 0; tile < tile_count(segment); ++tile) {
      const Range channels = even_part(segment.channels.size(), tile_count(segment), tile);
      t.channels = static_cast<int>(channels.size());
      t.bias = packed + bias_at_ + segment.channels.begin + channels.begin;
      t.acc = sums + channels.begin * pixels.size();
      if (whole > 0) {
        t.x = plane;
        t.lists[0] = {offsets_.data(), planes, weights};
        t.pixels = whole;
        isa_.pixel_tile(t);
      }
      if (rest > 0) {
        t.x = edge;
        t.lists[0] = {edge_offsets_.data(), planes, weights};
        t.acc += whole;
        t.pixels = rest;
        isa_.pixel_tile(t);
      }
      weights += planes * channels.size();
    }
    plane += planes * input_.channel_stride;
  }
  consume({sums, pixels.size(), {sample, segment.channels, pixels}, std::numeric_limits<float>::infinity()});
}

}  // namespace onepass::cpu
