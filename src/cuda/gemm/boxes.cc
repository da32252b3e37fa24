// The row "gemm_boxes": a wide convolution of 16-bit tensors with channels last as a matrix product that
// reads x through tensor maps, as it lies (gemm/boxes.cuh). Without a norm and a mean it writes the output,
// else it holds values for the norm, or writes them in f32 for a tail.
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
constexpr int64_t most_piece_bytes = 100 << 10;
constexpr int64_t most_step = 8;  // of a tensor map's elements

bool has_no_tail(const ThinShape& shape) { return shape.parts.norm == nullptr && !shape.parts.mean; }

class GemmBoxes final : public WholeBlockKernel {
 public:
  explicit GemmBoxes(const Problem& problem)
      : WholeBlockKernel(problem), numbers_(*wide_numbers<GemmBoxesNumbers>(problem)), redo_(problem) {
    const GemmBoxesNumbers& n = numbers_;
    const Device& device = problem.device;
    if (!n.held && !has_no_tail(shape_)) {
      tail_problem_ = tail_after_convolution(problem);
      tail_ = build_tail(*tail_problem_);
    }
    compile(std::vector<Source>{pack_source(), product_source()}, gpu_of(device).architecture);
    pack_.emplace(pack_source(), device,
                  Launch{n.weight_items(), static_cast<uint32_t>(GemmBoxesNumbers::pack_threads), 1,
                         static_cast<uint32_t>(round_up(n.piece_bytes, 128)), false, true});
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
    parts_ = regions_.add(when(n.held, shape_.slabs() * (n.unit_tiles() * 16)));
    map_ = regions_.add(128);
    marks_ = regions_.add((shape_.batch + 1) * 4);
    // What may be kept from call to call.
    piece_marks_ = regions_.add(n.weight_items() * 4);
    packed_weights_ = regions_.add(n.weight_bytes());
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
    return static_cast<size_t>((piece_marks_.bytes + packed_weights_.bytes).value());
  }
  uint64_t packing() const override {
    return packing_of(*pack_, numbers_.weight_items(), static_cast<int64_t>(packed_bytes()));
  }

  std::string describe() const override {
    const GemmBoxesNumbers& n = numbers_;
    std::ostringstream out;
    out << "convolution: " << shape_.in_channels * n.taps << " terms, x read as it lies\n"
        << "tile: " << n.tile_channels << " channels, " << n.box_n << 'x' << n.box[0] << 'x' << n.box[1]
        << 'x' << n.box[2] << " positions in " << 128 * n.products << " rows"
        << (n.patches ? " of 8 x 8, " : ", ") << tiles_.value() * n.channel_tiles() << " tiles\n"
        << "stages: " << n.x_stages << " windows of " << n.window[0] << 'x' << n.window[1] << 'x'
        << n.window[2] << " positions, " << n.chunk_channels << " channels and " << n.group_taps << " taps; "
        << n.weight_stages << " of weights, " << n.stage_taps << " taps\n"
        << "blocks: " << describe_blocks(blocks_, *product_);
    if (n.held) out << "values held in registers, " << n.unit_tiles() << " tiles a unit\n";
    if (tail_) out << "then: " << tail_->row << '\n';
    out << "workspace: " << workspace_bytes() << " bytes\n";
    if (tail_) out << tail_->kernel->describe();
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return tail_ ? tail_->kernel->numerics()
                 : notes_of_chains(problem_.block, bits_of(problem_, problem_.output.dtype));
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    const LaunchChain chain;
    const bool packs = arguments.packed == nullptr;
    void* const redo = at(workspace, redo_memory_);
    BoxesPackParameters pack;
    pack.input = arguments.input;
    pack.packed_weights = packs ? at(workspace, packed_weights_) : nullptr;
    pack.map = at(workspace, map_);
    pack.only = at(workspace, marks_);
    pack.piece_marks = at(workspace, piece_marks_);
    pack.control = redo_.control(redo);
    pack.arrived = at(workspace, arrived_);
    pack.units = shape_.batch * numbers_.units_of_sample();
    pack.batch = shape_.batch;
    pack.parameter = arguments.parameters;
    pack.launch(*pack_, stream, packs ? Number(numbers_.weight_items()) : Number(1));
    BoxesParameters p;
    p.input = arguments.input;
    p.output = arguments.output;
    p.values = at(workspace, values_);
    p.packed_weights = packed_at(arguments, workspace, packed_weights_, piece_marks_);
    p.map = at(workspace, map_);
    p.statistics = statistics_of(arguments, workspace);
    p.parts = at(workspace, parts_);
    p.control = at(workspace, arrived_);
    p.only = at(workspace, marks_);
    p.piece_marks = packed_at(arguments, workspace, piece_marks_, piece_marks_);
    p.batch = shape_.batch;
    p.tiles = tiles_;
    p.parameter = arguments.parameters;
    p.launch(*product_, stream, blocks_);
    if (tail_) launch_tail(arguments, workspace, stream);
    redo_.launch_marked(arguments, redo, at(workspace, marks_), 1, stream);
  }

  void launch_pack(const std::vector<const void*>& parameters, void* packed, Stream stream) const override {
    const Arguments kept = arguments_of_packing(parameters, packed);
    BoxesPackParameters pack;
    pack.input = nullptr;
    pack.packed_weights = packed_at(kept, nullptr, packed_weights_, piece_marks_);
    pack.map = nullptr;
    pack.only = nullptr;
    pack.piece_marks = packed_at(kept, nullptr, piece_marks_, piece_marks_);
    pack.control = nullptr;
    pack.arrived = nullptr;
    pack.units = 0;
    pack.batch = 0;
    pack.parameter = parameters;
    pack.launch(*pack_, stream);
  }

 private:
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
            .flag("guards", false, "held", n.held)
            .flag("classes_apart", false)
            .add("piece_bytes", n.piece_bytes, "shared_bytes", n.shared_bytes())
            .add("value_stride_n", values.strides[0], "value_stride_c", values.strides[1])
            .add("value_stride0", ThinShape::spatial_stride(values, 0), "value_stride1",
                 ThinShape::spatial_stride(values, 1), "value_stride2", ThinShape::spatial_stride(values, 2))
            .text();
    return tail_source(problem_, bits_of(problem_, problem_.output.dtype)) + thin_source(problem_, shape_) +
           wide_numbers_source(problem_, shape_.parts, "::Product", constants);
  }

  Source pack_source() const {
    return agent_kernel("onepass_gemm_boxes_pack",
                        "#include \"gemm/boxes.cuh\"\nstruct Product;\n" + structs(),
                        "BoxesPack<onepass::Convolution, onepass::Tail, Numbers>",
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
  std::optional<Function> pack_, product_;
  Number tiles_;
  Number blocks_ = 1;
  Regions regions_;
  Region map_, arrived_, parts_, marks_, piece_marks_, packed_weights_, values_, statistics_, redo_memory_;
};

// Whether a tensor has its channels side by side and everything else on 16 bytes of two-byte elements.
bool lies_in_vectors(const TensorSpec& spec) {
  if (spec.strides[1] != 1) return false;
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    if (d != 1 && spec.sizes[d] > 1 && (spec.strides[d] % 8 != 0 || spec.strides[d] <= 0)) return false;
  }
  return true;
}

std::string refusal(const Problem& problem) {
  std::string reason = wgmma_refusal(problem);
  if (!reason.empty()) return reason;
  if (byte_size(problem.input.dtype) != 2) return "x is not of 16 bits";
  const ThinShape shape(problem);
  if (shape.conv_groups != 1) return "the convolution has groups";
  if (shape.in_channels % 8 != 0 || shape.channels % 8 != 0) return "channels are not a multiple of 8";
  if (!lies_in_vectors(problem.input)) return "x has no channels side by side with strides of 16 bytes";
  if (!classes_meet_alike(shape))
    return "outputs of the transposed convolution meet different elements, by its stride";
  for (const ThinAxis& axis : shape.axes) {
    if (axis.step > most_step) return "a stride of more than " + std::to_string(most_step);
  }
  if (has_no_tail(shape)) {
    if (!lies_in_vectors(problem.output)) return "the output has no channels side by side";
  } else {
    if (layout_of_values(problem) != Layout::nhwc) return "the output has channels before space";
    const std::optional<Problem> tail = tail_after_convolution(problem);
    if (tail_row(*tail) == nullptr) return "no row takes what follows the convolution";
  }
  const auto found = wide_numbers<GemmBoxesNumbers>(problem);
  const GemmBoxesNumbers& numbers = *found;
  if (numbers.tile_channels == 0) return "the window of a tile is too large";
  if (numbers.piece_bytes > most_piece_bytes) return "a kernel of " + std::to_string(numbers.taps) + " taps";
  constexpr int64_t most = int64_t{1} << 31;  // tiles, samples, elements of a sample
  if (shape.channels * shape.spatial >= most)
    return "a sample of the convolution's output has 2^31 elements or more";
  if (numbers.tiles(shape.samples) * numbers.channel_tiles() >= most || shape.samples >= most)
    return "more than 2^31 tiles";
  return "";
}

double seconds(const Problem& problem, const PlanOptions&) {
  const WideCost<GemmBoxesNumbers> cost(problem);
  const GemmBoxesNumbers& numbers = *cost.numbers;
  const auto weights = static_cast<double>(problem.parameters[0].byte_span());
  const double packed = weights + static_cast<double>(numbers.weight_bytes());
  const bool has_tail = !numbers.held && !has_no_tail(cost.shape);
  const auto values = static_cast<double>((cost.shape.rows() * cost.shape.spatial).value()) * 4;
  const double moved =
      has_tail ? (static_cast<double>(problem.input.byte_span()) + values) / cost.gpu.bytes_per_second
               : cost.moving_seconds(problem);
  double after = 0;
  if (has_tail) {
    const Problem tail = *tail_after_convolution(problem);
    after = values_factor(tail) * tail_row(tail)->seconds(tail, {});
  }
  // Below the highest clock: 1.7 of 1.98 GHz.
  return 6e-6 + 1.2 * packed / cost.gpu.bytes_per_second +
         std::max(numbers.clocks / cost.clock(0.86), moved) + after;
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_boxes =
    cuda::row_of<cuda::GemmBoxes>("gemm_boxes", cuda::refusal, cuda::seconds);

}  // namespace onepass
