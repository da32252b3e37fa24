// What the rows for tails share: which problems they take, how tensors lie, how a pass is cut into tiles.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/costs/gpu.h"
#include "cuda/runtime/function.h"
#include "cuda/runtime/number.h"
#include "cuda/runtime/recording.h"
#include "cuda/source.h"
#include "plan/strategy.h"

namespace onepass::cuda {

// Sizes of a tail and how its tensors lie.
struct TailShape {
  TailParts parts;
  Order order = Order::planar;
  Number batch;
  int64_t channels = 0;
  int64_t groups = 1;  // 1 without a norm
  int64_t spatial = 1;
  int width = 1;       // elements in a vector that lies within a row, or a group's channels: up to 16 bytes
  int slab_width = 1;  // in one that lies within a slab: 16 bytes of the narrowest tensor
  int64_t element_bytes = 0;  // of all tensors of the input's size that the forward moves, for one element

  explicit TailShape(const Problem& problem);
  TailShape(const Problem& problem, const std::vector<const TensorSpec*>& gradients);
  // Where vectors may run over the ends of rows: only the slab's own ends count.
  static TailShape by_slabs(const Problem& problem);

  int64_t group_channels() const { return channels / groups; }
  int64_t slab_elements() const { return group_channels() * spatial; }
  Number slabs() const { return batch * groups; }
  Number rows() const { return batch * channels; }
  Number elements() const { return rows() * spatial; }
};

// Those of what follows a convolution: nothing in it is coarser in "fast".
inline Numerics tail_numerics(const Problem& problem) {
  return problem.numerics == Numerics::strict ? Numerics::strict : Numerics::pytorch;
}

// Why no tail kernel can take the problem; empty where one can.
std::string tail_refusal(const Problem& problem);
std::string tail_refusal(const BackwardProblem& problem);
// The same for kernels that hold a slab on the chip, of tensors that lie in one order. `Means`: whether they
// take blocks that end in one.
enum class Means : uint8_t { refused, held };
std::string slab_refusal(const Problem& problem, Order order = Order::planar, Means means = Means::refused);

// The gradients of the input's size.
std::vector<const TensorSpec*> large_gradients(const BackwardProblem& problem, const TailParts& parts);
// What a backward pass moves that reads x and dy once and writes dx once.
double backward_bytes(const BackwardProblem& problem, const TailShape& shape);
// An empty batch has no gradient for its weights but zero.
void clear_gradients(const BackwardProblem& problem, const BackwardArguments& arguments, Stream stream);

// Which tensors' vectors lie on 16 bytes, where the grid of vectors is the input's.
class Alignment {
 public:
  Alignment(const TailShape& shape, const TensorSpec& input, const void* pointer);
  // Of a forward call: the input, the output and the tensors that stages read.
  Alignment(const TailShape& shape, const Problem& problem, const Arguments& arguments);
  // Of a backward call: all tensors of the input's size.
  Alignment(const TailShape& shape, const BackwardProblem& problem, const BackwardArguments& arguments);
  // A parameter of the input's size, or its gradient: `bit` is that of the first one.
  void add_parameter(int bit, int index, const TensorSpec& spec, const void* pointer);
  void add(int bit, const TensorSpec& spec, const void* pointer);
  Number bits() const;
  Number phase() const;

 private:
  Recording* recording_ = Recording::current();
  int width_;
  int64_t phase_;
  uint64_t bits_ = 0;
  bool all_ = true;
  std::string phase_text_;    // of a recording: a formula of the input's address
  std::string tensors_text_;  // and what `aligned` is asked about
};

// Launches a kernel that holds a slab on the chip.
template <class Parameters>
void launch_slabs(const Function& function, const Number& blocks, const TailShape& shape,
                  const Problem& problem, const Arguments& arguments, Stream stream) {
  if (shape.elements() == 0) return;
  const Alignment alignment(shape, problem, arguments);
  Parameters p;
  p.input = arguments.input;
  p.output = arguments.output;
  p.statistics = arguments.statistics;
  p.control = nullptr;
  p.parts = nullptr;
  p.sums = nullptr;
  p.aligned = alignment.bits();
  p.phase = alignment.phase();
  p.batch = shape.batch;
  p.wave_units = 1;
  p.parameter = arguments.parameters;
  p.launch(function, stream, blocks);
}

// The numbers of a pass by tickets: how a unit is cut into tiles.
struct StreamNumbers {
  Order order = Order::planar;
  int threads = 256;
  int width = 1;
  int vectors_in_flight = 4;
  int team = 256;               // threads of a row; interleaved: threads along channels
  int64_t pieces = 1;           // of a row
  int64_t piece_vectors = 0;    // planar
  int64_t piece_positions = 0;  // interleaved
  int64_t strip_channels = 1;   // of a unit, interleaved: whole slabs
  int64_t part_channels = 1;    // interleaved: of a slab, whose moments a tile merges
  int64_t rows_per_tile = 1;    // where a row is one piece
  Number wave_units = 1;
  int64_t units_per_sample = 1;
  int64_t tiles_of_unit = 1;
  int units_of_block = 1;  // at a time; more than one: units of one tile, a warp each
  int blocks_wanted = 2;   // that a multiprocessor should have room for

  // What an interleaved unit is: all channels of a sample, or as few slabs as fill memory's sectors.
  enum class Units : uint8_t { samples, strips };
  // What a tile leaves of interleaved channels: sums of each, or moments of slabs' parts.
  enum class Leaves : uint8_t { channels, parts };
  // `bytes_of_element`: what both passes read of an element.
  StreamNumbers(const TailShape& shape, int64_t bytes_of_element, const Gpu& gpu, Units units, Leaves leaves);

  Number units(const Number& batch) const { return batch * units_per_sample; }
  Number waves(const Number& batch) const { return divide_up(units(batch), wave_units); }
  // `struct Numbers` and the walk's type, for launches with all vectors on 16 bytes and for others.
  std::string source() const;
  // A kernel of two agents of a class template, for tensors whose vectors lie on 16 bytes and for others.
  // `text` has the headers and structs before them, `first` the first statements.
  Source kernel(const std::string& name, const std::string& text, const std::string& agent,
                const std::string& checks, const std::string& first) const;
  std::string describe() const;
  // Floats that sums of `count` values a row need in shared memory, `at_once` of them at a time where the
  // order is interleaved.
  int64_t scratch_floats(int64_t count, int64_t at_once) const;

 private:
  void cut_interleaved(const TailShape& shape, int64_t bytes_of_element, Units units, Leaves leaves,
                       int64_t tile_elements);
  void fit_team(int64_t vectors);
  std::string wave_text() const;
};

// The row of a class that is its kernel and has its refusal and its cost.
template <class Row>
constexpr Strategy tail_strategy(std::string_view name) {
  return {name, Row::refusal, Row::seconds,
          [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
            return std::make_shared<const Row>(problem);
          },
          true};
}
template <class Row>
constexpr BackwardStrategy tail_backward_strategy(std::string_view name) {
  return {name, Row::refusal, Row::seconds,
          [](const BackwardProblem& problem, const PlanOptions&) -> std::shared_ptr<const BackwardKernel> {
            return std::make_shared<const Row>(problem);
          },
          true};
}

// The row for a tail inside another row: the fastest for 8 samples, so that bits do not depend on the batch.
// Null where none takes it.
const Strategy* tail_row(const Problem& tail);

// Its prediction for 8 samples; 0 where none takes it.
double tail_seconds_of_eight(const Problem& tail);

// That row's kernel, or the next one's where it cannot be compiled.
struct BuiltTail {
  std::string row;
  std::shared_ptr<const Kernel> kernel;
};
BuiltTail build_tail(const Problem& tail);

// What follows a convolution, as a tail of its output in f32: for rows that write that output and run a tail
// on it. None where nothing follows.
std::optional<Problem> tail_after_convolution(const Problem& problem);
// The convolution before that tail, alone. Something must follow it.
Problem convolution_before_tail(const Problem& problem);
// How that output lies between the two.
Layout layout_of_values(const Problem& problem);

// Instructions that the chains take for an element in a kernel that computes the before-chain `times` times,
// or, with gradients, once more and its derivative. Rough: they tell costly chains from others.
double instructions_of_value(const TailParts& parts, int bits, double times = 2);
double instructions_of_gradient(const TailParts& parts, int bits);

// Regions of a workspace, each aligned to 256 bytes.
struct Region {
  Number begin;
  Number bytes;
};
class Regions {
 public:
  Region add(const Number& bytes) {
    Region region{total_, round_up(bytes, 256)};
    if (region.bytes.value() > 0)
      total_ = (total_ + region.bytes).called("offset_" + std::to_string(++count_));
    return region;
  }
  const Number& total() const { return total_; }

 private:
  Number total_;
  int count_ = 0;
};

// "26 of 256 threads, 45 registers": how many blocks, and what a thread of the function takes.
std::string describe_blocks(int64_t blocks, const Function& function);

inline void* at(void* workspace, const Region& region) {
  void* address = static_cast<char*>(workspace) + region.begin.value();
  if (Recording* recording = Recording::current())
    recording->note(workspace, address, region.begin, region.bytes);
  return address;
}

}  // namespace onepass::cuda
