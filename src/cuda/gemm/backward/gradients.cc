// The row "gemm_backward": the gradients of a wide convolution of stride 1 without what follows it, as matrix
// products on Hopper's tensor cores (gemm/backward/gradients.cuh). Both tensors are packed first, as 16-bit
// elements in the order that products read.
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <sstream>

#include "cuda/gemm/gemm.h"
#include "cuda/notes.h"

namespace onepass {
namespace cuda {
namespace {

using Three = std::array<int64_t, max_spatial_rank>;

constexpr int64_t warpgroups = 3;  // that multiply for the weights' gradient
constexpr int64_t weight_threads = (warpgroups + 1) * 128;
constexpr int64_t input_threads = 384;
constexpr int64_t chunk = 128;          // positions of a stage
constexpr int64_t input_columns = 256;  // positions of a warpgroup, for the input's gradient
constexpr int64_t tile_positions = 2 * input_columns;
constexpr int64_t most_sums = 192;          // columns times taps of a warpgroup: half as many registers
constexpr int64_t split_positions = 16384;  // that are added up in the tensor cores, which truncate
constexpr int64_t pack_threads = 256;
constexpr int64_t pack_rounds = 8;   // of a piece of work: as many positions of a thread
constexpr int64_t glances = 16384;   // runs of 32 elements
constexpr int64_t few_blocks = 512;  // of a launch that mostly has nothing to do
constexpr int64_t least_taps = 3;

const char* name_of(DType type) { return type == DType::f32 ? "f32" : type == DType::f16 ? "f16" : "bf16"; }

// Sizes and strides of a tensor, with dimensions of one before its own.
struct Lying {
  int64_t channels = 1;
  Three sizes{1, 1, 1}, strides{0, 0, 0};
  int64_t of_sample = 0, of_channel = 0;

  explicit Lying(const TensorSpec& spec)
      : channels(spec.sizes[1]), of_sample(spec.strides[0]), of_channel(spec.strides[1]) {
    const size_t rank = spec.sizes.size() - 2;
    for (size_t d = 0; d < rank; ++d) {
      sizes[max_spatial_rank - rank + d] = spec.sizes[d + 2];
      strides[max_spatial_rank - rank + d] = spec.strides[d + 2];
    }
  }
  int64_t elements() const { return channels * sizes[0] * sizes[1] * sizes[2]; }
  // With channels of one group of so many.
  void add_to(Constants& constants, int64_t groups) const {
    constants.add("channels", channels / groups)
        .add("size0", sizes[0])
        .add("size1", sizes[1])
        .add("size2", sizes[2])
        .add("stride_n", of_sample)
        .add("stride_c", of_channel)
        .add("stride0", strides[0])
        .add("stride1", strides[1])
        .add("stride2", strides[2]);
  }
};

// The flat index of positions, how products are cut, and what of shared memory they take; nothing here
// depends on the batch.
struct GradientNumbers {
  bool transposed = false;
  Three kernel{1, 1, 1}, dilation{1, 1, 1}, padding{0, 0, 0};
  int64_t taps = 1;
  int64_t pitch = 1, plane = 1, sample = 1;
  int64_t margin = 0;  // zeros before the first sample; as many behind the last
  // Of a convolution in groups each is a product by itself; channels are those of one.
  int64_t conv_groups = 1;
  int64_t channels = 1, out_channels = 1;
  // The weights' gradient: 64 channels of u by `columns` of v for each of `taps_each` taps of a warpgroup.
  // Groups that fill neither are `together`: what one has of another's v is not stored.
  int64_t together = 1;
  int64_t u_channels = 1, v_channels = 1;
  int64_t taps_each = 1, columns = 8, stages = 0, lag = 0;
  // The input's gradient.
  int64_t group_taps = 1, window = 0, input_stages = 0;
  bool weights_stay = false;

  GradientNumbers(const Problem& problem, const Gpu& gpu) {
    const Conv& conv = *problem.block.conv();
    transposed = conv.transposed;
    const auto rank = static_cast<size_t>(conv.rank);
    for (size_t d = 0; d < rank; ++d) {
      const size_t at = max_spatial_rank - rank + d;
      kernel[at] = conv.kernel[d];
      dilation[at] = conv.dilation[d];
      padding[at] = conv.padding_before[d];
    }
    taps = kernel[0] * kernel[1] * kernel[2];
    conv_groups = conv.groups;
    channels = conv.in_channels / conv_groups;
    out_channels = conv.out_channels / conv_groups;
    u_channels = transposed ? channels : out_channels;
    v_channels = transposed ? out_channels : channels;
    // Where channels of neighbouring groups are packed side by side.
    for (int64_t count = 2; u_channels % 16 == 0 && v_channels % 16 == 0 && count <= conv_groups; ++count) {
      if (conv_groups % count == 0 && count * std::max(u_channels, v_channels) <= 64) together = count;
    }
    u_channels *= together;
    v_channels *= together;
    set_pitches(Lying(problem.input).sizes, Lying(problem.output).sizes, byte_size(problem.input.dtype));
    cut_weight(gpu);
    cut_input(gpu);
  }

  bool fits() const { return stages >= 2 && input_stages >= 2; }
  // Whether taps lie in the index as in the kernel: not where a row of the kernel is longer than one of x.
  bool taps_in_order() const {
    for (int64_t tap = 1; tap < taps; ++tap) {
      if (shift(tap) <= shift(tap - 1)) return false;
    }
    return true;
  }
  int64_t shift(int64_t tap) const {
    const int64_t t = std::min(tap, taps - 1);
    const Three m{t / (kernel[1] * kernel[2]), t / kernel[2] % kernel[1], t % kernel[2]};
    return (m[0] * dilation[0] - padding[0]) * plane + (m[1] * dilation[1] - padding[1]) * pitch +
           m[2] * dilation[2] - padding[2];
  }

  int64_t block_taps() const { return warpgroups * taps_each; }
  int64_t weight_tiles() const {
    return conv_groups / together * divide_up(u_channels, 64) * divide_up(v_channels, columns) *
           divide_up(taps, block_taps());
  }
  int64_t tile_sums() const { return 64 * columns * block_taps(); }
  int64_t weight_shared_bytes(int64_t count) const {
    return count * 8 * chunk * 16 + columns / 8 * ((count + lag) * chunk + 16) * 16 + count * 16 + 256;
  }

  // Parts of a tile's positions: few enough to be added up in the tensor cores, and as many as keep all
  // multiprocessors busy to the end.
  Number splits(const Number& all_chunks, const Gpu& gpu) const {
    const Number parts = divide_up(all_chunks, split_positions / chunk) * weight_tiles();
    return clamp(divide_up(parts, gpu.multiprocessors) * gpu.multiprocessors / weight_tiles(), 1,
                 maximum(1, all_chunks));
  }

  int64_t tap_groups() const { return taps / group_taps; }
  int64_t chunks() const { return divide_up(out_channels, 16); }
  int64_t channel_tiles() const { return conv_groups * divide_up(channels, 64); }
  // Of eight packed channels: a whole number of products' 16 in each group.
  static int64_t eights(int64_t group_channels) { return divide_up(group_channels, 16) * 2; }
  int64_t all_eights(int64_t group_channels) const { return conv_groups * eights(group_channels); }
  // Steps that one warpgroup is behind the other: half a tile, or what the ring has room for.
  int64_t input_lag() const { return std::min(tap_groups() * chunks() / 2, input_stages - 2); }
  int64_t window_bytes() const { return 2 * window * 16; }
  int64_t group_bytes() const { return group_taps * 2 * 64 * 16; }
  int64_t packed_weight_bytes() const { return channel_tiles() * tap_groups() * chunks() * group_bytes(); }
  int64_t input_shared_bytes(int64_t count) const {
    return count * window_bytes() + (weights_stay ? tap_groups() * chunks() : count) * group_bytes() +
           count * 16 + 256;
  }
  // What reaches beyond the last sample's positions: a tap, the end of a tile, a window's last chunks.
  int64_t behind() const { return margin + tile_positions + (lag + 1) * chunk; }

  // Clocks that the tiles of a multiprocessor take. A product of 64 x n x 16 takes n / 2 at best; 16 bytes a
  // clock come from the second-level cache. Fitted to an H200: s19 and s61 take 0.93 and 0.39 ms for the
  // weights' gradient, 1.06 and 0.39 for the input's.
  double weight_clocks(int64_t positions, const Gpu& gpu) const {
    const int64_t all_chunks = divide_up(positions, chunk);
    const int64_t parts = splits(Number(all_chunks), gpu);
    const int64_t rounds = divide_up(parts * weight_tiles(), int64_t{gpu.multiprocessors});
    const auto own = static_cast<double>(rounds * (divide_up(all_chunks, parts) + lag + 2) * chunk);
    const auto products = static_cast<double>(columns * block_taps()) / 32;
    const auto bytes = static_cast<double>(128 + columns * 2);
    return own * std::max(1.55 * products, bytes / 16);
  }
  double input_clocks(int64_t positions, const Gpu& gpu) const {
    const int64_t items = divide_up(positions, tile_positions) * channel_tiles();
    const auto own = static_cast<double>(divide_up(items, int64_t{gpu.multiprocessors}) * tile_positions);
    const auto steps = static_cast<double>(tap_groups() * chunks());
    const double products = static_cast<double>(chunks() * taps) / 2;
    const double bytes = steps * static_cast<double>(window_bytes() + (weights_stay ? 0 : group_bytes())) /
                         static_cast<double>(tile_positions);
    return own * (std::max(1.5 * products, bytes / 16) + 6);
  }

  Constants geometry() const {
    Constants constants;
    constants.add("kernel0", kernel[0])
        .add("kernel1", kernel[1])
        .add("kernel2", kernel[2])
        .add("dilation0", dilation[0])
        .add("dilation1", dilation[1])
        .add("dilation2", dilation[2])
        .add("padding0", padding[0])
        .add("padding1", padding[1])
        .add("padding2", padding[2])
        .add("taps", taps);
    add_pitches(constants);
    return constants;
  }
  void add_pitches(Constants& constants) const {
    constants.add("pitch", pitch).add("plane", plane).add("sample", sample).add("margin", margin);
  }

 private:
  // Pitches at which a tap is a shift from u to v and back, whatever the padding: what lies beside a row are
  // zeros.
  void set_pitches(const Three& input, const Three& output, int64_t element_bytes) {
    const Three& u = transposed ? input : output;
    const Three& v = transposed ? output : input;
    Three pitches{};
    for (size_t d = 0; d < max_spatial_rank; ++d) {
      const int64_t high = dilation[d] * (kernel[d] - 1) - padding[d];
      pitches[d] = std::max({u[d], v[d] + padding[d], u[d] + high});
    }
    // Pairs of columns lie in one row. Where it costs little as many do as fill 32 bytes of dx: whole sectors
    // are stored then, and partial ones take twice as long.
    const int64_t sector = 32 / element_bytes;
    const int64_t wide = round_up(pitches[2], sector);
    pitch = 16 * (wide - pitches[2]) <= pitches[2] ? wide : round_up(pitches[2], 2);
    plane = pitch * pitches[1];
    sample = plane * pitches[0];
    margin = round_up(std::max({-shift(0), shift(taps - 1), int64_t{0}}), 8);
  }

  void cut_weight(const Gpu& gpu) {
    taps_each = std::min<int64_t>(3, divide_up(taps, warpgroups));
    const int64_t most = most_sums / taps_each / 8 * 8;
    columns = round_up(divide_up(v_channels, divide_up(v_channels, most)), 8);
    int64_t reach = 0;
    for (int64_t first = 0; first < taps; first += block_taps())
      reach = std::max(reach, shift(first + block_taps() - 1) - shift(first));
    lag = (chunk - 1 + reach) / chunk;
    constexpr int64_t most_stages = 6;
    while (stages < most_stages && weight_shared_bytes(stages + 1) <= gpu.shared_bytes_per_block) ++stages;
  }

  // The window of all taps, of those of a plane or of a row: whichever moves least.
  void cut_input(const Gpu& gpu) {
    int64_t least = 0;
    GradientNumbers best = *this;
    for (const int64_t taps_of_group : {taps, kernel[1] * kernel[2], kernel[2]}) {
      GradientNumbers tried = *this;
      tried.group_taps = taps_of_group;
      tried.window = tile_positions + shift(taps_of_group - 1) - shift(0);
      const int64_t budget = gpu.shared_bytes_per_block;
      tried.weights_stay = channel_tiles() == 1;
      if (tried.input_shared_bytes(3) > budget) tried.weights_stay = false;
      constexpr int64_t most_stages = 8;
      while (tried.input_stages < most_stages && tried.input_shared_bytes(tried.input_stages + 1) <= budget)
        ++tried.input_stages;
      const int64_t bytes =
          tried.tap_groups() * (tried.window_bytes() + (tried.weights_stay ? 0 : tried.group_bytes()));
      if (tried.input_stages < 2 || (least > 0 && bytes >= least)) continue;
      best = tried;
      least = bytes;
    }
    *this = best;
  }
};

// A product of a warpgroup as a struct: 64 x `columns` x 16. The left operand lies in registers and the right
// one has its columns contiguous, or both lie in shared memory with their terms contiguous.
std::string product_source(const char* name, int64_t columns, const char* type, bool in_registers) {
  const int64_t sums = columns / 2;
  const int64_t left = in_registers ? 4 : 1;
  std::ostringstream out;
  out << "struct " << name << " {\n  static __device__ __forceinline__ void run(float (&d)[" << sums << "], "
      << (in_registers ? "const onepass::uint32 (&a)[4]" : "onepass::uint64 a")
      << ", onepass::uint64 b, int add) {\n"
      << "    asm volatile(\"{.reg .pred p; setp.ne.b32 p, %" << sums + left + 1
      << ", 0; wgmma.mma_async.sync.aligned.m64n" << columns << "k16.f32." << type << '.' << type << " {";
  for (int64_t i = 0; i < sums; ++i) out << (i > 0 ? ", " : "") << '%' << i;
  out << "}, ";
  if (in_registers) {
    out << "{%" << sums << ", %" << sums + 1 << ", %" << sums + 2 << ", %" << sums + 3 << '}';
  } else {
    out << '%' << sums;
  }
  out << ", %" << sums + left << (in_registers ? ", p, 1, 1, 1;}\"\n" : ", p, 1, 1, 0, 0;}\"\n")
      << "        : ";
  for (int64_t i = 0; i < sums; ++i) out << (i > 0 ? ", " : "") << "\"+f\"(d[" << i << "])";
  out << "\n        : " << (in_registers ? "\"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3])" : "\"l\"(a)")
      << ", \"l\"(b), \"r\"(add));\n  }\n};\n";
  return out.str();
}

class GemmBackward final : public BackwardKernel {
 public:
  explicit GemmBackward(const BackwardProblem& problem)
      : problem_(problem),
        batch_(ThinShape(problem.forward).samples),
        numbers_(problem.forward, gpu_of(problem.forward.device)),
        wants_weight_(problem.wants_parameter(0)),
        wants_bias_(problem.forward.block.conv()->bias && problem.wants_parameter(1)) {
    if (!wants_weight_ && !wants_bias_ && !problem.wants_input()) return;
    const GradientNumbers& n = numbers_;
    const Device& device = problem.forward.device;
    const Gpu& gpu = gpu_of(device);
    const Number positions = batch_ * n.sample;
    length_ = (n.margin + n.behind() + round_up(positions, tile_positions)).called("length");
    chunks_ = divide_up(positions, chunk);
    tiles_ = divide_up(positions, tile_positions);
    bias_parts_ = pack_parts(problem.output_gradient).called("bias_parts");
    splits_ = n.splits(chunks_, gpu).called("splits");
    compile_all(device);
    pack_gradient_.emplace(pack_source(problem.output_gradient, true), device,
                           Launch{1, static_cast<uint32_t>(pack_threads)});
    largest_ = regions_.add(4 * 4);
    packed_gradient_ = regions_.add(packed_bytes(n.out_channels));
    bias_sums_ = regions_.add(when(wants_bias_, bias_parts_ * (n.all_eights(n.out_channels) * 8 * 4)));
    if (wants_weight_) {
      pack_input_.emplace(pack_source(problem.forward.input, false), device,
                          Launch{1, static_cast<uint32_t>(pack_threads)});
      weight_.emplace(weight_source(), device,
                      Launch{1, static_cast<uint32_t>(weight_threads), 1,
                             static_cast<uint32_t>(n.weight_shared_bytes(n.stages))});
      weight_blocks_ = minimum(splits_ * n.weight_tiles(), weight_->resident_clusters());
    }
    if (wants_weight_ || wants_bias_)
      sum_.emplace(sum_source(), device, Launch{1, static_cast<uint32_t>(pack_threads)});
    packed_input_ = regions_.add(when(wants_weight_ && !packs_into_gradient(), packed_bytes(n.channels)));
    parts_ = regions_.add(when(wants_weight_, splits_ * (n.weight_tiles() * n.tile_sums() * 4)));
    if (problem.wants_input()) {
      pack_weight_.emplace(pack_weight_source(), device,
                           Launch{n.channel_tiles() * 64, static_cast<uint32_t>(pack_threads)});
      input_.emplace(input_source(), device,
                     Launch{1, static_cast<uint32_t>(input_threads), 1,
                            static_cast<uint32_t>(n.input_shared_bytes(n.input_stages))});
      input_blocks_ = minimum(tiles_ * n.channel_tiles(), input_->resident_clusters());
    }
    packed_weights_ = regions_.add(when(problem.wants_input(), n.packed_weight_bytes()));
    scales_ = regions_.add(when(problem.wants_input(), n.channel_tiles() * 64 * 4));
  }

  size_t workspace_bytes() const override { return static_cast<size_t>(regions_.total().value()); }
  bool reads_statistics() const override { return false; }

  std::string describe() const override {
    if (!pack_gradient_) return "passes: none, no gradient is wanted\n";
    const GradientNumbers& n = numbers_;
    std::ostringstream out;
    out << "operands: " << (scales() ? "rounded to f16, as to tf32, and scaled" : "as they are")
        << ", packed first: " << length_.value() << " positions"
        << (n.conv_groups == 1 ? "" : ", in each of " + std::to_string(n.conv_groups) + " groups") << '\n';
    if (weight_) {
      out << "weights' gradient: tiles of 64 x " << n.columns << " channels, " << n.block_taps() << " taps, "
          << n.weight_tiles() << " of them in " << splits_.value() << " parts; " << n.stages << " stages of "
          << chunk << " positions\n"
          << "blocks: " << describe_blocks(weight_blocks_, *weight_);
    }
    if (input_) {
      out << "input's gradient: tiles of 64 channels, " << tile_positions << " positions, " << n.tap_groups()
          << (n.tap_groups() == 1 ? " window" : " windows") << " of " << n.window << " positions, "
          << n.input_stages << " stages of 16 channels, weights "
          << (n.weights_stay ? "all in shared memory\n" : "with them\n")
          << "blocks: " << describe_blocks(input_blocks_, *input_);
    }
    out << "saved by forward: the input\n"
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return where(pack_gradient_ && scales(), note::operands_rounded);
  }

  void launch(const BackwardArguments& arguments, void* workspace, Stream stream) const override {
    if (!pack_gradient_) return;
    if (batch_ == 0) {
      clear_gradients(problem_, arguments, stream);
      return;
    }
    const GradientNumbers& n = numbers_;
    clear(at(workspace, largest_), 4 * 4, stream, problem_.forward.device);
    pack(*pack_gradient_, problem_.output_gradient, arguments.output_gradient,
         at(workspace, packed_gradient_), largest_of(workspace, 0), at(workspace, bias_sums_), stream);
    if (weight_) {
      void* const packed =
          packs_into_gradient() ? on_vector(arguments.input_gradient) : at(workspace, packed_input_);
      pack(*pack_input_, problem_.forward.input, arguments.input, packed, largest_of(workspace, 1), nullptr,
           stream);
      Words words;
      words.add(n.transposed ? packed : at(workspace, packed_gradient_));
      words.add(n.transposed ? at(workspace, packed_gradient_) : packed);
      words.add(at(workspace, parts_));
      words.add(length_);
      words.add(chunks_);
      words.add(splits_);
      words.launch(*weight_, stream, weight_blocks_);
    }
    if (sum_) {
      Words words;
      words.add(at(workspace, parts_));
      words.add(at(workspace, bias_sums_));
      words.add(largest_of(workspace, 0));
      words.add(largest_of(workspace, 1));
      words.add(wants_weight_ ? arguments.parameter_gradients[0] : nullptr);
      words.add(wants_bias_ ? arguments.parameter_gradients[1] : nullptr);
      words.add(splits_);
      words.add(bias_parts_);
      words.launch(*sum_, stream, weight_sum_blocks() + n.conv_groups * n.out_channels);
    }
    if (input_) {
      Words pack;
      pack.add(arguments.parameters[0]);
      pack.add(at(workspace, packed_weights_));
      pack.add(at(workspace, scales_));
      pack.launch(*pack_weight_, stream, 0);
      Words words;
      words.add(at(workspace, packed_gradient_));
      words.add(at(workspace, packed_weights_));
      words.add(at(workspace, scales_));
      words.add(largest_of(workspace, 0));
      words.add(arguments.input_gradient);
      words.add(batch_);
      words.add(length_);
      words.add(tiles_);
      words.launch(*input_, stream, input_blocks_);
    }
  }

 private:
  bool scales() const { return problem_.forward.input.dtype == DType::f32; }
  const char* operand() const { return problem_.forward.input.dtype == DType::bf16 ? "bf16" : "f16"; }
  Number packed_bytes(int64_t group_channels) const {
    return length_ * (numbers_.all_eights(group_channels) * 16);
  }
  // Blocks that add up the weights' gradient.
  int64_t weight_sum_blocks() const {
    const int64_t few = int64_t{16} * gpu_of(problem_.forward.device).multiprocessors;
    return wants_weight_ ? std::min(few, numbers_.weight_tiles() * numbers_.tile_sums() / 32) : 0;
  }
  int64_t pack_positions(const TensorSpec& spec) const { return pack_rounds * pack_threads / lanes(spec); }
  Number pack_parts(const TensorSpec& spec) const { return divide_up(length_, pack_positions(spec)); }

  // Whether the packed input lies where its gradient is written afterwards: of f32 it takes half as much. So
  // for one sample, and then for all.
  bool packs_into_gradient() const {
    if (!wants_weight_ || !problem_.wants_input()) return false;
    const GradientNumbers& n = numbers_;
    const Lying lying(problem_.input_gradient);
    const int64_t positions = n.margin + n.behind() + tile_positions + n.sample;
    return positions * n.all_eights(n.channels) * 16 + 16 <=
           lying.elements() * byte_size(problem_.input_gradient.dtype);
  }
  static void* on_vector(void* pointer) {
    const uintptr_t behind = reinterpret_cast<uintptr_t>(pointer) % 16;
    return static_cast<unsigned char*>(pointer) + (16 - behind) % 16;
  }

  // The words of the gradient, then those of the input.
  void* largest_of(void* workspace, int64_t index) const {
    return at(workspace, Region{largest_.begin + index * 8, 8});
  }

  int64_t eights_of(const TensorSpec& spec) const {
    return numbers_.all_eights(spec.sizes[1] / numbers_.conv_groups);
  }
  // Eights of channels that neighbouring threads have: where channels lie side by side.
  int64_t lanes(const TensorSpec& spec) const {
    const int64_t all = eights_of(spec);
    return spec.strides[1] != 1 ? 1 : all % 4 == 0 ? 4 : 2;
  }

  void pack(const Function& function, const TensorSpec& spec, const void* tensor, void* packed, void* largest,
            void* sums, Stream stream) const {
    for (int pass = scales() ? 0 : 1; pass <= (scales() ? 2 : 1); ++pass) {
      Words words;
      words.add(tensor);
      words.add(packed);
      words.add(largest);
      words.add(sums);
      words.add(batch_);
      words.add(length_);
      words.add(pack_parts(spec));
      words.add(Number(pass));
      const Number pieces = pack_parts(spec) * (eights_of(spec) / lanes(spec));
      words.launch(function, stream,
                   pass == 0   ? Number(glances / 64)
                   : pass == 1 ? pieces
                               : minimum(pieces, few_blocks));
    }
  }

  // At once: each kernel is found there when its function is made.
  void compile_all(const Device& device) const {
    std::vector<Source> sources{pack_source(problem_.output_gradient, true)};
    if (wants_weight_) {
      sources.push_back(pack_source(problem_.forward.input, false));
      sources.push_back(weight_source());
    }
    if (wants_weight_ || wants_bias_) sources.push_back(sum_source());
    if (problem_.wants_input()) {
      sources.push_back(pack_weight_source());
      sources.push_back(input_source());
    }
    compile(sources, gpu_of(device).architecture);
  }

  static Source kernel(const char* name, const std::string& structs, const std::string& agent,
                       const char* parameters, int64_t threads, bool has_shared) {
    std::ostringstream out;
    out << "#include \"gemm/backward/gradients.cuh\"\n"
        << structs << "using Agent = onepass::" << agent << ";\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << threads << (has_shared ? ", 1" : "") << ") "
        << name << "(const __grid_constant__ onepass::" << parameters << " p) {\n";
    if (has_shared) {
      out << "  extern __shared__ __align__(128) unsigned char shared[];\n"
             "  Agent{p, *reinterpret_cast<Agent::Shared*>(shared)}.run();\n";
    } else {
      out << "  Agent{p}.run();\n";
    }
    out << "}\n";
    return {name, out.str()};
  }

  Source pack_source(const TensorSpec& spec, bool is_gradient) const {
    const Lying lying(spec);
    Constants constants;
    lying.add_to(constants, numbers_.conv_groups);
    numbers_.add_pitches(constants);
    constants.add("elements", lying.elements())
        .add("conv_groups", numbers_.conv_groups)
        .add("groups", eights_of(spec))
        .add("lanes", lanes(spec))
        .add("part_positions", pack_positions(spec))
        .add("glances", glances)
        .flag("has_sums", is_gradient && wants_bias_);
    return kernel(is_gradient ? "onepass_gemm_pack_gradient" : "onepass_gemm_pack_input",
                  std::string("struct Numbers {\n  using Type = onepass::") + name_of(spec.dtype) +
                      ";\n  using Operand = onepass::" + operand() + ";\n" + constants.text() + "};\n",
                  "GemmPackTensor<Numbers>", "GemmPackedParameters", pack_threads, false);
  }

  std::string weight_numbers() const {
    const GradientNumbers& n = numbers_;
    Constants constants = n.geometry();
    constants.add("warpgroups", warpgroups)
        .add("chunk", chunk)
        .add("columns", n.columns)
        .add("stages", n.stages)
        .add("lag", n.lag)
        .add("taps_each", n.taps_each)
        .add("u_channels", n.u_channels)
        .add("v_channels", n.v_channels)
        .add("conv_groups", n.conv_groups)
        .add("together", n.together)
        .add("out_channels", n.out_channels)
        .add("shared_bytes", n.weight_shared_bytes(n.stages))
        .flag("scales", scales())
        .add("weight_blocks", weight_sum_blocks());
    return std::string("struct Numbers {\n  using Product = ::Product;\n  using Weight = onepass::") +
           name_of(problem_.forward.parameters[0].dtype) + ";\n" + constants.text() + "};\n";
  }
  Source weight_source() const {
    return kernel("onepass_gemm_weight_gradient",
                  product_source("Product", numbers_.columns, operand(), true) + weight_numbers(),
                  "GemmWeightGradient<Numbers>", "GemmWeightParameters", weight_threads, true);
  }
  Source sum_source() const {
    return kernel("onepass_gemm_weight_sum", "struct Product;\n" + weight_numbers(), "GemmWeightSum<Numbers>",
                  "GemmWeightSumParameters", pack_threads, false);
  }

  std::string input_numbers() const {
    const GradientNumbers& n = numbers_;
    const TensorSpec& spec = problem_.input_gradient;
    const Lying lying(spec);
    // Whether so many neighbours of a row can be a vector.
    const auto fit = [&](int64_t count) {
      return lying.strides[2] == 1 && n.pitch % count == 0 && lying.sizes[2] % count == 0 &&
             lying.of_sample % count == 0 && lying.of_channel % count == 0 && lying.strides[0] % count == 0 &&
             lying.strides[1] % count == 0;
    };
    Constants constants = n.geometry();
    lying.add_to(constants, n.conv_groups);
    constants.add("columns", input_columns)
        .add("conv_groups", n.conv_groups)
        .add("in_channels", n.out_channels)
        .add("window", n.window)
        .add("group_taps", n.group_taps)
        .add("tap_groups", n.tap_groups())
        .add("chunks", n.chunks())
        .add("stages", n.input_stages)
        .add("lag", n.input_lag())
        .add("sign", n.transposed ? 1 : -1)
        .add("shared_bytes", n.input_shared_bytes(n.input_stages))
        .flag("weights_stay", n.weights_stay)
        .flag("weights_by_input", !n.transposed)
        .flag("scales", scales())
        .flag("pairs_fit", fit(2))
        .flag("quads_fit", byte_size(spec.dtype) == 2 && fit(4));
    return std::string("struct Numbers {\n  using Product = ::Product;\n  using Operand = onepass::") +
           operand() + ";\n  using Weight = onepass::" + name_of(problem_.forward.parameters[0].dtype) +
           ";\n  using Output = onepass::" + name_of(spec.dtype) + ";\n" + constants.text() + "};\n";
  }
  Source input_source() const {
    return kernel("onepass_gemm_input_gradient",
                  product_source("Product", input_columns, operand(), false) + input_numbers(),
                  "GemmInputGradient<Numbers>", "GemmInputParameters", input_threads, true);
  }
  Source pack_weight_source() const {
    return kernel("onepass_gemm_pack_adjoint", "struct Product;\n" + input_numbers(),
                  "GemmPackAdjoint<Numbers>", "GemmAdjointParameters", pack_threads, false);
  }

  BackwardProblem problem_;
  Number batch_;
  GradientNumbers numbers_;
  bool wants_weight_, wants_bias_;
  std::optional<Function> pack_gradient_, pack_input_, weight_, sum_, pack_weight_, input_;
  Number length_, chunks_, tiles_, bias_parts_, splits_ = 1;
  Number weight_blocks_ = 1, input_blocks_ = 1;
  Regions regions_;
  Region largest_, packed_gradient_, bias_sums_, packed_input_, parts_, packed_weights_, scales_;
};

bool is_dense(const TensorSpec& spec) {
  for (const Layout layout : {Layout::nchw, Layout::nhwc}) {
    const Shape strides = TensorSpec::dense(spec.dtype, spec.sizes, layout).strides;
    bool same = true;
    for (size_t d = 0; d < spec.sizes.size(); ++d)
      same = same && (spec.sizes[d] <= 1 || spec.strides[d] == strides[d]);
    if (same) return true;
  }
  return false;
}

std::string refusal(const BackwardProblem& problem) {
  const Problem& forward = problem.forward;
  std::string reason = whole_block_refusal(forward);
  if (reason.empty()) reason = ties_refusal(forward);
  if (!reason.empty()) return reason;
  const Gpu& gpu = gpu_of(forward.device);
  if (gpu.architecture != "sm_90a") return "it needs wgmma, which sm_90a alone has";
  if (forward.block.stages().size() > 1) return "stages follow the convolution";
  const Conv& conv = *forward.block.conv();
  if (std::min(conv.in_channels, conv.out_channels) / conv.groups < least_wide_channels) {
    return "fewer than " + std::to_string(least_wide_channels) + " channels" +
           (conv.groups == 1 ? "" : " in a group");
  }
  int64_t taps = 1;
  for (size_t d = 0; d < static_cast<size_t>(conv.rank); ++d) {
    if (conv.stride[d] != 1) return "the convolution has a stride";
    if (conv.padding_before[d] != conv.padding_after[d]) return "the padding is uneven";
    if (conv.output_padding[d] != 0) return "the convolution has output padding";
    if (conv.padding_before[d] > conv.dilation[d] * (conv.kernel[d] - 1)) return "padding beyond the kernel";
    taps *= conv.kernel[d];
  }
  if (taps < least_taps) return "a kernel of fewer than " + std::to_string(least_taps) + " taps";
  const DType type = forward.input.dtype;
  if (type == DType::f32 && forward.precision != Precision::tf32)
    return "strict f32: products of f16 are not as exact";
  std::vector<const TensorSpec*> large{&forward.input, &problem.output_gradient};
  if (problem.wants_input()) large.push_back(&problem.input_gradient);
  std::vector<const TensorSpec*> all = large;
  for (size_t i = 0; i < forward.parameters.size(); ++i) {
    all.push_back(&forward.parameters[i]);
    if (problem.wants_parameter(i)) all.push_back(&problem.parameter_gradients[i]);
  }
  for (const TensorSpec* spec : all) {
    if (spec->dtype != type) return "the tensors are not all of one type";
  }
  constexpr int64_t most = int64_t{1} << 31;  // positions, and elements of a sample
  for (const TensorSpec* spec : large) {
    if (!is_dense(*spec)) return "a tensor of the input's or the output's size is not dense";
    if (Lying(*spec).elements() >= most) return "a sample is too large";
  }
  const GradientNumbers numbers(forward, gpu);
  if (!numbers.taps_in_order()) return "the kernel reaches beyond rows of the input";
  if (!numbers.fits()) return "the window of a tile is too large";
  if (numbers.sample * (forward.input.sizes[0] + 1) + 2 * numbers.margin >= most)
    return "more than 2^31 positions";
  return "";
}

double seconds(const BackwardProblem& problem, const PlanOptions&) {
  const Problem& forward = problem.forward;
  const Gpu& gpu = gpu_of(forward.device);
  const GradientNumbers numbers(forward, gpu);
  const int64_t positions = numbers.sample * forward.input.sizes[0];
  const auto moved = [&](const TensorSpec& spec, int64_t channels) {
    return static_cast<double>(spec.byte_span()) +
           static_cast<double>(2 * positions * numbers.conv_groups * channels);
  };
  double bytes = moved(problem.output_gradient, numbers.out_channels);
  double clocks = 0;
  if (problem.wants_parameter(0)) {
    bytes += moved(forward.input, numbers.channels);
    clocks += numbers.weight_clocks(positions, gpu);
    const int64_t splits = numbers.splits(Number(divide_up(positions, chunk)), gpu);
    bytes += static_cast<double>((2 * splits + 1) * numbers.weight_tiles() * numbers.tile_sums() * 4);
  }
  if (problem.wants_input()) clocks += numbers.input_clocks(positions, gpu);
  const double clock = gpu.flops / 256 / gpu.multiprocessors;
  // Launches: f32 is looked at before and after it is packed.
  const double launches = forward.input.dtype == DType::f32 ? 8e-5 : 4.5e-5;
  return launches + 1.2 * bytes / gpu.bytes_per_second + clocks / clock;
}

}  // namespace
}  // namespace cuda

extern const BackwardStrategy cuda_gemm_backward{
    "gemm_backward", cuda::refusal, cuda::seconds,
    [](const BackwardProblem& problem, const PlanOptions&) -> std::shared_ptr<const BackwardKernel> {
      return std::make_shared<const cuda::GemmBackward>(problem);
    }};

}  // namespace onepass
