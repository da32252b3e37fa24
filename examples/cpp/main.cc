// A block from C++ without any framework: plan it once, give it memory, run it.
#include <onepass/onepass.h>

#include <cstdlib>
#include <iostream>
#include <vector>

int main() try {
  const auto block = onepass::Block::parse("conv3d(3,16,k=4) | hardswish | group_norm(4) | mean");
  const onepass::Plan plan = onepass::plan({block, {2, 3, 16, 32, 32}});
  std::cout << plan.explain();

  const onepass::Problem& problem = plan.problem();
  auto tensor = [](const onepass::TensorSpec& spec, float value) {
    return std::vector<float>(static_cast<size_t>(onepass::element_count(spec.sizes)), value);
  };
  const std::vector<float> input = tensor(problem.input, 1.0F);
  std::vector<float> output = tensor(problem.output, 0.0F);
  std::vector<std::vector<float>> parameters;  // here all 0.25; a model's own come from its file
  for (const onepass::TensorSpec& spec : problem.parameters) parameters.push_back(tensor(spec, 0.25F));
  onepass::Arguments arguments{input.data(), output.data(), {}};
  for (const auto& parameter : parameters) arguments.parameters.push_back(parameter.data());

  void* workspace = std::aligned_alloc(64, (plan.workspace_bytes() + 63) / 64 * 64);
  onepass::SerialExecutor executor;
  plan.run(arguments, workspace, executor);
  std::free(workspace);

  // Every channel is constant here, so the norm leaves its bias: 0.25.
  std::cout << "output " << onepass::to_string(problem.output.sizes) << ", first value " << output[0] << '\n';
  return std::abs(output[0] - 0.25F) < 1e-5F ? EXIT_SUCCESS : EXIT_FAILURE;
} catch (const onepass::Error& error) {
  std::cerr << error.what() << '\n';
  return EXIT_FAILURE;
}
