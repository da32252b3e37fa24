// The row "gemm_wgmma": a wide convolution with all that follows it as an implicit matrix product on Hopper's
// tensor cores, in one launch after a small one that packs the weights.
#include <algorithm>
#include <array>
#include <optional>
#include <sstream>

#include "cuda/gemm/gemm.h"
#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "gemm/parameters.cuh"

namespace onepass {
namespace cuda {
namespace {

constexpr int64_t threads = 384;  // gemm/wgmma.cuh
constexpr int64_t staging_threads = 128;
constexpr int64_t converting_threads = 96;
constexpr int64_t most_columns = 304;        // of a warpgroup: sums of 152 registers a thread
constexpr int64_t most_split_columns = 176;  // a second set of sums takes as many registers
constexpr int64_t moments_threads = 128;     // a warp for each slab

// Of a product: a channel has one for each class.
int64_t rows_of(const ThinShape& shape) { return shape.channels * shape.classes(); }
int64_t taps_of(const ThinShape& shape) {
  int64_t taps = 1;
  for (const ThinAxis& axis : shape.axes) taps *= axis.classes[0].count;
  return taps;
}

bool splits(const Problem& problem) { return problem.input.dtype == DType::f32 && !problem.rounds_to_tf32(); }

using Box = std::array<int64_t, max_spatial_rank>;
bool is_empty(const Box& box) { return box[2] == 0; }

// How a sample is cut into tiles and shared memory into rings; nothing here depends on the batch.
struct WgmmaNumbers {
  int64_t columns = 0;      // positions of a warpgroup; 0 where nothing fits
  int64_t conv_groups = 1;  // each with weights of its own
  bool groups_share_positions = false;
  int64_t tile_positions = 0, tile_channels = 64;
  int64_t position_tiles = 1, channel_tiles = 1, unit_channel_tiles = 1;
  FlatGeometry::Windows windows;
  int64_t pitch = 1, plane = 1;  // of the index of positions
  Box box;                       // of outputs, that a tile is; empty where it is a run of the sample's index
  std::array<int64_t, max_spatial_rank> boxes{1, 1, 1};  // of a sample
  int64_t chunk_channels = 16, chunks = 1;
  int64_t taps = 1, group_taps = 1;
  int64_t parts = 1;  // 16-bit numbers that make an operand
  int64_t x_stages = 0, weight_stages = 0;
  bool weights_stay = false;
  bool by_vectors = false;  // a box's x comes by copies of vectors
  bool copies = false;      // x comes to shared memory by bulk copies
  int64_t slot_channels = 8;
  int64_t raw_slots = 1, raw_pitch = 0, raw_slot_bytes = 16;
  bool apart = false;   // each warpgroup goes its own way
  int64_t stagger = 0;  // and so many chunks after the other
  bool held = false;
  bool stored = false;
  int64_t late_vectors = 0;  // of 16 bytes of a row: they go to memory while the next tile is multiplied
  int64_t late_pitch = 16;   // bytes of such a row
  int64_t shared_bytes = 0;
  double clocks_of_tile = 0;  // of a multiprocessor, in all passes

  WgmmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
    double least = 0;
    const auto take = [&](const WgmmaNumbers& tried) {
      if (tried.columns == 0) return;
      const double clocks = tried.clocks_of_tile * static_cast<double>(tried.tiles()) /
                            static_cast<double>(tried.blocks_at_once(gpu));
      if (columns > 0 && clocks >= least) return;
      *this = tried;
      least = clocks;
    };
    const FlatGeometry flat(shape);
    for (const bool share : {false, true}) {
      for (int64_t most = most_columns; most >= 64; most -= 8)
        take(WgmmaNumbers(problem, shape, gpu, share, most, Box{}));
      if (flat.has_stride(shape)) continue;
      const int64_t most = splits(problem) ? most_split_columns : most_columns;
      for (const Box& tried : boxes_of(shape, flat, most * (share ? 1 : 2)))
        take(WgmmaNumbers(problem, shape, gpu, share, most, tried));
    }
  }

  int64_t tiles() const { return position_tiles * channel_tiles; }
  int64_t unit_tiles() const { return position_tiles * unit_channel_tiles; }
  int64_t x_stage_bytes() const { return round_up(windows.all() * chunk_channels * 2 * parts, 128); }
  int64_t weight_stage_bytes() const { return group_taps * chunk_channels * tile_channels * 2 * parts; }
  int64_t weight_bytes() const { return padded_channels() * chunks * chunk_channels * taps * 2 * parts; }
  int64_t padded_channels() const { return conv_groups * channel_tiles * tile_channels; }
  int passes(const ThinShape& shape) const { return held ? 1 : shape.passes(); }

  // Multiprocessors that have a block: of held units whole ones.
  int64_t blocks_at_once(const Gpu& gpu) const {
    return held ? gpu.multiprocessors / unit_tiles() * unit_tiles() : gpu.multiprocessors;
  }

  // Tiles that a multiprocessor has one after the other, for all samples.
  double rounds(const ThinShape& shape, const Gpu& gpu) const {
    return static_cast<double>(divide_up(shape.batch * tiles(), blocks_at_once(gpu)));
  }

 private:
  // The largest boxes whose positions are at most so many, for each depth and width.
  static std::vector<Box> boxes_of(const ThinShape& shape, const FlatGeometry& flat, int64_t most) {
    const auto out = [&](size_t d) { return shape.axes[d].classes[0].positions; };
    const auto even = [](int64_t all, int64_t part) { return divide_up(all, divide_up(all, part)); };
    std::vector<Box> found;
    for (int64_t z = 1; z <= std::min<int64_t>(out(0), 16); ++z) {
      int64_t before = 0;
      for (int64_t count = 1; count <= out(2); ++count) {
        const int64_t x = divide_up(out(2), count);
        if (x == before) continue;
        before = x;
        int64_t y = 0;
        while (y < out(1) && flat.positions_of({z, y + 1, x}) <= most) ++y;
        if (y > 0 && x >= 8) found.push_back({z, even(out(1), y), x});
      }
    }
    return found;
  }

  WgmmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu, bool share, int64_t most,
               const Box& tried)
      : conv_groups(shape.conv_groups), groups_share_positions(share), box(tried), taps(taps_of(shape)) {
    const FlatGeometry flat(shape);
    parts = splits(problem) ? 2 : 1;
    if (parts == 2 && most > most_split_columns) return;
    tile_channels = share ? 128 : 64;
    if (share && rows_of(shape) <= 64) return;
    const int64_t at_most = share ? most : 2 * most;
    position_tiles = divide_up(flat.positions, at_most);
    const int64_t wanted_positions =
        is_empty(box) ? divide_up(flat.positions, position_tiles) : flat.positions_of(box);
    int64_t own = round_up(divide_up(wanted_positions, share ? 1 : 2), 8);
    if (own > 256) own = round_up(own, 16);  // two products
    if (own > most) return;
    tile_positions = share ? own : 2 * own;
    pitch = flat.pitch;
    plane = flat.plane;
    position_tiles = divide_up(flat.positions, tile_positions);
    windows = flat.windows(shape, tile_positions);
    if (!is_empty(box)) {
      pitch = flat.pitch_of(box);
      plane = flat.plane_of(box);
      position_tiles = 1;
      for (size_t d = 0; d < box.size(); ++d) {
        boxes[d] = divide_up(shape.axes[d].classes[0].positions, box[d]);
        position_tiles *= boxes[d];
      }
      windows = {0, 1, (box[0] + flat.high[0] - flat.low[0]) * plane};
    }
    const int64_t runs = is_empty(box) ? windows.count : windows.positions / pitch;
    channel_tiles = divide_up(rows_of(shape), tile_channels);
    const int64_t group_rows = rows_of(shape) / shape.groups;
    unit_channel_tiles = shape.parts.norm && tile_channels % group_rows != 0 ? channel_tiles : 1;
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
      raw_pitch = round_up((is_empty(box) ? windows.positions : pitch) + 2 * (vector - 1), vector);
      constexpr int64_t most_vectors = 512;  // of a box: what the lanes of a warp keep in registers
      by_vectors = !is_empty(box) && runs * raw_pitch / vector <= most_vectors;
      if (!is_empty(box) && !by_vectors && runs > 48) return;
      raw_slot_bytes = round_up(8 * runs * raw_pitch * byte_size(problem.input.dtype), 128);
    }
    held = shape.parts.norm && !shape.parts.mean_follows_norm() && unit_tiles() <= gpu.multiprocessors &&
           parts_of_tile(shape) <= 16384;
    stored = !held && shape.passes() == 2 && !shape.parts.mean && lies_dense(problem.output);
    // Held ones wait for each other: 2.80 ms of s19 for 2.60. Split operands are summed outside of the tensor
    // cores after every group, one warpgroup while the other multiplies: 6.28 for 5.03.
    apart = stored && !share && parts == 1;
    group_taps = 1;
    // Split operands: at most 64 terms in the tensor cores.
    for (int64_t divisor = 2; divisor <= (parts == 2 ? 4 : 9); ++divisor) {
      if (taps % divisor == 0 && divisor * tile_channels <= 9 * 64) group_taps = divisor;
    }
    // Moments, statistics, values on their way to memory and where they go, barriers.
    const int64_t fixed =
        2 * 64 * 16 + 2 * tile_channels * 8 + 8 * 8 * 40 * 4 + tile_positions * 4 + taps * 4 + 1024;
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
    if (apart) set_stagger();
    // 4 barriers of 8 bytes at most for each stage.
    shared_bytes = x_stages * x_stage_bytes() + weight_stages * weight_stage_bytes() +
                   raw_slots * raw_slot_bytes + fixed;
    columns = own;
    clocks_of_tile = predict(problem, shape);
    // Held values leave products waiting for x that has had no room while they were finished.
    if (held && copies && parts == 1 && weights_stay && x_stages < chunks && set_streamed_stages(budget)) {
      shared_bytes = x_stages * x_stage_bytes() + weight_stages * weight_stage_bytes() +
                     raw_slots * raw_slot_bytes + fixed;
      clocks_of_tile *= 0.94;  // s19: 2.43 ms for 2.59, in bf16 2.13 for 2.24
    }
    if (held && rows_fit_vectors(problem, shape)) set_late_stages(gpu.shared_bytes_per_block);
  }

  // Whether a tile's rows lie in the output as 16-bit elements in vectors of 16 bytes.
  bool rows_fit_vectors(const Problem& problem, const ThinShape& shape) const {
    const TensorSpec& output = problem.output;
    const auto stride = [&](size_t d) { return shape.spatial_stride(output, shape.order[d]); };
    return byte_size(output.dtype) == 2 && !shape.parts.mean && is_empty(box) && shape.classes() == 1 &&
           pitch == shape.axes[2].out && plane == pitch * shape.axes[1].out && stride(2) == 1 &&
           stride(1) == pitch && (shape.axes[0].out == 1 || stride(0) == plane) &&
           output.strides[1] % 8 == 0 && output.strides[0] % 8 == 0 && shape.spatial % 8 == 0;
  }

  // Room for the values of a tile as 16 bits, if need be in place of stages of x beyond two, of weights
  // beyond five and of copies beyond two: as many vectors of each row as fit, if registers have room for the
  // others. Copies of four channels instead of eight would make room for all, but x is late then: 0.487 ms of
  // s61 for 0.458.
  void set_late_stages(int64_t available) {
    constexpr int64_t most_kept = 12;  // vectors of a row, in two registers each
    if (!copies || parts != 1) return;
    int64_t x = 2, raw = 2, weights = weights_stay ? weight_stages : std::min<int64_t>(weight_stages, 5);
    int64_t vectors = columns / 16 * 2;
    // Rows begin in different banks.
    const auto pitch_of = [](int64_t count) { return 16 * (count % 4 == 0 ? count + 1 : count); };
    const auto bytes = [&](int64_t more) {
      // Statistics, taps and barriers; moments lie where values will.
      const int64_t fixed = round_up(tile_channels * 8 + taps * 4 + 16 * (weights + x + raw + 1) + 48, 128);
      return fixed + weights * weight_stage_bytes() + x * x_stage_bytes() + raw * raw_slot_bytes +
             8 * 16 * pitch_of(vectors) + more;
    };
    while (vectors > 0 && bytes(0) > available) vectors -= 2;
    if (columns / 8 - vectors > std::min(most_kept, vectors)) return;
    while (x < x_stages && bytes(x_stage_bytes()) <= available) ++x;
    while (weights < weight_stages && bytes(weight_stage_bytes()) <= available) ++weights;
    while (raw < raw_slots && bytes(raw_slot_bytes) <= available) ++raw;
    late_vectors = vectors;
    late_pitch = pitch_of(vectors);
    weight_stages = weights;
    x_stages = x;
    raw_slots = raw;
    shared_bytes = bytes(0);
    clocks_of_tile *= 0.95;  // s61 in bf16: 0.441 ms for 0.463
  }

  // What each tile of a held unit reads of the others.
  int64_t parts_of_tile(const ThinShape& shape) const {
    const int64_t group_rows = rows_of(shape) / shape.groups;
    return divide_up(tile_channels, group_rows) * divide_up(group_rows, tile_channels) * position_tiles;
  }

  // Channels before space or after it, nothing between.
  static bool lies_dense(const TensorSpec& spec) {
    return spec.strides == TensorSpec::dense(spec.dtype, spec.sizes).strides ||
           spec.strides == TensorSpec::dense(spec.dtype, spec.sizes, Layout::nhwc).strides;
  }

  // Channels before space, each a whole number of 16 bytes.
  static bool lies_for_copies(const Problem& problem) {
    const TensorSpec dense = TensorSpec::dense(problem.input.dtype, problem.input.sizes);
    const int64_t vector = 16 / byte_size(problem.input.dtype);
    return problem.input.strides == dense.strides && dense.strides[1] % vector == 0;
  }

  // Two of everything, and as many weights as arrive while two groups are multiplied; then x, which waits
  // while a tile is finished, as much as a tile has; then the others.
  bool set_stages(int64_t budget) {
    const int64_t x = x_stage_bytes();
    const int64_t w = weight_stage_bytes();
    int64_t raw = raw_slot_bytes;
    const int64_t all = chunks * (taps / group_taps);
    raw_slots = copies ? 2 : 1;
    weights_stay =
        conv_groups * channel_tiles == 1 && all * w + 2 * x + raw_slots * raw <= budget && all <= 64;
    weight_stages = weights_stay ? all : 2;
    int64_t left = budget - weight_stages * w - raw_slots * raw;
    if (!weights_stay) {
      const int64_t more = std::clamp<int64_t>((left - 2 * x) / w, 0, 3);
      weight_stages += more;
      left -= more * w;
    }
    x_stages = std::min(std::clamp<int64_t>(chunks, 2, 4), left / x);
    if (x_stages < 2) return false;
    // Smaller slots for one stage more: the warpgroups are further apart.
    const int64_t smaller = round_up(raw / 2, 128);
    if (apart && copies && x_stages < chunks && slot_channels == 8 &&
        left + 2 * (raw - smaller) >= (x_stages + 1) * x) {
      slot_channels = 4;
      left += raw_slots * (raw - smaller);
      raw = smaller;
      raw_slot_bytes = smaller;
      ++x_stages;
    }
    left -= x_stages * x;
    if (!weights_stay) {
      const int64_t more = std::min<int64_t>(3, left / w);
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

  // As far as the rings let the first warpgroup go alone. Not two tiles: it tells the other one of each, and
  // two tellings that nobody has waited for yet would be taken for one.
  void set_stagger() {
    const int64_t steps = taps / group_taps;
    const int64_t alone = weights_stay ? chunks : (weight_stages - 1) / steps;
    stagger = std::max<int64_t>(0, std::min({x_stages - 1, alone, chunks}));
    const int64_t weight_chunks = weights_stay ? x_stages : weight_stages / steps;
    if (std::min(x_stages, weight_chunks) < chunks + stagger) return;
    if (chunks > 1) {
      x_stages = chunks + stagger - 1;
    } else {
      stagger = 0;
    }
  }

  // Where weights might stay: a few taps of them at a time instead, and the room for x. Changes nothing where
  // that does not fit.
  bool set_streamed_stages(int64_t budget) {
    int64_t few_taps = 1;
    for (int64_t divisor = 2; divisor <= 3; ++divisor) {
      if (taps % divisor == 0 && divisor * tile_channels <= 3 * 64) few_taps = divisor;
    }
    const int64_t w = weight_stage_bytes() / group_taps * few_taps;
    const int64_t more_x = std::min<int64_t>(chunks, 3);
    constexpr int64_t stages = 4;
    const int64_t left = budget - stages * w - more_x * x_stage_bytes() - 2 * raw_slot_bytes;
    if (left < 0) return false;
    weights_stay = false;
    group_taps = few_taps;
    weight_stages = stages;
    x_stages = more_x;
    raw_slots = 2 + std::min<int64_t>(4, left / raw_slot_bytes);
    return true;
  }

  // Clocks of an H200 as they were counted in s19, s61 and layers of real models.
  double predict(const Problem& problem, const ThinShape& shape) const {
    const auto n = static_cast<double>(columns);
    const bool reads_halves = byte_size(problem.input.dtype) == 2;
    const auto in_channels = static_cast<double>(shape.in_channels);
    const double elements = n * 128;  // of a tile
    const double existing =
        elements * static_cast<double>(rows_of(shape)) / static_cast<double>(channel_tiles * tile_channels);
    const auto output_bytes = static_cast<double>(byte_size(problem.output.dtype));
    // A product of 64 x n x 16; sums of split operands leave the tensor cores, which wait.
    const int64_t steps = 2 * chunks * (chunk_channels / 16) * taps * (parts == 2 ? 3 : 1);
    const double products = static_cast<double>(steps) * n / 2 * (parts == 2 ? 1.4 : 1.05);
    // Through L2, and by the converting warps: eight channels of 96 positions at a time.
    const auto x_bytes =
        static_cast<double>(windows.all() * shape.in_channels * byte_size(problem.input.dtype));
    const double weights =
        weights_stay ? 0.0
                     : static_cast<double>(weight_bytes()) / static_cast<double>(conv_groups * channel_tiles);
    const auto rounds = static_cast<double>(divide_up(windows.all(), converting_threads));
    double staging = x_bytes / 7;
    double copying = 0;
    if (copies) {
      staging = rounds * (in_channels / 8 * (reads_halves ? 90 : 120) * static_cast<double>(parts) + 380);
      // A bulk copy takes 75 clocks, whatever its size; vectors come at 6 bytes a clock.
      const int64_t runs = is_empty(box) ? windows.count : windows.positions / pitch;
      copying = by_vectors ? in_channels * static_cast<double>(raw_slot_bytes) /
                                 static_cast<double>(slot_channels) / 6
                           : static_cast<double>(runs) * in_channels * 75;
    }
    const double moved = std::max((x_bytes + weights) / 18, copying);
    const double late =
        1 - std::min(1.0, static_cast<double>(x_stages) / static_cast<double>(chunks));  // of x
    const double multiplied = std::max(products + std::max(0.0, staging - products) * late, moved) + 1500;
    const bool fits_flat = is_empty(box) && pitch == shape.axes[2].out;
    const double before = n * (1 + gemm_chain_instructions(shape.parts.before)) +
                          (shape.parts.norm ? n * (fits_flat ? 7 : 20) : 0.0);
    // A tile that is a unit by itself waits for nobody.
    const double exchanged = held ? (unit_tiles() == 1 ? 3000 : 7700) : shape.parts.norm ? 6000 : 500;
    const double after = n * (3 + gemm_chain_instructions(shape.parts.after));
    // Outputs of neighbouring classes leave one by one.
    const double written = existing * output_bytes / (shape.classes() > 1 ? 3 : 15);
    double all;
    if (stored) {
      all = multiplied + before + exchanged + existing * 4 / 12.5 + existing * (4 + output_bytes) / 17;
    } else {
      all = multiplied + before + exchanged + after + (shape.parts.mean ? 0.0 : written);
    }
    // What layers of real models took besides; s19 and s61 take less.
    all = (reads_halves && !(held && copies) ? 1.25 : 1.12) * std::max({all, staging, moved});
    return passes(shape) == 1 || stored ? all : 2 * all;
  }
};

class GemmWgmma final : public Kernel {
 public:
  explicit GemmWgmma(const Problem& problem)
      : problem_(problem),
        shape_(problem),
        flat_(shape_),
        numbers_(problem, shape_, gpu_of(problem.device)),
        pack_(pack_source(), problem.device,
              {numbers_.padded_channels() / pack_channels(), 256, 1,
               static_cast<uint32_t>(packs_staged() ? pack_bytes(pack_channels()) : 0)}),
        function_(source(), problem.device, launch_numbers()),
        redo_(problem) {
    if (numbers_.stored) {
      finish_.emplace(problem, shape_, is_planar());
      moments_.emplace(moments_source(), problem.device,
                       Launch{divide_up(shape_.slabs(), moments_threads / 32), moments_threads});
    }
    const Number resident = function_.resident_clusters();
    const Number units = shape_.batch * (numbers_.channel_tiles / numbers_.unit_channel_tiles);
    // Twice as many tiles as run at a time: pass 2 of a wave then finds pass 1 done.
    wave_units_ =
        clamp(divide_up(2 * resident, numbers_.unit_tiles()), 1, maximum(1, units)).called("wave_units");
    blocks_ =
        clamp(shape_.batch * numbers_.tiles() * (numbers_.stored ? 1 : numbers_.passes(shape_)), 1, resident);
    // Held units begin together: as many as there is room for, whole.
    if (numbers_.held) {
      function_.require_resident(numbers_.unit_tiles());
      blocks_ = minimum(units, divide(resident, numbers_.unit_tiles())) * numbers_.unit_tiles();
    }
    const int64_t group_rows = rows_of(shape_) / shape_.groups;
    const int64_t spans =
        numbers_.tile_channels % group_rows == 0 ? 1 : (group_rows - 1) / numbers_.tile_channels + 2;
    control_ = regions_.add(units * 4 * 4);
    marks_ = regions_.add((shape_.batch + 1) * 4);
    guard_ = regions_.add(shape_.batch * 4);
    scales_ = regions_.add((numbers_.padded_channels() + 1) * 4);
    cleared_bytes_ = regions_.total();
    packed_ = regions_.add(numbers_.weight_bytes());
    const int64_t agents = numbers_.apart ? 2 : 1;
    parts_ =
        regions_.add(when(shape_.parts.norm, shape_.slabs() * spans * numbers_.position_tiles * agents * 16));
    sums_ = regions_.add(when(shape_.parts.mean, shape_.rows() * numbers_.position_tiles * 4));
    statistics_ = regions_.add(when(shape_.parts.norm, shape_.slabs() * 2 * 4));
    values_ = regions_.add(when(has_own_values(), shape_.rows() * shape_.spatial * 4));
  }

  Accuracy accuracy() const override { return accuracy_of_chains(problem_); }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + redo_.workspace_bytes();
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "convolution: " << shape_.in_channels * numbers_.taps << " terms" << describe_groups(shape_)
        << ", "
        << (!guards()             ? "operands as they are"
            : numbers_.parts == 2 ? "operands split in two of f16"
                                  : "operands rounded to f16, as to tf32")
        << '\n'
        << "tile: " << numbers_.tile_channels << " channels, " << numbers_.tile_positions << " positions, "
        << numbers_.tiles() << " tiles a sample of " << flat_.positions << " positions"
        << (is_empty(numbers_.box)
                ? ""
                : " (boxes of " + std::to_string(numbers_.box[0]) + "x" + std::to_string(numbers_.box[1]) +
                      "x" + std::to_string(numbers_.box[2]) + ")")
        << ", " << numbers_.unit_tiles() << " a unit\n"
        << "window: " << numbers_.windows.count << " of " << numbers_.windows.positions << " positions, "
        << numbers_.x_stages << " stages of " << numbers_.chunk_channels << " channels"
        << (numbers_.copies ? ", " + std::to_string(numbers_.raw_slots) + " copies of " +
                                  std::to_string(numbers_.slot_channels) + " channels ahead"
                            : "")
        << '\n'
        << "weights: " << (numbers_.weights_stay ? "all in shared memory, " : "") << numbers_.weight_stages
        << " stages of " << numbers_.group_taps << " taps\n"
        << "blocks: " << describe_blocks(blocks_, function_) << "passes: " << numbers_.passes(shape_)
        << (numbers_.held      ? ", values held in registers"
            : has_own_values() ? ", values in memory between them"
            : numbers_.stored  ? ", values in the output between them"
                               : "")
        << (numbers_.late_vectors > 0 ? ", " + std::to_string(numbers_.late_vectors * 8) +
                                            " columns stored while the next tile is multiplied"
                                      : "")
        << '\n'
        << "then: thin_cores for samples that f16 has no room for\n"
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return where(guards() && numbers_.parts == 1, note::operands_rounded) + where(guards(), note::redone) +
           notes_of_chains(problem_.block, bits_of(problem_, problem_.output.dtype));
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    clear(at(workspace, control_), cleared_bytes_, stream, problem_.device);
    GemmPackParameters pack;
    pack.weights = arguments.parameters[0];
    pack.packed = at(workspace, packed_);
    pack.scales = at(workspace, scales_);
    pack.only = at(workspace, marks_);
    pack.batch = shape_.batch;
    pack.launch(pack_, stream);
    void* const values = has_own_values() ? at(workspace, values_) : arguments.output;
    void* const statistics =
        arguments.statistics ? static_cast<void*>(arguments.statistics) : at(workspace, statistics_);
    GemmParameters p;
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
    p.wave_units = wave_units_;
    p.parameter = arguments.parameters;
    p.launch(function_, stream, blocks_);
    if (finish_) {
      p.launch(*moments_, stream);
      finish_->launch(arguments, values, statistics, stream);
    }
    redo_.launch_marked(arguments, at(workspace, Region{regions_.total(), 0}), at(workspace, marks_), stream);
  }

 private:
  // The rows of a warp are whole slabs.
  bool rows_are_slabs() const {
    const int64_t group_rows = rows_of(shape_) / std::max<int64_t>(1, shape_.groups);
    return numbers_.held && numbers_.groups_share_positions && 16 % group_rows == 0;
  }
  bool guards() const { return problem_.input.dtype == DType::f32; }
  // Values between the passes have no room in the output.
  bool has_own_values() const { return numbers_.stored && problem_.output.dtype != DType::f32; }
  // Packing: several channels to a block where they are many, since it writes 16 bytes of each; their weights
  // once through shared memory where they fit.
  int64_t pack_bytes(int64_t channels) const {
    return channels * shape_.in_channels * numbers_.taps * byte_size(problem_.parameters[0].dtype);
  }
  int64_t pack_channels() const {
    constexpr int64_t least_blocks = 256;
    constexpr int64_t two_blocks_fit = 110 << 10;
    for (const int64_t channels : {4, 2}) {
      if (numbers_.padded_channels() / channels >= least_blocks && pack_bytes(channels) <= two_blocks_fit)
        return channels;
    }
    return 1;
  }
  bool packs_staged() const { return pack_bytes(pack_channels()) <= 200 << 10; }
  bool is_planar() const {
    const TensorSpec& output = problem_.output;
    return output.strides == TensorSpec::dense(output.dtype, output.sizes).strides;
  }

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
               .add("pitch", n.pitch)
               .add("plane", n.plane)
               .flag("boxed", !is_empty(n.box))
               .add("box_z", n.box[0])
               .add("box_y", n.box[1])
               .add("box_x", n.box[2])
               .add("boxes_y", n.boxes[1])
               .add("boxes_x", n.boxes[2])
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
               .flag("by_vectors", n.by_vectors)
               .flag("copies", n.copies)
               .add("slot_channels", n.slot_channels)
               .add("raw_slots", n.raw_slots)
               .add("raw_pitch", n.raw_pitch)
               .add("raw_slot_bytes", n.raw_slot_bytes)
               .flag("apart", n.apart)
               .add("stagger", n.stagger)
               .add("late_vectors", n.late_vectors)
               .add("late_pitch", n.late_pitch)
               .flag("rows_are_slabs", rows_are_slabs())
               .flag("has_after", !parts.after.empty())
               .flag("held", n.held)
               .flag("stored", n.stored)
               .flag("guards", guards())
               .flag("before_reads_tensors", reads_tensors(parts.before))
               .flag("after_reads_tensors", reads_tensors(parts.after))
               .add("shared_bytes", n.shared_bytes)
               .add("pack_channels", pack_channels())
               .flag("pack_staged", packs_staged())
               .text()
        << flat_.source() << "};\n";
    return out.str();
  }

  Source source() const {
    return {"onepass_gemm_wgmma",
            "#include \"gemm/wgmma.cuh\"\n" +
                tail_source(problem_, bits_of(problem_, problem_.output.dtype)) +
                thin_source(problem_, shape_) +
                wgmma_source(numbers_.columns, problem_.input.dtype == DType::bf16) + numbers_source() +
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
            "#include \"gemm/source/pack.cuh\"\nstruct Product;\n" + tail_source(problem_) +
                thin_source(problem_, shape_) + numbers_source() +
                "extern \"C\" __global__ void __launch_bounds__(256)\n"
                "onepass_gemm_pack(const __grid_constant__ onepass::GemmPackParameters p) {\n"
                "  extern __shared__ __align__(16) unsigned char staged[];\n"
                "  onepass::GemmPack<onepass::Convolution, Numbers>{p, staged}.run();\n"
                "}\n"};
  }

  Source moments_source() const {
    return {"onepass_gemm_moments",
            "#include \"gemm/store/epilogue.cuh\"\nstruct Product;\n" + tail_source(problem_) +
                thin_source(problem_, shape_) + numbers_source() +
                "using Agent = onepass::GemmSlabs<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(moments_threads) +
                ") onepass_gemm_moments(const __grid_constant__ Agent::Parameters p) {\n"
                "  Agent{p}.run();\n"
                "}\n"};
  }

  Launch launch_numbers() const {
    const bool waits = shape_.parts.norm && !shape_.parts.mean_follows_norm() && !numbers_.stored;
    return {1, static_cast<uint32_t>(threads), 1, static_cast<uint32_t>(numbers_.shared_bytes), waits};
  }

  Problem problem_;
  ThinShape shape_;
  FlatGeometry flat_;
  WgmmaNumbers numbers_;
  Function pack_;
  Function function_;
  // Where values are stored between the passes.
  std::optional<Function> moments_;
  std::optional<GemmFinish> finish_;
  ThinCores redo_;
  Number wave_units_ = 1;
  Number blocks_ = 1;
  Number cleared_bytes_;
  Regions regions_;
  Region control_, marks_, guard_, scales_, packed_, parts_, sums_, statistics_, values_;
};

std::string refusal(const Problem& problem) {
  std::string reason = wide_refusal(problem);
  if (!reason.empty()) return reason;
  const Gpu& gpu = gpu_of(problem.device);
  if (gpu.architecture != "sm_90a") return "it needs wgmma, which sm_90a alone has";
  const ThinShape shape(problem);
  if (!classes_meet_alike(shape))
    return "outputs of the transposed convolution meet different elements, by its stride";
  if (shape.classes() > 1 && shape.parts.mean)
    return "the transposed convolution has a stride, and a mean follows";
  constexpr int64_t most = int64_t{1} << 30;  // positions, and elements of a sample of x: bytes are 32 bits
  if (FlatGeometry(shape).plane * (shape.axes[0].out + shape.axes[0].kernel) >= most ||
      problem.input.byte_span() / std::max<int64_t>(1, shape.samples.value()) >= 4 * most) {
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
  // Tensor cores at work keep a GPU below its highest clock: 1.75 of 1.98 GHz.
  const double clock = gpu.flops / 256 / gpu.multiprocessors * 0.885;
  // Weights are read and packed before.
  const double packed = static_cast<double>(problem.parameters[0].byte_span() + numbers.weight_bytes());
  // What tiles take of their count: those of s19 and s61, one after the other many times, 0.72 to 0.78; where
  // there are a few rounds, or values are stored and loaded again, 0.93 to 1.1.
  const double rounds = numbers.rounds(shape, gpu);
  const bool steady = numbers.held || numbers.parts == 2;
  const double taken = steady ? std::min(1.0, 0.72 + 0.9 / std::max(1.0, rounds)) : 1.0;
  return 2e-5 + 2 * packed / gpu.bytes_per_second +
         std::max({bytes / gpu.bytes_per_second, taken * rounds * numbers.clocks_of_tile / clock,
                   scattered_seconds(problem, shape)});
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_wgmma{
    "gemm_wgmma", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::GemmWgmma>(problem);
    }};

}  // namespace onepass
