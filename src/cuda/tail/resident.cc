// The row "tail_resident": a slab stays in registers between statistics and output.
#include <algorithm>
#include <optional>
#include <sstream>

#include "cuda/notes.h"
#include "cuda/tail/tail.h"

namespace onepass {
namespace cuda {
namespace {

// How a slab is spread over the threads of a cluster.
struct ResidentNumbers {
  int threads = 0;
  int vectors = 0;  // of a thread
  int blocks = 1;   // in a cluster

  int64_t shared_bytes() const { return 128 + threads / 32 * 8 + blocks * 8; }
};

constexpr int64_t resident_values = 24;  // that one thread has at most

std::optional<ResidentNumbers> resident_numbers(const TailShape& shape, const Gpu& gpu) {
  const int64_t vectors = shape.slab_elements() / shape.width;
  const int64_t most = std::max<int64_t>(1, resident_values / shape.width);
  for (int blocks = 1; blocks <= gpu.largest_cluster(); blocks *= 2) {
    for (const int threads : {32, 64, 128, 256}) {
      if (blocks > 1 && threads < 256) continue;
      if (int64_t{blocks} * threads * most < vectors) continue;
      const int64_t share =
          std::max<int64_t>(1, (vectors + int64_t{blocks} * threads - 1) / (int64_t{blocks} * threads));
      return ResidentNumbers{threads, static_cast<int>(share), blocks};
    }
  }
  return std::nullopt;
}

// Vectors may run over the ends of rows here: only the slab's own ends count.
TailShape resident_shape(const Problem& problem) {
  TailShape shape(problem);
  shape.width = shape.slab_width;
  return shape;
}

std::optional<ResidentNumbers> find_numbers(const Problem& problem) {
  return resident_numbers(resident_shape(problem), gpu_of(problem.device));
}

std::string refusal(const Problem& problem) {
  std::string reason = tail_refusal(problem);
  if (!reason.empty()) return reason;
  const TailShape shape = resident_shape(problem);
  if (shape.parts.norm == nullptr) return "the block has no norm";
  if (shape.parts.mean) return "the block ends in a mean";
  if (shape.order != Order::planar) return "channels lie after space: a slab is not contiguous";
  if (!find_numbers(problem)) {
    return "a slab of " + std::to_string(shape.slab_elements()) + " elements does not fit the registers of " +
           std::to_string(gpu_of(problem.device).largest_cluster()) + " blocks";
  }
  return "";
}

class TailResident final : public Kernel {
 public:
  explicit TailResident(const Problem& problem)
      : problem_(problem),
        shape_(resident_shape(problem)),
        numbers_(*find_numbers(problem)),
        function_(source(), problem.device, launch_numbers()),
        blocks_(shape_.slabs() * numbers_.blocks) {}

  Accuracy accuracy() const override { return accuracy_of_chains(problem_); }
  size_t workspace_bytes() const override { return 0; }

  std::string describe() const override {
    std::ostringstream out;
    out << "slab: " << shape_.slab_elements() << " elements in the registers of " << numbers_.blocks
        << (numbers_.blocks > 1 ? " blocks of a cluster" : " block") << '\n'
        << "thread: " << numbers_.vectors << " vectors of " << shape_.width << " elements\n"
        << "blocks: " << describe_blocks(blocks_, function_);
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return notes_of_chains(problem_.block, bits_of(problem_, problem_.output.dtype));
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
    out << "#include \"tail/resident.cuh\"\n"
        << tail_source(problem_, bits_of(problem_, problem_.output.dtype))
        << Constants()
               .add("threads", numbers_.threads)
               .add("width", shape_.width)
               .add("vectors", numbers_.vectors)
               .add("blocks", numbers_.blocks)
               .numbers()
        << "using Agent = onepass::TailResident<onepass::Tail, Numbers>;\n"
        << "static_assert(sizeof(Agent::Shared) <= " << numbers_.shared_bytes() << ");\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers_.threads << ", " << blocks_wanted()
        << ") onepass_tail_resident(const __grid_constant__ Agent::Parameters p) {\n"
        << "  extern __shared__ __align__(128) unsigned char memory[];\n"
        << wait_source() << "  Agent{p, *reinterpret_cast<Agent::Shared*>(memory)}.run();\n"
        << "}\n";
    return {"onepass_tail_resident", out.str()};
  }

  // Enough blocks on a multiprocessor to hide each other's waits: 512 threads of 128 registers. With 768 of
  // 80 the values of a thread spill.
  int blocks_wanted() const { return 512 / numbers_.threads; }

  Launch launch_numbers() const {
    return {static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(numbers_.threads),
            static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(numbers_.shared_bytes()),
            false,
            true};
  }

  Problem problem_;
  TailShape shape_;
  ResidentNumbers numbers_;
  Function function_;
  Number blocks_;
};

double seconds(const Problem& problem, const PlanOptions&) {
  const TailShape shape = resident_shape(problem);
  const double bytes = static_cast<double>(shape.elements()) * static_cast<double>(shape.element_bytes);
  // H200, times a copy: clusters wait for each other, 2.8 to 3.7.
  const double factor = find_numbers(problem)->blocks > 1 ? 3.0 : 1.4;
  return 4e-6 + factor * bytes / gpu_of(problem.device).bytes_per_second;
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_tail_resident{
    "tail_resident", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::TailResident>(problem);
    }};

}  // namespace onepass
