// Which bit of a launch's `aligned` belongs to which tensor; shared by host and device.
#pragma once

namespace onepass {

// Set where vectors of the grid that fits the input lie on 16 bytes in this tensor too.
enum AlignedBit {
  aligned_input = 0,
  aligned_output = 1,
  aligned_output_gradient = 2,
  aligned_input_gradient = 3,
  aligned_parameter = 8,  // the first 24 of them; of others no bit is ever set
  aligned_gradient = 32,
  aligned_all = 63  // every tensor of the launch
};

}  // namespace onepass
