// The row "gemm_boxes": a wide convolution as a matrix product of 16-bit operands that reads x through tensor
// maps (gemm/boxes.cuh): as it lies where it has 16 bits and channels last, else a copy. Without a norm and a
// mean it writes the output, else it holds values for the norm, or writes them in f32 for a tail.
#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>

#include "cuda/gemm/boxes_numbers.h"
#include "cuda/gemm/workspace.h"
#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "gemm/parameters.cuh"

namespace onepass {
namespace cuda {
namespace {

constexpr int64_t threads = 384;  // gemm/boxes/product.cuh
constexpr int64_t step_warps = GemmBoxesNumbers::pack_threads / 32;
constexpr int64_t most_step = 8;  // of a tensor map's elements

bool has_no_tail(const ThinShape& shape) { return shape.parts.norm == nullptr && !shape.parts.mean; }

class GemmBoxes final : public WholeBlockKernel {
 public:
  explicit GemmBoxes(const Problem& problem)
      : WholeBlockKernel(problem), numbers_(*wide_numbers<GemmBoxesNumbers>(problem)), redo_(problem) {
    const GemmBoxesNumbers& n = numbers_;
    const Device& device = problem.device;
    if (n.has_tail(shape_)) {
      tail_problem_ = tail_after_convolution(problem);
      tail_ = build_tail(*tail_problem_);
    }
    compile(std::vector<Source>{steps_source(), product_source()}, gpu_of(device).architecture);
    steps_.emplace(steps_source(), device,
                   Launch{1, static_cast<uint32_t>(GemmBoxesNumbers::pack_threads), 1,
                          static_cast<uint32_t>(n.step_bytes()), false, true});
    product_.emplace(product_source(), device,
                     Launch{1, static_cast<uint32_t>(threads), 1, static_cast<uint32_t>(n.shared_bytes()),
                            n.held, !n.held});
    tiles_ = n.tiles(shape_.samples).called("tiles");
    blocks_ = minimum(tiles_ * n.channel_tiles(), product_->resident_clusters());
    const Number units = shape_.batch * n.units_of_sample();
    if (n.held) {
      // Units whose values are held begin together: as many as there is room for, whole.
      product_->require_resident(n.unit_tiles());
      blocks_ = minimum(units, divide(product_->resident_clusters(), n.unit_tiles())) * n.unit_tiles();
    }
    arrived_ = regions_.add(units * 4);
    parts_ = regions_.add(when(n.held || n.twice, shape_.slabs() * (n.unit_tiles() * 16)));
    lines_ = regions_.add(when(n.twice, shape_.slabs() * 8));
    sums_ = regions_.add(when(sums(), shape_.rows() * (n.sums_of_row() * 4)));
    map_ = regions_.add(128);
    const int64_t positions = spatial_elements(problem.input.sizes);
    copied_items_ = (shape_.batch * n.copied_items(positions)).called("copied_items");
    marks_ = regions_.add((shape_.batch + 1) * 4);
    guard_ = regions_.add(when(n.guards, shape_.batch * 4));
    // Of weights alone, side by side: what may be kept from call to call.
    scales_ = regions_.add(when(n.guards, (n.padded_channels() + 2) * 4));
    row_largest_ = regions_.add(when(n.guards, n.padded_channels() * 4));
    row_sums_ = regions_.add(when(n.guards, n.padded_channels() * 8));
    piece_marks_ = regions_.add(when(!n.guards, n.weight_items() * 4));
    packed_weights_ = regions_.add(n.weight_bytes());
    packed_input_ = regions_.add(shape_.batch * (positions * n.copied_channels * 2));
    values_ = regions_.add(when(tail_.has_value(), shape_.rows() * shape_.spatial * 4));
    statistics_ = regions_.add(when(shape_.parts.norm, shape_.slabs() * 2 * 4));
    redo_memory_ = regions_.add(redo_.bytes());
  }

  Accuracy accuracy() const override {
    Accuracy own = tail_ ? tail_->kernel->accuracy() : accuracy_of_chains(problem_);
    own.cut_terms = cut_terms(problem_, shape_);
    return own;
  }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + (tail_ ? tail_->kernel->workspace_bytes() : 0);
  }

  size_t packed_bytes() const override {
    return static_cast<size_t>((weight_factors_bytes() + piece_marks_.bytes + packed_weights_.bytes).value());
  }
  uint64_t packing() const override {
    return packing_of(*steps_, numbers_.weight_items(), static_cast<int64_t>(packed_bytes()));
  }

  std::string describe() const override {
    const GemmBoxesNumbers& n = numbers_;
    std::ostringstream out;
    out << "convolution: " << shape_.in_channels * n.taps << " terms"
        << (n.conv_groups == 1 ? "" : " in each of " + std::to_string(n.conv_groups) + " groups") << ", x "
        << (!n.copies() ? "read as it lies"
            : n.guards  ? "and weights packed first, rounded to f16, as to tf32"
                        : "copied first")
        << '\n'
        << "tile: " << n.tile_channels << (n.classes_apart ? " channels of one class, " : " channels, ")
        << n.box_n << 'x' << n.box[0] << 'x' << n.box[1] << 'x' << n.box[2] << " positions in "
        << 128 * n.products << " rows" << (n.patches ? " of 8 x 8, " : ", ")
        << tiles_.value() * n.channel_tiles() << " tiles\n"
        << "stages: " << n.x_stages << " windows of " << n.window[0] << 'x' << n.window[1] << 'x'
        << n.window[2] << " positions, " << n.chunk_channels << " channels and " << n.group_taps << " taps; "
        << n.weight_stages << " of weights, " << n.stage_taps << " taps\n"
        << "blocks: " << describe_blocks(blocks_, *product_);
    if (n.held) out << "values held in registers, " << n.unit_tiles() << " tiles a unit\n";
    if (n.twice) out << "values computed twice, " << n.unit_tiles() << " tiles a slab\n";
    if (tail_) out << "then: " << tail_->row << '\n';
    if (n.guards) out << "then: thin_cores for samples whose values overflow f16\n";
    out << "workspace: " << workspace_bytes() << " bytes\n";
    if (tail_) out << tail_->kernel->describe();
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return where(numbers_.guards, rounding_note(problem_)) + where(numbers_.guards, note::redone) +
           (tail_ ? tail_->kernel->numerics()
                  : notes_of_chains(problem_.block, bits_of(problem_, problem_.output.dtype)));
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    const LaunchChain chain;
    const bool packs = arguments.packed == nullptr;
    const bool guards = numbers_.guards;
    if (guards) {
      const Number own = marks_.bytes + guard_.bytes;
      clear(at(workspace, marks_), packs ? own + weight_factors_bytes() : own, stream, problem_.device);
    }
    void* const redo = at(workspace, redo_memory_);
    BoxesStepParameters step;
    step.input = arguments.input;
    step.output = arguments.output;
    step.parts = at(workspace, parts_);
    step.lines = at(workspace, lines_);
    step.sums = at(workspace, sums_);
    step.statistics = statistics_of(arguments, workspace);
    step.packed_input = at(workspace, packed_input_);
    fill_weights(step, arguments, workspace);
    step.map = at(workspace, map_);
    step.only = at(workspace, marks_);
    step.guard = at(workspace, guard_);
    step.control = redo_.control(redo);
    step.arrived = at(workspace, arrived_);
    step.units = shape_.batch * numbers_.units_of_sample();
    step.batch = shape_.batch;
    step.parameter = arguments.parameters;
    if (packs) {
      launch_step(step, step_pack, numbers_.weight_items() + copied_items_, stream);
      if (guards) launch_step(step, step_pack_again, scaled_blocks(), stream);
    } else {
      launch_step(step, step_pack_input, maximum(1, copied_items_), stream);
    }
    BoxesParameters p;
    p.input = arguments.input;
    p.output = arguments.output;
    p.values = at(workspace, values_);
    p.packed_weights = packed_at(arguments, workspace, packed_weights_, scales_);
    p.scales = packed_at(arguments, workspace, scales_, scales_);
    p.map = at(workspace, map_);
    p.statistics = statistics_of(arguments, workspace);
    p.parts = at(workspace, parts_);
    p.lines = at(workspace, lines_);
    p.sums = at(workspace, sums_);
    p.control = at(workspace, arrived_);
    p.only = at(workspace, marks_);
    p.piece_marks = packed_at(arguments, workspace, piece_marks_, scales_);
    p.batch = shape_.batch;
    p.tiles = tiles_;
    p.parameter = arguments.parameters;
    if (numbers_.twice) {
      p.pass = int64_t{0};
      p.launch(*product_, stream, blocks_);
      launch_step(step, step_merge, divide_up(shape_.slabs(), step_warps), stream);
    }
    p.pass = int64_t{1};
    p.launch(*product_, stream, blocks_);
    if (sums()) launch_step(step, step_means, divide_up(shape_.rows(), step_warps), stream);
    if (tail_) launch_tail(arguments, workspace, stream);
    if (guards) launch_step(step, step_judge, shape_.batch, stream);
    redo_.launch_marked(arguments, redo, at(workspace, marks_), 1, stream);
  }

  void launch_pack(const std::vector<const void*>& parameters, void* packed, Stream stream) const override {
    const LaunchChain chain;
    if (numbers_.guards) clear(packed, weight_factors_bytes(), stream, problem_.device);
    BoxesStepParameters step;
    step.input = nullptr;
    step.output = nullptr;
    step.parts = nullptr;
    step.lines = nullptr;
    step.sums = nullptr;
    step.statistics = nullptr;
    step.packed_input = nullptr;
    fill_weights(step, arguments_of_packing(parameters, packed), nullptr);
    step.map = nullptr;
    step.only = nullptr;
    step.guard = nullptr;
    step.control = nullptr;
    step.arrived = nullptr;
    step.units = 0;
    step.batch = 0;
    step.parameter = parameters;
    launch_step(step, step_pack_weights, numbers_.weight_items(), stream);
    if (numbers_.guards) launch_step(step, step_pack_again, scaled_blocks(), stream);
  }

 private:
  bool sums() const { return numbers_.stored == GemmBoxesNumbers::Stored::sums; }
  // Bytes of weights that packing begins with as zeros, from scales_ on; none of 16 bits.
  Number weight_factors_bytes() const { return scales_.bytes + row_largest_.bytes + row_sums_.bytes; }
  int64_t scaled_blocks() const { return divide_up(numbers_.padded_channels(), WeightPieces::rows); }
  void fill_weights(BoxesStepParameters& step, const Arguments& arguments, void* workspace) const {
    const auto place = [&](const Region& region) { return packed_at(arguments, workspace, region, scales_); };
    step.scales = place(scales_);
    step.row_largest = place(row_largest_);
    step.row_sums = place(row_sums_);
    step.piece_marks = place(piece_marks_);
    step.packed_weights = place(packed_weights_);
  }
  void launch_step(BoxesStepParameters& p, PackedGemmStep step, const Number& blocks, Stream stream) const {
    p.step = int64_t{step};
    p.launch(*steps_, stream, blocks);
  }
  float* statistics_of(const Arguments& arguments, void* workspace) const {
    return arguments.statistics || !shape_.parts.norm ? arguments.statistics
                                                      : static_cast<float*>(at(workspace, statistics_));
  }
  void launch_tail(const Arguments& arguments, void* workspace, Stream stream) const {
    Arguments tail;
    tail.input = at(workspace, values_);
    tail.output = arguments.output;
    tail.statistics = statistics_of(arguments, workspace);
    tail.parameters.assign(arguments.parameters.end() - std::ssize(tail_problem_->parameters),
                           arguments.parameters.end());
    tail_->kernel->launch(tail, at(workspace, Region{regions_.total(), 0}), stream);
  }

  std::string structs() const {
    const GemmBoxesNumbers& n = numbers_;
    const TensorSpec& values = tail_ ? tail_problem_->input : problem_.output;
    const std::string constants =
        Constants()
            .add("box_n", n.box_n, "box_z", n.box[0], "box_y", n.box[1], "box_x", n.box[2])
            .add("window_z", n.window[0], "window_y", n.window[1], "window_x", n.window[2])
            .add("boxes_z", n.boxes[0], "boxes_y", n.boxes[1], "boxes_x", n.boxes[2])
            .flag("patches", n.patches)
            .add("split", n.split, "taps", n.taps, "group_taps", n.group_taps, "stage_taps", n.stage_taps)
            .add("products", n.products, "tile_channels", n.tile_channels)
            .add("padded_channels", n.padded_channels())
            .add("input_channels", n.input_channels, "chunk_channels", n.chunk_channels)
            .add("chunks", n.chunks(), "stage_positions", n.stage_positions)
            .add("x_stages", n.x_stages, "weight_stages", n.weight_stages)
            .add("swizzle", n.swizzle())
            .flag("scales_x", false, "guards", n.guards, "held", n.held, "twice", n.twice)
            .add("sums_of_row", n.sums_of_row())
            .flag("classes_apart", n.classes_apart, "copied", n.copies())
            .add("copied_channels", n.copied_channels, "parts", 1)
            .add("part_taps", n.pieces.part_taps, "piece_bytes", n.step_bytes())
            .add("shared_bytes", n.shared_bytes())
            .add("value_stride_n", values.strides[0], "value_stride_c", values.strides[1])
            .add("value_stride0", ThinShape::spatial_stride(values, 0), "value_stride1",
                 ThinShape::spatial_stride(values, 1), "value_stride2", ThinShape::spatial_stride(values, 2))
            .text() +
        "  static constexpr auto stored = onepass::BoxesStored::" + name_of(n.stored) + ";\n";
    return tail_source(problem_, bits_of(problem_, problem_.output.dtype)) + thin_source(problem_, shape_) +
           wide_numbers_source(problem_, shape_.parts, "::Product", constants);
  }

  static const char* name_of(GemmBoxesNumbers::Stored stored) {
    using Stored = GemmBoxesNumbers::Stored;
    return stored == Stored::vectors     ? "vectors"
           : stored == Stored::channels  ? "channels"
           : stored == Stored::positions ? "positions"
                                         : "sums";
  }

  Source steps_source() const {
    return agent_kernel("onepass_gemm_boxes_steps",
                        "#include \"gemm/boxes.cuh\"\nstruct Product;\n" + structs(),
                        "BoxesSteps<onepass::Convolution, onepass::Tail, Numbers>",
                        std::to_string(GemmBoxesNumbers::pack_threads), SharedAs::structure);
  }
  Source product_source() const {
    return agent_kernel("onepass_gemm_boxes",
                        "#include \"gemm/boxes/product.cuh\"\n" +
                            wgmma_source(numbers_.tile_channels, problem_.input.dtype == DType::bf16) +
                            structs(),
                        "BoxesGemm<onepass::Convolution, onepass::Tail, Numbers>",
                        std::to_string(threads) + ", 1", SharedAs::structure);
  }

  GemmBoxesNumbers numbers_;
  std::optional<Problem> tail_problem_;
  std::optional<BuiltTail> tail_;
  ThinCores redo_;
  std::optional<Function> steps_, product_;
  Number tiles_, copied_items_;
  Number blocks_ = 1;
  Regions regions_;
  Region map_, arrived_, parts_, lines_, sums_, marks_, guard_, scales_, row_largest_, row_sums_,
      piece_marks_, packed_weights_, packed_input_, values_, statistics_, redo_memory_;
};

std::string refusal(const Problem& problem) {
  std::string reason = wgmma_refusal(problem);
  if (!reason.empty()) return reason;
  if (splits_operands(problem)) return "strict f32: products of f16 are not as exact";
  const ThinShape shape(problem);
  for (const ThinAxis& axis : shape.axes) {
    if (axis.step > most_step) return "a stride of more than " + std::to_string(most_step);
  }
  if (!has_no_tail(shape)) {
    const std::optional<Problem> tail = tail_after_convolution(problem);
    if (tail_row(*tail) == nullptr) return "no row takes what follows the convolution";
  }
  const auto found = wide_numbers<GemmBoxesNumbers>(problem);
  const GemmBoxesNumbers& numbers = *found;
  if (numbers.tile_channels == 0) return "the window of a tile is too large";
  constexpr int64_t most = int64_t{1} << 31;  // tiles, samples, elements of a sample, blocks
  if (shape.conv_groups * shape.channels * shape.spatial >= most)
    return "a sample of the convolution's output has 2^31 elements or more";
  if (numbers.tiles(shape.samples) * numbers.channel_tiles() >= most || shape.samples >= most)
    return "more than 2^31 tiles";
  const int64_t copied = numbers.copied_items(spatial_elements(problem.input.sizes));
  if (shape.batch * copied >= most - numbers.weight_items()) return "more than 2^31 blocks copy x";
  return "";
}

double seconds(const Problem& problem, const PlanOptions&) {
  const WideCost<GemmBoxesNumbers> cost(problem);
  const GemmBoxesNumbers& numbers = *cost.numbers;
  using Stored = GemmBoxesNumbers::Stored;
  const auto weights = static_cast<double>(problem.parameters[0].byte_span());
  const auto input = static_cast<double>(problem.input.byte_span());
  const auto copy = static_cast<double>(
      (cost.shape.batch * (spatial_elements(problem.input.sizes) * numbers.copied_channels * 2)).value());
  const double packed =
      weights + static_cast<double>(numbers.weight_bytes()) + (numbers.copies() ? input + copy : 0);
  const bool has_tail = numbers.has_tail(cost.shape);
  const auto values = static_cast<double>((cost.shape.rows() * cost.shape.spatial).value()) * 4;
  const double stored = has_tail ? values : static_cast<double>(problem.output.byte_span());
  const double read = (numbers.copies() ? copy : input) * (numbers.twice ? 2 : 1);
  double moved = (read + stored) / cost.gpu.bytes_per_second;
  // Values of one class are every s-th element of a row: of s = 2 gemm_packed stored 0.7 TB/s, of 3 0.5.
  if (numbers.classes_apart && numbers.stored == Stored::positions) {
    const auto apart = static_cast<double>(cost.shape.axes[2].classes.size());
    moved = std::max(moved, stored * apart / (0.34 * cost.gpu.bytes_per_second));
  }
  double after = 0;
  if (has_tail) {
    const Problem tail = *tail_after_convolution(problem);
    after = values_factor(tail) * tail_row(tail)->seconds(tail, {});
  }
  // Below the highest clock: 1.7 of 1.98 GHz.
  const double launches = (numbers.twice ? 6e-6 : 0) + (numbers.stored == Stored::sums ? 3e-6 : 0);
  return (numbers.guards ? 11e-6 : 6e-6) + launches + 1.2 * packed / cost.gpu.bytes_per_second +
         std::max(numbers.clocks / cost.clock(0.86), moved) + after;
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_boxes =
    cuda::row_of<cuda::GemmBoxes>("gemm_boxes", cuda::refusal, cuda::seconds);

}  // namespace onepass
