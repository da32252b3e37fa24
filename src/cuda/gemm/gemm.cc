// What strategies that compute a wide convolution as an implicit matrix product share.
#include "cuda/gemm/gemm.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "cuda/runtime/parameters.h"
#include "gemm/parameters.cuh"

namespace onepass::cuda {

FlatGeometry::FlatGeometry(const ThinShape& shape) {
  std::array<int64_t, max_spatial_rank> pitches{};
  for (size_t d = 0; d < max_spatial_rank; ++d) {
    const ThinAxis& axis = shape.axes[d];
    const int64_t out = axis.classes[0].positions;
    for (const ThinAxis::Class& own : axis.classes) {
      for (int64_t m = 0; m < own.count; ++m) {
        const int64_t place = own.base + m * axis.delta;
        const int64_t phase = (place % axis.step + axis.step) % axis.step;
        const int64_t offset = (place - phase) / axis.step;
        const bool is_first = phases[d].empty();
        low[d] = is_first ? offset : std::min(low[d], offset);
        high[d] = is_first ? offset : std::max(high[d], offset);
        if (std::find(phases[d].begin(), phases[d].end(), phase) == phases[d].end())
          phases[d].push_back(phase);
      }
    }
    std::sort(phases[d].begin(), phases[d].end());
    // What lies before a row is at the end of the one before, beyond its input: both are zeros there.
    const int64_t in = divide_up(axis.in, axis.step);
    pitches[d] = std::max({out, in - std::min<int64_t>(low[d], 0), out + high[d]});
  }
  pitch = pitches[2];
  plane = pitch * pitches[1];
  const auto last = [&](size_t d) { return shape.axes[d].classes[0].positions - 1; };
  positions = last(0) * plane + last(1) * pitch + last(2) + 1;
}

FlatGeometry::Windows FlatGeometry::windows(const ThinShape& shape, int64_t tile_positions) const {
  const auto reach = [&](size_t d) { return high[d] - low[d]; };
  const int64_t in_row = tile_positions + reach(2);
  const int64_t in_plane = in_row + reach(1) * pitch;
  Windows best{0, 1, in_plane + reach(0) * plane};
  if (has_stride(shape)) {
    for (const auto& own : phases) best.count *= std::ssize(own);
    return best;
  }
  const auto taps = [&](size_t d) { return shape.axes[d].classes[0].count; };
  const Windows planes{1, taps(0), in_plane};
  const Windows rows{2, taps(0) * taps(1), in_row};
  if (planes.all() < best.all()) best = planes;
  if (rows.all() < best.all()) best = rows;
  return best;
}

bool FlatGeometry::has_stride(const ThinShape& shape) const {
  return std::any_of(shape.axes.begin(), shape.axes.end(),
                     [](const ThinAxis& axis) { return axis.step > 1; });
}

std::vector<FlatGeometry::Box> FlatGeometry::boxes(const ThinShape& shape,
                                                   const std::function<bool(const Box&)>& fits) {
  constexpr int64_t most_planes = 16, least_columns = 8;
  const auto out = [&](size_t d) { return shape.axes[d].classes[0].positions; };
  std::vector<Box> found;
  for (int64_t z = 1; z <= std::min(out(0), most_planes); ++z) {
    int64_t before = 0;
    for (int64_t count = 1; count <= out(2); ++count) {
      const int64_t x = divide_up(out(2), count);
      if (x == before) continue;
      before = x;
      int64_t y = 0;
      while (y < out(1) && fits({z, y + 1, x})) ++y;
      if (y > 0 && x >= least_columns) found.push_back({z, divide_up(out(1), divide_up(out(1), y)), x});
    }
  }
  return found;
}

std::string FlatGeometry::source() const {
  std::string count = "  static constexpr __device__ int phases(int d) { return ";
  std::string values = "  static constexpr __device__ int phase(int d, int i) {\n    return ";
  for (size_t d = 0; d < phases.size(); ++d) {
    count += "d == " + std::to_string(d) + " ? " + std::to_string(phases[d].size()) + " : ";
    for (size_t i = 0; i < phases[d].size(); ++i) {
      values += "d == " + std::to_string(d) + " && i == " + std::to_string(i) + " ? " +
                std::to_string(phases[d][i]) + " : ";
    }
  }
  return count + "1; }\n" + values + "0;\n  }\n";
}

WeightPieces::WeightPieces(int64_t taps, DType weight) {
  constexpr int64_t most_bytes = 52 << 10;
  const auto bytes_of = [&](int64_t own) {
    return round_up(rows * ((16 * own * byte_size(weight) / 4) | 1) * 4, 8) + threads * 8;
  };
  while (bytes_of(divide_up(taps, parts)) > most_bytes) ++parts;
  part_taps = divide_up(taps, parts);
  parts = divide_up(taps, part_taps);
  bytes = bytes_of(part_taps);
}

bool classes_meet_alike(const ThinShape& shape) {
  return std::all_of(shape.axes.begin(), shape.axes.end(), [](const ThinAxis& axis) {
    return axis.classes[0].count > 0 &&
           std::all_of(axis.classes.begin(), axis.classes.end(), [&](const ThinAxis::Class& own) {
             return own.base == axis.classes[0].base && own.count == axis.classes[0].count &&
                    own.positions == axis.classes[0].positions;
           });
  });
}

namespace {

// How the kernel that goes over values in memory cuts them, for all groups of the convolution together.
struct FinishNumbers {
  int64_t threads = 256;
  int64_t width = 4;
  int64_t vectors = 4;  // of a thread at a time
  int64_t team = 1;     // threads of a row, interleaved: along channels
  int64_t pieces = 1;   // of a row, interleaved: of a sample
  int64_t piece_vectors = 0;
  int64_t piece_positions = 0;
  Number blocks = 1;
  bool planar = true;

  FinishNumbers(const Problem& problem, const ThinShape& shape, bool values_are_planar)
      : planar(values_are_planar) {
    if (planar) {
      cut_rows(shape);
    } else {
      const int64_t channels = problem.block.conv_output_shape(problem.input.sizes)[1];
      while (channels % width != 0) width /= 2;
      if (shape.parts.mean) {
        cut_channels(channels / width, shape.spatial);
      } else {
        cut_positions(channels, shape.spatial);
      }
      blocks = shape.samples * pieces;
    }
  }

  std::string source() const {
    return Constants()
        .flag("interleaved", !planar)
        .add("threads", threads, "width", width, "vectors", vectors, "team", team, "pieces", pieces,
             "piece_vectors", piece_vectors, "piece_positions", piece_positions)
        .numbers();
  }

 private:
  // Each thread a few vectors of a row; for a mean a warp has a short row, a block a long one.
  void cut_rows(const ThinShape& shape) {
    constexpr int64_t least_team = 4, most_elements_of_warp = 2048, many_positions = 16384;
    const int64_t row_vectors = shape.spatial / width;
    if (shape.parts.mean && shape.spatial >= many_positions) threads = 1024;  // there may be few rows
    team = least_team;
    while (team < threads && team * vectors < row_vectors) team *= 2;
    if (shape.parts.mean)
      team = shape.spatial > most_elements_of_warp ? threads : std::min<int64_t>(team, 32);
    piece_vectors = team * vectors;
    pieces = shape.parts.mean ? 1 : std::max<int64_t>(1, divide_up(row_vectors, piece_vectors));
    blocks = divide_up(shape.rows(), threads / team) * pieces;
  }

  void cut_positions(int64_t channels, int64_t spatial) {
    constexpr int64_t block_elements = 16384;
    const int64_t columns = channels / width;
    team = divide_up(columns, divide_up(columns, threads));
    const int64_t lanes = threads / team;
    threads = round_up(team * lanes, 32);
    piece_positions = round_up(std::max<int64_t>(1, block_elements / channels), lanes * vectors);
    pieces = divide_up(spatial, piece_positions);
  }

  // A block adds up all positions of some channels: those of a sector of memory where it has many.
  void cut_channels(int64_t columns, int64_t spatial) {
    constexpr int64_t many_positions = 4096, sector = 8;
    const bool are_many = spatial >= many_positions;
    if (are_many) threads = 512;
    team = (are_many ? sector : 4 * sector) / width;
    while (team > columns) team /= 2;
    pieces = divide_up(columns, team);
  }
};

Source finish_source(const Problem& problem, const FinishNumbers& numbers) {
  return agent_kernel("onepass_gemm_finish",
                      "#include \"gemm/store/finish.cuh\"\n" + whole_tail_source(problem) + numbers.source(),
                      "GemmFinish<onepass::Tail, Numbers>", std::to_string(numbers.threads), SharedAs::none);
}

Function finish_function(const Problem& problem, const FinishNumbers& numbers) {
  return {finish_source(problem, numbers), problem.device,
          Launch{maximum(1, numbers.blocks), static_cast<uint32_t>(numbers.threads)}};
}

}  // namespace

GemmFinish::GemmFinish(const Problem& problem, const ThinShape& shape, bool planar)
    : samples_(shape.samples), function_(finish_function(problem, FinishNumbers(problem, shape, planar))) {}

void GemmFinish::launch(const Arguments& arguments, const void* values, const void* statistics,
                        Stream stream) const {
  GemmFinishParameters p;
  p.values = values;
  p.output = arguments.output;
  p.statistics = statistics;
  p.batch = samples_;
  p.parameter = arguments.parameters;
  p.launch(function_, stream);
}

int64_t cut_terms(const Problem& problem, const ThinShape& shape) {
  // Statistics of shorter sums are as exact as those of f32 sums.
  constexpr int64_t most_exact_terms = 1024;
  return splits_operands(problem) || shape.terms() <= most_exact_terms ? 0 : shape.terms();
}

std::string describe_groups(const ThinShape& shape) {
  if (shape.conv_groups == 1) return "";
  return " in each of " + std::to_string(shape.conv_groups) + " groups, each a sample of its own";
}

namespace {

// A statement `d[...] += a b` of 16 terms (`d[...] = a b` unless `add`). The sums of its columns begin at
// d[first_sum], its columns `first` positions after b's.
std::string wgmma_statement(int64_t columns, bool is_bf16, int64_t first_sum, int64_t first) {
  const int64_t sums = columns / 2;
  std::ostringstream out;
  out << "    asm volatile(\"{.reg .pred p; setp.ne.b32 p, %" << sums + 2
      << ", 0; wgmma.mma_async.sync.aligned.m64n" << columns << "k16.f32."
      << (is_bf16 ? "bf16.bf16" : "f16.f16") << " {";
  for (int64_t i = 0; i < sums; ++i) out << (i > 0 ? ", " : "") << '%' << i;
  out << "}, %" << sums << ", %" << sums + 1 << ", p, 1, 1, 0, 0;}\"\n        : ";
  for (int64_t i = 0; i < sums; ++i) out << (i > 0 ? ", " : "") << "\"+f\"(d[" << first_sum + i << "])";
  // A position is 16 bytes, the unit of a descriptor's address.
  out << "\n        : \"l\"(a), \"l\"(b + " << first << "), \"r\"(add));\n";
  return out.str();
}

}  // namespace

std::string wgmma_source(int64_t columns, bool is_bf16) {
  constexpr int64_t most = 256;
  const int64_t products = columns > most ? 2 : 1;
  std::ostringstream out;
  out << "struct Product {\n"
         "  static __device__ __forceinline__ void run(float (&d)["
      << columns / 2 << "], onepass::uint64 a, onepass::uint64 b, int add) {\n";
  for (int64_t i = 0; i < products; ++i)
    out << wgmma_statement(columns / products, is_bf16, i * columns / products / 2, i * columns / products);
  out << "  }\n};\n";
  return out.str();
}

double gemm_chain_instructions(const std::vector<TailParts::Stage>& stages, int bits) {
  struct Row {
    Op op;
    double instructions;
    double in_16_bits;  // device/pointwise.cuh
  };
  static constexpr Row costly[] = {{Op::gelu, 17, 10}, {Op::gelu_tanh, 30, 18}, {Op::tanh, 30, 14},
                                   {Op::mish, 30, 11}, {Op::softplus, 30, 13},  {Op::elu, 30, 12},
                                   {Op::swish, 6, 5},  {Op::sigmoid, 6, 4},     {Op::residual_add, 6, 6}};
  double count = 0;
  for (const TailParts::Stage& stage : stages) {
    const auto* const row = std::find_if(std::begin(costly), std::end(costly),
                                         [&](const Row& known) { return known.op == stage.pointwise.op; });
    count += row == std::end(costly) ? 2 : bits == 16 ? row->in_16_bits : row->instructions;
  }
  return count;
}

double scattered_seconds(const Problem& problem, const ThinShape& shape) {
  if (shape.classes() == 1 || shape.parts.mean || problem.output.strides[1] != 1) return 0;
  const auto sectors = static_cast<double>(shape.rows() * shape.spatial) *
                       static_cast<double>(std::min<int64_t>(8, shape.classes())) / 8;
  constexpr double part_of_rate = 0.45;  // written in parts of sectors
  return 32 * sectors / (part_of_rate * gpu_of(problem.device).bytes_per_second);
}

namespace {

const char* where_channels_are(const Conv& conv) { return conv.groups == 1 ? "" : " in a group"; }

}  // namespace

std::string product_refusal(const Problem& problem) {
  std::string reason = whole_block_refusal(problem);
  if (!reason.empty()) return reason;
  const Conv& conv = *problem.block.conv();
  if (conv.out_channels / conv.groups > most_channels_of_cores)
    return "more than " + std::to_string(most_channels_of_cores) + " output channels" +
           where_channels_are(conv);
  if (problem.parameters[0].dtype != problem.input.dtype) return "the weights are of another type than x";
  return "";
}

std::string wide_refusal(const Problem& problem) {
  std::string reason = whole_block_refusal(problem);
  if (!reason.empty()) return reason;
  const Conv& conv = *problem.block.conv();
  if (std::min(conv.in_channels, conv.out_channels) / conv.groups < least_wide_channels)
    return "fewer than " + std::to_string(least_wide_channels) + " channels" + where_channels_are(conv);
  return product_refusal(problem);
}

std::string wgmma_refusal(const Problem& problem) {
  std::string reason = wide_refusal(problem);
  if (!reason.empty()) return reason;
  return gpu_of(problem.device).architecture == "sm_90a" ? "" : "it needs wgmma, which sm_90a alone has";
}

std::string wide_numbers_source(const Problem& problem, const TailParts& parts, const std::string& product,
                                const std::string& members) {
  std::ostringstream out;
  out << "struct Numbers {\n  using Operand = onepass::"
      << (problem.input.dtype == DType::bf16 ? "bf16" : "f16") << ";\n  using Product = " << product
      << ";\n  static constexpr float steepness = " << std::showpoint << steepness(parts) << "f;\n"
      << members << "};\n";
  return out.str();
}

bool reads_tensors(const std::vector<TailParts::Stage>& stages) {
  return std::any_of(stages.begin(), stages.end(), [](const TailParts::Stage& stage) {
    return argument_kind(stage.pointwise.op) == ArgumentKind::tensor;
  });
}

bool lies_planar(const TensorSpec& spec) {
  return spec.strides == TensorSpec::dense(spec.dtype, spec.sizes).strides;
}

bool lies_dense(const TensorSpec& spec) {
  return lies_planar(spec) || spec.strides == TensorSpec::dense(spec.dtype, spec.sizes, Layout::nhwc).strides;
}

}  // namespace onepass::cuda
