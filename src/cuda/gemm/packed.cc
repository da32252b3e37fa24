// The row "gemm_packed": a wide convolution of stride 1 as a matrix product over the positions of all samples
// (gemm/packed.cuh), then what follows it as a tail. For layers whose samples have too few tiles for
// "gemm_wgmma" to fill a GPU.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <sstream>
#include <utility>

#include "cuda/gemm/gemm.h"
#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "gemm/parameters.cuh"

namespace onepass {
namespace cuda {
namespace {

constexpr int64_t threads = 384;  // gemm/packed.cuh
constexpr int64_t pack_threads = 256;
constexpr int64_t piece_rows = 32;
constexpr int64_t most_columns = 256;
constexpr int64_t most_stages = 8;
constexpr int64_t most_piece_bytes = 100 << 10;
constexpr int64_t least_taps = 3;  // else x is copied for too few products

// In which order the convolution's output lies.
Layout layout_of_values(const Problem& problem) {
  const Shape sizes = problem.block.conv_output_shape(problem.input.sizes);
  const TensorSpec& like = problem.output.sizes == sizes ? problem.output : problem.input;
  return like.strides[1] == 1 && like.sizes[1] > 1 ? Layout::nhwc : Layout::nchw;
}

// What follows the convolution, of its output as f32; none where nothing does.
std::optional<Problem> tail_of(const Problem& problem) {
  const std::vector<Stage>& all = problem.block.stages();
  if (all.size() == 1) return std::nullopt;
  const Shape sizes = problem.block.conv_output_shape(problem.input.sizes);
  const Layout layout = layout_of_values(problem);
  Problem tail(Block(std::vector<Stage>(all.begin() + 1, all.end())), sizes, problem.input.dtype,
               problem.device, layout);
  tail.input = TensorSpec::dense(DType::f32, sizes, layout);
  tail.output = problem.output;
  tail.numerics = tail_numerics(problem);
  tail.parameters.assign(problem.parameters.end() - std::ssize(tail.parameters), problem.parameters.end());
  return tail;
}

// How positions are cut into tiles and shared memory into stages.
struct PackedNumbers {
  int64_t columns = 0;  // positions of a warpgroup; 0 where nothing fits
  // What the two warpgroups of a block have: two halves of 128 channels, two runs of positions, or tiles of
  // their own, by turns.
  enum class Groups { channels, positions, turns };
  Groups shared_by = Groups::positions;
  int64_t tile_channels = 64, tile_positions = 0;
  int64_t pitch = 1, plane = 1, sample = 1;
  int64_t margin = 0, behind = 0;  // positions before the first sample and behind the last tile
  int64_t taps = 1, group_taps = 1;
  int64_t input_channels = 16;  // a multiple of 16
  int64_t chunk_channels = 16;
  int64_t conv_groups = 1;     // input channels and rows are those of each
  int64_t rows = 1;            // of the product: channels of the output, for each class
  bool mixes_classes = false;  // in the runs that are stored
  int64_t window = 0;
  int64_t stages = 0;
  int64_t piece_bytes = 16;    // of weights being packed, in shared memory
  int64_t last_positions = 1;  // of the last sample
  double clocks = 0;

  PackedNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
    const FlatGeometry flat(shape);
    set_index(shape, flat);
    mixes_classes = shape.classes() > 1 && layout_of_values(problem) == Layout::nchw;
    piece_bytes = round_up(piece_rows * ((16 * taps * byte_size(problem.input.dtype) / 4) | 1) * 4, 8) +
                  pack_threads * 8;
    const PackedNumbers empty = *this;
    // The taps of a stage decide in which order a sum is added up: those that suit some samples, however many
    // there are.
    constexpr int64_t some = 8;
    const std::array<int64_t, 3> groups{taps, taps_of(shape, 1) * taps_of(shape, 2), taps_of(shape, 2)};
    PackedNumbers best = empty;
    for (const int64_t group : groups) best.take_better(empty.cut_best(shape, flat, gpu, group, some));
    if (best.columns > 0)
      *this = empty.cut_best(shape, flat, gpu, best.group_taps, CutFor::instead_of(shape.samples));
  }

  int64_t groups() const { return taps / group_taps; }
  int64_t chunks() const { return input_channels / chunk_channels; }
  int64_t steps() const { return groups() * chunks(); }
  int64_t channel_tiles() const { return conv_groups * divide_up(rows, tile_channels); }
  int64_t padded_channels() const { return channel_tiles() * tile_channels; }
  int64_t x_bytes() const { return window * chunk_channels * 2; }
  int64_t weight_stage_bytes() const { return group_taps * chunk_channels * tile_channels * 2; }
  int64_t weight_bytes() const { return padded_channels() * input_channels * taps * 2; }
  int64_t shared_bytes(int64_t count) const {
    return count * (round_up(x_bytes(), 128) + weight_stage_bytes() + 16) + 8 * 8 * 40 * 4 +
           (shared_by == Groups::turns ? 2 : 1) * tile_positions * 4 + 256;
  }
  Number tiles(const Number& batch) const {
    return divide_up(batch * sample - (sample - last_positions), tile_positions);
  }
  Number length(const Number& batch) const { return margin + tiles(batch) * tile_positions + behind; }

 private:
  static int64_t taps_of(const ThinShape& shape, size_t d) { return shape.axes[d].classes[0].count; }

  void set_index(const ThinShape& shape, const FlatGeometry& flat) {
    conv_groups = shape.conv_groups;
    rows = shape.channels * shape.classes();
    input_channels = round_up(shape.in_channels, 16);
    taps = taps_of(shape, 0) * taps_of(shape, 1) * taps_of(shape, 2);
    pitch = flat.pitch;
    plane = flat.plane;
    const ThinAxis& first = shape.axes[0];
    const int64_t out = first.classes[0].positions;
    sample = plane * std::max({out, first.in - std::min<int64_t>(flat.low[0], 0), out + flat.high[0]});
    last_positions = flat.positions;
    const auto shift = [&](const std::array<int64_t, max_spatial_rank>& offset) {
      return offset[0] * plane + offset[1] * pitch + offset[2];
    };
    margin = std::max<int64_t>(0, -shift(flat.low));
    behind = std::max<int64_t>(0, shift(flat.high));
  }

  void take_better(const PackedNumbers& other) {
    if (other.columns > 0 && (columns == 0 || other.clocks < clocks)) *this = other;
  }

  // The fastest tiles of so many samples.
  PackedNumbers cut_best(const ThinShape& shape, const FlatGeometry& flat, const Gpu& gpu, int64_t group,
                         int64_t samples) const {
    PackedNumbers best = *this;
    for (const Groups by : {Groups::positions, Groups::channels, Groups::turns}) {
      if (by == Groups::channels && rows <= 64) continue;
      // By turns what stores most is slower: 64 to 32 channels doubled at 64^3 0.64 ms, and else 0.55.
      if (by == Groups::turns && shape.classes() > 1) continue;
      for (int64_t own = most_columns; own >= 32; own -= 8) {
        PackedNumbers tried = *this;
        tried.cut(shape, flat, gpu, group, by, own, samples);
        best.take_better(tried);
      }
    }
    return best;
  }

  void cut(const ThinShape& shape, const FlatGeometry& flat, const Gpu& gpu, int64_t group, Groups by,
           int64_t own, int64_t samples) {
    group_taps = group;
    shared_by = by;
    tile_channels = by == Groups::channels ? 128 : 64;
    tile_positions = by == Groups::positions ? 2 * own : own;
    const auto reach = [&](size_t d) { return flat.high[d] - flat.low[d]; };
    window = tile_positions + reach(2);
    if (group > taps_of(shape, 2)) window += reach(1) * pitch;
    if (group > taps_of(shape, 1) * taps_of(shape, 2)) window += reach(0) * plane;
    // Few taps make a chunk of 16 channels a short one.
    chunk_channels = 16;
    while (group_taps * chunk_channels < 64 && input_channels % (2 * chunk_channels) == 0)
      chunk_channels *= 2;
    while (stages < most_stages && shared_bytes(stages + 1) <= gpu.shared_bytes_per_block) ++stages;
    if (stages < 3) return;
    columns = own;
    clocks = predict(samples, gpu);
  }

  // Of the whole GPU: tensor cores at work, or what comes through the second-level cache, 46 bytes a clock to
  // each multiprocessor at most (320 channels at 8^3); where both come near, each a little slower (2560
  // channels at 16 x 16 pixels: 26 bytes a clock, 97% of the tensor cores' rate).
  double predict(int64_t samples, const Gpu& gpu) const {
    const int64_t terms = taps * input_channels;
    const bool turns = shared_by == Groups::turns;
    const bool in_groups = conv_groups > 1;
    const auto products = static_cast<double>(terms * columns) / (turns ? 32 : 16);
    const auto bytes = static_cast<double>(steps() * (x_bytes() + weight_stage_bytes()));
    // In groups tiles of the same positions share no x: 448 channels in 4 at 28 x 28, 1232 in 11 at 14 x 14
    // take 1.2 to 1.4 of the time.
    const double multiplied = (turns ? 1.04 : 1.0) * (in_groups ? 1.2 : 1.0) * products *
                              std::pow(1 + std::pow(bytes / products / 46, 4), 0.25);
    // What a warp stores, 16 rows of its columns; classes of an output side by side are longer runs. Groups
    // of 16 and 32 channels (512 in 32 at 28 x 28, 128 in 4 at 32^3) take as long as of 64.
    const double stored = static_cast<double>(columns * (in_groups ? 64 : std::min<int64_t>(rows, 64))) / 64;
    const double after = mixes_classes ? 2000 + 32 * stored : 3000 + 51 * stored;
    const auto of_block =
        static_cast<double>(divide_up(tiles(Number(samples)) * channel_tiles(), gpu.multiprocessors));
    if (turns) return 2000 + of_block * std::max(multiplied, (multiplied + after) / 2) + after / 2;
    return 2000 + of_block * (multiplied + after);
  }
};

class GemmPacked final : public Kernel {
 public:
  explicit GemmPacked(const Problem& problem)
      : problem_(problem),
        shape_(problem),
        numbers_(problem, shape_, gpu_of(problem.device)),
        tail_problem_(*tail_of(problem)),
        tail_(build_tail(tail_problem_)),
        redo_(problem) {
    const PackedNumbers& n = numbers_;
    const Device& device = problem.device;
    compile(std::vector<Source>{steps_source(), product_kernel_source()}, gpu_of(device).architecture);
    steps_.emplace(
        steps_source(), device,
        Launch{1, static_cast<uint32_t>(pack_threads), 1, static_cast<uint32_t>(n.piece_bytes), false, true});
    product_.emplace(product_kernel_source(), device,
                     Launch{1, static_cast<uint32_t>(threads), 1,
                            static_cast<uint32_t>(n.shared_bytes(n.stages)), false, true});
    tiles_ = n.tiles(shape_.samples).called("tiles");
    length_ = n.length(shape_.samples).called("length");
    input_items_ =
        (divide_up(length_, pack_threads) * (n.conv_groups * n.input_channels / 16)).called("input_items");
    blocks_ = minimum(tiles_ * n.channel_tiles(), product_->resident_clusters());
    marks_ = regions_.add((shape_.batch + 1) * 4);
    guard_ = regions_.add(when(guards(), shape_.batch * 4));
    scales_ = regions_.add(when(guards(), (n.padded_channels() + 1) * 4));
    row_largest_ = regions_.add(when(guards(), n.padded_channels() * 4));
    row_sums_ = regions_.add(when(guards(), n.padded_channels() * 8));
    cleared_bytes_ = regions_.total();
    piece_marks_ = regions_.add(when(!guards(), weight_items() * 4));
    packed_input_ = regions_.add(length_ * (n.conv_groups * n.input_channels * 2));
    packed_weights_ = regions_.add(n.weight_bytes());
    values_ = regions_.add(shape_.rows() * shape_.spatial * 4);
    statistics_ = regions_.add(when(shape_.parts.norm, shape_.slabs() * 2 * 4));
    redo_memory_ = regions_.add(redo_.bytes());
  }

  Accuracy accuracy() const override { return tail_.kernel->accuracy(); }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + tail_.kernel->workspace_bytes();
  }

  std::string describe() const override {
    const PackedNumbers& n = numbers_;
    std::ostringstream out;
    out << "convolution: " << shape_.in_channels * n.taps << " terms"
        << (n.conv_groups == 1 ? "" : " in each of " + std::to_string(n.conv_groups) + " groups")
        << ", operands packed first, " << (guards() ? "rounded to f16, as to tf32" : "as they are") << '\n'
        << "tile: " << n.tile_channels << " channels, " << n.tile_positions << " positions of all samples, "
        << tiles_.value() * n.channel_tiles() << " tiles"
        << (n.shared_by == PackedNumbers::Groups::turns ? ", warpgroups by turns\n" : "\n")
        << "stages: " << n.stages << " of " << n.chunk_channels << " channels, " << n.group_taps
        << " taps, a window of " << n.window << " positions\n"
        << "blocks: " << describe_blocks(blocks_, *product_) << "then: " << tail_.row
        << (guards() ? ", thin_cores for samples that f16 has no room for" : "") << '\n'
        << "workspace: " << workspace_bytes() << " bytes\n"
        << tail_.kernel->describe();
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return where(guards(), note::operands_rounded) + where(guards(), note::redone) + tail_.kernel->numerics();
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    const LaunchChain chain;
    if (guards()) clear(at(workspace, marks_), cleared_bytes_, stream, problem_.device);
    float* const statistics = arguments.statistics || !shape_.parts.norm
                                  ? arguments.statistics
                                  : static_cast<float*>(at(workspace, statistics_));
    void* const redo = at(workspace, redo_memory_);
    PackedGemmParameters p;
    p.input = arguments.input;
    p.values = at(workspace, values_);
    p.statistics = statistics;
    p.only = at(workspace, marks_);
    p.guard = at(workspace, guard_);
    p.packed_input = at(workspace, packed_input_);
    p.packed_weights = at(workspace, packed_weights_);
    p.scales = at(workspace, scales_);
    p.row_largest = at(workspace, row_largest_);
    p.row_sums = at(workspace, row_sums_);
    p.piece_marks = at(workspace, piece_marks_);
    p.control = redo_.control(redo);
    p.batch = shape_.batch;
    p.length = length_;
    p.tiles = tiles_;
    p.parameter = arguments.parameters;
    const auto launch_step = [&](PackedGemmStep step, const Number& blocks) {
      p.step = int64_t{step};
      p.launch(*steps_, stream, blocks);
    };
    launch_step(step_pack, input_items_ + weight_items());
    if (guards()) launch_step(step_pack_again, numbers_.padded_channels() / piece_rows);
    p.step = int64_t{step_pack};
    p.launch(*product_, stream, blocks_);
    Arguments tail;
    tail.input = at(workspace, values_);
    tail.output = arguments.output;
    tail.statistics = statistics;
    tail.parameters.assign(arguments.parameters.end() - std::ssize(tail_problem_.parameters),
                           arguments.parameters.end());
    tail_.kernel->launch(tail, at(workspace, Region{regions_.total(), 0}), stream);
    if (guards()) launch_step(step_judge, shape_.batch);
    redo_.launch_marked(arguments, redo, at(workspace, marks_), 1, stream);
  }

 private:
  bool guards() const { return problem_.input.dtype == DType::f32; }
  int64_t weight_items() const {
    return numbers_.padded_channels() / piece_rows * (numbers_.input_channels / 16);
  }

  std::string structs() const {
    const PackedNumbers& n = numbers_;
    // Dense: two and then three spatial dimensions, as the convolution's.
    const TensorSpec& values = tail_problem_.input;
    const auto stride = [&](size_t d) {
      const size_t rank = values.sizes.size() - 2;
      return d + rank < max_spatial_rank ? int64_t{0} : values.strides[2 + d + rank - max_spatial_rank];
    };
    std::ostringstream out;
    out << tail_source(problem_) << thin_source(problem_, shape_)
        << "struct Numbers {\n  using Operand = onepass::"
        << (problem_.input.dtype == DType::bf16 ? "bf16" : "f16") << ";\n  using Product = ::Product;\n"
        << "  static constexpr float steepness = " << std::showpoint << steepness(shape_.parts) << "f;\n"
        << Constants()
               .add("parts", 1)
               .flag("guards", guards())
               .add("pitch", n.pitch)
               .add("plane", n.plane)
               .add("sample", n.sample)
               .add("margin", n.margin)
               .add("taps", n.taps)
               .add("group_taps", n.group_taps)
               .add("input_channels", n.input_channels)
               .add("chunk_channels", n.chunk_channels)
               .add("chunks", n.chunks())
               .add("steps", n.steps())
               .add("columns", n.columns)
               .flag("groups_share_positions", n.shared_by == PackedNumbers::Groups::channels)
               .flag("groups_take_turns", n.shared_by == PackedNumbers::Groups::turns)
               .add("tile_channels", n.tile_channels)
               .add("padded_channels", n.padded_channels())
               .add("window", n.window)
               .add("stages", n.stages)
               .add("piece_bytes", n.piece_bytes)
               .add("shared_bytes", n.shared_bytes(n.stages))
               .add("value_stride_n", values.strides[0])
               .add("value_stride_c", values.strides[1])
               .add("value_stride0", stride(0))
               .add("value_stride1", stride(1))
               .add("value_stride2", stride(2))
               .text()
        << "};\n";
    return out.str();
  }

  // `agent`: a template of gemm/packed.cuh; `own`: what it is given besides the parameters.
  Source kernel(const std::string& name, const std::string& agent, const std::string& product,
                const std::string& bounds, const std::string& own) const {
    return {name, product + structs() + "using Agent = onepass::" + agent +
                      "<onepass::Convolution, onepass::Tail, Numbers>;\n"
                      "extern \"C\" __global__ void __launch_bounds__(" +
                      bounds + ") " + name +
                      "(const __grid_constant__ Agent::Parameters p) {\n"
                      "  extern __shared__ __align__(128) unsigned char shared[];\n"
                      "  Agent{p" +
                      own + "}.run();\n}\n"};
  }
  Source steps_source() const {
    return kernel("onepass_gemm_packed_steps", "PackedGemmSteps",
                  "#include \"gemm/packed.cuh\"\nstruct Product;\n", std::to_string(pack_threads),
                  ", shared");
  }
  Source product_kernel_source() const {
    return kernel("onepass_gemm_packed", "PackedGemm",
                  "#include \"gemm/packed/product.cuh\"\n" +
                      wgmma_source(numbers_.columns, problem_.input.dtype == DType::bf16),
                  std::to_string(threads) + ", 1", ", *reinterpret_cast<Agent::Shared*>(shared)");
  }

  Problem problem_;
  ThinShape shape_;
  PackedNumbers numbers_;
  Problem tail_problem_;
  BuiltTail tail_;
  ThinCores redo_;
  std::optional<Function> steps_, product_;
  Number tiles_, length_, input_items_;
  Number blocks_ = 1;
  Number cleared_bytes_;
  Regions regions_;
  Region marks_, guard_, scales_, row_largest_, row_sums_, piece_marks_, packed_input_, packed_weights_,
      values_, statistics_, redo_memory_;
};

std::string refusal(const Problem& problem) {
  std::string reason = wide_refusal(problem);
  if (!reason.empty()) return reason;
  const Gpu& gpu = gpu_of(problem.device);
  if (gpu.architecture != "sm_90a") return "it needs wgmma, which sm_90a alone has";
  if (problem.input.dtype == DType::f32 && !problem.rounds_to_tf32())
    return "strict f32: products of f16 are not as exact";
  const ThinShape shape(problem);
  for (const ThinAxis& axis : shape.axes) {
    if (axis.step != 1) return "the convolution has a stride";
  }
  if (shape.taps < least_taps) return "a kernel of fewer than " + std::to_string(least_taps) + " taps";
  if (!classes_meet_alike(shape))
    return "outputs of the transposed convolution meet different elements, by its stride";
  const std::optional<Problem> tail = tail_of(problem);
  if (!tail) return "nothing follows the convolution";
  if (tail_row(*tail) == nullptr) return "no row takes what follows the convolution";
  const PackedNumbers numbers(problem, shape, gpu);
  if (numbers.columns == 0) return "the window of a tile is too large";
  if (numbers.piece_bytes > most_piece_bytes) return "a kernel of " + std::to_string(numbers.taps) + " taps";
  constexpr int64_t most = int64_t{1} << 31;  // positions, pieces of work, elements of the output
  const int64_t length = numbers.length(shape.samples);
  const int64_t channels = numbers.conv_groups * numbers.input_channels;
  if (length + numbers.sample >= most || length / pack_threads * (channels / 16) >= most / 2 ||
      shape.rows() * shape.spatial >= most) {
    return "more than 2^31 positions or outputs";
  }
  return "";
}

double seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const PackedNumbers numbers(problem, shape, gpu);
  const Problem tail = *tail_of(problem);
  const bool guards = problem.input.dtype == DType::f32;
  const auto weights = static_cast<double>(problem.parameters[0].byte_span());
  const double packed =
      static_cast<double>(problem.input.byte_span()) +
      static_cast<double>(numbers.length(shape.samples) * numbers.conv_groups * numbers.input_channels * 2) +
      weights + static_cast<double>(numbers.weight_bytes());
  // Tensor cores at work keep a GPU below its highest clock: 1.7 of 1.98 GHz.
  const double clock = gpu.flops / 256 / gpu.multiprocessors * 0.86;
  return (guards ? 8e-6 : 3e-6) + 1.2 * packed / gpu.bytes_per_second + numbers.clocks / clock +
         tail_row(tail)->seconds(tail, {});
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_packed{
    "gemm_packed", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::GemmPacked>(problem);
    }};

}  // namespace onepass
