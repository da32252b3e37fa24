// The functions that a SIMD target provides: one table per target, compiled from the same source.
//
// The functions work on panels: two-dimensional f32 blocks of one sample, small enough for a cache. In a
// planar panel a row is a channel, so pixels are contiguous. In an interleaved one a row is a pixel, so
// channels are.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "onepass/block.h"
#include "onepass/tensor.h"

namespace onepass::cpu {

enum class Orientation : uint8_t { planar, interleaved };

// What a step does to x before its operation, per channel, and what is known of what the operation gets.
enum class Affine : uint8_t {
  none,
  norm,    // (x - centre) * scale + shift
  raised,  // the same, which is known to lie above raised_limit: hardswish has one clamp less
  narrow,  // nothing, and x is known to lie within narrow_limit of 0: no clamps before an exponential
  small,   // within small_limit: most of a row may be near enough to 0 for a polynomial
  tiny,    // within tiny_limit: all of it is
};
inline constexpr int affine_count = 6;
inline constexpr float raised_limit = -2.9f;
inline constexpr float narrow_limit = 80;  // an exponential of f32 has 87 to either side
inline constexpr float small_limit = 12;   // proven for a sum of many terms that seldom comes near it
inline constexpr float tiny_limit = 1;

// Sum and sum of squares of a row of results, where the step that made them has them.
struct RowSums {
  float sum = 0;
  float squares = 0;
  bool known = false;
};

// One pointwise operation over a panel. src may be dst. Per-channel arrays start at the panel's first channel
// and may be read up to one vector past its last.
struct StepArguments {
  const float* src = nullptr;
  int64_t src_stride = 0;  // floats between rows
  float* dst = nullptr;
  int64_t dst_stride = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  const float* centre = nullptr;
  const float* scale = nullptr;
  const float* shift = nullptr;
  float a = 0;
  float b = 0;
  const float* operand = nullptr;  // per channel, or a panel where the operation takes a tensor
  int64_t operand_stride = 0;      // of such a panel
  RowSums* sums = nullptr;         // of a panel of one row: a step may add them up
};
using StepFunction = void (*)(const StepArguments& arguments);

// The operations of pointwise.def and, last, the identity (a step that is only its affine part).
inline constexpr int identity_step = op_count;
inline constexpr int step_count = op_count + 1;

// Running statistics of each channel: merge a panel (pixels_before pixels are already in mean and m2).
struct StatisticsArguments {
  const float* src = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  float* mean = nullptr;  // per channel of the panel, with a vector of slack
  float* m2 = nullptr;    // sum of squared distances from the mean
  int64_t pixels_before = 0;
  const RowSums* sums = nullptr;  // of a panel of one row, where they may be known
};

// Mean and 1 / sqrt(variance + eps) of slabs whose rows are runs of `width` elements.
struct SlabStatisticsArguments {
  const float* src = nullptr;
  int64_t stride = 0;  // between the rows of a slab
  int64_t rows = 0;
  int64_t width = 0;  // also between slabs
  int64_t slabs = 0;
  float eps = 0;
  float* statistics = nullptr;  // the two of each slab
};

// What the norm does to columns: (x - centre) * scale + its bias. Arrays of columns have a vector of slack.
struct ColumnNormArguments {
  const float* mean = nullptr;  // moments of columns over the rows, for column_norm
  const float* m2 = nullptr;
  int64_t slabs = 0;
  int64_t width = 0;  // columns of a slab
  int64_t rows = 0;
  float eps = 0;
  const float* weight = nullptr;  // per column; null: 1
  float* statistics = nullptr;    // mean and rstd of each slab; column_norm writes them
  float* centre = nullptr;
  float* scale = nullptr;
};

// The norm and the operation after it over slabs whose elements lie together, one slab behind the other.
// step.src may be step.dst.
struct SlabStepArguments {
  StepArguments step;  // without rows, strides and coefficients
  int64_t slabs = 0;
  int64_t channels = 0;  // of a slab
  int64_t pixels = 0;
  const float* statistics = nullptr;  // mean and rstd of each slab
  // Per channel, or per column where they are repeated for the pixels of a channel; null: 1 and 0. The same
  // holds for the operation's own argument.
  const float* weights = nullptr;
  const float* biases = nullptr;
  bool repeated = false;  // else a channel has at least a vector of pixels
};

// The gradient of one step over a panel. `step.src` is the input of the step's affine part. `step.dst` gets
// the gradient of its operation's input. `step.operand` is read as in the forward step.
struct GradientArguments {
  StepArguments step;
  const float* gradient = nullptr;  // of the step's result; may be step.dst
  int64_t gradient_stride = 0;
  // The argument's gradient, where it is asked for. It is the sum over the panel's pixels for each channel,
  // with a vector of slack, or a panel for a tensor.
  float* argument = nullptr;
  int64_t argument_stride = 0;
};
using GradientFunction = void (*)(const GradientArguments& arguments);

// The gradient of a norm over a panel of its input x and of the gradient of its output before its weight.
struct NormGradientArguments {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const float* gradient = nullptr;
  int64_t gradient_stride = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  const float* centre = nullptr;  // per channel, as all below but dst: xhat = (x - centre) * inverse
  const float* inverse = nullptr;
  // norm_sums: sums of gradient and of gradient * xhat over the panel's pixels, with a vector of slack.
  float* sums = nullptr;
  float* products = nullptr;
  // norm_gradient: dst = gradient * scale - offset - xhat * slope. dst may be gradient.
  float* dst = nullptr;
  int64_t dst_stride = 0;
  const float* scale = nullptr;
  const float* offset = nullptr;
  const float* slope = nullptr;
};

// The same over slabs whose elements lie together, one slab behind the other. Per column is per element, or
// per channel where `pixels` is not 0.
struct SlabGradientArguments {
  const float* x = nullptr;
  const float* gradient = nullptr;
  int64_t slabs = 0;
  int64_t width = 0;                  // elements of a slab
  int64_t pixels = 0;                 // of a channel, at least a vector
  const float* statistics = nullptr;  // mean and rstd of each slab
  const float* weights = nullptr;     // the norm's, per column; null: 1
  // Get gradient and gradient * xhat of each column, or are added to; null: not wanted.
  float* sums = nullptr;
  float* products = nullptr;
  bool add = false;
  float* dst = nullptr;  // the gradient of x; may be gradient; null: not wanted
};

// A panel's way to or from a tensor: element (r, c) lies at base + r * row_stride + c * col_stride elements.
struct TransferArguments {
  float* panel = nullptr;
  int64_t panel_stride = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  char* tensor = nullptr;  // only read by load
  DType dtype = DType::f32;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};

// One row of output pixels of a convolution for one tile of output channels, lanes along channels:
//   acc[p * pixel_stride + o] (+)= bias[o] + sum over terms t of x[offsets[t] + p] * weights[t * tile + o]
// Here tile = vectors * lanes. x may be read up to one vector past the last pixel's element. One entry of
// offsets behind the last term is read and not used.
struct ChannelTileArguments {
  const float* x = nullptr;
  const int32_t* offsets = nullptr;
  int64_t terms = 0;
  const float* weights = nullptr;
  float* acc = nullptr;
  int64_t pixel_stride = 0;
  int64_t pixels = 0;
  int vectors = 1;
  bool add = false;             // to what acc holds, without a bias; else it is overwritten
  const float* bias = nullptr;  // null: 0
};

// The same for a few output channels, lanes along pixels:
//   acc[o * channel_stride + (p * classes + k) * pixel_stride] (+)= bias[o] + the sum of class k at x + p
// for some rows of pixels. Two classes are the sub-convolutions of rows whose outputs alternate; an input
// that both meet is loaded once. One class has one list of terms, weights[t * channels + o]. Two classes have
// three lists: terms of both, weights[(t * 2 + k) * channels + o], terms of the first alone, and terms of the
// second alone. Up to a vector behind the last pixel of a row of acc may be read and written back.
struct PixelTerms {
  const int32_t* offsets = nullptr;
  int64_t terms = 0;
  const float* weights = nullptr;
};
inline constexpr int max_pixel_tile_classes = 2;
inline constexpr int max_pixel_term_lists = 3;
struct PixelTileArguments {
  const float* x = nullptr;
  PixelTerms lists[max_pixel_term_lists];
  int classes = 1;  // two have a pixel_stride of 1
  float* acc = nullptr;
  int64_t channel_stride = 0;
  int64_t pixel_stride = 0;
  int64_t pixels = 0;  // of all classes in a row
  int64_t rows = 1;
  int64_t x_row_stride = 0;
  int64_t acc_row_stride = 0;
  int channels = 1;  // at most max_pixel_tile_channels
  bool add = false;
  const float* bias = nullptr;  // not null, also where it is not added
};
inline constexpr int max_pixel_tile_channels = 4;

// Some positions times some channels of a convolution, lanes along the terms of a sum:
//   sums[p * sums_stride + o] (+)= bias[o] + sum of x[p * x_stride + t] * weights[o * weight_stride + t]
struct DotTileArguments {
  int64_t positions = 0;
  int64_t channels = 0;
  int64_t terms = 0;
  const float* x = nullptr;
  int64_t x_stride = 0;
  const float* weights = nullptr;
  int64_t weight_stride = 0;
  float* sums = nullptr;
  int64_t sums_stride = 0;
  bool add = false;             // to what sums holds, without a bias; else it is overwritten
  const float* bias = nullptr;  // not null, also where it is not added
};

// The same where terms are read in place, in runs of contiguous floats:
//   sums[rows[p] * sums_stride + o] (+)= bias[o]
//     + sum over runs r and terms t of x[p][r.x + t] * weights[o * weight_stride + r.weight + t]
struct DotRun {
  int64_t x = 0, weight = 0;  // offsets of the first term
  int64_t terms = 0;
};
struct DotRunArguments {
  const float* const* x = nullptr;  // of each position
  const int32_t* rows = nullptr;
  int64_t positions = 0;
  int64_t channels = 0;
  const DotRun* runs = nullptr;
  int64_t run_count = 0;
  const float* weights = nullptr;
  int64_t weight_stride = 0;
  float* sums = nullptr;
  int64_t sums_stride = 0;
  bool add = false;             // to what sums holds, without a bias; else it is overwritten
  const float* bias = nullptr;  // not null, also where it is not added
};

// Some positions times one tile of output channels, lanes along channels, where a position's input channels
// are contiguous:
//   sums[rows[p] * sums_stride + o] (+)= bias[o] + sum over runs r and channels c of
//     x[r * x_stride + p][c] * weights[(r * channels + c) * tile + o]
// Here tile = vectors * lanes. A run is a tap: positions have a pointer for each. Runs that meet `zeros` at
// all positions of a register tile are left out.
struct IndirectTileArguments {
  const float* const* x = nullptr;
  int64_t x_stride = 0;
  int64_t x_shift = 0;           // added to each of the pointers but `zeros`
  const float* zeros = nullptr;  // null: there are none
  int64_t runs = 0;
  int64_t channels = 0;
  const float* weights = nullptr;
  float* sums = nullptr;
  int64_t sums_stride = 0;
  const int32_t* rows = nullptr;
  int64_t positions = 0;
  int vectors = 1;
  bool add = false;             // to what sums holds, without a bias; else it is overwritten
  const float* bias = nullptr;  // not null, also where it is not added
};

// Pixels of the channels of some groups, for lanes of several groups:
//   to[p * to_stride + i * channel_stride + l] = from[p * from_stride + group of lane l * group_channels + i]
// Lane 0 is lane `first_lane` of the first group. Up to a vector behind `from` may be read.
struct SpreadArguments {
  const float* from = nullptr;
  float* to = nullptr;
  int64_t from_stride = 0, to_stride = 0, channel_stride = 0;
  int64_t pixels = 0;
  int64_t first_lane = 0, lanes = 0;
  int64_t group_lanes = 1, group_channels = 1;
};

// Some rows of output pixels of a convolution in groups, lanes along channels of several groups:
//   acc[q * acc_row + p * acc_stride + c] = bias[c]
//     + sum over rows r of taps that output row q meets, and taps k, of
//       r.x[(q - r.first) * row_step + p * x_stride + k * tap_stride + c] * r.weights[k * weight_stride + c]
// All are read and written in whole vectors of c. Where one chain takes all rows, acc_stride may be
// `channels`: then what a pixel's last vector writes too far is overwritten by the next pixel, or lies behind
// the last. So there is one row of outputs then, or one tile has all its pixels.
struct GroupTapRow {
  const float* x = nullptr;  // what output row `first` meets
  const float* weights = nullptr;
  int64_t first = 0, end = 1;  // the rows of outputs that meet it
};
struct GroupTileArguments {
  const GroupTapRow* rows = nullptr;
  int64_t row_count = 0;
  int64_t rows_of_chain = 0;              // rows whose products one chain of additions takes
  int64_t x_shift = 0, weight_shift = 0;  // added to r.x and r.weights
  int64_t tap_stride = 0, x_stride = 0, weight_stride = 0, acc_stride = 0;
  int64_t row_step = 0, acc_row = 0;
  int64_t taps = 0, pixels = 0, out_rows = 1, channels = 0;
  const float* bias = nullptr;
  float* acc = nullptr;
};

// The gradient of the weights of one row of taps over some rows of positions:
//   sums[k * sums_stride + c] += sum over r and p of coarse[r * coarse_row + p * coarse_stride + c]
//                                                    * fine[r * fine_row + p * fine_stride + k * tap_stride +
//                                                    c]
struct GroupGradientArguments {
  const float* coarse = nullptr;
  const float* fine = nullptr;
  int64_t coarse_row = 0, coarse_stride = 0;
  int64_t fine_row = 0, fine_stride = 0, tap_stride = 0;
  int64_t taps = 0, rows = 0, pixels = 0, channels = 0;
  float* sums = nullptr;
  int64_t sums_stride = 0;
};

struct Isa {
  std::string name;
  int64_t lanes = 1;
  int max_tile_vectors = 1;       // of output channels in one channel tile
  int64_t tile_pixels = 1;        // of a channel tile that wide
  int64_t pixel_tile_pixels = 1;  // of the widest pixel tile
  int64_t group_tile_pixels = 1;  // side by side in a tile of several groups
  StepFunction steps[step_count][affine_count][2] = {};
  void (*statistics[2])(const StatisticsArguments& arguments) = {};
  void (*slab_statistics)(const SlabStatisticsArguments& arguments) = nullptr;
  void (*column_coefficients)(const ColumnNormArguments& arguments) = nullptr;
  void (*column_norm)(const ColumnNormArguments& arguments) = nullptr;
  void (*slab_steps[step_count])(const SlabStepArguments& arguments) = {};
  // Means of rows that lie one behind the other, less the centre.
  void (*row_means)(const float* panel, int64_t rows, int64_t cols, float centre, float* means) = nullptr;
  GradientFunction gradients[op_count][2][2][2] = {};  // [after the norm][orientation][of the argument too]
  void (*norm_sums[2])(const NormGradientArguments& arguments) = {};
  void (*norm_gradient[2])(const NormGradientArguments& arguments) = {};
  void (*slab_norm_back)(const SlabGradientArguments& arguments) = nullptr;
  // The largest magnitude in a panel; NaN where it has one.
  float (*largest)(const float* panel, int64_t stride, int64_t rows, int64_t cols) = nullptr;
  void (*load)(const TransferArguments& arguments) = nullptr;
  void (*store)(const TransferArguments& arguments) = nullptr;
  void (*channel_tile)(const ChannelTileArguments& arguments) = nullptr;
  void (*pixel_tile)(const PixelTileArguments& arguments) = nullptr;
  void (*dot_tile)(const DotTileArguments& arguments) = nullptr;
  void (*dot_runs)(const DotRunArguments& arguments) = nullptr;
  void (*indirect_tile)(const IndirectTileArguments& arguments) = nullptr;
  void (*spread)(const SpreadArguments& arguments) = nullptr;
  void (*group_tile)(const GroupTileArguments& arguments) = nullptr;
  void (*group_gradient)(const GroupGradientArguments& arguments) = nullptr;
};

// The targets this build has and this CPU runs, best first; empty on a CPU with neither NEON nor AVX2.
const std::vector<const Isa*>& isas();
// The one of this name, or the best for an empty name; throws Error for one that cannot run here.
const Isa& find_isa(std::string_view name);

}  // namespace onepass::cpu
