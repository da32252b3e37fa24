// A plan run into a Recording, with a name for every address it is given.
#include "cuda/export/record_plan.h"

#include <bit>
#include <string>
#include <utility>

#include "plan/verbose.h"

namespace onepass::cuda {
namespace {

constexpr int64_t apart = int64_t{1} << 40;

// Gives out addresses and names them.
class Addresses {
 public:
  explicit Addresses(Recording& recording) : recording_(recording) {}

  void* add(std::string name) {
    void* const address = std::bit_cast<void*>(next_);
    next_ += apart;
    recording_.name(address, std::move(name));
    return address;
  }

 private:
  Recording& recording_;
  int64_t next_ = first_address;
};

std::string element(const char* array, size_t index) {
  return std::string(array) + '[' + std::to_string(index) + ']';
}

}  // namespace

void record(const Plan& plan, bool with_statistics, Recording& recording, void*& workspace) {
  Addresses addresses(recording);
  workspace = addresses.add("workspace");
  Arguments arguments{addresses.add("input"), addresses.add("output"), {}, nullptr};
  if (with_statistics) arguments.statistics = static_cast<float*>(addresses.add("statistics"));
  for (size_t i = 0; i < plan.problem().parameters.size(); ++i)
    arguments.parameters.push_back(addresses.add(element("parameters", i)));
  const Unprinted unprinted;
  plan.run(arguments, workspace, Stream{});
}

void record(const BackwardPlan& plan, Recording& recording, void*& workspace) {
  Addresses addresses(recording);
  workspace = addresses.add("workspace");
  BackwardArguments arguments;
  arguments.input = addresses.add("input");
  arguments.output_gradient = addresses.add("output_gradient");
  arguments.statistics = static_cast<float*>(addresses.add("statistics"));
  const BackwardProblem& problem = plan.problem();
  if (problem.wants_input()) arguments.input_gradient = addresses.add("input_gradient");
  for (size_t i = 0; i < problem.forward.parameters.size(); ++i) {
    arguments.parameters.push_back(addresses.add(element("parameters", i)));
    arguments.parameter_gradients.push_back(
        problem.wants_parameter(i) ? addresses.add(element("parameter_gradients", i)) : nullptr);
  }
  const Unprinted unprinted;
  plan.run(arguments, workspace, Stream{});
}

}  // namespace onepass::cuda
