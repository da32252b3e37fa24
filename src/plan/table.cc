// The lists of strategies, forward and backward: a new kernel is its file and its line here.
#include <array>

#include "plan/strategy.h"

namespace onepass {

extern const Strategy cpu_conv_channel_lanes;
extern const Strategy cpu_conv_pixel_lanes;
extern const Strategy cpu_tail;
extern const Strategy reference_strategy;

extern const BackwardStrategy cpu_conv_backward;
extern const BackwardStrategy cpu_tail_backward;
extern const BackwardStrategy reference_backward_strategy;

BuiltStrategy::~BuiltStrategy() = default;

std::span<const Strategy* const> strategies() {
  static constexpr std::array table{
      &cpu_conv_channel_lanes,
      &cpu_conv_pixel_lanes,
      &cpu_tail,
      &reference_strategy,
  };
  return table;
}

std::span<const BackwardStrategy* const> backward_strategies() {
  static constexpr std::array table{
      &cpu_conv_backward,
      &cpu_tail_backward,
      &reference_backward_strategy,
  };
  return table;
}

}  // namespace onepass
