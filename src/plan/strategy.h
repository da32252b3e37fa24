// The tables of rows (strategies). A row has a name, a refusal, a cost and a build function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "onepass/backward.h"
#include "onepass/plan.h"

namespace onepass {

// A built strategy: its numbers are fixed, its memory is the caller's.
class BuiltStrategy {
 public:
  virtual ~BuiltStrategy();
  virtual size_t workspace_bytes() const = 0;
  // As those of Plan.
  virtual size_t packed_bytes() const { return 0; }
  // The numbers it runs with, one "name: value" a line, for explain.
  virtual std::string describe() const = 0;
  // What it computes in less than f32, one line of explain each.
  virtual std::vector<std::string> numerics() const { return {}; }
};

// A strategy of a CPU runs by an executor, one of a GPU on a stream. Asked for the other it throws Error.
class Kernel : public BuiltStrategy {
 public:
  // Its declared error besides roundings of f32. Tests and the tool grant it this alone.
  virtual Accuracy accuracy() const { return {}; }
  virtual void run(const Arguments& arguments, void* workspace, Executor& executor) const;
  virtual void launch(const Arguments& arguments, void* workspace, Stream stream) const;
  virtual uint64_t packing() const { return 0; }
  virtual void pack(const std::vector<const void*>& parameters, void* packed, Executor& executor) const;
  virtual void launch_pack(const std::vector<const void*>& parameters, void* packed, Stream stream) const;
};

class BackwardKernel : public BuiltStrategy {
 public:
  virtual bool reads_statistics() const = 0;
  virtual bool may_overwrite_input() const { return false; }
  virtual void run(const BackwardArguments& arguments, void* workspace, Executor& executor) const;
  virtual void launch(const BackwardArguments& arguments, void* workspace, Stream stream) const;
};

template <class ProblemType, class KernelType>
struct StrategyRow {
  std::string_view name;
  // Why it cannot take the problem; empty where it can.
  std::string (*refusal)(const ProblemType& problem);
  // Predicted seconds on this machine with the device's threads, from checked-in constants.
  double (*seconds)(const ProblemType& problem, const PlanOptions& options);
  std::shared_ptr<const KernelType> (*build)(const ProblemType& problem, const PlanOptions& options);
  // Made for blocks without a convolution. Other rows build one for what follows their convolution.
  bool takes_tails = false;
};
using Strategy = StrategyRow<Problem, Kernel>;
using BackwardStrategy = StrategyRow<BackwardProblem, BackwardKernel>;

// The rows of a device, in order of preference where costs are equal. The last forward row accepts every
// problem that the device computes.
std::span<const Strategy* const> strategies(Device::Kind device);
std::span<const BackwardStrategy* const> backward_strategies(Device::Kind device);

}  // namespace onepass
