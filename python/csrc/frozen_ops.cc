// Operators of frozen models: they pack weights once, and run blocks with them. Those of CUDA tensors are in
// cuda_ops.cc. All have the same schemas.
#include <torch/csrc/stable/library.h>

#include "boxed.h"
#include "forward_plan.h"
#include "torch_executor.h"

namespace onepass::torch_binding {
namespace {

std::shared_ptr<const ForwardPlan> plan_of(const std::string& block, const Tensor& input,
                                           const std::vector<Tensor>& parameters) {
  return forward_plan(block, {input, parameters}, std::nullopt, torch_threads());
}

int64_t packing(const Tensor& input, const std::vector<Tensor>& parameters, const std::string& block,
                const std::string& /*numerics*/) {
  return static_cast<int64_t>(plan_of(block, input, parameters)->packing);
}

Tensor pack(const Tensor& input, const std::vector<Tensor>& parameters, const std::string& block,
            const std::string& /*numerics*/) {
  const auto prepared = plan_of(block, input, parameters);
  const Plan& plan = prepared->plan;
  ReadParameters read(parameters, prepared->copied);
  Tensor packed = empty_bytes(plan.packed_bytes(), {});
  TorchExecutor executor(plan.problem().device.threads);
  plan.pack(read.take_addresses(), packed.mutable_data_ptr(), executor);
  return packed;
}

// A plan that was made anew since may pack otherwise: then it packs itself.
Tensor run(const Tensor& input, const std::vector<Tensor>& parameters, const std::string& block,
           const std::string& /*numerics*/, const Tensor& packed, int64_t packing, int64_t /*redone*/) {
  const auto prepared = plan_of(block, input, parameters);
  const bool fits = static_cast<int64_t>(prepared->packing) == packing;
  return run_forward(*prepared, input, parameters, nullptr, fits ? packed.const_data_ptr() : nullptr);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, library) {
  library.def("frozen_packing(Tensor input, Tensor[] parameters, str block, str numerics) -> int");
  library.def("frozen_pack(Tensor input, Tensor[] parameters, str block, str numerics) -> Tensor");
  library.def(
      "frozen_forward(Tensor input, Tensor[] parameters, str block, str numerics, Tensor packed, "
      "int packing, int redone=-1) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, library) {
  library.impl("frozen_packing", boxed<packing>);
  library.impl("frozen_pack", boxed<pack>);
  library.impl("frozen_forward", boxed<run>);
}

}  // namespace onepass::torch_binding
