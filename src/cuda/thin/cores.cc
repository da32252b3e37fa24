// The row "thin_cores": a thin convolution with all stages after it in one launch, on CUDA cores. It takes
// every problem of the thin rows, in exactly the arithmetic of its precision.
#include <algorithm>
#include <sstream>

#include "cuda/notes.h"
#include "cuda/thin/thin.h"

namespace onepass {
namespace cuda {
namespace {

// How a sample is cut into tiles; nothing here depends on the batch.
struct CoresNumbers {
  int64_t threads = 256;
  int64_t channels_at_once = 16;
  int64_t tile_positions = 0;
  int64_t tiles_of_class = 1;
  int64_t tiles = 1;
  int64_t slots = 1;  // rows a tile has values of: its channels
  bool weights_in_shared = true;

  explicit CoresNumbers(const ThinShape& shape) {
    const int64_t positions = shape.class_positions();
    constexpr int64_t positions_of_thread = 4;
    threads = std::clamp<int64_t>(divide_up(positions, 32) * 32, 64, 256);
    tile_positions = threads * positions_of_thread;
    tiles_of_class = divide_up(positions, tile_positions);
    tiles = tiles_of_class * shape.classes();
    slots = shape.channels;
    // Each channel has its chain operands and the values of both passes in registers.
    const size_t operands =
        shape.parts.has_operands() ? shape.parts.before.size() + shape.parts.after.size() : 0;
    const int64_t most = operands > 2 ? 4 : operands > 0 || shape.passes() == 2 ? 8 : 16;
    channels_at_once = 4;
    while (channels_at_once < std::min(most, shape.channels)) channels_at_once *= 2;
    // Weights of a wide convolution, and weights that samples do not share, are read from memory.
    weights_in_shared = is_thin(shape) && shape.conv_groups == 1;
  }

  int64_t warps() const { return threads / 32; }
  int64_t weight_floats(const ThinShape& shape) const {
    return divide_up(shape.channels, channels_at_once) * channels_at_once * shape.terms();
  }
  // Weights, biases and scratch for sums over the block.
  int64_t shared_bytes(const ThinShape& shape) const {
    const int64_t biases = divide_up(shape.channels, channels_at_once) * channels_at_once;
    return 4 * ((weights_in_shared ? weight_floats(shape) + biases : 0) + 3 * warps() * shape.channels);
  }

  std::string source() const {
    return Constants()
        .add("threads", threads)
        .add("warps", warps())
        .add("channels_at_once", channels_at_once)
        .add("tile_positions", tile_positions)
        .add("tiles_of_class", tiles_of_class)
        .add("tiles", tiles)
        .add("slots", slots)
        .flag("weights_in_shared", weights_in_shared)
        .numbers();
  }
};

Source source(const Problem& problem, const ThinShape& shape, const CoresNumbers& numbers) {
  return {"onepass_thin_cores",
          "#include \"thin/cores.cuh\"\n" + tail_source(problem) + thin_source(problem, shape) +
              numbers.source() +
              "using Mainloop = onepass::CoresMainloop<onepass::Convolution, onepass::Tail, Numbers>;\n"
              "using Agent = onepass::Thin<onepass::Convolution, onepass::Tail, Numbers, Mainloop>;\n"
              "extern \"C\" __global__ void __launch_bounds__(" +
              std::to_string(numbers.threads) + ", " + std::to_string(512 / numbers.threads) +
              ") onepass_thin_cores(const __grid_constant__ Agent::Parameters p) {\n"
              "  extern __shared__ float shared[];\n" +
              wait_source() +
              "  if (!Agent::has_work(p)) return;\n"
              "  Agent::count_marked(p);\n"
              "  Mainloop::load_weights(p, shared);\n"
              "  Agent{p, shared + Mainloop::shared_floats, Mainloop{shared}}.run();\n"
              "}\n"};
}

}  // namespace

struct ThinCores::Parts {
  Problem problem;
  ThinShape shape;
  CoresNumbers numbers;
  ThinWorkspace workspace;
  Function function;
  Number wave_samples = 1;
  Number blocks = 1;

  explicit Parts(const Problem& given)
      : problem(given),
        shape(problem),
        numbers(shape),
        workspace(shape, 1, numbers.tiles, 0),
        function(source(problem, shape, numbers), problem.device,
                 {1, static_cast<uint32_t>(numbers.threads), 1,
                  static_cast<uint32_t>(numbers.shared_bytes(shape)), false, true}) {
    const Number resident = function.resident_clusters();
    // Twice as many tiles as run at a time: pass 2 of a wave finds pass 1 done.
    wave_samples =
        clamp(divide_up(2 * resident, numbers.tiles), 1, maximum(1, shape.batch)).called("wave_samples");
    blocks = clamp(shape.batch * numbers.tiles * shape.passes(), 1, resident);
  }
};

ThinCores::ThinCores(const Problem& problem) : parts_(std::make_unique<const Parts>(problem)) {}
ThinCores::~ThinCores() = default;

size_t ThinCores::workspace_bytes() const { return static_cast<size_t>(parts_->workspace.bytes().value()); }

std::string ThinCores::describe() const {
  const auto& [problem, shape, numbers, workspace, function, wave_samples, blocks] = *parts_;
  std::ostringstream out;
  out << "convolution: " << shape.terms() << " terms, " << shape.classes()
      << (shape.classes() == 1 ? " class" : " classes") << ", "
      << (problem.rounds_to_tf32() ? "operands rounded to tf32" : "f32") << '\n'
      << "tile: " << numbers.tile_positions << " positions, " << numbers.channels_at_once
      << " channels a thread, " << numbers.tiles << " tiles a sample\n"
      << "wave: " << wave_samples << " samples between the passes\n"
      << "blocks: " << describe_blocks(blocks, function) << "passes: " << shape.passes() << '\n'
      << "workspace: " << workspace_bytes() << " bytes\n";
  return out.str();
}

std::vector<std::string> ThinCores::numerics() const { return notes_of_rounding(parts_->problem); }

void ThinCores::launch(const Arguments& arguments, void* workspace, Stream stream) const {
  launch_marked(arguments, workspace, nullptr, stream);
}

void ThinCores::launch_marked(const Arguments& arguments, void* workspace, void* marks, Stream stream) const {
  if (parts_->shape.batch == 0) return;
  parts_->workspace.clear(workspace, stream, parts_->problem.device);
  launch_marked(arguments, workspace, marks, 1, stream);
}

void ThinCores::launch_marked(const Arguments& arguments, void* workspace, void* marks,
                              const Number& mark_words, Stream stream) const {
  if (parts_->shape.batch == 0) return;
  ThinParameters p;
  parts_->workspace.fill(p, arguments, workspace);
  p.only = marks;
  p.only_words = mark_words;
  p.wave_units = parts_->wave_samples;
  p.launch(parts_->function, stream, parts_->blocks);
}

const Number& ThinCores::bytes() const { return parts_->workspace.bytes(); }

void* ThinCores::control(void* workspace) const { return parts_->workspace.control(workspace); }

std::string ThinCores::refusal(const Problem& problem) {
  std::string reason = thin_refusal(problem);
  if (!reason.empty()) return reason;
  const ThinShape shape(problem);
  const int64_t bytes = CoresNumbers(shape).shared_bytes(shape);
  if (bytes > gpu_of(problem.device).shared_bytes_per_block) {
    return "the weights take " + std::to_string(bytes) + " bytes of shared memory";
  }
  return "";
}

double ThinCores::seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const double bytes =
      static_cast<double>(problem.input.byte_span()) + static_cast<double>(problem.output.byte_span());
  // H200: 3.92 ms for s27 (192 terms an output) and 2.85 for s60 (10 terms, twice).
  const auto outputs = static_cast<double>(shape.rows() * shape.spatial);
  // Serial work of a thread, for a position of every class, however few threads there are. One sample of s27
  // takes 0.09 ms, of s60 0.09, an image of 32 x 32 with 3 to 16 channels and kernel 3 0.045.
  const double cells = std::max(1.0, outputs / static_cast<double>(shape.channels * shape.classes()));
  const double serial = 2.4e-8 * static_cast<double>(problem.conv_multiply_adds()) / cells;
  // A thread waits for each load, or for four neighbouring taps at once: the longer, the more sectors a warp
  // meets. 64 inputs k2 s2 in channels last took 1412 us and 96 inputs k1 545, where 81 and 74 were predicted
  // without.
  const double apart =
      static_cast<double>(problem.input.strides.back() * shape.axes[2].step * byte_size(problem.input.dtype));
  const double wait = 3e-7 + 2e-8 * std::min(32.0, apart);
  const double loads = static_cast<double>(shape.terms()) /
                       static_cast<double>(std::clamp<int64_t>(shape.axes[2].classes[0].count, 1, 4));
  const double waves = std::max(1.0, cells / (2048 * static_cast<double>(gpu.multiprocessors)));
  const int64_t chunks = divide_up(shape.channels, CoresNumbers(shape).channels_at_once);
  const double waiting = wait * loads * waves * static_cast<double>(chunks);
  const double computing = serial + 6 * static_cast<double>(problem.conv_multiply_adds()) / gpu.flops +
                           4.1e-12 * outputs * 66.9e12 / gpu.flops;
  return shape.passes() * (1e-5 + std::max(computing, waiting)) + bytes / gpu.bytes_per_second;
}

}  // namespace cuda

extern constexpr Strategy cuda_thin_cores = cuda::row_of<cuda::ThinCores>("thin_cores");

}  // namespace onepass
