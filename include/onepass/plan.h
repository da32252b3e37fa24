// A plan: the strategy chosen for a problem, with all its numbers. It is immutable, holds no weights and may
// be shared between threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "onepass/executor.h"
#include "onepass/export.h"
#include "onepass/problem.h"

namespace onepass {

class Kernel;

// The memory of one call, laid out as the problem's specs say.
struct Arguments {
  const void* input = nullptr;
  void* output = nullptr;
  std::vector<const void*> parameters;  // in the order of Problem::parameters
  // Gets mean and 1 / sqrt(variance + eps) of each slab as [batch][groups][2], where it is not null and the
  // block has a norm. The backward pass reads it besides the input and the parameters.
  float* statistics = nullptr;
  // Where it is not null, a GPU's plan adds the number of samples that overflow its fast arithmetic and are
  // recomputed in f32. It is memory of the GPU or a counter of cuda::new_counter.
  int64_t* redone = nullptr;
  // Memory that Plan::pack has filled from the parameters as they are: the call packs no weights then. Null:
  // it packs them itself.
  const void* packed = nullptr;
};

struct PlanOptions {
  std::string strategy;  // force this row of the table; empty: the cheapest that accepts
  std::string target;    // force this SIMD target ("neon", "avx2", "avx3"); empty: the best the CPU runs
  // Measure the rows of a GPU whose predictions are close, on memory of the plan's own. The fastest is taken
  // and remembered on disk. Must not be used while a stream is captured.
  bool tune = false;
};

// One row of the strategy table as the planner saw it.
struct Candidate {
  std::string strategy;
  double seconds = 0;  // predicted; meaningless where refused
  std::string reason;  // why it was refused; empty where it accepts
};

// The declared error of a row besides roundings of f32, and its treatment of tf32 operands. Tests grant a row
// this much and no more.
struct Accuracy {
  // Storage precision of values before the norm. `normed_in_f16`: as f16, and the norm is applied in f16.
  enum class Held : uint8_t { as_computed, as_f16, in_20_bits, normed_in_f16 };
  // The operands of a tf32 convolution:
  //   rounded           both are rounded, as the precision says
  //   weights_whole     only x is rounded
  //   weights_dithered  x is rounded; weights are exact on average over the outputs of a mean
  //   whole             nothing is rounded
  enum class Tf32 : uint8_t { rounded, weights_whole, weights_dithered, whole };

  Held held = Held::as_computed;
  Tf32 tf32 = Tf32::rounded;
  double sigmoid = 0;  // the error of a sigmoid, or of the normal distribution function
  // Terms of a sum that tensor cores add without a pause, where these are many: they cut sums off.
  int64_t cut_terms = 0;

  bool operator==(const Accuracy&) const = default;
};

class ONEPASS_API Plan {
 public:
  const Problem& problem() const { return problem_; }
  const std::string& strategy() const { return strategy_; }
  const std::vector<Candidate>& candidates() const { return candidates_; }
  size_t workspace_bytes() const;
  // Bytes of packed weights that a caller may keep for later calls; 0 where the row keeps none.
  size_t packed_bytes() const;
  // Plans with the same number, and of the same GPU, read each other's packed weights; 0 where there are
  // none.
  uint64_t packing() const;
  Accuracy accuracy() const;
  // Every row with its cost or its reason, then the numbers of the chosen one.
  std::string explain() const;

  // Runs the block. `workspace` has workspace_bytes() bytes aligned to 64; each concurrent call needs its
  // own. It never allocates. The executor runs at most problem().device.threads tasks at once.
  void run(const Arguments& arguments, void* workspace, Executor& executor) const;
  // The same for a plan of a GPU. All memory is that GPU's. The call returns once the work is on the stream.
  void run(const Arguments& arguments, void* workspace, Stream stream) const;

  // Packs the convolution's parameters into `packed`, of packed_bytes() bytes aligned to 64. It serves
  // Arguments::packed until one of them changes, which nobody notices here.
  void pack(const std::vector<const void*>& parameters, void* packed, Executor& executor) const;
  void pack(const std::vector<const void*>& parameters, void* packed, Stream stream) const;

 private:
  friend ONEPASS_API Plan plan(const Problem& problem, const PlanOptions& options);
  Plan(Problem problem, std::string strategy, std::vector<Candidate> candidates,
       std::shared_ptr<const Kernel> kernel);

  Problem problem_;
  std::string strategy_;
  std::vector<Candidate> candidates_;
  std::shared_ptr<const Kernel> kernel_;
};

// The cheapest strategy that accepts the problem, or the one the options force. Throws Error when there is
// none.
ONEPASS_API Plan plan(const Problem& problem, const PlanOptions& options = {});

// The prediction of the cheapest row that accepts the problem, without building it; infinite where none does.
ONEPASS_API double predicted_seconds(const Problem& problem);
// Every row of the table with its prediction or its refusal, without building any.
ONEPASS_API std::vector<Candidate> candidates(const Problem& problem);

// The SIMD targets this build has and this CPU runs, best first.
ONEPASS_API std::vector<std::string> cpu_targets();

}  // namespace onepass
