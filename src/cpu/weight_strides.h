// Where the weights of a convolution lie: [output][input of a group][tap], of a transposed convolution
// [input][output of a group][tap]. In channels last, taps come second.
#pragma once

#include "block/spec_checks.h"
#include "onepass/problem.h"

namespace onepass::cpu {

struct WeightStrides {
  int64_t output = 0, input = 0, tap = 0;  // elements between neighbours

  WeightStrides() = default;
  explicit WeightStrides(const Problem& problem) {
    const Conv& conv = *problem.block.conv();
    is_transposed_ = conv.transposed;
    group_inputs_ = conv.in_channels / conv.groups;
    group_outputs_ = conv.out_channels / conv.groups;
    int64_t taps = 1;
    for (const int64_t k : conv.kernel) taps *= k;
    const bool last = lies_channels_last(problem.parameters[0]);
    const int64_t channels = is_transposed_ ? group_outputs_ : group_inputs_;
    (is_transposed_ ? input : output) = channels * taps;
    (is_transposed_ ? output : input) = last ? 1 : taps;
    tap = last ? channels : 1;
  }

  // The first element of an output channel.
  int64_t first_of(int64_t channel) const {
    if (!is_transposed_) return channel * output;
    return channel / group_outputs_ * group_inputs_ * input + channel % group_outputs_ * output;
  }

 private:
  bool is_transposed_ = false;
  int64_t group_inputs_ = 0, group_outputs_ = 1;
};

}  // namespace onepass::cpu
