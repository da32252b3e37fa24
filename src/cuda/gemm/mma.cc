// The row "gemm_mma": a wide convolution with all that follows it as an implicit matrix product on the tensor
// cores of every GPU from sm_80 on. A launch that packs the weights, one that convolves up to the norm, and
// one for the norm and what follows it.
#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <sstream>

#include "cuda/gemm/gemm.h"
#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "gemm/parameters.cuh"

namespace onepass {

extern const Strategy cuda_gemm_wgmma;

namespace cuda {
namespace {

constexpr int64_t pack_threads = 256;  // gemm/mma/pack.cuh

using Box = std::array<int64_t, max_spatial_rank>;

bool splits(const Problem& problem) { return problem.input.dtype == DType::f32 && !problem.rounds_to_tf32(); }

// The places of a dimension that a box's window has (gemm/mma.cuh).
struct WindowAxis {
  int64_t entries = 1;
  int64_t width = 1;
  int64_t unit = 1;
  bool compact = false;  // each tap has places of its own

  WindowAxis(const ThinAxis& axis, int64_t box) {
    int64_t taps = 1;
    for (const ThinAxis::Class& own : axis.classes) taps = std::max(taps, own.count);
    const int64_t spread = std::abs(axis.delta);
    const int64_t reach = (box - 1) * axis.step + (taps - 1) * spread + 1;
    // Every step-th place is a run of neighbours.
    width = divide_up(reach, axis.step);
    entries = width * std::min(axis.step, reach);
    if (taps * box < entries) {
      compact = true;
      width = box;
      unit = spread;
      entries = taps * box;
    }
  }
  WindowAxis() = default;
};

// How a sample is cut into tiles; nothing here depends on the batch.
struct MmaNumbers {
  struct Tile {
    int64_t row_tiles, column_tiles, warps_m, warps_n;
    int64_t rows() const { return 16 * row_tiles * warps_m; }
    int64_t positions() const { return 8 * column_tiles * warps_n; }
    int64_t threads() const { return 32 * warps_m * warps_n; }
  };

  Tile tile{};
  int64_t conv_groups = 1;  // each with weights of its own
  bool merges_classes = false;
  Box box{}, boxes{1, 1, 1};
  std::array<WindowAxis, max_spatial_rank> axes;
  int64_t position_tiles = 1, channel_tiles = 1;
  bool halves = false;  // f16 stands for f32 operands
  int64_t parts = 1;
  int64_t vectors = 4, of_vector = 8, chunks = 1;
  int64_t stages = 4;
  int64_t group_taps = 1;  // of a stage
  int64_t batch_vectors = 1, group_batches = 1;
  int64_t window_pitch = 0;
  int64_t staged_vectors = 0;  // of a chunk, those that fill a turn of all threads too
  int64_t all_taps = 0, most_taps = 0, least_taps = 0, common_taps = 0;  // of classes
  int64_t shared_bytes = 0;                                              // 0 where nothing fits
  int64_t blocks_wanted = 2;                                             // of a multiprocessor
  double clocks = 0;                                                     // of a multiprocessor, for a sample

  MmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
    const bool two = splits(problem);
    const int64_t wide = two ? 4 : 8;
    const std::array<Tile, 7> tiles{{{4, wide, 1, 32 / wide},
                                     {4, wide, 2, 16 / wide},
                                     {4, wide, 1, 16 / wide},
                                     {2, wide, 1, 32 / wide},
                                     {1, wide, 1, 32 / wide},
                                     {4, wide, 2, 32 / wide},
                                     {4, 4, 1, 4}}};
    for (const Tile& wanted : tiles) {
      for (const Box& tried : boxes_of(shape, wanted.positions())) {
        const MmaNumbers found(problem, shape, gpu, wanted, tried);
        if (found.shared_bytes > 0 && (shared_bytes == 0 || found.clocks < clocks)) *this = found;
      }
    }
  }

  int64_t classes(const ThinShape& shape) const { return merges_classes ? 1 : shape.classes(); }
  int64_t rows(const ThinShape& shape) const {
    return shape.channels * (merges_classes ? shape.classes() : 1);
  }
  int64_t tiles(const ThinShape& shape) const { return classes(shape) * channel_tiles * position_tiles; }
  int64_t window() const { return axes[0].entries * axes[1].entries * axes[2].entries; }
  int64_t chunk_channels() const { return vectors * of_vector; }
  int64_t weight_bytes() const {
    return conv_groups * all_taps * channel_tiles * chunks * parts * vectors * tile.rows() * 16;
  }
  int64_t spans(const ThinShape& shape) const {
    const int64_t group_rows = rows(shape) / shape.groups;
    return tile.rows() % group_rows == 0 ? 1 : (group_rows - 1) / tile.rows() + 2;
  }

 private:
  static int64_t positions_of(const ThinAxis& axis) {
    int64_t most = 1;
    for (const ThinAxis::Class& own : axis.classes) most = std::max(most, own.positions);
    return most;
  }

  // Boxes of at most so many positions, as even as they cover the output.
  static std::vector<Box> boxes_of(const ThinShape& shape, int64_t most) {
    const auto out = [&](size_t d) { return positions_of(shape.axes[d]); };
    const auto even = [](int64_t all, int64_t part) { return divide_up(all, divide_up(all, part)); };
    std::vector<Box> found;
    for (int64_t z = 1; z <= std::min(out(0), most); z = z < 8 ? z + 1 : 2 * z) {
      int64_t before = 0;
      for (int64_t count = 1; count <= out(2); ++count) {
        const int64_t x = divide_up(out(2), count);
        if (x == before || z * x > most) continue;
        before = x;
        if (x < std::min<int64_t>(out(2), 4)) break;
        found.push_back({even(out(0), z), even(out(1), most / (z * x)), x});
      }
    }
    return found;
  }

  MmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu, const Tile& wanted,
             const Box& tried)
      : tile(wanted), conv_groups(shape.conv_groups), box(tried) {
    merges_classes = shape.classes() > 1 && !shape.parts.mean && classes_meet_alike(shape);
    halves = problem.input.dtype == DType::f32 && classes(shape) == 1;
    parts = splits(problem) ? 2 : 1;
    of_vector = halves ? 8 : 16 / byte_size(problem.input.dtype);
    // The first chunk's x comes before anything is multiplied: it is a small part.
    vectors = shape.in_channels <= 8 * of_vector ? 2 : 4;
    chunks = divide_up(shape.in_channels, chunk_channels());
    channel_tiles = divide_up(rows(shape), tile.rows());
    position_tiles = 1;
    for (size_t d = 0; d < box.size(); ++d) {
      axes[d] = WindowAxis(shape.axes[d], box[d]);
      boxes[d] = divide_up(positions_of(shape.axes[d]), box[d]);
      position_tiles *= boxes[d];
    }
    count_taps(shape);
    // Where vectors of channels come side by side, they go to different banks.
    const bool interleaved = problem.input.strides[1] == 1;
    window_pitch = interleaved ? round_up(window() - 8 / vectors, 8) + 8 / vectors : window();
    group_taps = 1;
    for (int64_t divisor = 2; divisor <= 4; ++divisor) {
      if (common_taps % divisor == 0) group_taps = divisor;
    }
    const int64_t turns = interleaved ? divide_up(window(), tile.threads() / vectors)
                                      : divide_up(window(), tile.threads()) * vectors;
    staged_vectors = turns * tile.threads();
    const int64_t of_group = divide_up(turns, std::max<int64_t>(1, least_taps / group_taps));
    const int64_t most_in_registers = parts == 2 || tile.column_tiles < 8 ? 2 : 4;
    batch_vectors = std::clamp<int64_t>(of_group, 1, most_in_registers);
    group_batches = std::clamp<int64_t>(divide_up(of_group, batch_vectors), 1, group_taps);
    // Of two blocks, as far as that goes.
    const int64_t half = gpu.shared_bytes_per_multiprocessor / 2 - 1024;
    for (const int64_t limit : {std::min(half, gpu.shared_bytes_per_block), gpu.shared_bytes_per_block}) {
      for (stages = 4; stages >= 2 && shared_bytes == 0; --stages) {
        const int64_t bytes = bytes_of_shared();
        if (bytes <= limit) shared_bytes = bytes;
      }
      if (shared_bytes > 0) break;
    }
    ++stages;  // the loop went one further
    // Registers of a thread besides its sums: 64, and more where there is room.
    const int64_t registers = (4 * tile.row_tiles * tile.column_tiles * parts + 64) * tile.threads();
    constexpr int64_t all_registers = 65536;
    if (registers > all_registers) shared_bytes = 0;
    if (shared_bytes > 0) {
      blocks_wanted = std::clamp<int64_t>(
          std::min(all_registers / registers, gpu.shared_bytes_per_multiprocessor / (shared_bytes + 1024)), 1,
          4);
    }
    clocks = predict(problem, shape, gpu);
  }

  void count_taps(const ThinShape& shape) {
    std::array<size_t, max_spatial_rank> r{};
    const auto taps_of = [&] {
      int64_t taps = 1;
      for (size_t d = 0; d < r.size(); ++d) taps *= shape.axes[d].classes[r[d]].count;
      return taps;
    };
    all_taps = most_taps = common_taps = 0;
    least_taps = taps_of();
    for (r[0] = 0; r[0] < shape.axes[0].classes.size(); ++r[0]) {
      for (r[1] = 0; r[1] < shape.axes[1].classes.size(); ++r[1]) {
        for (r[2] = 0; r[2] < shape.axes[2].classes.size(); ++r[2]) {
          if (merges_classes && r[0] + r[1] + r[2] > 0) continue;
          all_taps += taps_of();
          most_taps = std::max(most_taps, taps_of());
          least_taps = std::min(least_taps, taps_of());
          common_taps = std::gcd(common_taps, taps_of());
        }
      }
    }
  }

  // As gemm/mma.cuh has it.
  int64_t bytes_of_shared() const {
    const int64_t rings =
        2 * parts * vectors * window_pitch * 16 + stages * group_taps * parts * vectors * tile.rows() * 16;
    const int64_t finish = tile.warps_n * tile.rows() * 16 + tile.threads() / 32 * 16 * 40 * 4;
    return round_up(
        std::max(rings, finish) + 4 * (window_pitch + tile.positions() + std::max<int64_t>(1, most_taps)),
        128);
  }

  double predict(const Problem& problem, const ThinShape& shape, const Gpu& gpu) const {
    const auto bytes = static_cast<double>(byte_size(problem.input.dtype));
    const auto operand_bytes = 16 / static_cast<double>(of_vector);
    const auto taps = static_cast<double>(all_taps) / static_cast<double>(classes(shape));
    const auto outputs = static_cast<double>(tile.rows() * tile.positions());
    const auto products = parts == 2 ? 3.0 : 1.0;
    const double terms = taps * static_cast<double>(chunks * chunk_channels());
    const double multiplied =
        outputs * terms * products / gpu.tensor_products() / (operand_bytes == 2 ? 2 : 1);
    // 128 bytes of shared memory a clock: each warp reads its rows and its columns.
    const double warps = static_cast<double>(tile.threads()) / 32;
    const double read = warps * static_cast<double>(16 * tile.row_tiles + 8 * tile.column_tiles) * terms *
                        operand_bytes * static_cast<double>(parts) / 128;
    // Through L2.
    // Rows are pieces of memory that begin and end within sectors of 32 bytes.
    const auto in_sectors = [](int64_t row, double size) {
      return 1 + 32 / (static_cast<double>(row) * size);
    };
    const bool planar = problem.input.strides[1] != 1;
    const double x_bytes = static_cast<double>(window() * shape.in_channels) * bytes *
                           (planar ? in_sectors(axes[2].entries, bytes) : 1.0);
    const double moved =
        (x_bytes + static_cast<double>(tile.rows()) * terms * operand_bytes * static_cast<double>(parts)) /
        32;
    const double staged = static_cast<double>(staged_vectors * chunks) * (of_vector == 8 ? 26 : 20) / 128;
    const double finished = outputs * 24 / 128 + outputs * 4 / 16 * (planar ? in_sectors(box[2], 4) : 1.0);
    // Four blocks of small tiles hide half of what is not multiplied: s19 took 0.89 ms so (32 samples,
    // without the norm) where two blocks of twice the positions took 1.07. Long sums leave little to hide,
    // and smaller tiles read more: they have to be better by a twelfth.
    const bool small = parts == 1 && tile.column_tiles == 4;
    const double hidden = small && blocks_wanted >= 4 ? 0.57 : 1.0;
    const double all = 1.25 * std::max({multiplied, read, moved}) + (staged + finished + 2000) * hidden;
    return static_cast<double>(tiles(shape)) * all * (small ? 1.08 : 1.0) * (blocks_wanted > 1 ? 1.0 : 1.15);
  }
};

class GemmMma final : public Kernel {
 public:
  explicit GemmMma(const Problem& problem)
      : problem_(problem),
        shape_(problem),
        numbers_(problem, shape_, gpu_of(problem.device)),
        pack_(pack_source(), problem.device, pack_launch()),
        function_(source(), problem.device,
                  Launch{maximum(1, shape_.batch * numbers_.tiles(shape_)),
                         static_cast<uint32_t>(numbers_.tile.threads()), 1,
                         static_cast<uint32_t>(numbers_.shared_bytes)}),
        redo_(problem) {
    if (has_second()) finish_.emplace(problem, shape_, is_planar());
    const int64_t tiles_of_slab = numbers_.classes(shape_) * numbers_.position_tiles;
    control_ = regions_.add(shape_.batch * 4);
    marks_ = regions_.add((shape_.batch + 1) * 4);
    guard_ = regions_.add(shape_.batch * 4);
    scales_ = regions_.add((padded_channels() + 1) * 4);
    cleared_bytes_ = regions_.total();
    packed_ = regions_.add(numbers_.weight_bytes());
    parts_ =
        regions_.add(when(shape_.parts.norm, shape_.slabs() * (numbers_.spans(shape_) * tiles_of_slab * 16)));
    sums_ = regions_.add(when(shape_.parts.mean, shape_.rows() * (tiles_of_slab * 4)));
    statistics_ = regions_.add(when(shape_.parts.norm, shape_.slabs() * 2 * 4));
    values_ = regions_.add(when(has_own_values(), shape_.rows() * shape_.spatial * 4));
  }

  Accuracy accuracy() const override { return accuracy_of_chains(problem_); }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + redo_.workspace_bytes();
  }

  std::string describe() const override {
    const MmaNumbers& n = numbers_;
    std::ostringstream out;
    out << "convolution: " << shape_.terms() << " terms" << describe_groups(shape_) << ", "
        << (problem_.input.dtype != DType::f32 ? "operands as they are"
            : n.parts == 2                     ? "operands split in two of "
                                               : "operands rounded to ")
        << (problem_.input.dtype != DType::f32 ? ""
            : n.halves                         ? "f16"
                                               : "tf32")
        << '\n'
        << "tile: " << n.tile.rows() << " channels, a box of " << n.box[0] << "x" << n.box[1] << "x"
        << n.box[2] << " outputs (" << n.tile.positions() << "), " << n.tiles(shape_) << " tiles a sample\n"
        << "window: " << n.window() << " positions, 2 stages of " << n.chunk_channels() << " channels\n"
        << "weights: " << n.stages << " stages of " << n.group_taps << " taps\n"
        << "blocks: " << describe_blocks(shape_.batch * n.tiles(shape_), function_);
    if (finish_)
      out << "second: values " << (has_own_values() ? "of the workspace" : "of the output") << '\n';
    out << "then: thin_cores for samples that f16 has no room for, or that are not finite\n"
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return where(problem_.input.dtype == DType::f32 && numbers_.parts == 1, note::operands_rounded) +
           where(problem_.input.dtype == DType::f32, note::redone) +
           notes_of_chains(problem_.block, bits_of(problem_, problem_.output.dtype));
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    clear(at(workspace, control_), cleared_bytes_, stream, problem_.device);
    if (packs_classes()) {
      GemmMmaPackParameters pack;
      pack.weights = arguments.parameters[0];
      pack.packed = at(workspace, packed_);
      pack.only = at(workspace, marks_);
      pack.batch = shape_.batch;
      pack.launch(pack_, stream);
    } else {
      GemmPackParameters pack;
      pack.weights = arguments.parameters[0];
      pack.packed = at(workspace, packed_);
      pack.scales = at(workspace, scales_);
      pack.only = at(workspace, marks_);
      pack.batch = shape_.batch;
      pack.launch(pack_, stream);
    }
    void* const values = has_own_values() ? at(workspace, values_) : arguments.output;
    void* const statistics =
        arguments.statistics ? static_cast<void*>(arguments.statistics) : at(workspace, statistics_);
    GemmMmaParameters p;
    p.input = arguments.input;
    p.output = arguments.output;
    p.values = values;
    p.statistics = statistics;
    p.control = at(workspace, control_);
    p.parts = at(workspace, parts_);
    p.sums = at(workspace, sums_);
    p.only = at(workspace, marks_);
    p.guard = at(workspace, guard_);
    p.packed = at(workspace, packed_);
    p.scales = at(workspace, scales_);
    p.batch = shape_.batch;
    p.parameter = arguments.parameters;
    p.launch(function_, stream);
    if (finish_) finish_->launch(arguments, values, statistics, stream);
    redo_.launch_marked(arguments, at(workspace, Region{regions_.total(), 0}), at(workspace, marks_), stream);
  }

 private:
  // Whether the norm waits for other tiles, with values in memory.
  bool has_second() const { return shape_.parts.norm && !shape_.parts.mean_follows_norm(); }
  // Values have no room in the output.
  bool has_own_values() const {
    return has_second() && (shape_.parts.mean || problem_.output.dtype != DType::f32);
  }
  // Values between the launches: dense, in one order or the other.
  bool is_planar() const {
    const Shape sizes = problem_.block.conv_output_shape(problem_.input.sizes);
    Shape dense = TensorSpec::dense(DType::f32, sizes).strides;
    dense.insert(dense.begin() + 2, 5 - dense.size(), 0);
    return strides() == dense;
  }
  // Whether 32 bits count the bytes of a sample of x.
  bool has_small_samples() const {
    int64_t last = 0;
    for (size_t d = 1; d < problem_.input.sizes.size(); ++d)
      last += (problem_.input.sizes[d] - 1) * problem_.input.strides[d];
    return (last + 1) * byte_size(problem_.input.dtype) <= int64_t{1} << 32;
  }
  // One class: packed as for gemm_wgmma, several channels to a block where they are many, since it writes 16
  // bytes of each; their weights once through shared memory where they fit.
  bool packs_classes() const { return numbers_.classes(shape_) > 1; }
  int64_t padded_channels() const {
    return shape_.conv_groups * numbers_.channel_tiles * numbers_.tile.rows();
  }
  int64_t pack_bytes(int64_t channels) const {
    return channels * shape_.in_channels * numbers_.most_taps * byte_size(problem_.parameters[0].dtype);
  }
  int64_t pack_channels() const {
    constexpr int64_t least_blocks = 256;
    const int64_t two_blocks_fit = gpu_of(problem_.device).shared_bytes_per_block * 31 / 64;
    for (const int64_t channels : {4, 2}) {
      if (padded_channels() / channels >= least_blocks && pack_bytes(channels) <= two_blocks_fit)
        return channels;
    }
    return 1;
  }
  bool packs_staged() const {
    return pack_bytes(pack_channels()) <= gpu_of(problem_.device).shared_bytes_per_block * 7 / 8;
  }
  Launch pack_launch() const {
    if (packs_classes()) {
      const int64_t vectors =
          padded_channels() * numbers_.chunks * numbers_.vectors * numbers_.classes(shape_);
      return {divide_up(vectors, pack_threads), pack_threads};
    }
    return {padded_channels() / pack_channels(), pack_threads, 1,
            static_cast<uint32_t>(packs_staged() ? pack_bytes(pack_channels()) : 0)};
  }

  // Strides of values, and of tensors that stages read.
  Shape strides() const {
    Shape list = problem_.output.strides;
    if (shape_.parts.mean) {
      list = TensorSpec::dense(DType::f32, problem_.block.conv_output_shape(problem_.input.sizes)).strides;
      for (const int index : shape_.parts.tensor_parameters())
        list = problem_.parameters[static_cast<size_t>(index)].strides;
    }
    // Batch and channel, then three spatial dimensions.
    list.insert(list.begin() + 2, 5 - list.size(), 0);
    return list;
  }

  std::string numbers_source() const {
    const MmaNumbers& n = numbers_;
    const auto table = [](const char* type, const char* name, const auto& value, size_t count) {
      std::ostringstream out;
      out << "  static constexpr __device__ " << type << ' ' << name << "(int d) { return ";
      for (size_t d = 0; d + 1 < count; ++d) out << "d == " << d << " ? " << value(d) << " : ";
      out << value(count - 1) << "; }\n";
      return out.str();
    };
    const TailParts& parts = shape_.parts;
    const std::vector<TailParts::Stage>& chain = parts.norm ? parts.before : parts.after;
    const bool reads_tensors = std::any_of(chain.begin(), chain.end(), [](const TailParts::Stage& stage) {
      return argument_kind(stage.pointwise.op) == ArgumentKind::tensor;
    });
    const Shape all_strides = strides();
    const bool is_bf16 = problem_.input.dtype == DType::bf16;
    const char* const product = is_bf16 ? "Bf16" : n.of_vector == 8 ? "F16" : "Tf32";
    std::ostringstream out;
    out << "struct Numbers {\n  using Product = onepass::mma::" << product
        << ";\n  using Operand = onepass::" << (is_bf16 ? "bf16" : "f16") << ";\n"
        << "  static constexpr float steepness = " << std::showpoint << steepness(parts) << "f;\n"
        << Constants()
               .add("threads", n.tile.threads())
               .add("row_tiles", n.tile.row_tiles)
               .add("column_tiles", n.tile.column_tiles)
               .add("warps_n", n.tile.warps_n)
               .add("tile_rows", n.tile.rows())
               .add("tile_positions", n.tile.positions())
               .flag("merges_classes", n.merges_classes)
               .add("boxes_y", n.boxes[1])
               .add("boxes_x", n.boxes[2])
               .add("position_tiles", n.position_tiles)
               .add("channel_tiles", n.channel_tiles)
               .add("spans", n.spans(shape_))
               .add("parts", n.parts)
               .add("vectors", n.vectors)
               .add("of_vector", n.of_vector)
               .flag("guards", n.halves)
               .add("padded_channels", padded_channels())
               .add("chunks", n.chunks)
               .add("stages", n.stages)
               .add("group_taps", n.group_taps)
               .add("batch_vectors", n.batch_vectors)
               .add("group_batches", n.group_batches)
               .flag("small_samples", has_small_samples())
               .add("window_pitch", n.window_pitch)
               .add("most_taps", std::max<int64_t>(1, n.most_taps))
               .flag("chain_reads_tensors", reads_tensors)
               .add("shared_bytes", n.shared_bytes)
               // Of gemm_pack.cuh alone.
               .add("tile_channels", n.tile.rows())
               .add("chunk_channels", n.chunk_channels())
               .add("taps", n.most_taps)
               .add("pack_channels", pack_channels())
               .flag("pack_staged", packs_staged())
               .text()
        << table(
               "int", "box", [&](size_t d) { return n.box[d]; }, 3)
        << table(
               "int", "entries", [&](size_t d) { return n.axes[d].entries; }, 3)
        << table(
               "int", "width", [&](size_t d) { return n.axes[d].width; }, 3)
        << table(
               "int", "unit", [&](size_t d) { return n.axes[d].unit; }, 3)
        << table(
               "bool", "compact", [&](size_t d) { return n.axes[d].compact ? "true" : "false"; }, 3)
        << table(
               "long long", "stride", [&](size_t d) { return std::to_string(all_strides[d]) + "ll"; }, 5)
        << "};\n";
    return out.str();
  }

  Source source() const {
    return {"onepass_gemm_mma",
            "#include \"gemm/mma.cuh\"\n" + tail_source(problem_, bits_of(problem_, problem_.output.dtype)) +
                thin_source(problem_, shape_) + numbers_source() +
                "using Agent = onepass::GemmMma<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(numbers_.tile.threads()) + ", " + std::to_string(numbers_.blocks_wanted) +
                ") onepass_gemm_mma(const __grid_constant__ Agent::Parameters p) {\n"
                "  extern __shared__ __align__(16) unsigned char shared[];\n"
                "  Agent{p, *reinterpret_cast<Agent::Shared*>(shared)}.run();\n"
                "}\n"};
  }

  Source pack_source() const {
    const std::string problem = tail_source(problem_) + thin_source(problem_, shape_) + numbers_source();
    if (packs_classes()) {
      return {"onepass_gemm_mma_pack",
              "#include \"gemm/mma/pack.cuh\"\n" + problem +
                  "extern \"C\" __global__ void __launch_bounds__(256)\n"
                  "onepass_gemm_mma_pack(const __grid_constant__ onepass::GemmMmaPackParameters p) {\n"
                  "  onepass::GemmMmaPack<onepass::Convolution, onepass::Tail, Numbers>{p}.run();\n"
                  "}\n"};
    }
    return {"onepass_gemm_pack",
            "#include \"gemm/source/pack.cuh\"\n#include \"device/mma.cuh\"\n" + problem +
                "extern \"C\" __global__ void __launch_bounds__(256)\n"
                "onepass_gemm_pack(const __grid_constant__ onepass::GemmPackParameters p) {\n"
                "  extern __shared__ __align__(16) unsigned char staged[];\n"
                "  onepass::GemmPack<onepass::Convolution, Numbers>{p, staged}.run();\n"
                "}\n"};
  }

  Problem problem_;
  ThinShape shape_;
  MmaNumbers numbers_;
  Function pack_;
  Function function_;
  std::optional<GemmFinish> finish_;
  ThinCores redo_;
  Number cleared_bytes_;
  Regions regions_;
  Region control_, marks_, guard_, scales_, packed_, parts_, sums_, statistics_, values_;
};

bool lies_dense(const TensorSpec& spec, Layout layout) {
  return spec.strides == TensorSpec::dense(spec.dtype, spec.sizes, layout).strides;
}

std::string refusal(const Problem& problem) {
  std::string reason = wide_refusal(problem);
  if (!reason.empty()) return reason;
  const Gpu& gpu = gpu_of(problem.device);
  const ThinShape shape(problem);
  if (shape.parts.norm && !shape.parts.mean && !lies_dense(problem.output, Layout::nchw) &&
      !lies_dense(problem.output, Layout::nhwc)) {
    return "the output is not dense, and a norm waits for it";
  }
  if (shape.parts.norm && shape.parts.mean && !shape.parts.mean_follows_norm()) {
    for (const int index : shape.parts.tensor_parameters()) {
      const TensorSpec& spec = problem.parameters[static_cast<size_t>(index)];
      if (!lies_dense(spec, Layout::nchw) && !lies_dense(spec, Layout::nhwc))
        return "a tensor that a stage reads is not dense, and a norm and a mean follow";
    }
  }
  const MmaNumbers numbers(problem, shape, gpu);
  if (numbers.shared_bytes == 0) return "the window of a tile is too large";
  constexpr int64_t most_tiles = int64_t{1} << 31;
  if (shape.batch.value() * numbers.tiles(shape) >= most_tiles) return "too many tiles";
  return "";
}

double seconds(const Problem& problem, const PlanOptions& options) {
  const ThinShape shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const MmaNumbers numbers(problem, shape, gpu);
  const auto samples = static_cast<double>(shape.batch.value());
  const auto tiles = numbers.tiles(shape);
  // Tiles that do not fill the GPU leave multiprocessors idle.
  const auto rounds = static_cast<double>(divide_up(shape.batch.value() * tiles, gpu.multiprocessors));
  const double clocks = numbers.clocks / static_cast<double>(tiles) * rounds;
  const double elements = samples * static_cast<double>(shape.channels) * static_cast<double>(shape.spatial);
  const auto input = static_cast<double>(problem.input.byte_span());
  const auto output = static_cast<double>(problem.output.byte_span());
  const bool second = shape.parts.norm && !shape.parts.mean_follows_norm();
  const double first_bytes = input + (second ? 4 * elements : output);
  const double second_bytes = second ? 4 * elements + output : 0;
  const double packed = static_cast<double>(problem.parameters[0].byte_span() + numbers.weight_bytes());
  // On an H200 tiles take 1.03 to 1.15 times as long as they are predicted to.
  const double own = (second ? 3e-5 : 2.5e-5) + (2 * packed + second_bytes) / gpu.bytes_per_second +
                     std::max({first_bytes / gpu.bytes_per_second, 1.1 * clocks / gpu.clock(),
                               numbers.merges_classes ? scattered_seconds(problem, shape) : 0.0});
  // Where the GPU has wgmma that row is faster: s19 takes 1.7 times as long here, s61 2.2, layers of
  // U-Nets 1.4 and 1.5. One that doubles an image took 0.7, which is not enough to tell by.
  if (shape.conv_groups == 1 && cuda_gemm_wgmma.refusal(problem).empty())
    return std::max(own, 1.05 * cuda_gemm_wgmma.seconds(problem, options));
  return own;
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_mma{
    "gemm_mma", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::GemmMma>(problem);
    }};

}  // namespace onepass
