// The tables of rows, forward and backward, and of tuners. A new row is its own file and a line here.
#include <array>

#include "onepass/error.h"
#include "plan/strategy.h"
#include "plan/tuner.h"

namespace onepass {

extern const Strategy cpu_conv_channel_lanes;
extern const Strategy cpu_conv_pixel_lanes;
extern const Strategy cpu_tail_slabs;
extern const Strategy cpu_conv_term_lanes;
extern const Strategy cpu_conv_group_lanes;
extern const Strategy cpu_conv_planes;
extern const Strategy cpu_conv_indirect;
extern const Strategy cpu_conv_run_lanes;
extern const Strategy cpu_conv_scaled;
extern const Strategy cpu_tail;
extern const Strategy reference_strategy;
extern const Strategy cuda_tail_resident;
extern const Strategy cuda_tail_slabs;
extern const Strategy cuda_tail_staged;
extern const Strategy cuda_tail_strips;
extern const Strategy cuda_tail_streamed;
extern const Strategy cuda_thin_samples;
extern const Strategy cuda_thin_wgmma;
extern const Strategy cuda_thin_cores;
extern const Strategy cuda_thin_mma;
extern const Strategy cuda_thin_resident;
extern const Strategy cuda_thin_inplace;
extern const Strategy cuda_gemm_pingpong;
extern const Strategy cuda_gemm_wgmma;
extern const Strategy cuda_gemm_packed;
extern const Strategy cuda_gemm_boxes;
extern const Strategy cuda_gemm_mma;
extern const Strategy cuda_gemm_apart;
extern const Strategy cuda_scaled;
extern const Strategy cuda_narrow;
extern const Strategy cuda_banded;
extern const Strategy cuda_direct;

extern const BackwardStrategy cpu_conv_backward;
extern const BackwardStrategy cpu_conv_backward_groups;
extern const BackwardStrategy cpu_tail_backward_slabs;
extern const BackwardStrategy cpu_tail_backward;
extern const BackwardStrategy reference_backward_strategy;
extern const BackwardStrategy cuda_tail_backward_slabs;
extern const BackwardStrategy cuda_tail_backward_resident;
extern const BackwardStrategy cuda_tail_backward_strips;
extern const BackwardStrategy cuda_tail_backward;
extern const BackwardStrategy cuda_thin_backward;
extern const BackwardStrategy cuda_gemm_backward;
extern const BackwardStrategy cuda_scaled_backward;
extern const BackwardStrategy cuda_narrow_backward;

extern const Tuner cuda_tuner;

namespace {

[[noreturn]] void refuse_executor() { throw Error("the plan is for a GPU: give run a stream"); }
[[noreturn]] void refuse_stream() { throw Error("the plan is for the CPU: give run an executor"); }

}  // namespace

BuiltStrategy::~BuiltStrategy() = default;

void Kernel::run(const Arguments&, void*, Executor&) const { refuse_executor(); }
void Kernel::launch(const Arguments&, void*, Stream) const { refuse_stream(); }
void Kernel::pack(const std::vector<const void*>&, void*, Executor&) const { refuse_executor(); }
void Kernel::launch_pack(const std::vector<const void*>&, void*, Stream) const { refuse_stream(); }
void BackwardKernel::run(const BackwardArguments&, void*, Executor&) const { refuse_executor(); }
void BackwardKernel::launch(const BackwardArguments&, void*, Stream) const { refuse_stream(); }

std::span<const Strategy* const> strategies(Device::Kind device) {
  static constexpr std::array cuda_table{
      &cuda_tail_slabs, &cuda_tail_resident, &cuda_tail_staged,   &cuda_tail_strips, &cuda_tail_streamed,
      &cuda_thin_wgmma, &cuda_thin_samples,  &cuda_thin_resident, &cuda_thin_mma,    &cuda_thin_inplace,
      &cuda_thin_cores, &cuda_gemm_pingpong, &cuda_gemm_wgmma,    &cuda_gemm_packed, &cuda_gemm_boxes,
      &cuda_gemm_mma,   &cuda_gemm_apart,    &cuda_scaled,        &cuda_narrow,      &cuda_banded,
      &cuda_direct,
  };
  static constexpr std::array table{
      &cpu_conv_channel_lanes, &cpu_conv_pixel_lanes,
      &cpu_conv_term_lanes,    &cpu_conv_group_lanes,
      &cpu_conv_planes,        &cpu_conv_indirect,
      &cpu_conv_run_lanes,     &cpu_conv_scaled,
      &cpu_tail_slabs,         &cpu_tail,
      &reference_strategy,
  };
  if (device == Device::Kind::cuda) return cuda_table;
  return table;
}

std::span<const BackwardStrategy* const> backward_strategies(Device::Kind device) {
  static constexpr std::array cuda_table{
      &cuda_tail_backward_slabs, &cuda_tail_backward_resident, &cuda_tail_backward_strips,
      &cuda_tail_backward,       &cuda_thin_backward,          &cuda_gemm_backward,
      &cuda_scaled_backward,     &cuda_narrow_backward,
  };
  static constexpr std::array table{
      &cpu_conv_backward, &cpu_conv_backward_groups,    &cpu_tail_backward_slabs,
      &cpu_tail_backward, &reference_backward_strategy,
  };
  if (device == Device::Kind::cuda) return cuda_table;
  return table;
}

const Tuner* tuner(Device::Kind device) { return device == Device::Kind::cuda ? &cuda_tuner : nullptr; }

}  // namespace onepass
