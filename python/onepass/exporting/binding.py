"""C++ that PyTorch calls: it checks tensors, allocates outputs and workspace, and launches an operator."""

from __future__ import annotations

from collections.abc import Sequence

from onepass.exporting.launcher import declaration
from onepass.exporting.plans import BACKWARD, BATCH, STATISTICS, Operator, Problem

BINDING_HEAD = """\
// What PyTorch calls: checks, memory from its allocator, its current stream.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

"""

BINDING_CHECKS = """\
namespace {

constexpr int64_t any = -1;  // the batch

// Without streams: where several copies of the standard library are loaded, printing a number may crash.
[[noreturn]] void refuse(const char* op, const std::string& why) {
  throw std::runtime_error(std::string(op) + ": " + why);
}

std::string listed(at::IntArrayRef sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

void check_tensor(const char* op, const char* what, const at::Tensor& tensor, at::IntArrayRef sizes,
                  at::ScalarType type, at::MemoryFormat format, const at::Device& device) {
  bool fits = tensor.device() == device && tensor.scalar_type() == type &&
              tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.is_contiguous(format);
  for (size_t d = 0; fits && d < sizes.size(); ++d) fits = sizes[d] == any || tensor.size(d) == sizes[d];
  if (fits) return;
  const std::string wanted = std::string(c10::toString(type)) + " tensor on the input's GPU of sizes ";
  refuse(op, std::string(what) + " must be a dense " + wanted + listed(sizes) + " (-1: any), is " +
                 c10::toString(tensor.scalar_type()) + " of sizes " + listed(tensor.sizes()) +
                 " and strides " + listed(tensor.strides()));
}

void check_cuda(const char* op, const at::Tensor& input) {
  if (!input.is_cuda()) refuse(op, "the input must be on a GPU");
}

"""


def binding_text(operators: Sequence[Operator], namespace: str) -> str:
    """The .cpp part: nothing of CUDA's language, and PyTorch's headers here alone."""
    declarations = "\n".join(
        f"int64_t {o.name}_workspace_bytes(int64_t batch, int device);\n{declaration(o)};" for o in operators
    )
    functions = "\n".join(_binding(o) for o in operators)
    names = "\n".join(f'  library.impl("{o.name}", run_{o.name});' for o in operators)
    return (
        f"{BINDING_HEAD}{declarations}\n\n{BINDING_CHECKS}{functions}\n}}  // namespace\n\n"
        f"TORCH_LIBRARY_IMPL({namespace}, CUDA, library) {{\n{names}\n}}\n"
    )


def _binding(operator: Operator) -> str:
    return _backward_binding(operator) if operator.what == BACKWARD else _forward_binding(operator)


def _sizes(sizes: Sequence[int], batch: str) -> str:
    return "{" + ", ".join([batch, *map(str, sizes[1:])]) + "}"


def _format(problem: Problem, dimensions: int) -> str:
    last = {4: "ChannelsLast", 5: "ChannelsLast3d"}.get(dimensions)
    return f"at::MemoryFormat::{last if problem.layout == 'nhwc' and last else 'Contiguous'}"


def _parameter_checks(operator: Operator) -> list[str]:
    problem = operator.problem
    lines = [
        f"  if (parameters.size() != {len(problem.parameters)}) {{",
        f'    refuse("{operator.name}", "takes {len(problem.parameters)} parameters");',
        "  }",
    ]
    for i, sizes in enumerate(problem.parameters):
        dimensions = len(sizes) if sizes[:1] == (BATCH,) and len(sizes) > 2 else 0
        batch = "input.size(0)"
        shown = _sizes(sizes, batch) if sizes[:1] == (BATCH,) else "{" + ", ".join(map(str, sizes)) + "}"
        name = f'"{operator.name}", "parameter {i}"'
        lines += [
            f"  check_tensor({name}, parameters[{i}], {shown}, at::k{problem.dtype},",
            f"               {_format(problem, dimensions)}, input.device());",
        ]
    count = len(problem.parameters)
    return [
        *lines,
        f"  std::array<const void*, {count}> addresses{{}};",
        f"  for (size_t i = 0; i < {count}; ++i) addresses[i] = parameters[i].const_data_ptr();",
    ]


def _forward_binding(operator: Operator) -> str:
    problem, name = operator.problem, operator.name
    keeps = operator.what == STATISTICS
    result = "std::tuple<at::Tensor, at::Tensor>" if keeps else "at::Tensor"
    slabs = f"{{batch, {problem.groups}, 2}}" if problem.groups else "{0}"
    lines = [
        f"{result} run_{name}(const at::Tensor& input, at::TensorList parameters) {{",
        f'  check_cuda("{name}", input);',
        f'  check_tensor("{name}", "the input", input, {_sizes(problem.sizes, "any")}, at::k{problem.dtype},',
        f"               {_format(problem, len(problem.sizes))}, input.device());",
        *_parameter_checks(operator),
        "  const c10::cuda::CUDAGuard guard(input.device());",
        "  const int64_t batch = input.size(0);",
        f"  at::Tensor output = at::empty({_sizes(problem.output, 'batch')}, input.options()"
        + (f", {_format(problem, len(problem.output))}" if problem.layout == "nhwc" else "")
        + ");",
    ]
    statistics = ""
    if keeps:
        lines.append(f"  at::Tensor statistics = at::empty({slabs}, input.options().dtype(at::kFloat));")
        statistics = "statistics.mutable_data_ptr<float>(), "
    returned = "{output, statistics}" if keeps else "output"
    lines += [
        f"  if (batch == 0) return {returned};",
        *_workspace(name),
        f"  {name}(input.const_data_ptr(), output.mutable_data_ptr(), {statistics}addresses.data(),",
        f"  {' ' * len(name)} static_cast<char*>(workspace.mutable_data_ptr()), batch, device, stream);",
        f"  return {returned};",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _workspace(name: str) -> list[str]:
    return [
        "  const int device = input.device().index();",
        "  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();",
        f"  const int64_t workspace_bytes = {name}_workspace_bytes(batch, device);",
        "  const at::Tensor workspace = at::empty({workspace_bytes}, input.options().dtype(at::kByte));",
    ]


def _backward_binding(operator: Operator) -> str:
    problem, name = operator.problem, operator.name
    count = len(problem.parameters)
    gradient_format = (
        _format(problem, len(problem.output)) if len(problem.output) > 2 else _format(problem, 0)
    )
    lines = [
        f"std::vector<at::Tensor> run_{name}(const at::Tensor& output_gradient, const at::Tensor& input,",
        "    at::TensorList parameters, const at::Tensor& statistics) {",
        f'  check_cuda("{name}", input);',
        f'  check_tensor("{name}", "the input", input, {_sizes(problem.sizes, "any")}, at::k{problem.dtype},',
        f"               {_format(problem, len(problem.sizes))}, input.device());",
        "  const int64_t batch = input.size(0);",
        f'  check_tensor("{name}", "the output\'s gradient", output_gradient,',
        f"               {_sizes(problem.output, 'batch')}, at::k{problem.dtype}, {gradient_format},",
        "               input.device());",
        f'  check_tensor("{name}", "what the forward kept", statistics, '
        + (f"{{batch, {problem.groups}, 2}}" if problem.groups else "{0}")
        + ", at::kFloat,",
        "               at::MemoryFormat::Contiguous, input.device());",
        *_parameter_checks(operator),
        "  const c10::cuda::CUDAGuard guard(input.device());",
        "  const auto gradient_of = [&](const at::Tensor& tensor, at::MemoryFormat format) {",
        "    return batch == 0 ? at::zeros(tensor.sizes(), tensor.options())",
        "                      : at::empty(tensor.sizes(), tensor.options(), format);",
        "  };",
        f"  std::vector<at::Tensor> gradients{{{_input_gradient(problem)}}};",
        f"  std::array<void*, {count}> gradient_addresses{{}};",
    ]
    for i, sizes in enumerate(problem.parameters):
        dimensions = len(sizes) if sizes[:1] == (BATCH,) and len(sizes) > 2 else 0
        lines += [
            f"  gradients.push_back(gradient_of(parameters[{i}], {_format(problem, dimensions)}));",
            f"  gradient_addresses[{i}] = gradients.back().mutable_data_ptr();",
        ]
    lines += [
        "  if (batch == 0) return gradients;",
        *_workspace(name),
        f"  {name}(input.const_data_ptr(), output_gradient.const_data_ptr(),",
        f"  {' ' * len(name)} statistics.const_data_ptr<float>(), addresses.data(),",
        f"  {' ' * len(name)} gradients[0].mutable_data_ptr(), gradient_addresses.data(),",
        f"  {' ' * len(name)} static_cast<char*>(workspace.mutable_data_ptr()), batch, device, stream);",
        "  return gradients;",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _input_gradient(problem: Problem) -> str:
    if not problem.wants_input:
        return "at::empty({0}, input.options())"
    return f"gradient_of(input, {_format(problem, len(problem.sizes))})"


def schema(operator: Operator) -> str:
    """The operator as torch.library declares it."""
    if operator.what == BACKWARD:
        return (
            f"{operator.name}(Tensor output_gradient, Tensor input, Tensor[] parameters, Tensor statistics) "
            "-> Tensor[]"
        )
    result = "(Tensor, Tensor)" if operator.what == STATISTICS else "Tensor"
    return f"{operator.name}(Tensor input, Tensor[] parameters) -> {result}"
