// The expected result of a block for one sample, and the error that an implementation may have.
//
// The reference runs stage by stage in double, and a bound goes along with every value. The unit roundoff of
// the arithmetic is u: 2^-24 for f32, f16 and bf16 tensors, 2^-53 for f64. A value is v, its bound before a
// stage e.
//
//   convolution   4 u sqrt(K) (sqrt(K) rms(w) rms(x) + |v|), K terms in a sum: errors add up as a random walk
//   pointwise     what the operation makes of x - e and x + e, plus 8 u (|x| + |v|); 8 u |v| where it selects
//   or
//                 multiplies
//   norm          |weight| ((e + d) rstd + r |xhat|) + 8 u (|weight| (|xhat| + |mean| rstd) + |bias|), d and
//   r the
//                 errors of the mean and, relative, of the variance. A slab with r > 1/2 is noise: not
//                 checked
//   mean          mean(e) + (8 + sqrt(positions) / 4) u mean|x|
//
// A result passes between v - e and v + e, both rounded to the type of the output. The tests have the same
// rule for any data (tests/support/error_bound.h). Here all terms of a sum are alike, since the tool draws
// them.
#pragma once

#include <vector>

#include "onepass/executor.h"
#include "onepass/plan.h"
#include "onepass/problem.h"

namespace onepass::tool {

struct Expected {
  std::vector<double> values;
  std::vector<double> bounds;  // infinite where the result is noise
};

// `problem` has batch 1; `input` and `parameters` are dense NCHW. Operands of tf32 are rounded as the row
// says.
Expected expected_output(const Problem& problem, std::vector<double> input,
                         std::vector<std::vector<double>> parameters, const Accuracy& accuracy,
                         Executor& executor);

// What the reference would take for the problem, seconds.
double reference_seconds(const Problem& problem);

extern const char* const tolerance_rule;  // one sentence for --help and the output

}  // namespace onepass::tool
