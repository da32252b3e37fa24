// How the products of the row "gemm_backward" are cut into tiles, and the clocks they take.
#include "cuda/gemm/backward/numbers.h"

#include <algorithm>

#include "cuda/struct_bytes.h"

namespace onepass::cuda {

TensorGeometry::TensorGeometry(const TensorSpec& spec)
    : channels(spec.sizes[1]), sample_stride(spec.strides[0]), channel_stride(spec.strides[1]) {
  const size_t rank = spec.sizes.size() - 2;
  for (size_t d = 0; d < rank; ++d) {
    sizes[max_spatial_rank - rank + d] = spec.sizes[d + 2];
    strides[max_spatial_rank - rank + d] = spec.strides[d + 2];
  }
}

void TensorGeometry::add_to(Constants& constants, int64_t groups) const {
  constants.add("channels", channels / groups)
      .add("size0", sizes[0], "size1", sizes[1], "size2", sizes[2])
      .add("stride_n", sample_stride, "stride_c", channel_stride)
      .add("stride0", strides[0], "stride1", strides[1], "stride2", strides[2]);
}

GradientNumbers::GradientNumbers(const BackwardProblem& backward) {
  const Problem& problem = backward.forward;
  const Gpu& gpu = gpu_of(problem.device);
  const Conv& conv = *problem.block.conv();
  transposed = conv.transposed;
  // Behind neutral dimensions that the block does not have.
  const auto spatial = [&](const auto& of_conv, Three all) {
    std::copy_n(of_conv.begin(), conv.rank, all.end() - conv.rank);
    return all;
  };
  kernel = spatial(conv.kernel, {1, 1, 1});
  dilation = spatial(conv.dilation, {1, 1, 1});
  padding = spatial(conv.padding_before, {0, 0, 0});
  taps = kernel[0] * kernel[1] * kernel[2];
  conv_groups = conv.groups;
  channels = conv.in_channels / conv_groups;
  out_channels = conv.out_channels / conv_groups;
  u_channels = transposed ? channels : out_channels;
  v_channels = transposed ? out_channels : channels;
  // Only where the packed channels of neighbouring groups are contiguous.
  for (int64_t count = 2; u_channels % 16 == 0 && v_channels % 16 == 0 && count <= conv_groups; ++count) {
    if (conv_groups % count == 0 && count * std::max(u_channels, v_channels) <= 64) merged_groups = count;
  }
  u_channels *= merged_groups;
  v_channels *= merged_groups;
  set_pitches(TensorGeometry(problem.input).sizes, TensorGeometry(problem.output).sizes,
              byte_size(problem.input.dtype));
  cut_weight(gpu);
  cut_input(gpu);
}

bool GradientNumbers::taps_in_order() const {
  for (int64_t tap = 1; tap < taps; ++tap) {
    if (shift(tap) <= shift(tap - 1)) return false;
  }
  return true;
}

int64_t GradientNumbers::shift(int64_t tap) const {
  const int64_t t = std::min(tap, taps - 1);
  const Three m{t / (kernel[1] * kernel[2]), t / kernel[2] % kernel[1], t % kernel[2]};
  return (m[0] * dilation[0] - padding[0]) * plane + (m[1] * dilation[1] - padding[1]) * pitch +
         m[2] * dilation[2] - padding[2];
}

// A tap is a shift from u to v and back at these pitches, whatever the padding: a row is followed by zeros.
void GradientNumbers::set_pitches(const Three& input, const Three& output, int64_t element_bytes) {
  const Three& u = transposed ? input : output;
  const Three& v = transposed ? output : input;
  Three pitches{};
  for (size_t d = 0; d < max_spatial_rank; ++d) {
    const int64_t high = dilation[d] * (kernel[d] - 1) - padding[d];
    pitches[d] = std::max({u[d], v[d] + padding[d], u[d] + high});
  }
  // A pair of columns lies in one row. Where the padding costs at most a sixteenth, rows are multiples of a
  // sector of dx: partial sectors take twice as long to store.
  const int64_t sector = 32 / element_bytes;
  const int64_t wide = round_up(pitches[2], sector);
  pitch = 16 * (wide - pitches[2]) <= pitches[2] ? wide : round_up(pitches[2], 2);
  plane = pitch * pitches[1];
  sample = plane * pitches[0];
  margin = round_up(std::max({-shift(0), shift(taps - 1), int64_t{0}}), 8);
}

void GradientNumbers::cut_weight(const Gpu& gpu) {
  constexpr int64_t most_sums = 192;  // columns times taps of a warpgroup; a thread holds half as many
  constexpr int64_t most_stages = 6;
  warpgroup_taps = std::min<int64_t>(3, divide_up(taps, warpgroups));
  const int64_t most = most_sums / warpgroup_taps / 8 * 8;
  columns = round_up(divide_up(v_channels, divide_up(v_channels, most)), 8);
  int64_t reach = 0;
  for (int64_t first = 0; first < taps; first += block_taps())
    reach = std::max(reach, shift(first + block_taps() - 1) - shift(first));
  lag = (chunk - 1 + reach) / chunk;
  while (stages < most_stages && weight_shared_bytes(stages + 1) <= gpu.shared_bytes_per_block) ++stages;
}

// A window serves all taps, those of a plane or those of a row: whichever moves the fewest bytes.
void GradientNumbers::cut_input(const Gpu& gpu) {
  constexpr int64_t most_stages = 8;
  int64_t least = 0;
  GradientNumbers best = *this;
  for (const int64_t taps_of_group : {taps, kernel[1] * kernel[2], kernel[2]}) {
    GradientNumbers tried = *this;
    tried.group_taps = taps_of_group;
    tried.window = tile_positions + shift(taps_of_group - 1) - shift(0);
    const int64_t budget = gpu.shared_bytes_per_block;
    tried.weights_resident = channel_tiles() == 1;
    if (tried.input_shared_bytes(3) > budget) tried.weights_resident = false;
    while (tried.input_stages < most_stages && tried.input_shared_bytes(tried.input_stages + 1) <= budget)
      ++tried.input_stages;
    const int64_t bytes =
        tried.tap_groups() * (tried.window_bytes() + (tried.weights_resident ? 0 : tried.group_bytes()));
    if (tried.input_stages < 2 || (least > 0 && bytes >= least)) continue;
    best = tried;
    least = bytes;
  }
  *this = best;
}

int64_t GradientNumbers::weight_tiles() const {
  return conv_groups / merged_groups * divide_up(u_channels, 64) * divide_up(v_channels, columns) *
         divide_up(taps, block_taps());
}

int64_t GradientNumbers::weight_shared_bytes(int64_t count) const {
  return StructBytes()
      .add(count * 8 * chunk * 16, 128)                           // u
      .add(columns / 8 * ((count + lag) * chunk + 16) * 16, 128)  // v
      .add(count * 2 * 8, 8)                                      // full, empty
      .total();
}

int64_t GradientNumbers::input_shared_bytes(int64_t count) const {
  return StructBytes()
      .add(count * window_bytes(), 128)                                                // x
      .add((weights_resident ? tap_groups() * chunks() : count) * group_bytes(), 128)  // weights
      .add((count * 2 + 2) * 8, 8)  // full, empty, weights_full, ahead
      .total();
}

Number GradientNumbers::splits(const Number& all_chunks, const Gpu& gpu) const {
  constexpr int64_t split_positions = 16384;  // that are added in the tensor cores, which truncate
  const Number parts = divide_up(all_chunks, split_positions / chunk) * weight_tiles();
  return clamp(divide_up(parts, gpu.multiprocessors) * gpu.multiprocessors / weight_tiles(), 1,
               maximum(1, all_chunks));
}

// A product of 64 x n x 16 takes n / 2 clocks at best; 16 bytes a clock come from the second-level cache.
// Fitted to an H200: s19 and s61 take 0.93 and 0.39 ms for the weights' gradient, 1.06 and 0.39 for the
// input's.
double GradientNumbers::weight_clocks(int64_t positions, const Gpu& gpu) const {
  const int64_t all_chunks = divide_up(positions, chunk);
  const int64_t parts = splits(Number(all_chunks), gpu);
  const int64_t rounds = divide_up(parts * weight_tiles(), int64_t{gpu.multiprocessors});
  const auto own = static_cast<double>(rounds * (divide_up(all_chunks, parts) + lag + 2) * chunk);
  const auto products = static_cast<double>(columns * block_taps()) / 32;
  const auto bytes = static_cast<double>(128 + columns * 2);
  return own * std::max(1.55 * products, bytes / 16);
}

double GradientNumbers::input_clocks(int64_t positions, const Gpu& gpu) const {
  const int64_t items = divide_up(positions, tile_positions) * channel_tiles();
  const auto own = static_cast<double>(divide_up(items, int64_t{gpu.multiprocessors}) * tile_positions);
  const auto steps = static_cast<double>(tap_groups() * chunks());
  const double products = static_cast<double>(chunks() * taps) / 2;
  const double bytes = steps * static_cast<double>(window_bytes() + (weights_resident ? 0 : group_bytes())) /
                       static_cast<double>(tile_positions);
  return own * (std::max(1.5 * products, bytes / 16) + 6);
}

Constants GradientNumbers::geometry() const {
  Constants constants;
  constants.add("kernel0", kernel[0])
      .add("kernel1", kernel[1])
      .add("kernel2", kernel[2])
      .add("dilation0", dilation[0])
      .add("dilation1", dilation[1])
      .add("dilation2", dilation[2])
      .add("padding0", padding[0])
      .add("padding1", padding[1])
      .add("padding2", padding[2])
      .add("taps", taps);
  add_pitches(constants);
  return constants;
}

void GradientNumbers::add_pitches(Constants& constants) const {
  constants.add("pitch", pitch).add("plane", plane).add("sample", sample).add("margin", margin);
}

}  // namespace onepass::cuda
