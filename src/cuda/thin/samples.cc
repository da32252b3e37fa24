// The row "thin_samples": a thin convolution whose block ends in a mean, on tensor cores, eight samples a
// product. Only sums leave the chip.
#include <algorithm>
#include <optional>
#include <sstream>

#include "cuda/notes.h"
#include "cuda/struct_bytes.h"
#include "cuda/thin/thin.h"

namespace onepass {
namespace cuda {
namespace {

constexpr int64_t samples = 8;

// f32 elements may not be halves: their samples are done again.
bool guards(const Problem& problem) { return problem.input.dtype == DType::f32; }

// How a unit of eight samples is cut into strips of output rows; nothing here depends on the batch.
struct SamplesNumbers {
  int64_t threads = 256;
  int64_t rows = 1;         // of the output in a strip
  int64_t columns = 2;      // that a warp computes at a time
  int64_t input_parts = 1;  // halves that make an element
  int64_t weight_parts = 1;
  int64_t planes = 1;  // of the ring: what one output meets
  int64_t window_rows = 1;
  int64_t window_columns = 1;
  int64_t plane_units = 1;  // of 16 bytes
  int64_t tiles = 1;
  int64_t slots = 1;
  int64_t shared_bytes = 0;

  SamplesNumbers(const Problem& problem, const ThinShape& shape) {
    const auto& [outer, middle, last] = shape.axes;
    const OperandParts parts(problem, shape);
    input_parts = parts.input;
    weight_parts = parts.weight;
    columns = input_parts == 2 || last.out == 1 ? 1 : 2;
    rows = strip_rows(middle.out);
    tiles = divide_up(middle.out, rows);
    slots = samples * shape.channels;
    planes = (outer.kernel - 1) * outer.delta + 1;
    window_rows = (rows - 1) * middle.step + (middle.kernel - 1) * middle.delta + 1;
    window_columns =
        (divide_up(last.out, columns) * columns - 1) * last.step + (last.kernel - 1) * last.delta + 1;
    // An odd multiple of 64 bytes: matrix rows of neighbouring planes lie in different banks.
    plane_units = divide_up(shape.in_channels * window_rows * window_columns, 8) * 8 + 4;
    const int64_t terms = shape.in_channels * outer.kernel * last.kernel;
    const int64_t row_tiles = divide_up(shape.channels, 16);
    const int64_t ring_bytes = 16 * input_parts * planes * plane_units;
    const int64_t scratch_bytes = 4 * 3 * warps() * slots;
    // sizeof(SamplesMainloop::Shared).
    shared_bytes =
        StructBytes()
            .add(ring_bytes, 16)                                                                 // x
            .add(16 * (terms % 16 == 0 ? 1 : window_rows * window_columns), 16)                  // zero
            .add(16 * row_tiles * divide_up(terms, 16) * middle.kernel * weight_parts * 32, 16)  // weight
            .add(4 * 2 * row_tiles * 16, 4)                                             // unscale, bias
            .add(row_tiles == 1 && scratch_bytes <= ring_bytes ? 4 : scratch_bytes, 4)  // own_scratch
            .add(4 * shape.in_channels * samples, 4)                                    // seen
            .total();
  }

  int64_t warps() const { return threads / 32; }

  // The fewest rows beyond the output, then the shortest strips: they balance best over multiprocessors.
  static int64_t strip_rows(int64_t out) {
    if (out <= 6) return out;
    int64_t best = 4;
    for (const int64_t rows : {5, 6}) {
      if (divide_up(out, rows) * rows < divide_up(out, best) * best) best = rows;
    }
    return best;
  }

  std::string source() const {
    return Constants()
        .add("threads", threads, "warps", warps(), "rows", rows, "columns", columns)
        .add("input_parts", input_parts, "weight_parts", weight_parts, "planes", planes)
        .add("window_rows", window_rows, "window_columns", window_columns, "plane_units", plane_units)
        .add("tiles", tiles, "slots", slots)
        .numbers();
  }
};

class ThinSamples final : public WholeBlockKernel {
 public:
  explicit ThinSamples(const Problem& problem)
      : WholeBlockKernel(problem),
        numbers_(problem, shape_),
        workspace_(shape_, samples, numbers_.tiles, guards(problem) ? shape_.in_channels + 1 : 0),
        function_(
            source(), problem.device,
            {1, static_cast<uint32_t>(numbers_.threads), 1, static_cast<uint32_t>(numbers_.shared_bytes)}) {
    const Number resident = function_.resident_clusters();
    const Number units = divide_up(shape_.batch, samples);
    wave_units_ = clamp(divide_up(2 * resident, numbers_.tiles), 1, maximum(1, units)).called("wave_units");
    blocks_ = clamp(units * numbers_.tiles * shape_.passes(), 1, resident);
    if (guards(problem)) redo_.emplace(problem);
  }

  // Weights of f32 are two halves, which have 22 bits.
  Accuracy accuracy() const override { return OperandParts(problem_, shape_).accuracy(); }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(workspace_.bytes().value()) + (redo_ ? redo_->workspace_bytes() : 0);
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "convolution: " << shape_.terms() << " terms, " << OperandParts(problem_, shape_).products()
        << " products of 16-bit parts\n"
        << "tile: " << samples << " samples, " << numbers_.rows << " rows, " << numbers_.tiles
        << " tiles a unit\n"
        << "blocks: " << describe_blocks(blocks_, function_) << "passes: " << shape_.passes() << '\n'
        << (redo_ ? "then: thin_cores for samples that f16 has no room for\n" : "")
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return parts_notes(problem_, shape_) + where(redo_.has_value(), note::redone);
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    void* marks = workspace_.marks(workspace);
    workspace_.clear(workspace, stream, problem_.device);
    ThinParameters p;
    workspace_.fill(p, arguments, workspace);
    p.only = marks;
    p.wave_units = wave_units_;
    p.launch(function_, stream, blocks_);
    if (redo_) redo_->launch_marked(arguments, at(workspace, Region{workspace_.bytes(), 0}), marks, stream);
  }

 private:
  Source source() const {
    return {"onepass_thin_samples",
            "#include \"thin/samples.cuh\"\n" + tail_source(problem_) + thin_source(problem_, shape_) +
                numbers_.source() +
                "using Mainloop = onepass::SamplesMainloop<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "using Agent = onepass::Thin<onepass::Convolution, onepass::Tail, Numbers, Mainloop>;\n"
                "static_assert(sizeof(Mainloop::Shared) == " +
                std::to_string(numbers_.shared_bytes) +
                ");\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(numbers_.threads) +
                ", 2) onepass_thin_samples(const __grid_constant__ Agent::Parameters p) {\n"
                "  extern __shared__ __align__(128) unsigned char bytes[];\n"
                "  auto& shared = *reinterpret_cast<Mainloop::Shared*>(bytes);\n"
                "  Mainloop::load_weights(p, shared);\n"
                "  Agent{p, shared.scratch(), Mainloop{shared}}.run();\n"
                "}\n"};
  }

  SamplesNumbers numbers_;
  ThinWorkspace workspace_;
  Function function_;
  std::optional<ThinCores> redo_;
  Number wave_units_ = 1;
  Number blocks_ = 1;
};

std::string refusal(const Problem& problem) {
  std::string reason = thin_refusal(problem);
  if (!reason.empty()) return reason;
  if (!problem.block.has_mean()) return "the block does not end in a mean";
  if (problem.block.conv()->transposed) return "the convolution is transposed";
  if (problem.parameters[0].dtype != problem.input.dtype) return "the weights are of another type than x";
  const ThinShape shape(problem);
  const SamplesNumbers numbers(problem, shape);
  const Gpu& gpu = gpu_of(problem.device);
  if (numbers.shared_bytes > gpu.shared_bytes_per_block) {
    return "a window and the weights take " + std::to_string(numbers.shared_bytes) +
           " bytes of shared memory";
  }
  return guards(problem) ? ThinCores::refusal(problem) : "";
}

double seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const SamplesNumbers numbers(problem, shape);
  const Gpu& gpu = gpu_of(problem.device);
  const auto& [outer, middle, last] = shape.axes;
  const auto up = [](int64_t a, int64_t b) { return static_cast<double>(divide_up(a, b) * b); };
  // Three products with one column at a time take as long as 4.5 of those with two.
  const double products = numbers.input_parts == 2 ? 4.5 : static_cast<double>(numbers.weight_parts);
  const double terms =
      up(shape.in_channels * outer.kernel * last.kernel, 16) * static_cast<double>(middle.kernel);
  const double outputs = up(shape.batch, samples) * up(shape.channels, 16) * static_cast<double>(outer.out) *
                         up(middle.out, numbers.rows) * up(last.out, numbers.columns);
  // H200, s27: 0.35 ms with one product, 0.46 with two, 0.70 with three. A product of 16 x 8 x 16 takes
  // a multiprocessor 1.5 clocks (2048 multiply-adds).
  const double rate = 10.2 * gpu.flops / 2;  // multiply-adds a second
  const double other = 1.1e-12;              // seconds an output
  // Few tiles leave multiprocessors idle: s27 takes 0.11 ms with 8 samples and with 32.
  const double tiles =
      static_cast<double>(divide_up(shape.batch.value(), samples) * divide_up(middle.out, numbers.rows) *
                          divide_up(shape.channels, 16));
  const double idle = std::max(1.0, 1.5 * gpu.multiprocessors / std::max(tiles, 1.0));
  const auto row_tiles = static_cast<double>(divide_up(shape.channels, 16));
  // Planes are staged anew for every 16 channels: 0.32 and 0.38 ms for 8 to 32 and 4 to 64 channels, kernel
  // 3, 128 samples of 16 x 32 x 32.
  const double units = static_cast<double>(shape.in_channels * numbers.window_rows * numbers.window_columns) *
                       static_cast<double>(outer.out) * tiles / row_tiles;
  const double staging = 4.5e-11 * units * (row_tiles - 1) * 66.9e12 / gpu.flops;
  return 1.5e-5 + shape.passes() *
                      (staging + outputs * idle * (terms * products / rate + other * 66.9e12 / gpu.flops));
}

}  // namespace
}  // namespace cuda

extern constexpr Strategy cuda_thin_samples =
    cuda::row_of<cuda::ThinSamples>("thin_samples", cuda::refusal, cuda::seconds);

}  // namespace onepass
