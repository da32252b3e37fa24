// Generates the device code of a problem's tail: its types, sizes and chains as the structs that kernels
// expect.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda/runtime/compile.h"
#include "onepass/backward.h"
#include "onepass/plan.h"
#include "onepass/problem.h"

namespace onepass::cuda {

// Whether tensors of the problem lie with channels before (planar) or after (interleaved) the spatial
// dimensions.
enum class Order : uint8_t { planar, interleaved };

// The stages after the convolution as kernels see them: a chain, a norm, a chain, a mean.
struct TailParts {
  struct Stage {
    Pointwise pointwise;
    int parameter = -1;  // index of its argument, -1 where it has none
  };
  std::vector<Stage> before;  // stages before the norm; empty where there is no norm
  std::vector<Stage> after;
  const Norm* norm = nullptr;
  int norm_weight = -1;
  int norm_bias = -1;
  bool mean = false;

  TailParts(const Block& block, const Shape& input);
  bool mean_follows_norm() const { return mean && norm != nullptr && after.empty(); }
  // Whether a stage reads anything besides x.
  bool has_operands() const;
  // Parameters that have the input's shape.
  std::vector<int> tensor_parameters() const;
};

// How much a chain can enlarge a difference, apart from slopes and factors that are parameters.
double steepness(const TailParts& parts);

// Which passes of the backward kernel run, and how many sums of a row each takes.
struct BackwardWork {
  bool first = false;   // sums of dz and dz xhat, and of the after-chain's operands
  bool second = false;  // the gradients of the input and of tensors, and the sums that the first pass lacks
  bool third = false;   // sums over the batch
  int after_sums = 0;   // operands of the after-chain that are summed: all, where one is wanted
  int before_sums = 0;
  int first_sums = 0;
  int second_sums = 0;

  BackwardWork(const BackwardProblem& problem, const TailParts& parts);
  bool is_empty() const { return !first && !second; }
};

int64_t spatial_elements(const Shape& shape);

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Constants of a struct in device code, a line each.
class Constants {
 public:
  explicit Constants(std::string type = "int") : type_(std::move(type)) {}
  Constants& add(const char* name, int64_t value);
  // Several that belong together, names and values in turn.
  template <class... More>
  Constants& add(const char* name, int64_t value, const char* next, const More&... more) {
    return add(name, value).add(next, more...);
  }
  Constants& flag(const char* name, bool value);
  template <class... More>
  Constants& flag(const char* name, bool value, const char* next, const More&... more) {
    return flag(name, value).flag(next, more...);
  }
  const std::string& text() const { return text_; }
  // `struct Numbers` of these alone.
  std::string numbers() const { return "struct Numbers {\n" + text_ + "};\n"; }

 private:
  std::string type_;
  std::string text_;
};

// What an agent takes as shared memory: nothing, its struct `Shared`, or bytes.
enum class SharedAs : uint8_t { none, structure, bytes };

// A kernel that runs an agent, a type of namespace onepass made of its `Parameters` and shared memory. `text`
// has the headers and structs that the type needs, `bounds` are the launch bounds.
Source agent_kernel(const std::string& name, const std::string& text, const std::string& agent,
                    const std::string& bounds, SharedAs shared);

// One chain as a struct of this name, its functions as exact as f32.
std::string chain_source(const char* name, const std::vector<TailParts::Stage>& stages,
                         const Problem& problem);

// `struct Before`, `struct After` and `struct Tail` of a forward problem, without its convolution.
// `Tail::Input` is the type of the problem's input. `bits` is 16 where the chains may use their short form
// (bits_of), else 32. After a convolution in groups the tail is that of one group (ThinShape);
// `whole_tail_source` gives that of all groups.
std::string tail_source(const Problem& problem, int bits = 32);
std::string whole_tail_source(const Problem& problem, int bits = 32);
// The same with gradients.
std::string tail_source(const BackwardProblem& problem, int bits = 32);

// Whether one of the stages is computed by sigmoid or by the normal distribution function, which have a
// shorter form of 16 bits (device/pointwise.cuh).
bool has_short_form(const Block& block);

inline int bits_of(const Problem& problem, DType result) {
  return byte_size(result) == 2 && problem.numerics != Numerics::strict ? 16 : 32;
}

// The first statements of a kernel that may begin before its predecessor has ended (Launch::waits).
inline std::string wait_source() {
  return "  onepass::allow_kernel_after();\n  onepass::wait_for_kernel_before();\n";
}

// The error of chains in the short form of 16-bit results (bits_of). Sigmoids and the normal distribution
// function use tanh.approx, off by 4e-6 and 6e-6.
inline Accuracy accuracy_of_chains(const Problem& problem) {
  return {.sigmoid = bits_of(problem, problem.output.dtype) == 16 ? 0x1p-17 : 0};
}

}  // namespace onepass::cuda
