// The rows "tail_staged" and "tail_overlapped": persistent clusters, a slab stays on the chip between
// statistics and output. Both spread it over all threads of a cluster in vectors of 16 bytes, one block a
// multiprocessor, and differ in their numbers: where those vectors wait.
#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

#include "cuda/notes.h"
#include "cuda/tail/tail.h"

namespace onepass {
namespace cuda {
namespace {

// What both have. A thread has 128 registers.
struct ClusterNumbers {
  static constexpr int threads = 512;
  static constexpr int warps = threads / 32;

  int blocks = 1;   // in a cluster
  int vectors = 0;  // of a thread

  ClusterNumbers() = default;
  ClusterNumbers(const TailShape& shape, int cluster) : blocks(cluster) {
    const int64_t rows = divide_up(shape.slab_elements() / shape.width, 32);
    vectors = static_cast<int>(std::max<int64_t>(1, divide_up(rows, int64_t{blocks} * warps)));
  }

  // In shared memory besides vectors: sums of warps and blocks for two slabs, and what counts them.
  int64_t exchange_bytes() const { return 2 * (blocks + warps) * 16; }
};

// A slab waits in registers, through a ring, and what those do not hold where it arrived in shared memory, as
// f32; the next one arrives as it goes.
struct StagedNumbers : ClusterNumbers {
  static constexpr const char* row = "tail_staged";
  static constexpr const char* header = "tail/staged.cuh";
  static constexpr const char* agent = "TailStaged";
  static constexpr bool waits = true;
  static constexpr double of_copy = 1.2;  // H200: 1.15 to 1.22 times a copy in f32
  double of_value() const { return 6.5e-8; }
  static Accuracy::Held held_values() { return Accuracy::Held::as_computed; }

  int held = 0;   // vectors of a thread in shared memory
  int chunk = 1;  // vectors of a thread that arrive together
  int slots = 0;  // chunks of a warp's ring

  using ClusterNumbers::ClusterNumbers;

  static std::string refusal(const Problem& problem);
  static std::optional<StagedNumbers> find(const Problem& problem, const TailShape& shape);

  int64_t shared_bytes(const TailShape& shape, int64_t input_bytes) const {
    const int64_t stage = int64_t{chunk} * threads * shape.width * input_bytes + warps * 8;
    return (slots + held / chunk) * stage + 128 + 32 + exchange_bytes();
  }

  // Of one cluster the first slab's loads and the last one's stores have nothing beside them.
  double more_rounds() const { return blocks > 1 ? 1 : 0; }

  void add_to(Constants& constants) const {
    constants.add("held", held).add("chunk", chunk).add("slots", slots);
  }
  std::string describe() const {
    return std::to_string(held) + " of them in shared memory\nstaging: " + std::to_string(slots) +
           " chunks of " + std::to_string(chunk) + " vectors a thread";
  }
  static Notes notes() { return {}; }
};

// Slabs of 16 bits: the sums of one are exchanged while the next is begun.
struct OverlappedNumbers : ClusterNumbers {
  static constexpr const char* row = "tail_overlapped";
  static constexpr const char* header = "tail/overlapped.cuh";
  static constexpr const char* agent = "TailOverlapped";
  static constexpr bool waits = false;
  static constexpr double of_copy = 1.2;
  // H200: a slab of s60 and s19 in bf16 takes 8.2 and 9.0 us, of s61 11.1.
  double of_value() const { return halves ? 5.1e-8 : 5.7e-8; }
  Accuracy::Held held_values() const { return halves ? Accuracy::Held::as_f16 : Accuracy::Held::as_computed; }

  static constexpr int at_once = 4;  // vectors in the body of a loop over those in shared memory

  int doubled = 0;      // vectors of a thread with two places in shared memory
  int single = 0;       // with one; the others are in registers
  bool halves = false;  // what the before-chain makes of those waits as f16

  using ClusterNumbers::ClusterNumbers;

  static std::string refusal(const Problem& problem);
  static std::optional<OverlappedNumbers> find(const Problem& problem, const TailShape& shape);

  int64_t shared_bytes(const TailShape& shape, int64_t input_bytes) const {
    return int64_t{vectors + doubled} * threads * shape.width * input_bytes + warps * 32 + 128 + 48 +
           exchange_bytes();
  }

  double more_rounds() const { return 0; }

  void add_to(Constants& constants) const {
    constants.add("doubled", doubled).add("single", single).add("at_once", at_once);
    constants.flag("halves", halves);
  }
  std::string describe() const {
    return std::to_string(doubled) + " of them with two places, " + std::to_string(single) +
           " with one, the others in registers" + (halves ? "; those wait as f16" : "");
  }
  Notes notes() const { return where(halves, note::held_as_f16); }
};

// The smallest cluster that has room for a slab, and for a ring into which 0.3 of the next one arrives: with
// 0.24 s19's tail takes 1.29 ms, with 0.3 to 0.36 1.22. Clusters of 8 use 120 of an H200's 132
// multiprocessors, clusters of 16 only 112.
std::optional<StagedNumbers> StagedNumbers::find(const Problem& problem, const TailShape& shape) {
  const Gpu& gpu = gpu_of(problem.device);
  const int64_t input_bytes = byte_size(problem.input.dtype);
  for (int blocks = 1; blocks <= gpu.largest_cluster(); blocks *= 2) {
    StagedNumbers numbers(shape, blocks);
    // Each chunk costs some 60 instructions: chunks as large as 2 KiB a warp.
    constexpr int64_t chunk_bytes = 2048;
    const int most = static_cast<int>(std::max<int64_t>(1, chunk_bytes / (32 * shape.width * input_bytes)));
    for (int chunk = std::min(most, numbers.vectors); chunk >= 1; --chunk) {
      // Values that a thread keeps in registers: as few as leave the ring its part (s60 with 15 vectors of 31
      // takes 0.563 ms, with 19 0.574, with 11 and a ring of two chunks 0.572); wider vectors need more
      // registers to be worked on.
      for (const int64_t kept_values : {64, 80}) {
        if (shape.width > 4 && kept_values > 64) continue;
        const int64_t over = std::max<int64_t>(0, numbers.vectors - kept_values / shape.width);
        numbers.chunk = chunk;
        numbers.held = static_cast<int>(divide_up(over, chunk) * chunk);
        if (numbers.held >= numbers.vectors || (numbers.held > 0 && input_bytes != 4)) continue;
        constexpr int most_slots = 16;
        numbers.slots = most_slots;
        while (numbers.slots > 0 && numbers.shared_bytes(shape, input_bytes) > gpu.shared_bytes_per_block) {
          --numbers.slots;
        }
        if (numbers.slots >= 2 && numbers.slots * chunk * 10 >= numbers.vectors * 3) return numbers;
      }
    }
  }
  return std::nullopt;
}

// Whether computing it again takes more than keeping it.
bool is_costly(Op op) {
  switch (op) {
    case Op::relu:
    case Op::relu6:
    case Op::leaky_relu:
    case Op::prelu:
    case Op::clamp:
    case Op::hardtanh:
    case Op::mul:
    case Op::add:
    case Op::channel_mul:
    case Op::channel_add:
      return false;
    default:
      return true;
  }
}

// The smallest cluster that has room for a slab, with two places for as much of it as there is room for.
std::optional<OverlappedNumbers> OverlappedNumbers::find(const Problem& problem, const TailShape& shape) {
  const Gpu& gpu = gpu_of(problem.device);
  const int64_t input_bytes = byte_size(problem.input.dtype);
  // Of smaller slabs too little is on its way at a time: tail_staged has several in its ring.
  constexpr int least_vectors = 8;
  const bool halves =
      problem.input.dtype == DType::bf16 && problem.output.dtype == DType::bf16 &&
      problem.numerics != Numerics::strict &&
      std::any_of(shape.parts.before.begin(), shape.parts.before.end(),
                  [](const TailParts::Stage& stage) { return is_costly(stage.pointwise.op); });
  // In registers: 64 values of 128 registers, less where a row has more than weight and bias. What waits as
  // f16 is cheap to finish, but with more than 5 vectors and an after-chain registers are spilled: s60 takes
  // 1.21, 1.22, 1.29 and 1.30 times its floor with 5, 6, 7 and 8; s19, without one, 1.26, 1.25 and 1.20 with
  // 6, 7 and 8.
  int kept_vectors = shape.parts.has_operands() ? 6 : 8;
  if (halves && !shape.parts.after.empty()) kept_vectors = 5;
  for (int blocks = 1; blocks <= gpu.largest_cluster(); blocks *= 2) {
    OverlappedNumbers numbers(shape, blocks);
    numbers.halves = halves;
    if (numbers.vectors < least_vectors) return std::nullopt;
    const int others = std::max(1, numbers.vectors - kept_vectors);
    for (numbers.doubled = others; numbers.doubled > 0; --numbers.doubled) {
      numbers.single = others - numbers.doubled;
      if (numbers.shared_bytes(shape, input_bytes) <= gpu.shared_bytes_per_block) return numbers;
    }
  }
  return std::nullopt;
}

// Vectors may run over the ends of rows here: only the slab's own ends count.
TailShape cluster_shape(const Problem& problem) {
  TailShape shape(problem);
  shape.width = shape.slab_width;
  return shape;
}

template <class Numbers>
std::optional<Numbers> find_numbers(const Problem& problem) {
  return Numbers::find(problem, cluster_shape(problem));
}

template <class Numbers>
std::string refusal(const Problem& problem) {
  std::string reason = tail_refusal(problem);
  if (!reason.empty()) return reason;
  const TailShape shape = cluster_shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  constexpr int64_t most_slabs = 1 << 30;
  if (shape.parts.norm == nullptr) return "the block has no norm";
  if (shape.parts.mean) return "the block ends in a mean";
  if (shape.order != Order::planar) return "channels lie after space: a slab is not contiguous";
  if (!gpu.has_clusters()) {
    return "it needs bulk copies and clusters, which are not used on " + gpu.architecture;
  }
  if (shape.width == 1) return "a slab of a few elements has no 16 bytes to copy";
  if (shape.slabs() > most_slabs) return "it counts slabs in 32 bits";
  reason = Numbers::refusal(problem);
  if (!reason.empty()) return reason;
  if (!find_numbers<Numbers>(problem)) {
    return "a slab of " + std::to_string(shape.slab_elements()) +
           " elements has too little for each thread, or too much for " +
           std::to_string(gpu.largest_cluster()) + " blocks";
  }
  return "";
}

std::string OverlappedNumbers::refusal(const Problem& problem) {
  return byte_size(problem.input.dtype) == 2 ? "" : "it is for elements of 16 bits";
}

std::string StagedNumbers::refusal(const Problem& problem) {
  return cuda::refusal<OverlappedNumbers>(problem).empty() ? "tail_overlapped takes it" : "";
}

template <class Numbers>
class ClusterTail final : public Kernel {
 public:
  explicit ClusterTail(const Problem& problem)
      : problem_(problem),
        shape_(cluster_shape(problem)),
        numbers_(*find_numbers<Numbers>(problem)),
        function_(source(), problem.device, launch_numbers()),
        blocks_(minimum(shape_.slabs(), function_.resident_clusters()) * numbers_.blocks) {}

  Accuracy accuracy() const override {
    Accuracy own = accuracy_of_chains(problem_);
    own.held = numbers_.held_values();
    return own;
  }
  size_t workspace_bytes() const override { return 0; }

  std::string describe() const override {
    std::ostringstream out;
    out << "slab: " << shape_.slab_elements() << " elements in " << numbers_.blocks
        << (numbers_.blocks > 1 ? " blocks of a cluster" : " block") << '\n'
        << "thread: " << numbers_.vectors << " vectors of " << shape_.width << " elements, "
        << numbers_.describe() << '\n'
        << "blocks: " << describe_blocks(blocks_, function_);
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return numbers_.notes() + notes_of_chains(problem_.block, bits_of(problem_, problem_.output.dtype));
  }

  void launch(const Arguments& arguments, void*, Stream stream) const override {
    if (shape_.elements() == 0) return;
    const Alignment alignment(shape_, problem_, arguments);
    Words words;
    words.add(arguments.input);
    words.add(arguments.output);
    words.add(arguments.statistics);
    for (int unused = 0; unused < 3; ++unused) words.add(nullptr);
    words.add(alignment.bits());
    words.add(alignment.phase());
    words.add(shape_.batch);
    words.add(int64_t{1});
    words.add(arguments.parameters);
    words.launch(function_, stream, blocks_);
  }

 private:
  Source source() const {
    Constants constants;
    constants.add("threads", numbers_.threads)
        .add("width", shape_.width)
        .add("blocks", numbers_.blocks)
        .add("vectors", numbers_.vectors);
    numbers_.add_to(constants);
    const std::string name = "onepass_" + std::string(Numbers::row);
    std::ostringstream out;
    out << "#include \"" << Numbers::header << "\"\n"
        << tail_source(problem_, bits_of(problem_, problem_.output.dtype)) << constants.numbers()
        << "using Agent = onepass::" << Numbers::agent << "<onepass::Tail, Numbers>;\n"
        << "static_assert(sizeof(Agent::Shared) <= " << shared_bytes() << ");\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers_.threads << ", 1) " << name
        << "(const __grid_constant__ Agent::Parameters p) {\n"
        << "  extern __shared__ __align__(128) unsigned char memory[];\n"
        << (Numbers::waits ? wait_source() : "")
        << "  Agent{p, *reinterpret_cast<Agent::Shared*>(memory), static_cast<int>(blockIdx.x % "
        << numbers_.blocks << ")}.run();\n"
        << "}\n";
    return {name, out.str()};
  }

  int64_t shared_bytes() const { return numbers_.shared_bytes(shape_, byte_size(problem_.input.dtype)); }

  Launch launch_numbers() const {
    return {static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(numbers_.threads),
            static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(shared_bytes()),
            false,
            Numbers::waits};
  }

  Problem problem_;
  TailShape shape_;
  Numbers numbers_;
  Function function_;
  Number blocks_;
};

template <class Numbers>
double seconds(const Problem& problem, const PlanOptions&) {
  const TailShape shape = cluster_shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const double bytes = static_cast<double>(shape.elements()) * static_cast<double>(shape.element_bytes);
  const Numbers numbers = *find_numbers<Numbers>(problem);
  const double copy = Numbers::of_copy * bytes / gpu.bytes_per_second;
  // A slab takes a cluster some microseconds whatever its size, then time for each value of a thread.
  // Clusters lie within GPCs, and one of those has fewer multiprocessors.
  const double clusters = std::max(1, gpu.multiprocessors / numbers.blocks - (numbers.blocks >= 8 ? 1 : 0));
  const double rounds = std::ceil(static_cast<double>(shape.slabs()) / clusters) + numbers.more_rounds();
  return 4e-6 + std::max(copy, rounds * (2e-6 + numbers.of_value() * numbers.vectors * shape.width));
}

template <class Numbers>
constexpr Strategy strategy() {
  return {Numbers::row, refusal<Numbers>, seconds<Numbers>,
          [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
            return std::make_shared<const ClusterTail<Numbers>>(problem);
          }};
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_tail_staged = cuda::strategy<cuda::StagedNumbers>();
extern const Strategy cuda_tail_overlapped = cuda::strategy<cuda::OverlappedNumbers>();

}  // namespace onepass
