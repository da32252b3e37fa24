// The search of tiles for products by mma.sync, the kernel's source, and the cost of a launch.
#include "cuda/notes.h"
#include "cuda/thin/mma.h"

#include <algorithm>
#include <optional>

namespace onepass::cuda {
namespace {

// The lowest and the highest offset of an axis.
struct Offsets {
  int64_t low = 0, high = 0;

  explicit Offsets(const ThinAxis& axis) {
    std::optional<int64_t> least, most;
    for (const ThinAxis::Class& own : axis.classes) {
      for (int64_t m = 0; m < own.count; ++m) {
        const int64_t offset = own.base + m * axis.delta;
        least = std::min(least.value_or(offset), offset);
        most = std::max(most.value_or(offset), offset);
      }
    }
    low = least.value_or(0);
    high = most.value_or(0);
  }
  int64_t reach() const { return high - low; }
};

// Products of the classes of one class of z: pairs of groups of four terms (thin/mma/terms.cuh).
int64_t product_count(const ThinShape& shape, const ThinAxis::Class& z) {
  const int64_t taps_at_once = shape.in_channels == 1 && shape.taps <= 64 ? 4
                               : shape.in_channels == 2                   ? 2
                                                                          : 1;
  int64_t count = 0;
  for (const ThinAxis::Class& y : shape.axes[1].classes) {
    for (const ThinAxis::Class& x : shape.axes[2].classes) {
      const int64_t groups =
          divide_up(z.count * y.count * x.count, taps_at_once) * divide_up(shape.in_channels, 4);
      count += divide_up(groups, 2);
    }
  }
  return count;
}

bool is_16_bits(DType type) { return type == DType::f16 || type == DType::bf16; }

// Whether all rows of the input begin where a vector of 16 bytes does, if the first one does.
bool rows_are_vectors(const TensorSpec& input) {
  const int64_t width = 16 / byte_size(input.dtype);
  for (size_t d = 0; d + 1 < input.sizes.size(); ++d) {
    if (input.strides[d] % width != 0) return false;
  }
  return input.strides.back() == 1;
}

double chain_instructions(const std::vector<TailParts::Stage>& stages) {
  double count = 0;
  for (const TailParts::Stage& stage : stages) {
    switch (stage.pointwise.op) {
      case Op::gelu:
      case Op::gelu_tanh:
      case Op::tanh:
      case Op::mish:
      case Op::softplus:
      case Op::elu:
        count += 20;
        break;
      case Op::swish:
      case Op::sigmoid:
        count += 6;
        break;
      default:
        count += 2;
    }
  }
  return count;
}

bool is_planar(const TensorSpec& tensor) { return is_dense(tensor, Layout::nchw); }

}  // namespace

bool is_dense(const TensorSpec& tensor, Layout layout) {
  return tensor.strides == TensorSpec::dense(tensor.dtype, tensor.sizes, layout).strides;
}

MmaNumbers::MmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu, Hold hold)
    : computes_once(hold == Hold::in_output) {
  if (computes_once) {
    // Values of all warps that are not yet normalised should fit the second-level cache. Tiles of less than
    // 64 cells gain nothing (H200).
    constexpr int64_t warps_of_multiprocessor = 16;
    const int64_t of_warp = gpu.l2_bytes / 4 / (warps_of_multiprocessor * gpu.multiprocessors);
    most_tile_cells = std::max<int64_t>(of_warp / (shape.channels * shape.classes() * 4), 64);
  }
  splits = !problem.rounds_to_tf32() &&
           !(is_16_bits(problem.input.dtype) && is_16_bits(problem.parameters[0].dtype));
  vectors = rows_are_vectors(problem.input);
  is_short = is_16_bits(problem.input.dtype);
  int64_t most_of_plane = 0;
  for (const ThinAxis::Class& z : shape.axes[0].classes) {
    products += product_count(shape, z);
    most_of_plane = std::max(most_of_plane, product_count(shape, z));
  }
  row_tiles = divide_up(shape.channels, 16);
  // Other values take about 70 of a thread's 128 registers, more with two spans of several classes.
  const int64_t most_registers = shape.classes() > 1 ? 32 : 56;
  weights_in_registers = products * 4 <= most_registers;
  // Several rows at a time: a row of x serves several rows of outputs, and a weight serves all of them.
  const int64_t classes_x = std::ssize(shape.axes[2].classes);
  constexpr int64_t most_products = 128;  // written out one after the other
  const int64_t bytes = computes_once ? 4 : byte_size(problem.output.dtype);
  // The lanes of a quad have 8 neighbouring cells: whole sectors of 32 bytes where rows are whole sectors.
  const bool rows_are_sectors = shape.axes[2].out * bytes % 32 == 0;
  interleaved = !is_planar(problem.output);
  if (interleaved) {
    piece = shape.channels > 8 && shape.channels % 2 == 0 ? 2 : 1;
  } else if (8 * classes_x * bytes % 32 == 0 && classes_x <= 2 && (rows_are_sectors || computes_once)) {
    piece = 2 * classes_x;
    if (!rows_are_sectors) kept_pitch = round_up(shape.axes[2].out, 8 * classes_x);
  }
  // One vector longer than the elements (thin/hold/in_output.cuh: values_of).
  kept_length = round_up(
      shape.channels * (kept_pitch > 0 ? shape.spatial / shape.axes[2].out * kept_pitch : shape.spatial) + 8,
      64);
  const bool is_direct = piece > 0;
  if (shape.classes() == 1) {
    spans_y =
        std::clamp<int64_t>(most_products / std::max<int64_t>(products, 1), 1, splits || !is_direct ? 2 : 4);
    while (spans_y > 1 && (spans_y > shape.axes[1].out || spans_y == 3)) --spans_y;
  }
  // Two spans where their sums fit registers: weights from shared memory serve both, and long instructions of
  // one overlap with the other.
  if (spans_y == 1 && (!weights_in_registers || shape.classes() > 1) && classes_x <= 2) spans_x = 2;
  const std::vector<TailParts::Stage>& before = shape.parts.before;
  swish_alone = before.size() == 1 && before[0].pointwise.op == Op::swish;
  begins_with_swish = !before.empty() && before[0].pointwise.op == Op::swish;
  strict = problem.numerics == Numerics::strict;
  pairs = begins_with_swish || (!before.empty() && before[0].pointwise.op == Op::sigmoid);
  // One span where most weights are held in registers (thin/mma/weights.cuh: Held) and two spans with their
  // stores would exceed the instruction cache.
  constexpr int64_t most_held = 10;
  constexpr double most_instructions = 550;
  holds_weights = spans_x == 2 && shape.classes() > 1 && !is_direct && most_of_plane <= most_held &&
                  2 * output_instructions(shape) > most_instructions;
  if (holds_weights) spans_x = 1;
  // Two blocks a multiprocessor where shared memory suffices. Large weights are shared by more warps.
  constexpr int64_t large_weights = 4 << 10;
  const auto fits = [&](int64_t threads_of_block, int64_t blocks) {
    threads = threads_of_block;
    cut(shape, bytes,
        std::min(gpu.shared_bytes_per_block, gpu.shared_bytes_per_multiprocessor / blocks - 1024));
    return tile_x > 0;
  };
  if (weight_bytes() > large_weights ? fits(512, 1) : fits(256, 2)) return;
  if (fits(256, 1)) return;
  spans_x = spans_y = 1;
  fits(256, 1);
}

int64_t MmaNumbers::window_bytes(const ThinShape& shape) const {
  const int64_t raw = is_short && vectors ? shape.in_channels * window_z * window_y * row_pitch * 2 : 16;
  return shape.in_channels * plane * 4 * (prefetches && !is_short ? 2 : 1) +
         (prefetches ? round_up(raw, 16) : 16);
}

int64_t MmaNumbers::weight_bytes() const {
  const int64_t parts = (weights_in_registers && row_tiles == 1 ? 0 : 1) + (splits ? 1 : 0);
  return std::max<int64_t>(1, parts * products * row_tiles) * 32 * 16;
}

std::string MmaNumbers::source(const std::string& more) const {
  const Constants constants = Constants()
                                  .add("threads", threads)
                                  .add("warps", warps())
                                  .add("spans_y", spans_y)
                                  .add("spans_x", spans_x)
                                  .add("tile_y", tile_y)
                                  .add("tile_x", tile_x)
                                  .add("tiles_y", tiles_y)
                                  .add("tiles_x", tiles_x)
                                  .add("tiles", tiles)
                                  .add("row_tiles", row_tiles)
                                  .add("piece", piece)
                                  .flag("interleaved", interleaved)
                                  .flag("overlaps", overlaps)
                                  .flag("prefetches", prefetches)
                                  .add("stage_y", stage_y)
                                  .add("chunk_pitch", chunk_pitch)
                                  .add("channel_pitch", channel_pitch)
                                  .add("stage_bytes", stage_bytes)
                                  .add("shared_bytes", shared_bytes)
                                  .add("window_z", window_z)
                                  .add("window_y", window_y)
                                  .add("window_x", window_x)
                                  .add("lead", lead)
                                  .add("row_pitch", row_pitch)
                                  .add("plane", plane)
                                  .flag("rows_are_vectors", vectors)
                                  .flag("weights_in_registers", weights_in_registers)
                                  .flag("splits", splits)
                                  .flag("pairs", pairs)
                                  .flag("begins_with_swish", begins_with_swish)
                                  .flag("swish_alone", swish_alone)
                                  .flag("strict", strict);
  const std::string rest = pairs ? "  using Rest = onepass::BeforeRest;\n" : "";
  return "struct Numbers {\n" + rest + constants.text() + more + "};\n";
}

std::string MmaNumbers::describe_convolution(const Problem& problem, const ThinShape& shape) const {
  std::string text = "convolution: " + std::to_string(shape.terms()) + " terms, " + std::to_string(products) +
                     " products of " + std::to_string(shape.classes()) +
                     (shape.classes() == 1 ? " class, " : " classes, ");
  if (splits) return text + "operands split in two";
  return text + (problem.rounds_to_tf32() ? "operands rounded to tf32" : "operands as they are");
}

std::vector<std::string> MmaNumbers::notes(const Problem& problem) const {
  return notes_of_rounding(problem) +
         where(begins_with_swish && !strict && byte_size(problem.output.dtype) == 2, note::approximate_swish);
}

double MmaNumbers::before_instructions(const ThinShape& shape) const {
  return begins_with_swish && is_short && !computes_once ? 3 : chain_instructions(shape.parts.before);
}

double MmaNumbers::span_outputs(const ThinShape& shape) {
  return static_cast<double>(shape.classes() * (shape.channels > 8 ? 4 : 2));
}

double MmaNumbers::output_instructions(const ThinShape& shape) const {
  return span_outputs(shape) *
         (before_instructions(shape) + chain_instructions(shape.parts.after) + (is_short ? 4 : 3));
}

double MmaNumbers::span_instructions(const ThinShape& shape) const {
  const auto number = [](int64_t n) { return static_cast<double>(n); };
  // Besides the product itself: its columns, some shared between rows, and its weights.
  const double rows = number(spans_y), taps_y = number(Offsets(shape.axes[1]).reach() + 1);
  const double loads = shape.classes() > 1 ? 1 : 2 * (rows + taps_y - 1) / (rows * taps_y);
  const double weights = (weights_in_registers ? 0 : 1) + (splits ? 1 : 0);
  // A vector of weights occupies shared memory for several instructions. (Held weights of one span count as
  // those of two.)
  const double of_product = (splits ? 3 : 1) + loads * (splits ? 4 : 1) +
                            8 * weights / number(spans_y * (holds_weights ? 2 : spans_x));
  return number(products) * of_product + 12 / number(spans_y * spans_x);
}

double MmaNumbers::window_instructions(const ThinShape& shape) const {
  return static_cast<double>(shape.in_channels * window_z * window_y * row_pitch) * (vectors ? 5 : 9) / 32;
}

double MmaNumbers::tile_instructions(const ThinShape& shape) const {
  const auto number = [](int64_t n) { return static_cast<double>(n); };
  const double of_span = span_outputs(shape);
  const double before = before_instructions(shape);
  const double after = chain_instructions(shape.parts.after);
  const double convolution = span_instructions(shape);
  const double spans = number(tile_y * tile_x) / 8;
  const double stages = number(tile_y / stage_y * std::ssize(shape.axes[0].classes));
  const bool whole = tiles_x == 1;
  const double chunks = whole ? 1 : number(stage_y * std::ssize(shape.axes[1].classes));
  // Partial sectors for every piece of a row: the second-level cache is slow with them.
  const bool has_parts = !whole && !overlaps && shape.axes[2].out % 8 != 0;
  const double stored = piece > 0 ? 0 : stages * (60 + chunks * (whole ? 100 : has_parts ? 240 : 140));
  const int64_t more_columns =
      divide_up(is_short && !computes_once ? 16 : 8, 8 * spans_x * std::ssize(shape.axes[2].classes));
  const double more =
      !overlaps ? 0
                : number(more_columns * spans_x) *
                      (whole ? number(spans_y) / number(std::ssize(shape.axes[1].classes)) : number(tile_y));
  const double second = (spans + more) * (convolution + of_span * (before + after + 3)) + stored;
  const double first = spans * (convolution + of_span * (before + 3));
  const double window = window_instructions(shape);
  // While a warp waits for its window, others have most of the issue slots.
  const double waiting = prefetches ? 0 : 500;
  if (computes_once) {
    const double kept = (spans + more) * (convolution + of_span * (before + 4)) + stored;
    return 450 + window + number(row_tiles) * (kept + 60) + number(tile_outputs(shape)) / 32 * (after + 3);
  }
  return number(shape.passes()) * (350 + window + waiting) +
         number(row_tiles) * (second + (shape.passes() > 1 ? first : 0) + 60);
}

void MmaNumbers::lay_window(const ThinShape& shape, int64_t rows, int64_t cells_x) {
  const Offsets of_x(shape.axes[2]);
  const int64_t input_width = is_short ? 8 : 4;
  window_z = Offsets(shape.axes[0]).reach() + 1;
  window_y = (rows - 1) * shape.axes[1].step + Offsets(shape.axes[1]).reach() + 1;
  window_x = (cells_x - 1) * shape.axes[2].step + of_x.reach() + 1;
  lead = (of_x.low % input_width + input_width) % input_width;
  row_pitch = round_up(lead + window_x, input_width);
  lay_planes(shape);
}

void MmaNumbers::lay_planes(const ThinShape& shape) {
  // Eight cells of four channels are then in 32 different banks.
  plane = round_up(window_z * window_y * row_pitch, 8);
  while (shape.in_channels > 1 && plane % 16 != 8) plane += 8;
}

int64_t MmaNumbers::tile_outputs(const ThinShape& shape) const {
  return tile_y * tile_x * shape.classes() * shape.channels;
}

void MmaNumbers::cut(const ThinShape& shape, int64_t bytes, int64_t budget) {
  MmaNumbers best = *this;
  double least = 0;
  const int64_t cells = divide_up(shape.axes[2].out, std::ssize(shape.axes[2].classes));
  const int64_t item_x = 8 * spans_x;
  int64_t last = 0;
  for (int64_t parts = 1; parts <= divide_up(cells, item_x); ++parts) {
    const int64_t candidate = round_up(divide_up(cells, parts), item_x);
    if (candidate == last) continue;
    last = candidate;
    for (int choice = 0; choice < 8; ++choice) {
      prefetches = choice % 2 == 1;
      // With values computed once, pass 2 runs while the next window arrives.
      if (prefetches && computes_once) continue;
      if (!cut_rows(shape, bytes, budget, candidate, choice / 2 % 2 == 1, choice / 4 == 0)) continue;
      // Work beyond the row's end counts.
      const double cost = tile_instructions(shape) * static_cast<double>(tiles);
      if (best.tile_x > 0 && cost >= least) continue;
      best = *this;
      least = cost;
    }
  }
  *this = best;
}

bool MmaNumbers::cut_rows(const ThinShape& shape, int64_t bytes, int64_t budget, int64_t cells_x,
                          bool several, bool overlapping) {
  const int64_t moment_bytes = row_tiles * 16 * 3 * 4;
  const int64_t share = (budget - weight_bytes() - 16) / warps() / 16 * 16 - moment_bytes;
  const auto classes = [&](size_t d) { return std::ssize(shape.axes[d].classes); };
  const auto cells = [&](size_t d) { return divide_up(shape.axes[d].out, classes(d)); };
  const int64_t width = 16 / bytes;
  const int64_t spatial = shape.axes[0].out * shape.axes[1].out * shape.axes[2].out;
  const auto fits = [&](int64_t rows, int64_t rows_of_stage) {
    const bool whole = cells_x >= cells(2);
    const int64_t sector = 32 / bytes;
    // Where tiles end within sectors and the next tile has the rest of the sector.
    const int64_t last = shape.axes[2].out - (divide_up(cells(2), cells_x) - 1) * cells_x * classes(2);
    // Which tile stores an element must not depend on the sample: tiles may compute it in different ways.
    const bool samples_are_sectors = shape.channels * spatial % sector == 0;
    overlaps = piece == 0 && shape.axes[2].out % sector != 0 && samples_are_sectors &&
               (whole ? rows < cells(1) && shape.axes[2].out >= sector : overlapping && last >= sector);
    const int64_t more_x = overlaps && !whole ? round_up(divide_up(sector, classes(2)), 8 * spans_x) : 0;
    const int64_t chunk = whole ? rows_of_stage * classes(1) * shape.axes[2].out + (overlaps ? sector - 1 : 0)
                                : (cells_x + more_x) * classes(2);
    chunk_pitch = width + round_up(chunk + width - 1, width);
    // An odd number of vectors from channel to channel: with the four neighbours of a quad, and phases that
    // differ from channel to channel, no two lanes of a store meet in a bank.
    channel_pitch = chunk_pitch * (whole ? 1 : rows_of_stage * classes(1));
    if (channel_pitch % (2 * width) == 0) channel_pitch += width;
    stage_bytes = piece > 0 ? 16 : std::min<int64_t>(shape.channels, 16) * channel_pitch * bytes;
    lay_window(shape, rows, cells_x + more_x);
    if (overlaps && whole) {
      const ThinAxis::Class& first = shape.axes[1].classes[0];
      const int64_t highest = std::max(first.base, first.base + (first.count - 1) * shape.axes[1].delta);
      const int64_t next =
          (rows + spans_y - 1) * shape.axes[1].step + highest - Offsets(shape.axes[1]).low + 1;
      if (first.count > 0 && next > window_y) {
        window_y = next;
        lay_planes(shape);
      }
    }
    // A 16-bit window arrives there too.
    if (is_short && vectors && !prefetches)
      stage_bytes =
          std::max(stage_bytes, round_up(shape.in_channels * window_z * window_y * row_pitch * 2, 16));
    shared_bytes = weight_bytes() + warps() * (stage_bytes + window_bytes(shape) + moment_bytes) + 16;
    return stage_bytes + window_bytes(shape) <= share;
  };
  const int64_t all_cells = cells(0) * cells(1) * cells(2);
  const int64_t most_cells = std::min(std::max<int64_t>(all_cells / 112, 64), most_tile_cells);
  stage_y = spans_y;
  if (!fits(stage_y, stage_y) || (cells_x > 8 * spans_x && stage_y * cells_x > most_cells)) return false;
  tile_x = cells_x;
  tiles_x = divide_up(cells(2), tile_x);
  // Where whole rows are short, a vector for every lane at a time. Then as many rows as the window allows,
  // but enough tiles for all warps of a GPU with few samples.
  const auto takes = [&](int64_t rows) {
    return rows <= round_up(cells(1), spans_y) && rows * shape.axes[2].out * classes(1) <= 32 * width &&
           fits(rows, rows);
  };
  while (several && piece == 0 && tiles_x == 1 && shape.axes[2].out >= width && takes(stage_y + spans_y))
    stage_y += spans_y;
  int64_t stages = 1;
  while (stages * stage_y < cells(1) && (stages + 1) * stage_y * tile_x <= most_cells &&
         fits((stages + 1) * stage_y, stage_y)) {
    ++stages;
  }
  tiles_y = divide_up(cells(1), stages * stage_y);
  tile_y = round_up(divide_up(cells(1), tiles_y), stage_y);
  tiles_y = divide_up(cells(1), tile_y);
  tiles = cells(0) * tiles_y * tiles_x;
  return fits(tile_y, stage_y);
}

std::string MmaNumbers::rest_source(const Problem& problem, const ThinShape& shape) const {
  if (!pairs) return "";
  const std::vector<TailParts::Stage>& before = shape.parts.before;
  return chain_source("BeforeRest", {before.begin() + 1, before.end()}, problem);
}

Source mma_source(Hold hold, const Problem& problem, const ThinShape& shape, const MmaNumbers& numbers,
                  const std::string& tail, const std::string& more, int64_t blocks) {
  struct Names {
    const char *kernel, *header, *type;
  };
  const Names names = hold == Hold::recompute ? Names{"onepass_thin_mma", "recompute", "HoldByRecomputing"}
                      : hold == Hold::in_output
                          ? Names{"onepass_thin_inplace", "in_output", "HoldInOutput"}
                          : Names{"onepass_thin_resident", "in_cluster", "HoldInCluster"};
  return {names.kernel, "#include \"thin/hold/" + std::string(names.header) + ".cuh\"\n" + tail +
                            numbers.rest_source(problem, shape) + thin_source(problem, shape) +
                            numbers.source(more) + "using Agent = onepass::" + names.type +
                            "<onepass::Convolution, onepass::Tail, Numbers>;\n"
                            "extern \"C\" __global__ void __launch_bounds__(" +
                            std::to_string(numbers.threads) + ", " + std::to_string(blocks) + ") " +
                            names.kernel +
                            "(const __grid_constant__ Agent::Parameters p) {\n"
                            "  extern __shared__ __align__(128) unsigned char shared[];\n" +
                            (hold == Hold::in_cluster ? wait_source() : "") +
                            "  Agent::run(p, shared);\n"
                            "}\n"};
}

std::string computed_once_refusal(const ThinShape& shape) {
  if (!shape.parts.norm) return "the block has no norm";
  if (shape.parts.mean) return "the block ends in a mean";
  const std::vector<int> tensors = shape.parts.tensor_parameters();
  for (const TailParts::Stage& stage : shape.parts.before) {
    if (std::find(tensors.begin(), tensors.end(), stage.parameter) != tensors.end())
      return "a stage before the norm reads a tensor";
  }
  return "";
}

std::string mma_refusal(const Problem& problem, const MmaNumbers& numbers) {
  if (!is_planar(problem.output) && !is_dense(problem.output, Layout::nhwc))
    return "the output does not lie dense with channels before or after space";
  const Gpu& gpu = gpu_of(problem.device);
  if (numbers.tile_x == 0) return "eight cells of all classes and channels are more than a warp's share";
  constexpr int64_t most_products = 256;
  if (numbers.products * numbers.row_tiles > most_products)
    return std::to_string(numbers.products * numbers.row_tiles) + " products of 8 cells, more than " +
           std::to_string(most_products);
  if (numbers.shared_bytes > gpu.shared_bytes_per_block)
    return "a block takes " + std::to_string(numbers.shared_bytes) + " bytes of shared memory";
  return "";
}

double mma_seconds(const Problem& problem, const ThinShape& shape, const MmaNumbers& numbers, double moved) {
  const Gpu& gpu = gpu_of(problem.device);
  // Half of the issue slots are used where each of a multiprocessor's 16 warps has many tiles (s60: eight). A
  // third is used where each has one: all load, multiply and store at the same time. Few warps alone are
  // faster. Loops of one span, in the instruction cache, use more slots.
  const double warps = 16.0 * gpu.multiprocessors;
  const double tiles = static_cast<double>(numbers.tiles) * static_cast<double>(shape.batch);
  const double rounds = tiles / warps;
  const double instructions = numbers.tile_instructions(shape) * std::max(tiles, warps / 4);
  const double slots = ((numbers.holds_weights ? 0.6 : 0.78) + 0.8 / std::max(rounds, 1.0)) * 2;
  // Windows of more than eight channels allow small tiles alone: 64 to 32 channels, at 64^3 doubled, take
  // 2.17 times the count in f32 and 3 times in 16 bits.
  const double wide = std::clamp((static_cast<double>(shape.in_channels) - 8) / 56, 0.0, 1.0);
  const double crowded = 1 + wide * (problem.input.dtype == DType::f32 ? 1.17 : 2.0);
  // Weights that all warps read from shared memory for every product, of images with few input channels. 8 to
  // 64 channels with kernel 5 take 1.2 times the count in tf32 and bf16; with three products each, the count.
  const bool waits = !numbers.splits && !numbers.weights_in_registers && numbers.row_tiles > 1 &&
                     shape.classes() == 1 && shape.in_channels <= 8;
  // Bank conflicts where neighbouring outputs read every other element: 3 to 64 channels, kernel 7, stride 2
  // at 224 x 224 take 1.9 to 2.2 times the count.
  const double waiting = shape.axes[2].step > 1 ? 1.9 : waits ? 1.2 : 1.0;
  // Few products beside a tile's other work: with two passes, kernels of 3 take 1.3 to 1.6 times the count in
  // tf32, images of 16 bits twice the count. (3 input channels, one product a row, do not.)
  const bool is_volume = shape.axes[0].out > 1;
  const bool is_brief = !numbers.computes_once && !numbers.splits && shape.classes() == 1 &&
                        shape.axes[2].step == 1 && Offsets(shape.axes[2]).reach() <= 2 &&
                        (is_volume || shape.in_channels >= 4);
  const double brief = !is_brief ? 1.0 : numbers.is_short && !is_volume ? 2.0 : 1.4;
  return 1.8e-5 + std::max(moved, brief * waiting * crowded * instructions * slots / (gpu.flops / 64));
}

}  // namespace onepass::cuda
