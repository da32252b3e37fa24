// The rows "tail_resident" and "tail_staged": a slab stays on the chip between statistics and output.
#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

#include "cuda/tail.h"

namespace onepass {
namespace cuda {
namespace {

// How a slab is spread over the threads of a cluster.
struct ResidentNumbers {
  int threads = 0;
  int vectors = 0;  // of a thread
  int blocks = 1;   // in a cluster
  bool staged = false;
  int chunk = 1;  // vectors of a thread that arrive together
  int slots = 1;  // of a warp's ring

  int64_t shared_bytes(const TailShape& shape, int64_t input_bytes) const {
    const int64_t stage =
        staged ? slots * (int64_t{chunk} * threads * shape.width * input_bytes + threads / 32 * 8)
               : threads / 32 * 24;
    return stage + 128 + threads / 32 * 16 + blocks * 16;
  }
};

// One thread has at most this many values. Staged: 512 threads of 128 registers have a multiprocessor to
// themselves.
constexpr int64_t resident_values = 24;
constexpr int64_t staged_values = 80;
constexpr int64_t most_group_channels = 4096;  // scale and shift of each are in shared memory

std::optional<ResidentNumbers> resident_numbers(const TailShape& shape, const Gpu& gpu) {
  const int64_t vectors = shape.slab_elements() / shape.width;
  const int64_t most = std::max<int64_t>(1, resident_values / shape.width);
  for (int blocks = 1; blocks <= gpu.largest_cluster(); blocks *= 2) {
    for (const int threads : {32, 64, 128, 256}) {
      if (blocks > 1 && threads < 256) continue;
      if (int64_t{blocks} * threads * most < vectors) continue;
      const int64_t share =
          std::max<int64_t>(1, (vectors + int64_t{blocks} * threads - 1) / (int64_t{blocks} * threads));
      return ResidentNumbers{threads, static_cast<int>(share), blocks, false};
    }
  }
  return std::nullopt;
}

std::optional<ResidentNumbers> staged_numbers(const TailShape& shape, const Gpu& gpu, int64_t input_bytes) {
  if (!gpu.has_clusters()) return std::nullopt;
  constexpr int threads = 512;  // 1024 of 64 registers take as long, and spill for s19 and s61
  const int64_t vectors = shape.slab_elements() / shape.width;
  for (int blocks = 1; blocks <= gpu.largest_cluster(); blocks *= 2) {
    const int64_t share =
        std::max<int64_t>(1, (vectors + int64_t{blocks} * threads - 1) / (int64_t{blocks} * threads));
    if (share * shape.width > staged_values) continue;
    ResidentNumbers numbers{threads, static_cast<int>(share), blocks, true};
    constexpr int parts = 4;  // 1, 2 and 4: 0.752, 0.747 and 0.740 ms on s60, 1.51, 1.44 and 1.43 on s19
    constexpr int most_slots = 16;
    numbers.chunk = (numbers.vectors + parts - 1) / parts;
    numbers.slots = most_slots;
    while (numbers.shared_bytes(shape, input_bytes) > gpu.shared_bytes_per_block && numbers.slots > 0) {
      --numbers.slots;
    }
    if (numbers.slots >= 1) return numbers;
  }
  return std::nullopt;
}

// Vectors may run over the ends of rows here: only the slab's own ends count.
TailShape resident_shape(const Problem& problem) {
  TailShape shape(problem);
  shape.width = shape.slab_width;
  return shape;
}

std::optional<ResidentNumbers> find_numbers(const Problem& problem, bool staged) {
  const TailShape shape = resident_shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  return staged ? staged_numbers(shape, gpu, byte_size(problem.input.dtype)) : resident_numbers(shape, gpu);
}

std::string refusal(const Problem& problem, bool staged) {
  std::string reason = tail_refusal(problem);
  if (!reason.empty()) return reason;
  const TailShape shape = resident_shape(problem);
  if (shape.parts.norm == nullptr) return "the block has no norm";
  if (shape.parts.mean) return "the block ends in a mean";
  if (shape.order != Order::planar) return "channels lie after space: a slab is not contiguous";
  if (shape.group_channels() > most_group_channels) {
    return "a group has " + std::to_string(shape.group_channels()) + " channels, at most " +
           std::to_string(most_group_channels) + " fit";
  }
  if (staged && !gpu_of(problem.device).has_clusters()) {
    return "it needs bulk copies and clusters, which are not used on " + gpu_of(problem.device).architecture;
  }
  if (staged && shape.width == 1) return "a slab of a few elements has no 16 bytes to copy";
  if (!find_numbers(problem, staged)) {
    return "a slab of " + std::to_string(shape.slab_elements()) + " elements does not fit the registers of " +
           std::to_string(gpu_of(problem.device).largest_cluster()) + " blocks";
  }
  return "";
}

class TailResident final : public Kernel {
 public:
  TailResident(const Problem& problem, bool staged)
      : problem_(problem),
        shape_(resident_shape(problem)),
        numbers_(*find_numbers(problem, staged)),
        function_(source(), problem.device, launch_numbers()) {
    const Number clusters = staged ? minimum(shape_.slabs(), function_.resident_clusters()) : shape_.slabs();
    blocks_ = clusters * numbers_.blocks;
  }

  size_t workspace_bytes() const override { return 0; }

  std::string describe() const override {
    std::ostringstream out;
    out << "slab: " << shape_.slab_elements() << " elements in the registers of " << numbers_.blocks
        << (numbers_.blocks > 1 ? " blocks of a cluster" : " block") << '\n'
        << "thread: " << numbers_.vectors << " vectors of " << shape_.width << " elements\n"
        << "blocks: " << describe_blocks(blocks_, function_);
    if (numbers_.staged) out << "staging: the next slab arrives in shared memory by bulk copies\n";
    return out.str();
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
    std::ostringstream out;
    out << "#include \"tail_resident.cuh\"\n"
        << tail_source(problem_)
        << Constants()
               .add("threads", numbers_.threads)
               .add("width", shape_.width)
               .add("vectors", numbers_.vectors)
               .add("blocks", numbers_.blocks)
               .add("chunk", numbers_.chunk)
               .add("slots", numbers_.slots)
               .flag("staged", numbers_.staged)
               .numbers()
        << "using Agent = onepass::TailResident<onepass::Tail, Numbers>;\n"
        << "static_assert(sizeof(Agent::Shared) <= " << shared_bytes() << ");\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers_.threads << ", "
        << (numbers_.staged ? 1 : blocks_wanted())
        << ") onepass_tail_resident(const __grid_constant__ Agent::Parameters p) {\n"
        << "  extern __shared__ __align__(128) unsigned char memory[];\n"
        << "  Agent{p, *reinterpret_cast<Agent::Shared*>(memory)}.run();\n"
        << "}\n";
    return {"onepass_tail_resident", out.str()};
  }

  // Enough blocks on a multiprocessor to hide each other's waits: 512 threads of 128 registers. With 768 of
  // 80 the values of a thread spill.
  int blocks_wanted() const { return 512 / numbers_.threads; }

  int64_t shared_bytes() const { return numbers_.shared_bytes(shape_, byte_size(problem_.input.dtype)); }

  Launch launch_numbers() const {
    return {static_cast<uint32_t>(numbers_.blocks), static_cast<uint32_t>(numbers_.threads),
            static_cast<uint32_t>(numbers_.blocks), static_cast<uint32_t>(shared_bytes())};
  }

  Problem problem_;
  TailShape shape_;
  ResidentNumbers numbers_;
  Function function_;
  Number blocks_;
};

double seconds(const Problem& problem, bool staged) {
  const TailShape shape = resident_shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const double bytes = static_cast<double>(shape.elements()) * static_cast<double>(shape.element_bytes);
  // H200, times a copy: staged 1.55, 1.39 and 1.37 on the tails of s60, s19 and s61, 1.3 where a block has a
  // slab to itself. Without staging clusters wait for each other: 2.8 to 3.7.
  const ResidentNumbers numbers = *find_numbers(problem, staged);
  const double copy = bytes / gpu.bytes_per_second;
  if (!staged) return 4e-6 + (numbers.blocks > 1 ? 3.0 : 1.4) * copy;
  // A slab takes a cluster some microseconds whatever its size: barriers, then each value of a thread.
  const double clusters = std::max(1, gpu.multiprocessors / numbers.blocks - (numbers.blocks > 8 ? 1 : 0));
  const double rounds = std::ceil(static_cast<double>(shape.slabs()) / clusters);
  const double latency = rounds * (2e-6 + 5e-8 * numbers.vectors * shape.width);
  return 4e-6 + std::max(latency, (numbers.blocks > 1 ? 1.45 : 1.3) * copy);
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_tail_resident{
    "tail_resident", [](const Problem& problem) { return cuda::refusal(problem, false); },
    [](const Problem& problem, const PlanOptions&) { return cuda::seconds(problem, false); },
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::TailResident>(problem, false);
    }};

extern const Strategy cuda_tail_staged{
    "tail_staged", [](const Problem& problem) { return cuda::refusal(problem, true); },
    [](const Problem& problem, const PlanOptions&) { return cuda::seconds(problem, true); },
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::TailResident>(problem, true);
    }};

}  // namespace onepass
