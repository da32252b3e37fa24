// The row "tail_staged": persistent clusters; a slab stays on the chip between statistics and output. It is
// spread over all threads of a cluster in vectors of 16 bytes, one block a multiprocessor.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>

#include "cuda/tail/slab_kernel.h"

namespace onepass {
namespace cuda {
namespace {

// Whether computing it again takes more than keeping it.
bool is_costly(Op op) {
  constexpr Op cheap[] = {Op::relu,     Op::relu6, Op::leaky_relu, Op::prelu,       Op::clamp,
                          Op::hardtanh, Op::mul,   Op::add,        Op::channel_mul, Op::channel_add};
  return std::ranges::find(cheap, op) == std::end(cheap);
}

constexpr double of_copy = 1.2;  // H200: 1.15 to 1.22 times a copy in f32

// How a slab is spread over a cluster, and where its vectors wait for the statistics. The schedule
// "overlapped" comes first where it has numbers.
struct StagedNumbers {
  static constexpr int most_threads = 512;  // of a multiprocessor, of 128 registers

  int width = 1;
  int input_bytes = 0;  // of an element
  int blocks = 0;       // in a cluster; 0 where the slab fits none
  // More blocks than a cluster has, which exchange their moments through memory.
  bool by_memory = false;
  int threads = most_threads;
  int blocks_wanted = 1;  // of a multiprocessor; more than one of slabs that a single block holds
  int vectors = 0;        // of a thread
  bool overlapped = false;

  // The schedule "ring".
  int held = 0;   // vectors of a thread in shared memory, as f32
  int chunk = 1;  // vectors of a thread that arrive together
  int slots = 0;  // chunks of a warp's ring

  // The schedule "overlapped".
  static constexpr int at_once = 4;  // vectors in the body of a loop over those in shared memory
  int doubled = 0;                   // vectors of a thread with two places in shared memory
  int single = 0;                    // with one; the others are in registers
  bool holds_f16 = false;            // results of the before-chain wait as f16

  int64_t mean_places = 0;  // of a slab in the workspace, where the block ends in a mean

  explicit StagedNumbers(const Problem& problem) {
    const TailShape shape = TailShape::by_slabs(problem);
    const Gpu& gpu = gpu_of(problem.device);
    width = shape.width;
    input_bytes = static_cast<int>(byte_size(problem.input.dtype));
    if (!find_overlapped(problem, shape, gpu)) {
      if (!find_ring(shape, gpu) && !find_by_memory(problem, shape, gpu)) blocks = 0;
      if (blocks == 1) share_multiprocessor(problem, shape, gpu);
    }
    if (fits() && shape.parts.mean) mean_places = count_places(shape);
  }

  bool fits() const { return blocks > 0; }

  bool waits() const { return !overlapped && !by_memory; }
  // The size of the kernel's `Shared`.
  int64_t shared_bytes() const {
    const int64_t vector_bytes = int64_t{threads} * width * input_bytes;
    const int64_t exchange = 2 * ((by_memory ? 1 : blocks) + warps()) * 16 + 4 * 8;
    constexpr int pieces = 4;
    const int64_t bytes = overlapped
                              ? (vectors + doubled) * vector_bytes + warps() * pieces * 8 + exchange + 4
                              : (slots + held / chunk) * (chunk * vector_bytes + warps() * 8) + exchange;
    return round_up(bytes, 128);
  }

  int warps() const { return threads / 32; }

  // What a slab takes its cluster: some microseconds whatever its size, then time for each value of a thread.
  // H200, overlapped: a slab of s60 and s19 in bf16 takes 8.2 and 9.0 us, of s61 11.1.
  double seconds_of_slab(const Problem& problem, const TailShape& shape, const Gpu& gpu) const {
    double value = !overlapped ? 6.5e-8 : holds_f16 ? 5.1e-8 : 5.7e-8;
    if (shape.parts.mean) value = seconds_of_summed(problem, shape, gpu);
    // Chunks that end in another row ask for the row of each vector: 26 instructions an element for 12 to 18.
    if (!overlapped) value *= 1 + std::min(1.0, chunk * 32.0 * width / static_cast<double>(shape.spatial));
    // Moments that go through memory: the first blocks that were tried so took some 8 us a slab, without
    // copies ahead. Not measured.
    return (by_memory ? 6e-6 : 2e-6) + value * vectors * width;
  }
  // Slabs that the GPU has at a time. Clusters lie within GPCs, and one of those has fewer multiprocessors.
  double clusters(const Gpu& gpu) const {
    const int less = blocks >= 8 && !by_memory ? 1 : 0;
    return std::max(1, gpu.multiprocessors * blocks_wanted / blocks - less);
  }
  // All slabs; what is loaded first and stored last overlaps with nothing.
  double seconds_of_rounds(const Problem& problem, const TailShape& shape, const Gpu& gpu,
                           double slabs) const {
    const double rounds = std::ceil(slabs / clusters(gpu)) + (!overlapped && blocks > 1 ? 1 : 0);
    return rounds * seconds_of_slab(problem, shape, gpu);
  }

  std::string describe() const {
    std::ostringstream out;
    if (overlapped) {
      out << doubled << " of them with two places, " << single << " with one, the others in registers"
          << (holds_f16 ? "; those wait as f16" : "");
    } else {
      out << held << " of them in shared memory\nstaging: " << slots << " chunks of " << chunk
          << " vectors a thread";
    }
    return out.str();
  }

  std::string source() const {
    Constants constants;
    constants.add("threads", threads).add("width", width).add("blocks", blocks).add("vectors", vectors);
    constants.flag("overlapped", overlapped).flag("by_memory", by_memory);
    if (overlapped) {
      constants.add("doubled", doubled).add("single", single).add("at_once", at_once);
      constants.flag("holds_f16", holds_f16);
    } else {
      constants.add("held", held).add("chunk", chunk).add("slots", slots);
    }
    return constants.numbers();
  }

 private:
  // A value that is not stored takes its instructions alone. Counted, not measured: 9 beside the chains, of
  // which the first is computed again for what waits as it arrived. A multiprocessor issues 0.75 of what it
  // could.
  double seconds_of_summed(const Problem& problem, const TailShape& shape, const Gpu& gpu) const {
    constexpr double others = 9, issued = 0.75;
    const double again = overlapped && !holds_f16 ? static_cast<double>(doubled + single) / vectors : 0;
    const double instructions =
        others + instructions_of_value(shape.parts, bits_of(problem, problem.output.dtype), 1 + again);
    return instructions * most_threads / (issued * gpu.lanes() * gpu.clock());
  }

  void spread(const TailShape& shape, int cluster) {
    blocks = cluster;
    const int64_t lines = divide_up(shape.slab_elements() / width, 32);
    vectors = static_cast<int>(std::max<int64_t>(1, divide_up(lines, int64_t{blocks} * warps())));
  }

  // What StagedMeans has of a slab: a sum for each row that a run of a warp may meet, and those of the edges.
  int64_t count_places(const TailShape& shape) const {
    const int64_t spatial = shape.spatial, line = 32 * width;
    const auto rows_of = [&](int64_t lines) {
      return lines > 0 ? (lines * line + spatial - 2) / spatial + 1 : int64_t{0};
    };
    int64_t of_warp = rows_of(vectors);
    if (overlapped && vectors * line > spatial)
      of_warp = rows_of(doubled) + rows_of(single) + rows_of(vectors - doubled - single);
    return of_warp * warps() * blocks + 2;
  }

  // The smallest cluster that has room for a slab, with two places for as much of it as there is room for.
  bool find_overlapped(const Problem& problem, const TailShape& shape, const Gpu& gpu) {
    if (input_bytes != 2) return false;
    // Of smaller slabs too little is in flight at a time: the ring has several of them.
    constexpr int least_vectors = 8;
    overlapped = true;
    holds_f16 = problem.input.dtype == DType::bf16 && problem.output.dtype == DType::bf16 &&
                problem.numerics != Numerics::strict &&
                std::any_of(shape.parts.before.begin(), shape.parts.before.end(),
                            [](const TailParts::Stage& stage) { return is_costly(stage.pointwise.op); });
    // In registers: 64 values of 128 registers, less where a row has more than weight and bias. With f16 and
    // an after-chain more than 5 vectors spill: s60 takes 1.21, 1.22, 1.29 and 1.30 times its floor with 5,
    // 6, 7 and 8; s19, without one, 1.26, 1.25 and 1.20 with 6, 7 and 8.
    int kept_vectors = shape.parts.has_operands() ? 6 : 8;
    if (holds_f16 && !shape.parts.after.empty()) kept_vectors = 5;
    for (int cluster = 1; cluster <= gpu.largest_cluster(); cluster *= 2) {
      spread(shape, cluster);
      if (vectors < least_vectors) break;
      const int others = std::max(1, vectors - kept_vectors);
      for (doubled = others; doubled > 0; --doubled) {
        single = others - doubled;
        if (shared_bytes() <= gpu.shared_bytes_per_block) return true;
      }
    }
    overlapped = holds_f16 = false;
    return false;
  }

  // The smallest cluster that has room for a slab, and for a ring into which 0.3 of the next one arrives:
  // with 0.24 s19's tail takes 1.29 ms, with 0.3 to 0.36 1.22. Clusters of 8 use 120 of an H200's 132
  // multiprocessors, clusters of 16 only 112.
  bool find_ring(const TailShape& shape, const Gpu& gpu) {
    for (int cluster = 1; cluster <= gpu.largest_cluster(); cluster *= 2) {
      if (fit_ring(shape, cluster, gpu.shared_bytes_per_block)) return true;
    }
    return false;
  }

  bool fit_ring(const TailShape& shape, int cluster, int64_t most_shared_bytes) {
    spread(shape, cluster);
    // Each chunk costs some 60 instructions: chunks as large as 2 KiB a warp.
    constexpr int chunk_bytes = 2048;
    const int most = std::max(1, chunk_bytes / (32 * width * input_bytes));
    for (chunk = std::min(most, vectors); chunk >= 1; --chunk) {
      // Values that a thread keeps in registers: as few as leave the ring its part (s60 with 15 vectors of 31
      // takes 0.563 ms, with 19 0.574, with 11 and a ring of two chunks 0.572); wider vectors need more
      // registers to be worked on.
      for (const int64_t kept_values : {64, 80}) {
        if (width > 4 && kept_values > 64) continue;
        // Two vectors less beside the sums for a mean, which 124 bytes were spilled for.
        const int64_t kept = kept_values / width - (shape.parts.mean ? 2 : 0);
        const int64_t over = std::max<int64_t>(0, vectors - kept);
        held = static_cast<int>(divide_up(over, chunk) * chunk);
        if (held >= vectors) continue;
        constexpr int most_slots = 16;
        slots = most_slots;
        while (slots > 0 && shared_bytes() > most_shared_bytes) --slots;
        if (slots >= 2 && slots * chunk * 10 >= vectors * 3) return true;
      }
    }
    return false;
  }

  // So many blocks that some slabs fill the GPU. The batch is not asked, which must not change a sum's order:
  // tensors of `typical_bytes` decide.
  bool find_by_memory(const Problem& problem, const TailShape& shape, const Gpu& gpu) {
    constexpr double typical_bytes = 256e6;
    const auto slab_bytes = static_cast<double>(shape.slab_elements() * input_bytes);
    const double slabs = std::max(static_cast<double>(shape.groups), std::ceil(typical_bytes / slab_bytes));
    double least = 0;
    StagedNumbers best = *this;
    for (int slabs_at_once = 1; gpu.multiprocessors / slabs_at_once > gpu.largest_cluster();
         ++slabs_at_once) {
      StagedNumbers some = *this;
      some.by_memory = true;
      if (!some.fit_ring(shape, gpu.multiprocessors / slabs_at_once, gpu.shared_bytes_per_block)) break;
      const double seconds = some.seconds_of_rounds(problem, shape, gpu, slabs);
      if (least == 0 || seconds < least) best = some, least = seconds;
    }
    *this = best;
    return least > 0;
  }

  // Smaller blocks beside each other where a slab of one block is small: one exchanges its moments while
  // others load and compute. As few as reach memory's rate.
  void share_multiprocessor(const Problem& problem, const TailShape& shape, const Gpu& gpu) {
    const double bytes =
        static_cast<double>(shape.slab_elements()) * static_cast<double>(shape.element_bytes);
    const double memory = of_copy * bytes * gpu.multiprocessors / gpu.bytes_per_second;
    const auto seconds = [&](const StagedNumbers& numbers) {
      return std::max(memory, numbers.seconds_of_slab(problem, shape, gpu) / numbers.blocks_wanted);
    };
    constexpr int64_t reserved = 1024;  // of each block's shared memory, by the driver
    StagedNumbers best = *this;
    for (const int wanted : {2, 4}) {
      StagedNumbers some = *this;
      some.blocks_wanted = wanted;
      some.threads = most_threads / wanted;
      if (!some.fit_ring(shape, 1, gpu.shared_bytes_per_multiprocessor / wanted - reserved)) break;
      if (seconds(some) < seconds(best)) best = some;
    }
    *this = best;
  }
};

class TailStaged final : public SlabKernel<TailStaged, StagedNumbers> {
 public:
  static std::string refusal(const Problem& problem) {
    std::string reason = slab_refusal(problem, Order::planar, Means::held);
    if (!reason.empty()) return reason;
    const TailShape shape = TailShape::by_slabs(problem);
    const Gpu& gpu = gpu_of(problem.device);
    constexpr int64_t most_slabs = 1 << 30;
    if (!gpu.has_clusters()) {
      return "it needs bulk copies and clusters, which are not used on " + gpu.architecture;
    }
    if (shape.width == 1) return "a slab of a few elements has no 16 bytes to copy";
    if (shape.slabs() > most_slabs) return "it counts slabs in 32 bits";
    if (shape.parts.mean && shape.spatial < 32 * shape.width)
      return "the vectors of a warp lie in more than two rows, and the block ends in a mean";
    if (!numbers_of<StagedNumbers>(problem)->fits()) {
      return "a slab of " + std::to_string(shape.slab_elements()) +
             " elements has too little for each thread, or too much for the GPU";
    }
    return "";
  }

  static double seconds(const Problem& problem, const PlanOptions&) {
    const TailShape shape(problem);
    const Gpu& gpu = gpu_of(problem.device);
    const auto numbers = numbers_of<StagedNumbers>(problem);
    const double bytes = static_cast<double>(shape.elements()) * static_cast<double>(shape.element_bytes);
    // Neither several blocks a multiprocessor nor slabs of more blocks than a cluster are measured.
    const double times = numbers->blocks_wanted > 1 ? 1.5 : numbers->by_memory ? 1.35 : of_copy;
    const double copy = times * bytes / gpu.bytes_per_second;
    const double rounds =
        numbers->seconds_of_rounds(problem, shape, gpu, static_cast<double>(shape.slabs().value()));
    return 4e-6 + std::max(copy, rounds);
  }

  explicit TailStaged(const Problem& problem) : SlabKernel(problem, TailShape::by_slabs(problem)) {
    Number clusters = function_.resident_clusters();
    if (numbers_.by_memory) {
      function_.require_resident(numbers_.blocks);
      clusters = divide(clusters, numbers_.blocks);
      control_ = regions_.add(shape_.slabs() * (numbers_.blocks * 8) + exchange_counters * 4);
    }
    blocks_ = minimum(shape_.slabs(), clusters) * numbers_.blocks;
    sums_ = regions_.add(shape_.slabs() * (numbers_.mean_places * 4));
  }

  size_t workspace_bytes() const override { return static_cast<size_t>(regions_.total().value()); }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.elements() == 0) return;
    const Alignment alignment(shape_, problem_, arguments);
    TailParameters p;
    p.input = arguments.input;
    p.output = arguments.output;
    p.statistics = arguments.statistics;
    p.control = numbers_.by_memory ? at(workspace, control_) : nullptr;
    p.parts = nullptr;
    p.sums = numbers_.mean_places > 0 ? at(workspace, sums_) : nullptr;
    p.aligned = alignment.bits();
    p.phase = alignment.phase();
    p.batch = shape_.batch;
    p.wave_units = 1;
    p.parameter = arguments.parameters;
    if (numbers_.by_memory) clear(at(workspace, control_), control_.bytes, stream, problem_.device);
    p.launch(function_, stream, blocks_);
  }

  static Source source(const Problem& problem, const TailShape&, const StagedNumbers& numbers) {
    std::ostringstream out;
    out << "#include \"tail/staged.cuh\"\n"
        << tail_source(problem, bits_of(problem, problem.output.dtype)) << numbers.source()
        << "using Agent = onepass::TailStaged<onepass::Tail, Numbers>;\n"
        << "static_assert(sizeof(Agent::Shared) == " << numbers.shared_bytes() << ");\n"
        << (numbers.mean_places > 0
                ? "static_assert(Agent::Means::slab_places == " + std::to_string(numbers.mean_places) + ");\n"
                : "")
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers.threads << ", "
        << numbers.blocks_wanted << ") onepass_tail_staged(const __grid_constant__ Agent::Parameters p) {\n"
        << "  extern __shared__ __align__(128) unsigned char memory[];\n"
        << (numbers.waits() ? wait_source() : "")
        << "  Agent{p, *reinterpret_cast<Agent::Shared*>(memory), static_cast<int>(blockIdx.x % "
        << numbers.blocks << ")}.run();\n"
        << "}\n";
    return {"onepass_tail_staged", out.str()};
  }

  Accuracy accuracy() const override {
    Accuracy own = SlabKernel::accuracy();
    if (numbers_.holds_f16) own.held = Accuracy::Held::as_f16;
    return own;
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "slab: " << shape_.slab_elements() << " elements in " << cluster_text() << '\n'
        << "schedule: " << (numbers_.overlapped ? "overlapped" : "ring") << '\n'
        << "thread: " << numbers_.vectors << " vectors of " << shape_.width << " elements, "
        << numbers_.describe() << '\n'
        << "blocks: " << describe_blocks(blocks_, function_);
    if (workspace_bytes() > 0) out << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return where(numbers_.holds_f16, note::held_as_f16) + SlabKernel::numerics();
  }

 private:
  Regions regions_;
  Region control_, sums_;
};

}  // namespace
}  // namespace cuda

extern const Strategy cuda_tail_staged = cuda::tail_strategy<cuda::TailStaged>("tail_staged");

}  // namespace onepass
