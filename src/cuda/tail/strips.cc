// The row "tail_strips": channels after space; strips of whole slabs stay in shared memory between statistics
// and output.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <sstream>

#include "cuda/tail/slab_kernel.h"

namespace onepass {
namespace cuda {
namespace {

// How a strip is spread over the threads of a cluster. The numbers are those of the best predicted times for
// 1 and for 64 samples together, whatever the batch is: sums have the same order in every batch. Times of 64
// count twice: a percent of them is more.
struct StripNumbers {
  static constexpr int most_warps = 16;  // of a block
  int width = 1;
  int strip = 0;         // channels: whole slabs and vectors
  int warp_columns = 1;  // vectors of a position that a warp has
  int threads = 0;
  int vectors = 0;  // of a thread
  int blocks = 0;   // in a cluster; 0 where no strip fits one
  int at_once = 2;  // vectors of a thread that are written together
  int threads_of_multiprocessor = 1024;
  int input_bytes = 0;  // of an element
  int64_t group_channels = 1;

  explicit StripNumbers(const Problem& problem) {
    const TailShape shape(problem);
    width = shape.width;
    input_bytes = static_cast<int>(byte_size(problem.input.dtype));
    group_channels = shape.group_channels();
    // What stages after the norm read is loaded for all of them before it is used.
    for (const TailParts::Stage& stage : shape.parts.after) {
      if (argument_kind(stage.pointwise.op) == ArgumentKind::tensor) at_once = 4;
    }
    // Registers: 64 of a thread, and more for each value that a channel has, for tensors before the norm, and
    // where each channel has sums of its own.
    const int64_t others = count_channel_values(shape.parts.before) +
                           count_channel_values(shape.parts.after) +
                           (before_bytes(problem, shape) > 0 ? 1 : 0) + (piece() == 1 ? 1 : 0);
    if (width > 4) threads_of_multiprocessor -= static_cast<int>(256 * std::min<int64_t>(2, others));
    const Gpu& gpu = gpu_of(problem.device);
    StripNumbers best = *this;
    double least = std::numeric_limits<double>::infinity();
    const auto consider = [&] {
      if (shared_bytes() > gpu.shared_bytes_per_block) return;
      const double time = weight(problem, shape, 1) * std::pow(weight(problem, shape, 64), 2);
      if (time >= least) return;
      least = time;
      best = *this;
    };
    for (int64_t groups = 1; groups <= shape.groups; ++groups) {
      const int64_t channels = groups * shape.group_channels();
      if (shape.groups % groups != 0 || channels % width != 0) continue;
      if (channels / width > 32 * most_warps) break;
      strip = static_cast<int>(channels);
      const int columns = strip / width;
      warp_columns = std::min(32, columns & -columns);
      for (blocks = 1; blocks <= gpu.largest_cluster() && blocks <= shape.spatial; blocks *= 2) {
        for (int sets = 1; sets * set_warps() <= most_warps; ++sets) {
          threads = sets * set_warps() * 32;
          vectors = static_cast<int>(
              std::min<int64_t>(most_vectors, divide_up(share(shape), sets * (32 / warp_columns))));
          if (vectors < most_vectors) consider();
        }
      }
    }
    blocks = 0;
    *this = best;
  }

  bool fits() const { return blocks > 0; }
  int64_t share(const TailShape& shape) const { return divide_up(shape.spatial, blocks); }  // positions
  int64_t strips(const TailShape& shape) const { return shape.channels / strip; }

  // The size of the kernel's `Shared`.
  int64_t shared_bytes() const {
    const int64_t values = int64_t{vectors} * threads * width * input_bytes;
    const int64_t parts = threads / 32 / set_warps() * (strip / piece());
    const int64_t slabs = strip / group_channels;
    const int64_t exchange = blocks > 1 ? slabs * blocks : 1;
    return values + (parts + exchange + slabs) * 16 + 16;
  }

  static constexpr bool waits() { return true; }

  // Blocks that a multiprocessor has room for.
  int resident(const Gpu& gpu) const {
    constexpr int64_t reserved = 1024;  // of each block, by the driver
    const int64_t by_memory = gpu.shared_bytes_per_multiprocessor / (shared_bytes() + reserved);
    const int64_t by_threads = threads_of_multiprocessor / threads;
    return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>({by_memory, by_threads, 16})));
  }

  // Orders the numbers of a problem: of 13 tails with 40 sets of numbers each, the best here took 1.0 to 1.2
  // times the least on an H200. 2026-11-18.
  double weight(const Problem& problem, const TailShape& shape, int64_t batch) const {
    const Gpu& gpu = gpu_of(problem.device);
    const double units = static_cast<double>(batch * strips(shape));
    const int per_multiprocessor = resident(gpu);
    // Clusters lie within GPCs, and one of those has fewer multiprocessors.
    const double clusters =
        std::max(1, gpu.multiprocessors * per_multiprocessor / blocks - (blocks >= 8 ? 1 : 0));
    const double rounds = std::ceil(units / clusters);
    // Instructions of a multiprocessor's threads in a round. Fewer threads than these do not keep it busy.
    constexpr double of_element = 15, of_vector = 20, of_thread = 400, least_threads = 768;
    const double here = std::min<double>(per_multiprocessor, std::ceil(units * blocks / gpu.multiprocessors));
    const double work = std::max(here * threads, least_threads) *
                        (vectors * (of_element * width + of_vector) + of_thread) /
                        (gpu.lanes() * gpu.clock());
    // From the first load to the first store: memory's latency and the sums.
    const double wait = blocks > 1 ? 3.5e-6 : 2.5e-6;
    // A cluster follows another when all of its blocks have room: tail_resident takes some 10 us for a slab
    // in 16 blocks.
    const double gaps = (rounds - 1) * (blocks > 1 ? 4e-7 * blocks : 0);
    const double bytes = static_cast<double>(batch * shape.channels * shape.spatial) *
                         static_cast<double>(shape.element_bytes + before_bytes(problem, shape));
    // Half of the multiprocessors reach the rate of all.
    const double used = std::min(1.0, 2 * units * blocks / gpu.multiprocessors);
    constexpr double of_copy = 1.2, launch = 4e-6;
    const double memory = of_copy * waste(shape) * bytes / (gpu.bytes_per_second * used);
    return launch + gaps + std::max(rounds * (wait + work), memory + rounds * wait / per_multiprocessor);
  }

  // 46 tails took 0.5 to 1.5 times as long, a fifth off in the mean.
  double seconds(const Problem& problem, const TailShape& shape, int64_t batch) const {
    return 0.82 * weight(problem, shape, batch) - 1.5e-6;
  }

  std::string source() const {
    return Constants()
        .add("threads", threads, "width", width, "vectors", vectors, "blocks", blocks)
        .add("strip", strip, "warp_columns", warp_columns, "at_once", at_once)
        .numbers();
  }

 private:
  static int64_t count_channel_values(const std::vector<TailParts::Stage>& stages) {
    return std::ranges::count_if(stages, [](const TailParts::Stage& stage) {
      return stage.parameter >= 0 && argument_kind(stage.pointwise.op) != ArgumentKind::tensor;
    });
  }

  static constexpr int64_t most_vectors = 256;  // more of them fit no shared memory

  // Neighbouring channels of every vector that are in one slab.
  int64_t piece() const { return std::gcd(int64_t{width}, group_channels); }
  int set_warps() const { return strip / width / warp_columns; }

  // Tensors that stages before the norm read, of one element: they are read twice.
  static int64_t before_bytes(const Problem& problem, const TailShape& shape) {
    int64_t bytes = 0;
    for (const TailParts::Stage& stage : shape.parts.before) {
      if (argument_kind(stage.pointwise.op) != ArgumentKind::tensor) continue;
      bytes += byte_size(problem.parameters[static_cast<size_t>(stage.parameter)].dtype);
    }
    return bytes;
  }

  // Bytes that are moved for each one that is asked for: sectors of 32 bytes, which memory gives in pairs.
  double waste(const TailShape& shape) const {
    constexpr double sector = 32;
    const auto element = static_cast<double>(input_bytes);
    const double position = strip * element;
    const double warp = warp_columns * width * element;
    double factor = strip == shape.channels ? 1.0 : 1.0 + sector / 4 / position;
    if (strip != shape.channels && std::fmod(position, sector) != 0) {
      factor *= (std::floor(position / sector) + 1) * sector / position;
    }
    return factor * std::max(1.0, sector / std::min(position * 32 / warp_columns, warp));
  }
};

class TailStrips final : public SlabKernel<TailStrips, StripNumbers> {
 public:
  static std::string refusal(const Problem& problem) {
    std::string reason = slab_refusal(problem, Order::interleaved);
    if (!reason.empty()) return reason;
    const TailShape shape(problem);
    if (shape.width * byte_size(problem.input.dtype) < 4) {
      return "an odd number of channels has no vectors of 4 bytes to copy";
    }
    if (!numbers_of<StripNumbers>(problem)->fits()) {
      const int blocks = gpu_of(problem.device).largest_cluster();
      return "no strip of whole slabs, of " + std::to_string(shape.group_channels()) + " channels and " +
             std::to_string(shape.spatial) + " positions each, fits the shared memory of " +
             (blocks > 1 ? "a cluster of " + std::to_string(blocks) + " blocks" : "one block");
    }
    return "";
  }

  static double seconds(const Problem& problem, const PlanOptions&) {
    const TailShape shape(problem);
    return numbers_of<StripNumbers>(problem)->seconds(problem, shape, shape.batch.value());
  }

  explicit TailStrips(const Problem& problem) : SlabKernel(problem, TailShape(problem)) {
    blocks_ = shape_.batch * (numbers_.strips(shape_) * numbers_.blocks);
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "strip: " << numbers_.strip << " channels of " << shape_.spatial
        << " positions in the shared memory of " << cluster_text() << '\n'
        << "thread: " << numbers_.vectors << " vectors of " << numbers_.width << " channels; "
        << numbers_.warp_columns << " of a warp at a position\n"
        << "blocks: " << describe_blocks(blocks_, function_);
    return out.str();
  }

  static Source source(const Problem& problem, const TailShape&, const StripNumbers& numbers) {
    const std::string agent = "onepass::TailStrips<onepass::Tail, Numbers, ";
    std::ostringstream out;
    out << "#include \"tail/strips.cuh\"\n"
        << tail_source(problem, bits_of(problem, problem.output.dtype)) << numbers.source()
        << "using Agent = " << agent << "true>;\n"
        << "using Unaligned = " << agent << "false>;\n"
        << "static_assert(sizeof(Agent::Shared) == " << numbers.shared_bytes()
        << " && sizeof(Unaligned::Shared) == sizeof(Agent::Shared));\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers.threads << ", "
        << numbers.resident(gpu_of(problem.device))
        << ") onepass_tail_strips(const __grid_constant__ Agent::Parameters p) {\n"
        << "  extern __shared__ __align__(128) unsigned char memory[];\n"
        << wait_source() << "  if (onepass::is_aligned(p, onepass::aligned_all)) {\n"
        << "    Agent{p, *reinterpret_cast<Agent::Shared*>(memory)}.run();\n"
        << "  } else {\n"
        << "    Unaligned{p, *reinterpret_cast<Unaligned::Shared*>(memory)}.run();\n"
        << "  }\n"
        << "}\n";
    return {"onepass_tail_strips", out.str()};
  }
};

}  // namespace
}  // namespace cuda

extern const Strategy cuda_tail_strips = cuda::tail_strategy<cuda::TailStrips>("tail_strips");

}  // namespace onepass
