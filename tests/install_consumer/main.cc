// What a user of the installed package writes: parse a problem, plan it, run it, look at the plan.
#include <onepass/onepass.h>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <vector>

int main() {
  const onepass::Problem problem = onepass::Problem::parse("relu | group_norm(2) @ 1x4x2x2");
  const onepass::Plan plan = onepass::plan(problem);
  const std::vector<float> input = {1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4, 1, 1, 1, 1};
  const std::vector<float> weight(4, 1.0F);
  const std::vector<float> bias(4, 0.5F);
  std::vector<float> output(input.size());
  // One plan serves many calls; each call brings its own workspace, aligned to 64 bytes.
  const size_t workspace_bytes = (plan.workspace_bytes() + 63) / 64 * 64;
  void* workspace = workspace_bytes == 0 ? nullptr : std::aligned_alloc(64, workspace_bytes);
  onepass::SerialExecutor executor;
  plan.run({input.data(), output.data(), {weight.data(), bias.data()}}, workspace, executor);
  std::free(workspace);

  std::cout << plan.explain() << '\n';
  // The first slab is 1..8: mean 4.5, variance 5.25, so its first element is 0.5 - 3.5 / sqrt(5.25 + eps).
  const double expected = 0.5 - 3.5 / std::sqrt(5.25 + 1e-5);
  std::cout << "output[0] = " << output[0] << ", expected " << expected << '\n';
  return std::abs(output[0] - expected) < 1e-5 ? EXIT_SUCCESS : EXIT_FAILURE;
}
