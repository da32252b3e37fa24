// The row "thin_cores": a thin convolution with all that follows it in one launch, on CUDA cores. Every
// problem the thin rows take, in exactly the arithmetic its precision names.
#include <algorithm>
#include <sstream>

#include "cuda/thin.h"

namespace onepass {
namespace cuda {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a sample is cut into tiles; nothing here depends on the batch.
struct CoresNumbers {
  int64_t threads = 256;
  int64_t channels_at_once = 16;
  int64_t tile_positions = 0;
  int64_t tiles_of_class = 1;
  int64_t tiles = 1;

  explicit CoresNumbers(const ThinShape& shape) {
    const int64_t positions = shape.class_positions();
    constexpr int64_t positions_of_thread = 4;
    threads = std::clamp<int64_t>(divide_up(positions, 32) * 32, 64, 256);
    tile_positions = threads * positions_of_thread;
    tiles_of_class = divide_up(positions, tile_positions);
    tiles = tiles_of_class * shape.classes();
    // Each channel has its values of the chains and of both passes in registers.
    const size_t operands =
        shape.parts.has_operands() ? shape.parts.before.size() + shape.parts.after.size() : 0;
    const int64_t most = operands > 2 ? 4 : operands > 0 || shape.passes() == 2 ? 8 : 16;
    channels_at_once = 4;
    while (channels_at_once < std::min(most, shape.channels)) channels_at_once *= 2;
  }

  int64_t warps() const { return threads / 32; }
  int64_t weight_floats(const ThinShape& shape) const {
    return divide_up(shape.channels, channels_at_once) * channels_at_once * shape.terms();
  }
  // Weights, biases and what sums over the block need.
  int64_t shared_bytes(const ThinShape& shape) const {
    return 4 * (weight_floats(shape) + divide_up(shape.channels, channels_at_once) * channels_at_once +
                3 * warps() * shape.channels);
  }

  std::string source() const {
    std::ostringstream out;
    out << "struct Numbers {\n";
    const auto constant = [&](const char* name, int64_t value) {
      out << "  static constexpr int " << name << " = " << value << ";\n";
    };
    constant("threads", threads);
    constant("warps", warps());
    constant("channels_at_once", channels_at_once);
    constant("tile_positions", tile_positions);
    constant("tiles_of_class", tiles_of_class);
    constant("tiles", tiles);
    out << "};\n";
    return out.str();
  }
};

class ThinCores final : public Kernel {
 public:
  explicit ThinCores(const Problem& problem)
      : problem_(problem),
        shape_(problem),
        numbers_(shape_),
        workspace_(shape_, numbers_.tiles),
        function_(source(), problem.device, launch_numbers()) {
    const int64_t resident = function_.resident_clusters();
    // Twice as many tiles as run at a time: pass 2 of a wave then finds pass 1 done.
    wave_samples_ =
        std::clamp<int64_t>(divide_up(2 * resident, numbers_.tiles), 1, std::max<int64_t>(1, shape_.batch));
    blocks_ = static_cast<uint32_t>(
        std::clamp<int64_t>(shape_.batch * numbers_.tiles * shape_.passes(), 1, resident));
  }

  size_t workspace_bytes() const override { return workspace_.bytes(); }

  std::string describe() const override {
    std::ostringstream out;
    out << "convolution: " << shape_.terms() << " terms, " << shape_.classes()
        << (shape_.classes() == 1 ? " class" : " classes") << ", "
        << (problem_.precision == Precision::tf32 ? "operands rounded to tf32" : "f32") << '\n'
        << "tile: " << numbers_.tile_positions << " positions, " << numbers_.channels_at_once
        << " channels a thread, " << numbers_.tiles << " tiles a sample\n"
        << "wave: " << wave_samples_ << " samples between the passes\n"
        << "blocks: " << describe_blocks(blocks_, function_) << "passes: " << shape_.passes() << '\n'
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    workspace_.launch(function_, blocks_, problem_, arguments, workspace, nullptr, wave_samples_, stream);
  }

 private:
  Source source() const {
    return {"onepass_thin_cores",
            "#include \"thin_cores.cuh\"\n" + tail_source(problem_) + thin_source(problem_, shape_) +
                numbers_.source() +
                "using Mainloop = onepass::CoresMainloop<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "using Agent = onepass::Thin<onepass::Convolution, onepass::Tail, Numbers, Mainloop>;\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(numbers_.threads) + ", " + std::to_string(512 / numbers_.threads) +
                ") onepass_thin_cores(const __grid_constant__ Agent::Parameters p) {\n"
                "  extern __shared__ float shared[];\n"
                "  Mainloop::load_weights(p, shared);\n"
                "  Agent{p, shared + Mainloop::shared_floats, Mainloop{shared}}.run();\n"
                "}\n"};
  }

  Launch launch_numbers() const {
    return {1, static_cast<uint32_t>(numbers_.threads), 1,
            static_cast<uint32_t>(numbers_.shared_bytes(shape_))};
  }

  Problem problem_;
  ThinShape shape_;
  CoresNumbers numbers_;
  ThinWorkspace workspace_;
  Function function_;
  int64_t wave_samples_ = 1;
  uint32_t blocks_ = 1;
};

std::string refusal(const Problem& problem) {
  std::string reason = thin_refusal(problem);
  if (!reason.empty()) return reason;
  const ThinShape shape(problem);
  const int64_t bytes = CoresNumbers(shape).shared_bytes(shape);
  if (bytes > gpu_of(problem.device).shared_bytes_per_block) {
    return "the weights take " + std::to_string(bytes) + " bytes of shared memory";
  }
  return "";
}

double seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const double bytes =
      static_cast<double>(problem.input.byte_span()) + static_cast<double>(problem.output.byte_span());
  // A quarter of the multiply-adds there could be: weights come from shared memory, four at a time.
  return 1e-5 +
         shape.passes() * (8 * static_cast<double>(problem.conv_multiply_adds()) / gpu.flops +
                           1e-12 * static_cast<double>(shape.rows() * shape.spatial)) +
         bytes / gpu.bytes_per_second;
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_thin_cores{
    "thin_cores", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::ThinCores>(problem);
    }};

}  // namespace onepass
