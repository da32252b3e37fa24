// What the gradients of a convolution need of those of its weights on the CPU.
#pragma once

#include <cstdint>
#include <string>

#include "cpu/convolver.h"
#include "onepass/plan.h"

namespace onepass::cpu {

class WeightSums : public Uncopied {
 public:
  virtual Lanes lanes() const = 0;
  int64_t workspace_floats() const { return workspace_floats_; }
  // Multiply-adds with those on lanes that hold no channel and those that wait for one another, for the cost.
  virtual double padded_multiply_adds() const = 0;
  // Elements that are brought into f32 windows and blocks, for the cost.
  virtual double staged_elements() const = 0;
  virtual std::string describe() const = 0;
  // `coarse` is the output's gradient and `fine` the input; of a transposed convolution the other way round.
  virtual void run(const void* coarse, const void* fine, void* gradient, float* workspace,
                   Executor& executor) const = 0;

 protected:
  int64_t workspace_floats_ = 0;
};

}  // namespace onepass::cpu
