// Running an indirect convolution: packing its weights, pointing at its positions, multiplying.
#include <algorithm>
#include <limits>

#include "cpu/indirect_convolution.h"

namespace onepass::cpu {
namespace {

// Weights and inputs that are turned at a time stay in L1.
constexpr int64_t turned_floats = 4 * 1024;
constexpr int64_t turned_pixels = 32;
// Inputs of a chunk that stay in L1 while the tiles of all channels pass over them.
constexpr int64_t l1_floats = 5 * 1024;
constexpr int64_t tile_positions = 5;
// Rows of weights lie pages apart: they are fetched so many ahead.
constexpr int64_t rows_ahead = 6;
constexpr int64_t line_floats = 16;

// The indices of an output along the three axes, one behind another.
struct Place {
  std::array<int64_t, 3> at{};

  void step(const std::array<Axis, 3>& axes) {
    for (size_t i = 3; i-- > 0;) {
      if (++at[i] < axes[i].out || i == 0) return;
      at[i] = 0;
    }
  }
};

}  // namespace

// ------------------------------------------------------------------------------------------------ weights

void IndirectConvolution::pack(const void* weights, const float* bias, float* packed,
                               Executor& executor) const {
  std::fill(packed + bias_at_, packed + packed_floats_, 0.0f);
  if (bias != nullptr) std::copy_n(bias, group_count_ * group_outputs_, packed + bias_at_);
  if (packs_at_use_) return;
  if (outputs_are_rows_) {
    const int64_t parts = ceil_div(group_inputs_, turned_pixels);
    executor.for_each(static_cast<int64_t>(segments_.size()) * parts, [&](int64_t index, int) {
      const auto i = static_cast<size_t>(index / parts);
      const Range channels = even_part(group_inputs_, parts, index % parts);
      for (const OutputClass& output_class : classes_) {
        for (int64_t tap = 0; tap < output_class.tap_count(); ++tap) {
          const int64_t term = output_class.first_term + tap * group_inputs_ + channels.begin;
          copy_rows(weights, segments_[i], output_class.kernel[static_cast<size_t>(tap)], channels, terms_,
                    term, packed + segment_at_[i]);
        }
      }
    });
    return;
  }
  const int64_t tiles = tile_count({0, {0, max_segment_channels_}});
  executor.for_each(static_cast<int64_t>(segments_.size()) * tiles, [&](int64_t index, int) {
    const auto i = static_cast<size_t>(index / tiles);
    if (index % tiles >= tile_count(segments_[i])) return;
    const Tile tile = tile_at(segments_[i], index % tiles);
    pack_tile(weights, segments_[i], tile, packed + segment_at_[i] + tile.first * terms_);
  });
}

// [class][tap][input channel][output channel of the tile], zero where a lane has no channel.
void IndirectConvolution::pack_tile(const void* weights, const Segment& segment, const Tile& tile,
                                    float* to) const {
  const int64_t width = tile.vectors * isa_.lanes;
  const int64_t first = segment.channels.begin + tile.first;
  const int64_t count = std::min(width, segment.channels.end - first);
  const int64_t origin = weights_.first_of(first);
  const auto address_of = [&](int64_t channel, int64_t k) {
    return const_cast<char*>(static_cast<const char*>(weights)) +
           (origin + channel * weights_.input + k * weights_.tap) * byte_size(weight_dtype_);
  };
  if (count < width) std::fill_n(to, terms_ * width, 0.0f);
  TransferArguments t;
  t.dtype = weight_dtype_;
  t.panel_stride = width;
  t.cols = count;
  t.col_stride = weights_.output;
  // Taps that lie apart are matrices of channels; else taps lie beside each other and are turned together.
  const bool apart = weights_.tap != 1 || kernel_elements_ == 1;
  const int64_t floats = width * (apart ? 1 : kernel_elements_);
  const int64_t step = std::max<int64_t>(1, turned_floats / floats);
  std::vector<float> turned(apart ? 0 : static_cast<size_t>(step * floats));
  for (int64_t c = 0; c < group_inputs_; c += step) {
    const int64_t channels = std::min(step, group_inputs_ - c);
    if (!apart) {
      const int64_t together = transposed_ ? 1 : channels;  // channels whose taps follow one another
      t.rows = together * kernel_elements_;
      t.row_stride = 1;
      for (int64_t i = 0; i < channels; i += together) {
        t.panel = turned.data() + i * floats;
        t.tensor = address_of(c + i, 0);
        isa_.load(t);
      }
    }
    for (const OutputClass& output_class : classes_) {
      for (int64_t tap = 0; tap < output_class.tap_count(); ++tap) {
        const int64_t k = output_class.kernel[static_cast<size_t>(tap)];
        float* at = to + (output_class.first_term + tap * group_inputs_ + c) * width;
        if (apart) {
          t.panel = at;
          t.rows = channels;
          t.row_stride = weights_.input;
          t.tensor = address_of(c, k);
          isa_.load(t);
          continue;
        }
        const float* from = turned.data() + k * width;
        for (int64_t i = 0; i < channels; ++i) std::copy_n(from + i * floats, count, at + i * width);
      }
    }
  }
}

// The same for some channels of one tap and all tiles of a segment, where output channels lie beside each
// other: rows are read as a whole. Tiles have `terms` terms in `to`, and these begin at `first_term`.
void IndirectConvolution::copy_rows(const void* weights, const Segment& segment, int64_t k, Range channels,
                                    int64_t terms, int64_t first_term, float* to) const {
  const int64_t in_group = segment.channels.begin - segment.group * group_outputs_;
  const int64_t tiles = tile_count(segment);
  for (int64_t c = channels.begin; c < channels.end; ++c, ++first_term) {
    const float* from = static_cast<const float*>(weights) +
                        (segment.group * group_inputs_ + c) * weights_.input + k * weights_.tap + in_group;
    for (int64_t i = 0; i < segment.channels.size(); i += line_floats) {
      __builtin_prefetch(from + rows_ahead * weights_.input + i);
    }
    for (int64_t i = 0; i < tiles; ++i) {
      const Tile tile = tile_at(segment, i);
      const int64_t width = tile.vectors * isa_.lanes;
      const int64_t count = std::min(width, segment.channels.size() - tile.first);
      float* at = std::copy_n(from + tile.first, count, to + tile.first * terms + first_term * width);
      std::fill_n(at, width - count, 0.0f);
    }
  }
}

// ------------------------------------------------------------------------------------------------ inputs

// The positions of the task's samples in channels last: those of the block, or all of a sample.
void IndirectConvolution::stage(const Arguments& arguments, const ConvolutionTask& task,
                                float* window) const {
  const int64_t first = segments_[task.segment].group * group_inputs_;
  const Range pixels = is_identity_ ? pixels_of(task.block) : Range{0, input_.pixels()};
  for (int64_t sample = task.samples.begin; sample < task.samples.end; ++sample) {
    for (int64_t p = pixels.begin; p < pixels.end; p += turned_pixels) {
      const Region region{
          sample, {first, first + group_inputs_}, {p, std::min(pixels.end, p + turned_pixels)}};
      transfer(isa_, Direction::load, input_, arguments.input, region, Orientation::interleaved,
               window + (p - pixels.begin) * window_pitch_, window_pitch_);
    }
    window += pixels.size() * window_pitch_;
  }
}

std::array<int64_t, 3> IndirectConvolution::place_of(int64_t pixel) const {
  const int64_t line = pixel / axes_[2].out;
  return {line / axes_[1].out, line % axes_[1].out, pixel % axes_[2].out};
}

size_t IndirectConvolution::kind_of(const std::array<int64_t, 3>& place) const {
  size_t kind = 0;
  for (size_t i = 0; i < 3; ++i) {
    kind = kind * outputs_[i].class_of_kind.size() +
           static_cast<size_t>(outputs_[i].kind[static_cast<size_t>(place[i])]);
  }
  return kind;
}

// Positions of each kind in a block of pixels.
std::vector<int64_t> IndirectConvolution::kind_sizes(Range pixels) const {
  size_t count = 1;
  for (const AxisOutputs& outputs : outputs_) count *= outputs.class_of_kind.size();
  std::vector<int64_t> sizes(count, 0);
  if (count == 1) {
    sizes[0] = pixels.size();
    return sizes;
  }
  Place place{place_of(pixels.begin)};
  for (int64_t p = pixels.begin; p < pixels.end; ++p, place.step(axes_)) ++sizes[kind_of(place.at)];
  return sizes;
}

// [class][tap][position], and for each position its row of sums. Positions of a class are in the order of
// their kinds.
void IndirectConvolution::point(const Arguments& arguments, const ConvolutionTask& task,
                                const std::vector<int64_t>& sizes, const std::vector<Positions>& positions,
                                const Memory& memory) const {
  const Range pixels = pixels_of(task.block);
  const int64_t samples = task.samples.size();
  struct Next {
    const Positions* positions;
    int64_t at;
  };
  std::vector<Next> next(sizes.size());
  for (size_t k = 0; k < classes_.size(); ++k) {
    int64_t at = 0;
    for (const size_t kind : kinds_[k]) {
      next[kind] = {&positions[k], at};
      at += samples * sizes[kind];
    }
  }
  std::array<int64_t, 3> strides = input_.strides;
  if (!in_place_) {
    strides = {axes_[1].in * axes_[2].in * window_pitch_, axes_[2].in * window_pitch_, window_pitch_};
  }
  // Each position reads its own, and all are evenly apart.
  const bool is_even = is_identity_ && (!in_place_ || input_.uniform);
  // A window of a block begins with its first pixel.
  const int64_t skipped = !in_place_ && is_identity_ ? pixels.begin * window_pitch_ : 0;
  for (int64_t s = 0; s < samples; ++s) {
    const float* base = memory.window + s * window_sample_of(task) * window_pitch_ - skipped;
    if (in_place_) {
      base = static_cast<const float*>(arguments.input) + (task.samples.begin + s) * input_.sample_stride +
             segments_[task.segment].group * group_inputs_;
    }
    if (is_even) {
      const int64_t step = in_place_ ? input_.pixel_stride : window_pitch_;
      for (int64_t p = 0; p < pixels.size(); ++p) {
        memory.rows[s * pixels.size() + p] = static_cast<int32_t>(s * pixels.size() + p);
        memory.pointers[s * pixels.size() + p] = base + (pixels.begin + p) * step;
      }
      continue;
    }
    Place place{place_of(pixels.begin)};
    for (int64_t p = 0; p < pixels.size(); ++p, place.step(axes_)) {
      Next& slot = next[kind_of(place.at)];
      const Positions& of = *slot.positions;
      std::array<int64_t, 3> first{};
      for (size_t i = 0; i < 3; ++i) first[i] = outputs_[i].first[static_cast<size_t>(place.at[i])];
      memory.rows[of.rows - memory.rows + slot.at] = static_cast<int32_t>(s * pixels.size() + p);
      const float** to = memory.pointers + (of.pointers - memory.pointers) + slot.at++;
      for (const Tap& depth : of.output_class->taps[0]) {
        const int64_t d = first[0] + depth.offset;
        const bool has_plane = d >= 0 && d < axes_[0].in;
        for (const Tap& height : of.output_class->taps[1]) {
          const int64_t h = first[1] + height.offset;
          const bool has_line = has_plane && h >= 0 && h < axes_[1].in;
          const float* line = base + d * strides[0] + h * strides[1];
          for (const Tap& width : of.output_class->taps[2]) {
            const int64_t w = first[2] + width.offset;
            const bool inside = has_line && w >= 0 && w < axes_[2].in;
            *to = inside ? line + w * strides[2] : memory.zeros;
            to += of.count;
          }
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ running

// The positions whose tap is inside the input, for a chunk of one tap; for others all of them.
IndirectConvolution::Positions IndirectConvolution::met_by(const Chunk& chunk, const Positions& positions,
                                                           const Memory& memory) const {
  Positions met = positions;
  met.pointers += chunk.taps.begin * positions.count;
  if (!picks(chunk)) return met;
  met.count = 0;
  for (int64_t i = 0; i < positions.count; ++i) {
    if (met.pointers[i] == memory.zeros) continue;
    memory.met_pointers[met.count] = met.pointers[i];
    memory.met_rows[met.count++] = positions.rows[i];
  }
  met.pointers = memory.met_pointers;
  met.rows = memory.met_rows;
  return met;
}

// Some positions of a class times a tile, over the terms of a chunk. Where chunks pick positions, sums begin
// with the bias.
void IndirectConvolution::multiply(const Positions& positions, Range part, const Tile& tile,
                                   const Chunk& chunk, const float* weights, const float* bias,
                                   const Memory& memory, int64_t sums_stride) const {
  IndirectTileArguments t;
  t.x = positions.pointers + part.begin;
  t.x_stride = positions.count;
  t.x_shift = chunk.channels.begin;
  t.zeros = has_border_ ? memory.zeros : nullptr;
  t.runs = chunk.taps.size();
  t.channels = chunk.channels.size();
  t.weights = weights;
  t.sums = memory.sums + tile.first;
  t.sums_stride = sums_stride;
  t.rows = positions.rows + part.begin;
  t.positions = part.size();
  t.vectors = tile.vectors;
  t.add = chunk.first_term > 0 || picks(chunk);
  t.bias = bias + tile.first;
  isa_.indirect_tile(t);
}

// No tap meets the input: the bias alone.
void IndirectConvolution::fill_with_bias(const Positions& positions, int64_t channels, const float* bias,
                                         const Memory& memory, int64_t sums_stride) const {
  for (int64_t i = 0; i < positions.count; ++i) {
    std::copy_n(bias, channels, memory.sums + positions.rows[i] * sums_stride);
  }
}

void IndirectConvolution::run(const Arguments& arguments, const float* packed, float* worker,
                              const ConvolutionTask& task,
                              const std::function<void(const Panel&)>& consume) const {
  const Segment& segment = segments_[task.segment];
  const Range pixels = pixels_of(task.block);
  const Memory memory = memory_of(worker);
  const float* bias = packed + bias_at_ + segment.channels.begin;
  const int64_t stride = padded_channels(segment.channels.size());
  const std::vector<int64_t> sizes = kind_sizes(pixels);
  std::vector<Positions> positions;
  const float* const* pointers = memory.pointers;
  const int32_t* rows = memory.rows;
  for (size_t k = 0; k < classes_.size(); ++k) {
    int64_t count = 0;
    for (const size_t kind : kinds_[k]) count += task.samples.size() * sizes[kind];
    positions.push_back({&classes_[k], pointers, rows, count});
    pointers += count * classes_[k].tap_count();
    rows += count;
  }
  if (!task.window_is_staged) {
    if (!in_place_) stage(arguments, task, memory.window);
    std::fill_n(memory.zeros, zero_floats_, 0.0f);
    point(arguments, task, sizes, positions, memory);
  }
  for (const Positions& of : positions) {
    const bool picked = of.output_class->tap_count() > 0 && picks(chunk_at(*of.output_class, 0));
    if (picked || of.output_class->tap_count() == 0) fill_with_bias(of, stride, bias, memory, stride);
  }
  const int64_t tiles = tile_count(segment);
  const bool by_tiles = packs_at_use_ && !outputs_are_rows_;
  for (int64_t i = 0; by_tiles && i < tiles; ++i) {
    const Tile tile = tile_at(segment, i);
    pack_tile(arguments.parameters[0], segment, tile, memory.tile);
    for (const Positions& of : positions) {
      for (int64_t c = 0; c < chunk_count(*of.output_class); ++c) {
        const Chunk chunk = chunk_at(*of.output_class, c);
        const int64_t term = of.output_class->first_term + chunk.first_term;
        const Positions met = met_by(chunk, of, memory);
        multiply(met, {0, met.count}, tile, chunk, memory.tile + term * tile.vectors * isa_.lanes, bias,
                 memory, stride);
      }
    }
  }
  const float* weights = packed + segment_at_[task.segment];
  for (const Positions& of : positions) {
    for (int64_t c = 0; !by_tiles && c < chunk_count(*of.output_class); ++c) {
      const Chunk chunk = chunk_at(*of.output_class, c);
      const int64_t terms = chunk.taps.size() * chunk.channels.size();
      if (packs_at_use_ && of.count > 0) {
        for (int64_t tap = chunk.taps.begin; tap < chunk.taps.end; ++tap) {
          copy_rows(arguments.parameters[0], segment, of.output_class->kernel[static_cast<size_t>(tap)],
                    chunk.channels, terms, (tap - chunk.taps.begin) * chunk.channels.size(), memory.tile);
        }
      }
      const int64_t first_term = of.output_class->first_term + chunk.first_term;
      const int64_t step = std::max(2 * tile_positions, l1_floats / terms / tile_positions * tile_positions);
      const Positions met = met_by(chunk, of, memory);
      for (int64_t p = 0; p < met.count; p += step) {
        const Range part{p, std::min(met.count, p + step)};
        for (int64_t i = 0; i < tiles; ++i) {
          const Tile tile = tile_at(segment, i);
          const float* of_tile = packs_at_use_
                                     ? memory.tile + tile.first * terms
                                     : weights + tile.first * terms_ + first_term * tile.vectors * isa_.lanes;
          multiply(met, part, tile, chunk, of_tile, bias, memory, stride);
        }
      }
    }
  }
  for (int64_t s = 0; s < task.samples.size(); ++s) {
    for (int64_t p = 0; p < pixels.size(); p += max_panel_pixels_) {
      const int64_t end = std::min(pixels.size(), p + max_panel_pixels_);
      const Region region{task.samples.begin + s, segment.channels, {pixels.begin + p, pixels.begin + end}};
      consume({memory.sums + (s * pixels.size() + p) * stride, stride, region,
               std::numeric_limits<float>::infinity()});
    }
  }
}

}  // namespace onepass::cpu
