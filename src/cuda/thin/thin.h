// What the strategies for thin convolutions share: which problems they take, the convolution as dense
// classes, and its device code.
//
// A convolution is thin where a sum has few terms and there are few output channels: the first and last
// layers of a network. Such an output is cheaper to compute again than to store.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/row_numbers.h"
#include "cuda/runtime/parameters.h"
#include "cuda/tail/tail.h"
#include "thin/parameters.cuh"

namespace onepass::cuda {

// One spatial dimension as dense convolutions ("classes"): an ordinary one is one class, a transposed one of
// stride s is s of them, of which each meets only its own taps. Output r + classes * j of class r reads
// inputs
//   j * step + base(r) + m * delta   by tap   first(r) + m * tap_step,   m < count(r).
struct ThinAxis {
  struct Class {
    int64_t first = 0;
    int64_t base = 0;
    int64_t count = 0;
    int64_t positions = 0;  // values of j
  };
  int64_t in = 1;
  int64_t out = 1;
  int64_t kernel = 1;
  int64_t step = 1;
  int64_t delta = 1;
  int64_t tap_step = 1;
  std::vector<Class> classes;

  ThinAxis(const Conv& conv, size_t d, int64_t in, int64_t out);
  ThinAxis();  // of a dimension the block does not have
};

struct ThinShape {
  using Order = std::array<size_t, max_spatial_rank>;

  std::array<ThinAxis, max_spatial_rank> axes;  // a block of rank 1 has two neutral dimensions before its own
  Order order{0, 1, 2};                         // which of those dimensions an axis is
  TailParts parts;
  // A convolution in groups is as many convolutions, each of its own channels. A group of a sample is treated
  // as a sample of its own: there are `conv_groups` times as many, neighbours in memory where channels come
  // before space. Channels and groups of the norm are those of one.
  int64_t conv_groups = 1;
  Number samples;  // of the problem
  Number batch;
  int64_t in_channels = 1;
  int64_t channels = 1;  // of the output
  int64_t groups = 1;    // 1 without a norm
  int64_t taps = 1;
  int64_t spatial = 1;  // of the output

  explicit ThinShape(const Problem& problem);

  // The same with its dimensions in another order.
  ThinShape reordered(const Order& by) const;
  // Of one of the three dimensions; 0 where it is neutral.
  static int64_t spatial_stride(const TensorSpec& spec, size_t d);

  int64_t terms() const { return in_channels * taps; }
  int64_t classes() const;
  // Positions of the largest class.
  int64_t class_positions() const;
  Number slabs() const { return batch * groups; }
  Number rows() const { return batch * channels; }
  int passes() const { return parts.norm && !parts.mean_follows_norm() ? 2 : 1; }
};

// The memory between the passes, and the parameters that lie there.
class ThinWorkspace {
 public:
  // Units of `samples` samples have `tiles` tiles; a mainloop leaves `guard_words` words of each sample.
  // Values that wait between the passes take `kept_bytes`, in place of sums.
  ThinWorkspace(const ThinShape& shape, int64_t samples, int64_t tiles, int64_t guard_words,
                const Number& kept_bytes = 0);

  const Number& bytes() const { return regions_.total(); }
  // Marks of samples that are to be computed again; null without guard words.
  void* marks(void* workspace) const { return guard_words_ > 0 ? at(workspace, marks_) : nullptr; }
  // Counters that must be zero before a launch.
  void* control(void* workspace) const { return at(workspace, control_); }
  // Sets every parameter of a launch: all samples, no lag between the passes, one RedoWord.
  void fill(ThinParameters& p, const Arguments& arguments, void* workspace) const;
  // Sets the parameters of a launch that lie there, and those of every launch.
  void fill(ThinMmaParameters& p, const Arguments& arguments, void* workspace) const;
  // Zeros what must be zero before a launch.
  void clear(void* workspace, Stream stream, const Device& device) const;

 private:
  template <class Parameters>
  void fill_common(Parameters& p, const Arguments& arguments, void* workspace) const;

  Number batch_;
  int64_t guard_words_;
  Number cleared_bytes_;
  Regions regions_;
  Region control_, marks_, guard_, parts_, sums_, statistics_;
};

// What the kernels of blocks with their convolution share.
class WholeBlockKernel : public Kernel {
 protected:
  explicit WholeBlockKernel(const Problem& problem) : problem_(problem), shape_(problem) {}

  Problem problem_;
  ThinShape shape_;
};

// The row that takes every thin problem. It also computes any convolution of at most `most_channels_of_cores`
// channels a group: samples that overflow the halves of other kernels are computed again by it. `marks`: the
// samples to compute, nullptr for all.
inline constexpr int64_t most_channels_of_cores = 2048;
class ThinCores final : public Kernel {
 public:
  explicit ThinCores(const Problem& problem);
  ~ThinCores() override;

  // Why it cannot take the problem; empty where it can.
  static std::string refusal(const Problem& problem);
  // Predicted time.
  static double seconds(const Problem& problem, const PlanOptions&);
  size_t workspace_bytes() const override;
  std::string describe() const override;
  std::vector<std::string> numerics() const override;
  void launch(const Arguments& arguments, void* workspace, Stream stream) const override;
  void launch_marked(const Arguments& arguments, void* workspace, void* marks, Stream stream) const;
  // The same after a kernel that left `mark_words` RedoWords behind the marks, and zeros in control(): four
  // words for each sample and four more.
  void launch_marked(const Arguments& arguments, void* workspace, void* marks, const Number& mark_words,
                     Stream stream) const;
  void* control(void* workspace) const;
  const Number& bytes() const;  // of its workspace

 private:
  struct Parts;
  std::unique_ptr<const Parts> parts_;
};

// The f16 parts of each operand, in a block that ends in a mean: 1 is rounded to nearest even at 10 bits, 2
// are as exact as f32. 16-bit operands have 1 part.
struct OperandParts {
  int64_t input = 1;
  int64_t weight = 1;

  OperandParts(const Problem& problem, const ThinShape& shape);
  int64_t products() const { return input + weight - 1; }
  // The error of these parts, for a judge of results.
  Accuracy accuracy() const {
    using Tf32 = Accuracy::Tf32;
    return {.tf32 = input == 2 ? Tf32::whole : weight == 2 ? Tf32::weights_whole : Tf32::rounded};
  }
};

// The same for explain.
std::vector<std::string> parts_notes(const Problem& problem, const ThinShape& shape);

// Few terms a sum and few output channels.
bool is_thin(const ThinShape& shape);

// Why no kernel for thin convolutions can take the problem; empty where one can.
std::string thin_refusal(const Problem& problem);
// The part of it that holds for wide convolutions too: groups, types and layouts.
std::string whole_block_refusal(const Problem& problem);

// Why a row that rounds ties to even cannot take the problem: ties go away from zero.
std::string ties_refusal(const Problem& problem);
// `struct Convolution`, as thin/thin.cuh expects it.
std::string thin_source(const Problem& problem, const ThinShape& shape);

}  // namespace onepass::cuda
