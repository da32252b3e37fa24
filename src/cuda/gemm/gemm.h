// What strategies that compute a wide convolution as an implicit matrix product share: the flat index of a
// sample's positions (gemm/wgmma.cuh) and how it is cut into tiles.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/row_numbers.h"
#include "cuda/struct_bytes.h"
#include "cuda/thin/thin.h"

namespace onepass::cuda {

// A convolution over one flat index of positions: pitches at which a tap is a shift. Of stride s, every s-th
// position of x from a phase on is an input by itself, in which taps of that phase are shifts.
struct FlatGeometry {
  using Box = std::array<int64_t, max_spatial_rank>;  // of outputs

  std::array<int64_t, max_spatial_rank> low{}, high{};          // the least and largest offset of a tap
  std::array<std::vector<int64_t>, max_spatial_rank> phases{};  // that taps meet
  int64_t pitch = 1;                                            // positions of a row
  int64_t plane = 1;                                            // of a plane
  int64_t positions = 1;                                        // of a sample, up to the last output

  explicit FlatGeometry(const ThinShape& shape);

  // The window of x that neighbouring positions meet, cut so that it is small: `split` dimensions have a
  // window for each of their taps. With a stride it is one for each phase.
  struct Windows {
    int64_t split = 0;
    int64_t count = 1;
    int64_t positions = 1;  // of each
    int64_t all() const { return count * positions; }
  };
  Windows windows(const ThinShape& shape, int64_t tile_positions) const;
  // The index of a box of outputs by itself, of stride 1: its pitches are those of what it meets of x.
  int64_t pitch_of(const Box& box) const { return box[2] + high[2] - low[2]; }
  int64_t plane_of(const Box& box) const { return pitch_of(box) * (box[1] + high[1] - low[1]); }
  int64_t positions_of(const Box& box) const {
    return (box[0] - 1) * plane_of(box) + (box[1] - 1) * pitch_of(box) + box[2];
  }
  bool has_stride(const ThinShape& shape) const;
  // The largest boxes that fit, for each depth and width.
  static std::vector<Box> boxes(const ThinShape& shape, const std::function<bool(const Box&)>& fits);
  // The phases as functions of `struct Numbers`.
  std::string source() const;
};

// Whether the classes of a transposed convolution meet the same elements of x, as those of a kernel that is
// as large as its stride: then they are rows of one product.
bool classes_meet_alike(const ThinShape& shape);

// How weights are packed through shared memory (gemm/packed/weights.cuh): 32 rows by 16 input channels by as
// many taps as leave room for four blocks.
struct WeightPieces {
  static constexpr int64_t rows = 32, threads = 256;

  int64_t part_taps = 1, parts = 1;
  int64_t bytes = 16;  // of shared memory

  WeightPieces() = default;
  WeightPieces(int64_t taps, DType weight);
  int64_t count(int64_t padded_channels, int64_t input_channels) const {
    return divide_up(padded_channels, rows) * (input_channels / 16) * parts;
  }
};

// The numbers of a row, made of the problem, its shape and its GPU.
template <class Numbers>
std::shared_ptr<const Numbers> wide_numbers(const Problem& problem) {
  return searched<Numbers>(problem, 0,
                           [&] { return Numbers(problem, ThinShape(problem), gpu_of(problem.device)); });
}

// Of long sums that stay in tensor cores from the first term to the last: all but those of split operands
// (Accuracy::cut_terms). 0 where sums are short.
int64_t cut_terms(const Problem& problem, const ThinShape& shape);
// The error of chains and of such sums.
inline Accuracy accuracy_of_products(const Problem& problem, const ThinShape& shape) {
  Accuracy own = accuracy_of_chains(problem);
  own.cut_terms = cut_terms(problem, shape);
  return own;
}

// Whether f32 operands are split in two of f16 instead of rounded.
inline bool splits_operands(const Problem& problem) {
  return problem.input.dtype == DType::f32 && !problem.rounds_to_tf32();
}

// Goes over values that a launch before has left in memory, from the norm on (gemm/store/finish.cuh).
class GemmFinish {
 public:
  // `planar`: values lie with channels before space, else after it.
  GemmFinish(const Problem& problem, const ThinShape& shape, bool planar);
  void launch(const Arguments& arguments, const void* values, const void* statistics, Stream stream) const;

 private:
  Number samples_;
  Function function_;
};

// " in each of 4 groups, each a sample of its own", where a convolution has some.
std::string describe_groups(const ThinShape& shape);

// `struct Product`: the product of a warpgroup, 64 rows by `columns` positions, of 16 terms. More columns
// than one instruction has (256) are two instructions side by side.
std::string wgmma_source(int64_t columns, bool is_bf16);

// Instructions a chain takes for an element, about; `bits` is 16 where it has its short form (bits_of).
double gemm_chain_instructions(const std::vector<TailParts::Stage>& stages, int bits = 32);

// A tail of f32 values with channels last takes 1.1 to 3 times its prediction: GroupNorm of 256 channels at
// 64 x 64 0.022 for 0.021 ms, of 320 0.034 for 0.012, of 128 at 512 x 512 0.20 for 0.094.
inline double values_factor(const Problem& tail) { return tail.input.strides[1] == 1 ? 1.8 : 1.0; }

// What storing an output takes at least where classes of a transposed convolution are neighbouring rows of a
// product and channels lie side by side: runs of as few channels as there are rows of one class among eight,
// a sector of 32 bytes each. 0.30 ms of 128 channels doubled at 64 x 64 (16 samples, 4 classes), 2.5 of 32 at
// 64^3 (2 samples, 8 classes).
double scattered_seconds(const Problem& problem, const ThinShape& shape);

// What products of matrices are for, and gradients by them too.
inline constexpr int64_t least_wide_channels = 16;  // of the input and of the output, in a group

// Why no row takes the problem as a product of matrices with the launch that does samples again.
std::string product_refusal(const Problem& problem);
// The same for rows that need `least_wide_channels`.
std::string wide_refusal(const Problem& problem);
// The same for rows that need Hopper's wgmma.
std::string wgmma_refusal(const Problem& problem);

// What a row's cost is computed from.
template <class Numbers>
struct WideCost {
  ThinShape shape;
  const Gpu& gpu;
  std::shared_ptr<const Numbers> numbers;

  explicit WideCost(const Problem& problem)
      : shape(problem), gpu(gpu_of(problem.device)), numbers(wide_numbers<Numbers>(problem)) {}
  // Tensor cores at work keep a GPU below its highest clock: 1.75 of 1.98 GHz.
  double clock(double part = 0.885) const { return gpu.flops / 256 / gpu.multiprocessors * part; }
  // To read the input and write the output once.
  double moving_seconds(const Problem& problem) const {
    return (static_cast<double>(problem.output.byte_span()) +
            static_cast<double>(problem.input.byte_span())) /
           gpu.bytes_per_second;
  }
};

// `struct Numbers` of these members; `product` multiplies 16-bit operands, or tf32.
std::string wide_numbers_source(const Problem& problem, const TailParts& parts, const std::string& product,
                                const std::string& members);
// Whether one of the stages reads a tensor.
bool reads_tensors(const std::vector<TailParts::Stage>& stages);
// Whether a tensor is dense, with channels before or after space.
bool lies_dense(const TensorSpec& spec);
bool lies_planar(const TensorSpec& spec);

}  // namespace onepass::cuda
