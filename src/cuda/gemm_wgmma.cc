// The row "gemm_wgmma": a wide convolution with all that follows it as an implicit matrix product on Hopper's
// tensor cores, in one launch after a small one that packs the weights.
#include <algorithm>
#include <optional>
#include <sstream>

#include "cuda/gemm.h"

namespace onepass {
namespace cuda {
namespace {

constexpr int64_t threads = 384;  // kernels/gemm.cuh
constexpr int64_t staging_threads = 128;
constexpr int64_t converting_threads = 96;
constexpr int64_t most_columns = 304;   // of a warpgroup: sums of 152 registers a thread
constexpr int64_t least_channels = 16;  // of the input and of the output

int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Instructions a chain takes for an element, about.
double chain_instructions(const std::vector<TailParts::Stage>& stages) {
  double count = 0;
  for (const TailParts::Stage& stage : stages) {
    switch (stage.pointwise.op) {
      case Op::gelu:
        count += 17;
        break;
      case Op::gelu_tanh:
      case Op::tanh:
      case Op::mish:
      case Op::softplus:
      case Op::elu:
        count += 30;
        break;
      case Op::swish:
      case Op::sigmoid:
      case Op::residual_add:
        count += 6;
        break;
      default:
        count += 2;
    }
  }
  return count;
}

// How a sample is cut into tiles and shared memory into rings; nothing here depends on the batch.
struct WgmmaNumbers {
  int64_t columns = 0;  // positions of a warpgroup; 0 where nothing fits
  bool groups_share_positions = false;
  int64_t tile_positions = 0, tile_channels = 64;
  int64_t position_tiles = 1, channel_tiles = 1, unit_channel_tiles = 1;
  FlatGeometry::Windows windows;
  int64_t chunk_channels = 16, chunks = 1;
  int64_t taps = 1, group_taps = 1;
  int64_t parts = 1;  // 16-bit numbers that make an operand
  int64_t x_stages = 0, weight_stages = 0;
  bool weights_stay = false;
  bool copies = false;  // x comes to shared memory by bulk copies
  int64_t raw_slots = 1, raw_pitch = 0, raw_slot_bytes = 16;
  bool held = false;
  bool stored = false;
  int64_t shared_bytes = 0;
  double clocks_of_tile = 0;  // of a multiprocessor, in all passes

  WgmmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
    double least = 0;
    for (const bool share : {false, true}) {
      for (int64_t most = most_columns; most >= 64; most -= 8) {
        WgmmaNumbers tried(problem, shape, gpu, share, most);
        if (tried.columns == 0) continue;
        const double clocks = tried.clocks_of_tile * static_cast<double>(tried.tiles()) /
                              static_cast<double>(tried.blocks_at_once(gpu));
        if (columns > 0 && clocks >= least) continue;
        *this = tried;
        least = clocks;
      }
    }
  }

  int64_t tiles() const { return position_tiles * channel_tiles; }
  int64_t unit_tiles() const { return position_tiles * unit_channel_tiles; }
  int64_t x_stage_bytes() const { return round_up(windows.all() * chunk_channels * 2 * parts, 128); }
  int64_t weight_stage_bytes() const { return group_taps * chunk_channels * tile_channels * 2 * parts; }
  int64_t weight_bytes() const {
    return channel_tiles * tile_channels * chunks * chunk_channels * taps * 2 * parts;
  }
  int64_t padded_channels() const { return channel_tiles * tile_channels; }
  int passes(const ThinShape& shape) const { return held ? 1 : shape.passes(); }

  // Multiprocessors that have a block: of held units whole ones.
  int64_t blocks_at_once(const Gpu& gpu) const {
    return held ? gpu.multiprocessors / unit_tiles() * unit_tiles() : gpu.multiprocessors;
  }

  // Of the whole GPU for all samples.
  double clocks(const ThinShape& shape, const Gpu& gpu) const {
    const int64_t all = shape.batch * tiles();
    return static_cast<double>(divide_up(all, blocks_at_once(gpu))) * clocks_of_tile;
  }

 private:
  WgmmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu, bool share, int64_t most)
      : groups_share_positions(share), taps(shape.taps) {
    const FlatGeometry flat(shape);
    parts = problem.input.dtype == DType::f32 && problem.precision != Precision::tf32 ? 2 : 1;
    // A second set of sums takes as many registers.
    if (parts == 2 && most > 128) return;
    tile_channels = share ? 128 : 64;
    if (share && shape.channels <= 64) return;
    const int64_t at_most = share ? most : 2 * most;
    position_tiles = divide_up(flat.positions, at_most);
    int64_t own = round_up(divide_up(divide_up(flat.positions, position_tiles), share ? 1 : 2), 8);
    if (own > 256) own = round_up(own, 16);  // two products
    tile_positions = share ? own : 2 * own;
    position_tiles = divide_up(flat.positions, tile_positions);
    channel_tiles = divide_up(shape.channels, tile_channels);
    const int64_t group_channels = shape.channels / shape.groups;
    unit_channel_tiles = shape.parts.norm && tile_channels % group_channels != 0 ? channel_tiles : 1;
    windows = flat.windows(shape, tile_positions);
    // Each thread of the staging warps keeps its positions' addresses in registers.
    constexpr int64_t most_rounds = 16;
    if (windows.all() > most_rounds * staging_threads) return;
    constexpr int64_t most_converting_rounds = 20;
    copies = lies_for_copies(problem) && !flat.has_stride(shape) &&
             windows.all() <= most_converting_rounds * converting_threads;
    // Loads keep more in registers than are left beside so many sums.
    if (!copies && own > 256) return;
    if (copies) {
      const int64_t vector = 16 / byte_size(problem.input.dtype);
      raw_pitch = round_up(windows.positions + 2 * (vector - 1), vector);
      raw_slot_bytes = round_up(8 * windows.count * raw_pitch * byte_size(problem.input.dtype), 128);
    }
    group_taps = 1;
    // Split operands: at most 64 terms in the tensor cores.
    for (int64_t divisor = 2; divisor <= (parts == 2 ? 4 : 9); ++divisor) {
      if (taps % divisor == 0 && divisor * tile_channels <= 9 * 64) group_taps = divisor;
    }
    const int64_t fixed = 2 * 64 * 16 + tile_channels * 8 + taps * 4 + 1024;
    const int64_t budget = gpu.shared_bytes_per_block - fixed;
    // Few taps make a chunk of 16 channels a short one: more channels at a time.
    const int64_t channels = round_up(shape.in_channels, 16);
    for (const int64_t wanted : {taps >= 4 ? 16 : 64, taps >= 4 ? 16 : 32, 16}) {
      chunk_channels = std::min<int64_t>(wanted, channels);
      if (parts == 2) chunk_channels = std::min(chunk_channels, 64 / group_taps / 16 * 16);
      chunks = divide_up(shape.in_channels, chunk_channels);
      if (set_stages(budget)) break;
    }
    if (x_stages < 2) return;
    // 4 barriers of 8 bytes at most for each stage.
    shared_bytes = x_stages * x_stage_bytes() + weight_stages * weight_stage_bytes() +
                   raw_slots * raw_slot_bytes + fixed;
    held = shape.parts.norm && !shape.parts.mean_follows_norm() && unit_tiles() <= gpu.multiprocessors &&
           parts_of_tile(shape) <= 16384;
    stored = !held && shape.passes() == 2 && !shape.parts.mean && problem.output.dtype == DType::f32;
    columns = own;
    clocks_of_tile = predict(problem, shape);
  }

  // What each tile of a held unit reads of the others.
  int64_t parts_of_tile(const ThinShape& shape) const {
    const int64_t group_channels = shape.channels / shape.groups;
    return divide_up(tile_channels, group_channels) * divide_up(group_channels, tile_channels) *
           position_tiles;
  }

  // Channels before space, each a whole number of 16 bytes.
  static bool lies_for_copies(const Problem& problem) {
    const TensorSpec dense = TensorSpec::dense(problem.input.dtype, problem.input.sizes);
    const int64_t vector = 16 / byte_size(problem.input.dtype);
    return problem.input.strides == dense.strides && dense.strides[1] % vector == 0;
  }

  // Two of everything; then x, which waits while a tile is finished, as much as a tile has; then the others.
  bool set_stages(int64_t budget) {
    const int64_t x = x_stage_bytes();
    const int64_t w = weight_stage_bytes();
    const int64_t raw = raw_slot_bytes;
    const int64_t all = chunks * (taps / group_taps);
    raw_slots = copies ? 2 : 1;
    weights_stay = channel_tiles == 1 && all * w + 2 * x + raw_slots * raw <= budget && all <= 64;
    weight_stages = weights_stay ? all : 2;
    int64_t left = budget - weight_stages * w - raw_slots * raw;
    x_stages = std::min(std::clamp<int64_t>(chunks, 2, 4), left / x);
    if (x_stages < 2) return false;
    left -= x_stages * x;
    if (!weights_stay) {
      const int64_t more = std::min<int64_t>(6, left / w);
      weight_stages += more;
      left -= more * w;
    }
    if (copies) {
      const int64_t more = std::min<int64_t>(4, left / raw);
      raw_slots += more;
      left -= more * raw;
    }
    x_stages += std::min<int64_t>(4, left / x);
    return true;
  }

  // Fitted to an H200: s19 takes 3.00 ms in tf32, of which its products and x alone 1.24, and 2.93 in bf16;
  // s61 0.737, 0.590 and 0.693; in f32 they take 8.7 and 2.2.
  double predict(const Problem& problem, const ThinShape& shape) const {
    const auto n = static_cast<double>(columns);
    // A product of 64 x n x 16 in clocks of the tensor cores, or as it reads shared memory at 128 bytes each.
    const double product = 1.5 * std::max(n / 2, 16 + n / 4);
    const int64_t steps = 2 * chunks * (chunk_channels / 16) * taps * (parts == 2 ? 3 : 1);
    const double products = static_cast<double>(steps) * product;
    // Elements of x and packed weights through L2: 15 bytes a clock by copies, x by loads at 7.
    const auto x_bytes =
        static_cast<double>(windows.all() * shape.in_channels * byte_size(problem.input.dtype));
    const int64_t tile_bytes = weight_bytes() / channel_tiles;
    const double staged =
        x_bytes / (copies ? 15 : 7) + (weights_stay ? 0.0 : static_cast<double>(tile_bytes) / 24);
    const double elements = n * 128;
    const double instructions =
        48 + 2 * (chain_instructions(shape.parts.before) + chain_instructions(shape.parts.after));
    const double computed = std::max(products, staged) + elements / 128 * instructions + (held ? 4000 : 1000);
    // Values through L2 between the passes: written, read and written again.
    return passes(shape) == 1 ? computed : stored ? computed + elements + 1000 : 2 * computed;
  }
};

// The product of a warpgroup, as a struct.
std::string product_source(int64_t columns, bool is_bf16) {
  // More columns than one instruction has: two, side by side.
  const int64_t products = columns > 256 ? 2 : 1;
  const int64_t sums = columns / 2 / products;
  std::ostringstream out;
  out << "struct Product {\n"
         "  static __device__ __forceinline__ void run(float (&d)["
      << columns / 2 << "], onepass::uint64 a, onepass::uint64 b, int add) {\n";
  for (int64_t product = 0; product < products; ++product) {
    out << "    asm volatile(\"{.reg .pred p; setp.ne.b32 p, %" << sums + 2
        << ", 0; wgmma.mma_async.sync.aligned.m64n" << columns / products << "k16.f32."
        << (is_bf16 ? "bf16.bf16" : "f16.f16") << " {";
    for (int64_t i = 0; i < sums; ++i) out << (i > 0 ? ", " : "") << '%' << i;
    out << "}, %" << sums << ", %" << sums + 1 << ", p, 1, 1, 0, 0;}\"\n        : ";
    for (int64_t i = 0; i < sums; ++i)
      out << (i > 0 ? ", " : "") << "\"+f\"(d[" << product * sums + i << "])";
    // A position is 16 bytes, the unit of a descriptor's address.
    out << "\n        : \"l\"(a), \"l\"(b + " << product * columns / products << "), \"r\"(add));\n";
  }
  out << "  }\n};\n";
  return out.str();
}

class GemmWgmma final : public Kernel {
 public:
  explicit GemmWgmma(const Problem& problem)
      : problem_(problem),
        shape_(problem),
        flat_(shape_),
        numbers_(problem, shape_, gpu_of(problem.device)),
        pack_(pack_source(), problem.device, {static_cast<uint32_t>(numbers_.padded_channels()), 256}),
        function_(source(), problem.device, launch_numbers()),
        redo_(problem) {
    const Number resident = function_.resident_clusters();
    const Number units = shape_.batch * (numbers_.channel_tiles / numbers_.unit_channel_tiles);
    // As many tiles as run at a time, or twice as many: pass 2 of a wave then finds pass 1 done.
    wave_units_ =
        clamp(divide_up((numbers_.stored ? 1 : 2) * resident, numbers_.unit_tiles()), 1, maximum(1, units))
            .called("wave_units");
    blocks_ = clamp(shape_.batch * numbers_.tiles() * numbers_.passes(shape_), 1, resident);
    // Held units begin together: as many as there is room for, whole.
    if (numbers_.held)
      blocks_ = minimum(units, divide(resident, numbers_.unit_tiles())) * numbers_.unit_tiles();
    const int64_t group_channels = shape_.channels / shape_.groups;
    const int64_t spans =
        numbers_.tile_channels % group_channels == 0 ? 1 : (group_channels - 1) / numbers_.tile_channels + 2;
    control_ = regions_.add(units * 4 * 4);
    marks_ = regions_.add((shape_.batch + 1) * 4);
    guard_ = regions_.add(shape_.batch * 4);
    scales_ = regions_.add((numbers_.padded_channels() + 1) * 4);
    cleared_bytes_ = regions_.total();
    packed_ = regions_.add(numbers_.weight_bytes());
    parts_ = regions_.add(when(shape_.parts.norm, shape_.slabs() * spans * numbers_.position_tiles * 16));
    sums_ = regions_.add(when(shape_.parts.mean, shape_.rows() * numbers_.position_tiles * 4));
    statistics_ = regions_.add(when(shape_.parts.norm, shape_.slabs() * 2 * 4));
  }

  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + redo_.workspace_bytes();
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "convolution: " << shape_.terms() << " terms, "
        << (!guards()             ? "operands as they are"
            : numbers_.parts == 2 ? "operands split in two of f16"
                                  : "operands rounded to f16, as to tf32")
        << '\n'
        << "tile: " << numbers_.tile_channels << " channels, " << numbers_.tile_positions << " positions, "
        << numbers_.tiles() << " tiles a sample of " << flat_.positions << " positions, "
        << numbers_.unit_tiles() << " a unit\n"
        << "window: " << numbers_.windows.count << " of " << numbers_.windows.positions << " positions, "
        << numbers_.x_stages << " stages of " << numbers_.chunk_channels << " channels"
        << (numbers_.copies ? ", " + std::to_string(numbers_.raw_slots) + " copies of 8 channels ahead" : "")
        << '\n'
        << "weights: " << (numbers_.weights_stay ? "all in shared memory, " : "") << numbers_.weight_stages
        << " stages of " << numbers_.group_taps << " taps\n"
        << "blocks: " << describe_blocks(blocks_, function_) << "passes: " << numbers_.passes(shape_)
        << (numbers_.held     ? ", values held in registers"
            : numbers_.stored ? ", values in the output between them"
                              : "")
        << '\n'
        << "then: thin_cores for samples that f16 has no room for\n"
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    clear(at(workspace, control_), cleared_bytes_, stream, problem_.device);
    Words pack;
    pack.add(arguments.parameters[0]);
    pack.add(at(workspace, packed_));
    pack.add(at(workspace, scales_));
    pack.add(at(workspace, marks_));
    pack.add(shape_.batch);
    pack.launch(pack_, stream, 0);
    Words words;
    words.add(arguments.input);
    words.add(arguments.output);
    words.add(arguments.statistics ? static_cast<void*>(arguments.statistics) : at(workspace, statistics_));
    words.add(at(workspace, control_));
    words.add(at(workspace, parts_));
    words.add(at(workspace, sums_));
    words.add(at(workspace, marks_));
    words.add(at(workspace, guard_));
    words.add(at(workspace, packed_));
    words.add(at(workspace, scales_));
    words.add(shape_.batch);
    words.add(wave_units_);
    words.add(arguments.parameters);
    words.launch(function_, stream, blocks_);
    redo_.launch_marked(arguments, at(workspace, Region{regions_.total(), 0}), at(workspace, marks_), stream);
  }

 private:
  bool guards() const { return problem_.input.dtype == DType::f32; }

  // `struct Numbers`.
  std::string numbers_source() const {
    const WgmmaNumbers& n = numbers_;
    const TailParts& parts = shape_.parts;
    const auto reads_tensors = [](const std::vector<TailParts::Stage>& stages) {
      return std::any_of(stages.begin(), stages.end(), [](const TailParts::Stage& stage) {
        return argument_kind(stage.pointwise.op) == ArgumentKind::tensor;
      });
    };
    std::ostringstream out;
    out << "struct Numbers {\n  using Operand = onepass::"
        << (problem_.input.dtype == DType::bf16 ? "bf16" : "f16") << ";\n  using Product = ::Product;\n"
        << "  static constexpr float steepness = " << std::showpoint << steepness(parts) << "f;\n"
        << Constants()
               .add("pitch", flat_.pitch)
               .add("plane", flat_.plane)
               .add("positions", flat_.positions)
               .add("window_split", n.windows.split)
               .add("window", n.windows.positions)
               .add("windows", n.windows.count)
               .add("tile_positions", n.tile_positions)
               .add("tile_channels", n.tile_channels)
               .add("columns", n.columns)
               .flag("groups_share_positions", n.groups_share_positions)
               .add("position_tiles", n.position_tiles)
               .add("channel_tiles", n.channel_tiles)
               .add("unit_channel_tiles", n.unit_channel_tiles)
               .add("padded_channels", n.padded_channels())
               .add("chunk_channels", n.chunk_channels)
               .add("chunks", n.chunks)
               .add("taps", n.taps)
               .add("group_taps", n.group_taps)
               .add("parts", n.parts)
               .add("x_stages", n.x_stages)
               .add("x_stage_bytes", n.x_stage_bytes())
               .add("weight_stages", n.weight_stages)
               .add("weight_stage_bytes", n.weight_stage_bytes())
               .flag("weights_stay", n.weights_stay)
               .flag("copies", n.copies)
               .add("raw_slots", n.raw_slots)
               .add("raw_pitch", n.raw_pitch)
               .add("raw_slot_bytes", n.raw_slot_bytes)
               .flag("held", n.held)
               .flag("stored", n.stored)
               .flag("guards", guards())
               .flag("before_reads_tensors", reads_tensors(parts.before))
               .flag("after_reads_tensors", reads_tensors(parts.after))
               .add("shared_bytes", n.shared_bytes)
               .text()
        << flat_.source() << "};\n";
    return out.str();
  }

  Source source() const {
    return {"onepass_gemm_wgmma",
            "#include \"gemm.cuh\"\n" + tail_source(problem_) + thin_source(problem_, shape_) +
                product_source(numbers_.columns, problem_.input.dtype == DType::bf16) + numbers_source() +
                "using Agent = onepass::Gemm<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(threads) +
                ", 1) onepass_gemm_wgmma(const __grid_constant__ Agent::Parameters p) {\n"
                "  extern __shared__ __align__(128) unsigned char shared[];\n"
                "  Agent{p, *reinterpret_cast<Agent::Shared*>(shared)}.run();\n"
                "}\n"};
  }

  Source pack_source() const {
    return {"onepass_gemm_pack",
            "#include \"gemm_pack.cuh\"\nstruct Product;\n" + tail_source(problem_) +
                thin_source(problem_, shape_) + numbers_source() +
                "extern \"C\" __global__ void __launch_bounds__(256)\n"
                "onepass_gemm_pack(const __grid_constant__ onepass::GemmPackParameters p) {\n"
                "  onepass::GemmPack<onepass::Convolution, Numbers>{p}.run();\n"
                "}\n"};
  }

  Launch launch_numbers() const {
    const bool waits = shape_.parts.norm && !shape_.parts.mean_follows_norm();
    return {1, static_cast<uint32_t>(threads), 1, static_cast<uint32_t>(numbers_.shared_bytes), waits};
  }

  Problem problem_;
  ThinShape shape_;
  FlatGeometry flat_;
  WgmmaNumbers numbers_;
  Function pack_;
  Function function_;
  ThinCores redo_;
  Number wave_units_ = 1;
  Number blocks_ = 1;
  Number cleared_bytes_;
  Regions regions_;
  Region control_, marks_, guard_, scales_, packed_, parts_, sums_, statistics_;
};

std::string refusal(const Problem& problem) {
  std::string reason = whole_block_refusal(problem);
  if (!reason.empty()) return reason;
  const Gpu& gpu = gpu_of(problem.device);
  if (gpu.architecture != "sm_90a") return "it needs wgmma, which sm_90a alone has";
  const Conv& conv = *problem.block.conv();
  if (std::min(conv.in_channels, conv.out_channels) < least_channels)
    return "fewer than " + std::to_string(least_channels) + " channels";
  if (conv.out_channels > most_channels_of_cores)
    return "more than " + std::to_string(most_channels_of_cores) + " output channels";
  for (size_t d = 0; d < static_cast<size_t>(conv.rank); ++d) {
    if (conv.transposed && conv.stride[d] != 1) return "the transposed convolution has a stride";
  }
  if (problem.parameters[0].dtype != problem.input.dtype) return "the weights are of another type than x";
  const ThinShape shape(problem);
  constexpr int64_t most = int64_t{1} << 30;  // positions, and elements of a sample of x: bytes are 32 bits
  if (FlatGeometry(shape).plane * (shape.axes[0].out + shape.axes[0].kernel) >= most ||
      problem.input.byte_span() / std::max<int64_t>(1, shape.batch.value()) >= 4 * most) {
    return "a sample of the input is too large";
  }
  if (WgmmaNumbers(problem, shape, gpu).columns == 0) return "the window of a tile is too large";
  return "";
}

double seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const WgmmaNumbers numbers(problem, shape, gpu);
  const double bytes =
      static_cast<double>(problem.output.byte_span()) + static_cast<double>(problem.input.byte_span());
  const double clock = gpu.flops / 256 / gpu.multiprocessors;
  // The clocks are those of the workloads they were fitted to (s19, s61); 20 layers of real models took 1.4
  // to 1.7 times as long, with packing and the launch that does samples again.
  constexpr double of_other_layers = 1.45;
  return 2e-5 + std::max(bytes / gpu.bytes_per_second, of_other_layers * numbers.clocks(shape, gpu) / clock);
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_wgmma{
    "gemm_wgmma", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::GemmWgmma>(problem);
    }};

}  // namespace onepass
