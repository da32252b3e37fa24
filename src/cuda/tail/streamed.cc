// The row "tail_streamed": one launch, tickets, at most two passes; slabs of any size, both orders.
#include <algorithm>
#include <sstream>

#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "cuda/tail/tail.h"
#include "tail/parameters.cuh"

namespace onepass {
namespace cuda {
namespace {

// The same tail where no stage knows channels: a sample is one row of all its elements, in either order.
// Vectors then cross the ends of rows, and of channels that are no power of two. Rows of 1869 elements took
// twice their floor, 24 channels after space 2.2 times.
Problem without_channels(const Problem& problem) {
  const TailParts parts(problem.block, problem.input.sizes);
  const std::vector<int> tensors = parts.tensor_parameters();
  if (parts.norm != nullptr || parts.mean || tensors.size() != problem.parameters.size()) return problem;
  Problem flat = problem;
  const int64_t elements = problem.input.sizes[1] * spatial_elements(problem.input.sizes);
  const auto flatten = [elements](TensorSpec& spec) {
    spec = TensorSpec::dense(spec.dtype, {spec.sizes[0], 1, elements});
  };
  flatten(flat.input);
  flatten(flat.output);
  for (TensorSpec& spec : flat.parameters) flatten(spec);
  return flat;
}

constexpr int64_t control_words = 4;  // of the whole launch, and of each unit

// Slabs of few elements that lie together: a warp takes a whole one. (4096 slabs of 616 elements a sample
// with a mean took 25 times the floor by blocks.) The batch does not decide: it must not change a sum's
// order.
void take_by_warps(StreamNumbers& numbers, const TailShape& shape) {
  constexpr int64_t most_elements = 2048;
  if (shape.order != Order::planar || numbers.pieces > 1 || numbers.team > 32 ||
      shape.slab_elements() > most_elements) {
    return;
  }
  numbers.units_of_block = numbers.threads / 32;
  const int64_t at_once = 32 / numbers.team;
  numbers.rows_per_tile = divide_up(shape.group_channels(), at_once) * at_once;
  numbers.tiles_of_unit = 1;
}

// A mean that follows from the moments is one pass over rows that do not wait for each other. Where slabs are
// small and many, a block takes a whole one, each warp rows of its own: no barrier is between their loads.
StreamNumbers numbers_of(const TailShape& shape, const Problem& problem) {
  const Gpu& gpu = gpu_of(problem.device);
  const int64_t input_bytes = byte_size(problem.input.dtype);
  // Samples of many channels and positions in strips: a wave of them stays in the second-level cache.
  constexpr int64_t piece_elements = 65536, most_parts = 8192;
  const int64_t sample_pieces = divide_up(shape.channels * shape.spatial, piece_elements);
  const bool in_strips =
      shape.order == Order::interleaved && sample_pieces > 1 && shape.channels * sample_pieces > most_parts;
  StreamNumbers numbers(shape, input_bytes, gpu,
                        in_strips ? StreamNumbers::Units::strips : StreamNumbers::Units::samples,
                        StreamNumbers::Leaves::parts);
  take_by_warps(numbers, shape);
  constexpr int64_t most_elements = 1 << 18;
  constexpr int64_t most_warps = 8;
  const int64_t rows = shape.group_channels();
  if (shape.order != Order::planar || !shape.parts.mean_follows_norm() || numbers.pieces > 1 ||
      numbers.team <= 32 || shape.slab_elements() > most_elements ||
      shape.slabs() < 4 * int64_t{gpu.multiprocessors}) {
    return numbers;
  }
  const int64_t warps = std::min(rows, most_warps);
  numbers.threads = static_cast<int>(32 * warps);
  numbers.team = 32;
  numbers.rows_per_tile = divide_up(rows, warps) * warps;
  numbers.tiles_of_unit = 1;
  numbers.blocks_wanted = 1024 / numbers.threads;
  // A third vector of 16 bits in flight takes the registers that a thread has at this many blocks. With two,
  // more blocks fit, and the last round of blocks is a short one: 10 for 8 took 1.04 times as long on s27.
  // With operands a third one would spill.
  if (numbers.width >= 8 && !shape.parts.has_operands()) numbers.vectors_in_flight = 3;
  return numbers;
}

class TailStreamed final : public Kernel {
 public:
  static std::string refusal(const Problem& problem) { return tail_refusal(problem); }

  static double seconds(const Problem& problem, const PlanOptions&) {
    const TailShape shape(without_channels(problem));
    const Gpu& gpu = gpu_of(problem.device);
    const auto elements = static_cast<double>(shape.elements());
    const double bytes = elements * static_cast<double>(shape.element_bytes);
    // H200: 1.63, 1.62 and 1.67 times a copy on the tails of s60, s19 and s61, 1.25 to 1.41 for s27's single
    // pass, 1.2 for a sigmoid.
    const bool again = shape.parts.norm && !shape.parts.mean_follows_norm();
    // A mean reads twice what it moves at least: planar 2.8 to 5 times that (2026-11-19).
    double times = again ? (shape.parts.mean ? 3.0 : 1.63) : 1.25;
    if (again && shape.order == Order::interleaved) times = shape.parts.mean ? 2.4 : 1.9;
    // Slabs of one channel in channels last: relu6, norm, softplus @ 107x64x221x145 f32 took 1304 us for 704,
    // norms of 256, 1024 and 2048 channels 1.5 to 2.4 times their predictions.
    if (again && shape.order == Order::interleaved && shape.group_channels() == 1) times *= 1.8;
    // leaky_relu and elu of 428 million elements of 16 bits take 573 us: instructions, of a loop and a chain.
    constexpr double issued = 0.8, of_loop = 8, of_norm = 10;
    const double instructions = of_loop + (shape.parts.norm ? of_norm : 0) +
                                instructions_of_value(shape.parts, bits_of(problem, problem.output.dtype),
                                                      shape.parts.mean_follows_norm() ? 1 : 2);
    const double compute = elements * instructions / (issued * gpu.flops / 2);
    // A slab of 30 elements takes 1.7 ns, of 400 to 1600 3 ns and more besides.
    const double of_slab = again && shape.order == Order::planar ? 2.5e-9 : 0;
    return (again ? 16e-6 : 8e-6) + of_slab * static_cast<double>(shape.slabs()) +
           std::max(times * bytes / gpu.bytes_per_second, compute);
  }

  explicit TailStreamed(const Problem& problem)
      : problem_(without_channels(problem)),
        shape_(problem_),
        numbers_(numbers_of(shape_, problem_)),
        function_(source(), problem.device, launch_numbers()) {
    blocks_ = alone() ? maximum(1, divide_up(numbers_.units(shape_.batch), numbers_.units_of_block))
                      : clamp(tickets(), 1, function_.resident_clusters());
    const Number sums = shape_.rows() * numbers_.pieces;
    const Number parts =
        shape_.slabs() * (shape_.group_channels() / numbers_.part_channels * numbers_.pieces);
    control_ = regions_.add(control_bytes());
    parts_ = regions_.add(when(shape_.parts.norm, parts * 4 * 4));
    sums_ = regions_.add(when(shape_.parts.mean, sums * 4));
    statistics_ = regions_.add(when(shape_.parts.norm, shape_.slabs() * 2 * 4));
  }

  Accuracy accuracy() const override { return accuracy_of_chains(problem_); }
  size_t workspace_bytes() const override { return static_cast<size_t>(regions_.total().value()); }

  std::string describe() const override {
    std::ostringstream out;
    out << numbers_.describe() << "blocks: " << describe_blocks(blocks_, function_)
        << "passes: " << (shape_.parts.norm && !shape_.parts.mean_follows_norm() ? 2 : 1) << '\n'
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return notes_of_chains(problem_.block, bits_of(problem_, problem_.output.dtype));
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.elements() == 0) return;
    const Alignment alignment(shape_, problem_, arguments);
    TailParameters p;
    p.input = arguments.input;
    p.output = arguments.output;
    p.statistics =
        arguments.statistics ? static_cast<void*>(arguments.statistics) : at(workspace, statistics_);
    p.control = at(workspace, control_);
    p.parts = at(workspace, parts_);
    p.sums = at(workspace, sums_);
    p.aligned = alignment.bits();
    p.phase = alignment.phase();
    p.batch = shape_.batch;
    p.wave_units = numbers_.wave_units;
    p.parameter = arguments.parameters;
    if (!alone()) clear(at(workspace, control_), control_bytes(), stream, problem_.device);
    p.launch(function_, stream, blocks_);
  }

 private:
  // A unit is one tile: a block or a warp has it to itself, and nothing is shared.
  bool alone() const { return numbers_.tiles_of_unit == 1; }

  Number control_bytes() const { return (numbers_.units(shape_.batch) + 1) * control_words * 4; }

  // The work in tickets; blocks take one after the other.
  Number tickets() const {
    const Number tiles = numbers_.wave_units * numbers_.tiles_of_unit;
    const Number first = when(shape_.parts.norm, tiles);
    const Number second = when(!shape_.parts.mean_follows_norm(), tiles);
    return first + numbers_.waves(shape_.batch) * (first + second);
  }

  Source source() const {
    const std::string check = "static_assert(sizeof(Agent::Shared) == " + std::to_string(scratch_bytes()) +
                              " && sizeof(Unaligned::Shared) == sizeof(Agent::Shared));\n";
    return numbers_.kernel(
        "onepass_tail_streamed",
        "#include \"tail/streamed.cuh\"\n" + tail_source(problem_, bits_of(problem_, problem_.output.dtype)),
        "TailStreamed", check, wait_source());
  }

  int64_t scratch_bytes() const { return numbers_.scratch_floats(4, 4) * 4; }

  Launch launch_numbers() const {
    return {maximum(1, tickets()),
            static_cast<uint32_t>(numbers_.threads),
            1,
            static_cast<uint32_t>(scratch_bytes()),
            false,
            true};
  }

  Problem problem_;
  TailShape shape_;
  StreamNumbers numbers_;
  Function function_;
  Number blocks_ = 1;
  Regions regions_;
  Region control_, parts_, sums_, statistics_;
};

}  // namespace
}  // namespace cuda

extern const Strategy cuda_tail_streamed = cuda::tail_strategy<cuda::TailStreamed>("tail_streamed");

}  // namespace onepass
