"""C++ around the kernels of a plan: what launches them, on plain pointers, and what PyTorch calls."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onepass.exporting import device_code

FORWARD, STATISTICS, BACKWARD = "forward", "statistics", "backward"
BATCH = -1  # stands for the batch in the sizes of a parameter


class NotExported(Exception):
    """Why a model is not exported, as one sentence."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A block on dense tensors of one type: what a plan is asked for."""

    block: str
    sizes: tuple[int, ...]  # with the batch that the plan is made for
    mode: str  # as in a problem string: f32, tf32, near_f32, tf32 fast, bf16 strict
    layout: str  # nchw or nhwc
    output: tuple[int, ...]
    parameters: tuple[tuple[int, ...], ...]
    groups: int | None  # slabs of a sample, where there is a norm
    wants_input: bool = True  # the input's gradient, of a backward pass

    @property
    def wanted(self) -> list[bool]:
        """Which gradients a backward pass gives."""
        return [self.wants_input, *(True for _ in self.parameters)]

    @property
    def dtype(self) -> str:
        """The element type as ATen calls it."""
        return {"f16": "Half", "bf16": "BFloat16"}.get(self.mode.split()[0], "Float")


@dataclasses.dataclass
class Kernel:
    """A kernel in a namespace of its own."""

    namespace: str
    name: str
    source: str
    threads: int
    cluster: int
    shared_bytes: int
    cooperative: bool  # blocks wait for each other: all run at the same time


@dataclasses.dataclass
class Operator:
    """One plan as an operator."""

    name: str
    what: str
    problem: Problem
    strategy: str
    explained: str
    kernels: list[Kernel]
    plan: dict[str, Any]

    @property
    def most_samples(self) -> int | None:
        """None where it takes any batch."""
        return self._limit("most_samples")

    @property
    def least_multiprocessors(self) -> int | None:
        """None where it runs on any GPU of the architecture."""
        return self._limit("least_multiprocessors")

    def _limit(self, name: str) -> int | None:
        constants = dict(self.plan["constants"])
        return int(constants[name]) if name in constants else None


class Planner:
    """Asks the library for plans; kernels that several plans share are one."""

    def __init__(self, architecture: str) -> None:
        self.device = f"cuda:{architecture}"
        self.files: dict[str, str] = dict(json.loads(torch.ops.onepass.cuda_device_code()))
        self.kernels: dict[tuple[Any, ...], Kernel] = {}

    def is_worth_fusing(self, problem: Problem) -> bool:
        """Whether a block's convolution is run with the rest, where PyTorch's could run instead."""
        arguments = (problem.block, problem.sizes, problem.mode, problem.layout, self.device)
        try:
            return torch.ops.onepass.cuda_is_worth_fusing(*arguments)
        except ValueError as error:
            raise NotExported(str(error)) from None

    def is_worth_training(self, problem: Problem) -> bool:
        """The same of a training step."""
        arguments = (problem.block, problem.sizes, problem.mode, problem.layout, self.device, problem.wanted)
        return torch.ops.onepass.cuda_is_worth_training(*arguments)

    def operator(self, name: str, what: str, problem: Problem) -> Operator:
        """Raises NotExported where the library has no such plan."""
        how = (problem.block, problem.sizes, problem.mode, problem.layout, self.device)
        try:
            plan = json.loads(torch.ops.onepass.cuda_export(*how, what, problem.wanted))
        except ValueError as error:
            raise NotExported(str(error)) from None
        kernels = [self._kernel(name, kernel, plan) for kernel in plan["kernels"]]
        return Operator(name, what, problem, plan["strategy"], plan["explained"], kernels, plan)

    def _kernel(self, operator: str, kernel: dict[str, Any], plan: dict[str, Any]) -> Kernel:
        key = tuple(kernel[name] for name in ("source", "threads", "cluster", "shared_bytes", "cooperative"))
        if key not in self.kernels:
            name = kernel["name"].removeprefix("onepass_")
            self.kernels[key] = Kernel(
                f"{operator}_{name}",
                kernel["name"],
                kernel["source"],
                kernel["threads"],
                kernel["cluster"],
                kernel["shared_bytes"],
                kernel["cooperative"],
            )
        return self.kernels[key]


# --- CUDA -------------------------------------------------------------------------------------------

CUDA_HEAD = """\
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
"""

HOST_CODE = """\
// Host code that all launches share. Plain pointers: nothing here knows of PyTorch.
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t clamp(int64_t value, int64_t low, int64_t high) { return std::min(std::max(value, low), high); }

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

// A kernel with the numbers of its launches. Attributes are set when a GPU first meets it.
class Kernel {
 public:
  // A cooperative kernel's blocks wait for each other: a launch fails where they cannot all run at once.
  Kernel(const char* name, const void* function, int threads, int cluster, int shared_bytes, bool cooperative)
      : name_(name),
        function_(function),
        threads_(threads),
        cluster_(cluster),
        shared_bytes_(shared_bytes),
        cooperative_(cooperative) {}

  // How many clusters (blocks, where the cluster is 1) the GPU runs at a time.
  int64_t resident(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int& count = resident_[device];
    if (count == 0) count = prepare(device);
    return count;
  }

  // `parameters` are the bytes of the kernel's one parameter.
  void launch(const void* parameters, int64_t blocks, int device, cudaStream_t stream) {
    resident(device);
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = configuration(blocks, stream, attribute);
    void* arguments[] = {const_cast<void*>(parameters)};
    check(cudaLaunchKernelExC(&config, function_, arguments), name_);
    check(cudaPeekAtLastError(), name_);
  }

 private:
  cudaLaunchConfig_t configuration(int64_t blocks, cudaStream_t stream,
                                   cudaLaunchAttribute& attribute) const {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads_);
    config.dynamicSmemBytes = shared_bytes_;
    config.stream = stream;
    if (cooperative_) {
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    } else {
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = cluster_;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    config.attrs = &attribute;
    config.numAttrs = cluster_ > 1 || cooperative_ ? 1 : 0;
    return config;
  }

  int prepare(int device) {
    constexpr int portable_cluster = 8;
    check(cudaFuncSetAttribute(function_, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes_), name_);
    int count = 0;
    if (cluster_ > 1) {
      if (cluster_ > portable_cluster)
        check(cudaFuncSetAttribute(function_, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name_);
      cudaLaunchAttribute attribute;
      const cudaLaunchConfig_t config = configuration(cluster_, nullptr, attribute);
      check(cudaOccupancyMaxActiveClusters(&count, function_, &config), name_);
    } else {
      int multiprocessors = 0;
      check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), name_);
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, function_, threads_, shared_bytes_), name_);
      count *= multiprocessors;
    }
    if (count == 0) throw std::runtime_error(std::string(name_) + ": a block does not fit this GPU");
    return count;
  }

  const char* name_;
  const void* function_;
  int threads_;
  int cluster_;
  int shared_bytes_;
  bool cooperative_;
  std::mutex mutex_;
  std::map<int, int> resident_;  // by GPU
};

// Kernels take one struct of eight-byte members.
template <class T>
uint64_t word(T* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}
inline uint64_t word(int64_t number) { return static_cast<uint64_t>(number); }
template <class Parameters>
constexpr size_t parameter_bytes(void (*)(Parameters)) {
  return sizeof(Parameters);
}

// Elements from the last boundary of a vector to the tensor's first.
int64_t phase_of(const void* tensor, int64_t element_bytes, int64_t vector_elements) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor) / element_bytes % vector_elements);
}

struct Vectors {
  int bit;  // of the result
  const void* tensor;
  int64_t element_bytes;
  int64_t elements;
};

// A bit for each tensor whose vectors lie on their boundaries where the input's do; bit 63: all of them.
int64_t aligned_bits(std::initializer_list<Vectors> tensors, int64_t phase, bool all = true) {
  uint64_t bits = 0;
  for (const Vectors& tensor : tensors) {
    const int64_t own = phase_of(tensor.tensor, tensor.element_bytes, tensor.elements);
    const bool aligned = reinterpret_cast<uintptr_t>(tensor.tensor) % tensor.element_bytes == 0 &&
                         own == phase % tensor.elements;
    if (aligned) bits |= uint64_t{1} << tensor.bit;
    all = all && aligned;
  }
  return static_cast<int64_t>(bits | uint64_t{all} << 63);
}

}  // namespace
"""


def kernel_text(kernel: Kernel) -> str:
    """The kernel's problem, numbers and entry, in a namespace of its own."""
    inner = "namespace onepass {\nusing namespace ::onepass;\n}\n\n"
    text = device_code.specialised(kernel.source)
    # What its structs name from the global namespace is in this one.
    text = re.sub(r"(?<![\w>:])::(?=[A-Z]\w)", f"{kernel.namespace}::", text)
    return f"namespace {kernel.namespace} {{\n{inner}{text}\n\n}}  // namespace {kernel.namespace}\n"


def title_text(operator: Operator) -> str:
    """The block and the plan as comments."""
    lines = operator.explained.rstrip().splitlines()
    chosen = next(i for i, line in enumerate(lines) if line.startswith("* "))
    first = next(i for i in range(chosen, len(lines)) if not lines[i].strip())
    # What depends on the batch, or on the compiler, is in the launch.
    numbers = [
        line.strip()
        for line in lines[first + 2 :]
        if not line.strip().startswith(("blocks:", "lag:", "wave:", "workspace:"))
    ]
    what = {
        FORWARD: "forward",
        STATISTICS: "forward, keeping mean and 1 / deviation of each slab for the backward pass",
        BACKWARD: "backward: all gradients" + ("" if operator.problem.wants_input else " but the input's"),
    }[operator.what]
    text = f"{operator.name}: {what}\n\n{lines[0]}\n\nplan: {operator.strategy}\n" + "\n".join(
        f"  {line}" for line in numbers
    )
    rule = "// " + "=" * 98
    return "\n".join([rule, *(f"// {line}".rstrip() for line in text.splitlines()), rule]) + "\n"


def launch_text(operator: Operator) -> str:
    """The operator on pointers: bytes of its workspace, and its launches."""
    plan, renamed = operator.plan, _resident_names(operator)
    used = plan["workspace_bytes"]
    arguments = ["int64_t batch", "int device"]
    size = [f"int64_t {operator.name}_workspace_bytes({', '.join(arguments)}) {{"]
    size += _constants(operator, [used], renamed)
    size += [f"  return {_renamed(used, renamed)};", "}"]
    texts = [t for s in plan["steps"] for t in (s["blocks"], s["memory"], s["bytes"], *s["words"])]
    body = _constants(operator, texts, renamed)
    for step in plan["steps"]:
        body += _clear(step, renamed) if step["kernel"] < 0 else _launch(operator, step, renamed)
    return "\n".join([*size, "", f"{_head(operator)} {{", *body, "}"]) + "\n"


def _head(operator: Operator) -> str:
    """The launching function's declaration."""
    pointers = f"void {operator.name}({', '.join(_pointers(operator))},"
    indent = " " * (len(operator.name) + 6)
    if len(pointers) > 108:
        pointers = f",\n{indent}".join(pointers.removesuffix(",").split(", ")) + ","
    return f"{pointers}\n{indent}char* workspace, int64_t batch, int device, cudaStream_t stream)"


def kernel_objects(kernels: Sequence[Kernel]) -> str:
    """The kernels as the launches know them."""
    lines = ["namespace {", ""]
    for k in kernels:
        function = f"reinterpret_cast<const void*>(&{k.namespace}::{k.name})"
        numbers = f"{k.threads}, {k.cluster}, {k.shared_bytes}, {str(k.cooperative).lower()}"
        lines.append(f'Kernel {k.namespace}_kernel("{k.namespace}",\n    {function}, {numbers});')
    return "\n".join([*lines, "", "}  // namespace"]) + "\n"


def _pointers(operator: Operator) -> list[str]:
    if operator.what == BACKWARD:
        return [
            "const void* input",
            "const void* output_gradient",
            "const float* statistics",
            "const void* const* parameters",
            "void* input_gradient",
            "void* const* parameter_gradients",
        ]
    statistics = ["float* statistics"] if operator.what == STATISTICS else []
    return ["const void* input", "void* output", *statistics, "const void* const* parameters"]


def _resident_names(operator: Operator) -> dict[str, str]:
    """Shorter names for what the library calls by a hash."""
    kernels = list(zip(operator.plan["kernels"], operator.kernels, strict=True))
    if len(kernels) == 1:
        return {kernels[0][0]["resident"]: "resident"}
    return {
        described["resident"]: f"resident_{described['name'].removeprefix('onepass_')}"
        for described, _ in kernels
    }


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        text = text.replace(old, new)
    return text


def _constants(operator: Operator, texts: Sequence[str], renamed: Mapping[str, str]) -> list[str]:
    """The constants that these formulas use, and the residents that those use."""
    needed = set(re.findall(r"\w+", " ".join(texts)))
    kept: list[str] = []
    for name, formula in reversed(operator.plan["constants"]):
        if name in needed:
            needed |= set(re.findall(r"\w+", formula))
            kept.append(f"  const int64_t {name} = {_renamed(formula, renamed)};")
    residents = [
        f"  const int64_t {renamed[described['resident']]} = {kernel.namespace}_kernel.resident(device);"
        for described, kernel in zip(operator.plan["kernels"], operator.kernels, strict=True)
        if described["resident"] in needed
    ]
    return residents + kept[::-1]


def _clear(step: dict[str, Any], renamed: Mapping[str, str]) -> list[str]:
    memory, size = (_renamed(step[name], renamed) for name in ("memory", "bytes"))
    return [f'  check(cudaMemsetAsync({memory}, 0, {size}, stream), "clearing memory");']


def _launch(operator: Operator, step: dict[str, Any], renamed: Mapping[str, str]) -> list[str]:
    kernel = operator.kernels[step["kernel"]]
    texts = [f"word({_renamed(text, renamed)})," for text in step["words"]]
    texts = ["0," if text == "word(0)," else text for text in texts]
    short = [len(text) for text in texts if len(text) < 48]
    width = max(short, default=0)
    lines = ["  {", "    const uint64_t words[] = {"]
    for text, name in zip(texts, step["names"] or [""] * len(texts), strict=True):
        lines.append(f"        {text.ljust(width)}  // {name}")
    blocks = _renamed(step["blocks"], renamed)
    return [
        *lines,
        "    };",
        f"    static_assert(sizeof words == parameter_bytes(&{kernel.namespace}::{kernel.name}));",
        f"    const int64_t blocks = {blocks};",
        f"    {kernel.namespace}_kernel.launch(words, blocks, device, stream);",
        "  }",
    ]


# --- PyTorch ----------------------------------------------------------------------------------------

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
        f"int64_t {o.name}_workspace_bytes(int64_t batch, int device);\n{_head(o)};" for o in operators
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


def kernels_text(operators: Sequence[Operator]) -> str:
    """The kernels of these operators, each with its problem and its numbers."""
    parts: list[str] = []
    written: list[Kernel] = []
    for operator in operators:
        parts.append(title_text(operator))
        new = [kernel for kernel in operator.kernels if kernel not in written]
        parts += [kernel_text(kernel) for kernel in new]
        written += new
    return "\n".join(parts)


def launches_text(operators: Sequence[Operator]) -> str:
    """What puts the kernels of these operators on a stream."""
    kernels = {kernel.namespace: kernel for operator in operators for kernel in operator.kernels}
    return "\n".join([kernel_objects(list(kernels.values())), *(launch_text(o) for o in operators)])


def shared_text(operators: Sequence[Operator], files: Mapping[str, str]) -> str:
    """The device code that the kernels of these operators use."""
    sources = dict.fromkeys(kernel.source for operator in operators for kernel in operator.kernels)
    return device_code.merge(files, sources)
