// The texts behind --help.
#include "tool/help.h"

#include <sstream>

#include "tool/expected.h"

namespace onepass::tool {

const char* const general_help = R"(
Examples:
  onepass explain "conv2d(3,16,p=1) | group_norm(4) | relu" --input 8x3x64x64
  onepass check   "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 2x3x8x16x16 bf16 nhwc"
  onepass bench   "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 2x64x256x256" --threads 2
  onepass bench   --peaks
  onepass check   --file tests/cases.txt
  onepass explain "swish | group_norm(4) @ 8x16x64x64" --device cuda:sm_90a
  onepass bench   "swish | group_norm(4) @ 8x16x64x64" --device cuda
  onepass cases
  onepass cache   list

A block is one or more stages joined by '|', in this order: [conv] pointwise* [norm pointwise*] [mean]
  conv       conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
             (in, out, k=3, s=1, p=0, d=1, groups=1, op=0, bias=true)
             k, s, p, d and op take one number or one for each dimension: k=3x3x1; p=same for stride 1
  norm       group_norm(groups, eps=1e-5, affine=true)   instance_norm(eps=1e-5, affine=false)
             layer_norm(eps=1e-5, affine=true), over channels and space
  mean       over space: (batch, channels) is left
  pointwise  relu relu6 leaky_relu(0.01) prelu elu(1) gelu gelu_tanh swish|silu hardswish hardsigmoid
             sigmoid tanh mish softplus clamp(lo,hi) hardtanh(-1,1) mul(c) add(c) channel_mul channel_add
             residual_add; a limit may be inf or -inf: clamp(0,inf)
A problem is a block with the sizes of its input: BLOCK @ SIZES [DTYPE] [nchw|nhwc] [NUMERICS]
  DTYPE      f32 f16 bf16 f64, and of f32 convolutions on a GPU: tf32 (operands rounded to nearest even,
             as PyTorch's TF32 kernels of sm_90 do), tf32_away (ties away from zero, as those of sm_80 do),
             near_f32 (where TF32 is allowed and PyTorch computes in f32: f32 to about 1e-5)
  NUMERICS   pytorch (the default: what PyTorch computes), strict (f32 throughout, 16-bit tensors too),
             fast (coarser than PyTorch where that is quicker: with tf32; without effect on 16 bits)

With --json, JSON alone is printed on stdout; progress and warnings go to stderr.
Exit codes: 0 good, 1 a result is wrong, 2 the request cannot be served (one sentence on stderr).)";

const char* const explain_help = R"(
Example: onepass explain "conv2d(3,16,p=1) | group_norm(4) | relu" --input 8x3x64x64

'*' marks the strategy that runs. Exit codes: 0 good, 2 the request cannot be served.)";

const char* const bench_help = R"(
Examples:
  onepass bench "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 32x3x16x32x32" --seconds 3
  onepass bench --peaks

The result is compared with the reference first, and no speed is printed for a wrong one. Printed are
  time         median, 10th to 90th percentile and best of the repeats; buffers are touched before
  convolution  useful multiply-adds (two operations each), beside the measured f32 peak of as many threads
  memory       input, parameters and output once, beside the time to read and write as much at full speed
  floor        writing the output plus each activation once, timed alone in the cache: without a
               convolution, norm or reading the input nothing is faster
  pages        how tensors of 4 MiB and more lie in memory, for the block and for the floor alike: in huge
               pages, which the tool asks for (madvise) and a program has to, or with --small-pages without
On a GPU (--device cuda) time is the GPU's own, its L2 cache overwritten before each repeat; memory stands
beside the rate of a large copy, and the floor is every tensor read or written once at that rate.
Exit codes: 0 good, 1 a result is wrong, 2 the request cannot be served.)";

const char* const cases_help = R"(
Each line is the chosen strategy, the problem string (which explain, check and bench take) and the output's
sizes. Without --file the list is tests/cases.txt of the working directory.)";

const char* const cache_help = R"(
Kernels for GPUs are compiled when first needed and kept in $ONEPASS_CACHE_DIR, else $XDG_CACHE_HOME/onepass,
else ~/.cache/onepass. clear removes them; they are compiled again when needed. It also removes the records of
kernels on which the compiler crashed, which are then tried again.)";

namespace {

// Lines of at most 100 characters, broken at spaces and indented by two.
std::string wrapped(const std::string& text) {
  std::istringstream words(text);
  std::string lines;
  size_t column = 100;
  for (std::string word; words >> word;) {
    const bool breaks = column + 1 + word.size() > 100;
    lines += (breaks ? (lines.empty() ? "  " : "\n  ") : " ") + word;
    column = (breaks ? 2 : column + 1) + word.size();
  }
  return lines;
}

}  // namespace

std::string check_help() {
  return std::string(R"(
Examples:
  onepass check "conv2d(3,16,p=1) | group_norm(4) | relu" --input 2x3x20x20 --dtype f16
  onepass check --file tests/cases.txt --strategy reference

Values are random, around 1 in size and rounded to the type; the output is NaN before the run; the reference
computes the same in double. Rounding allows an element:
)") + wrapped(tolerance_rule) +
         R"(.
A convolution of K terms adds 4 sqrt(K) such roundings of its sum, every other stage 8 of its value; each
stage passes on what came before as its slope does, a norm by 1 / deviation. Where rounding alone decides the
result (a slab that is constant but for rounding), elements are counted as not checked.
Exit codes: 0 every element within its tolerance, 1 not, 2 the request cannot be served.)";
}

}  // namespace onepass::tool
