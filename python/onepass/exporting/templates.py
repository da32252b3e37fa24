"""The parts of an exported file that are the same in every one, as text with @PLACES@."""

IMPORTS = """
# ----------------------------------------------------------------------------------------------------
# The kernels
import functools
import sys
import threading
import warnings

import torch
import torch.utils.cpp_extension
"""

REGISTRATION = '''
def _check_devices(input, parameters):
    """A parameter on the meta device brings a call of real tensors here."""
    for parameter in parameters:
        if parameter.device != input.device:
            raise RuntimeError(f"a parameter is on {parameter.device}, the input on {input.device}")


@FAKES@


_building = threading.RLock()
_built = {}  # extension: why it could not be built, or "" where it was


def _build(extension):
    """Compiles and loads an extension, which registers its operators for CUDA; why that failed, or ""."""
    with _building:
        if extension not in _built:
            binding, cuda = _EXTENSIONS[extension]
            try:
                torch.utils.cpp_extension.load_inline(
                    name=f"{_NAMESPACE}_{extension}",
                    cpp_sources=[binding],
                    cuda_sources=list(cuda),
                    extra_cuda_cflags=_NVCC,
                    is_python_module=False,
                    no_implicit_headers=True,
                )
                _built[extension] = ""
            except Exception as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                _built[extension] = f"the kernels could not be built ({lines[0]})"
        return _built[extension]


def _register():
    """Declares the operators, so that torch.compile knows them before they are built.

    NAME_recomputed is for compiled code that wants gradients: its backward pass is the original's.
    """
    namespace = getattr(torch.ops, _NAMESPACE)
    if hasattr(namespace, "exported"):  # the same file, imported under another name
        return
    namespace.exported = library = torch.library.Library(_NAMESPACE, "FRAGMENT")  # kept
    for name, (_, schema) in _OPERATORS.items():
        library.define(schema)
        torch.library.register_fake(f"{_NAMESPACE}::{name}", globals()[f"_fake_{name}"], lib=library)
        if name in _STAGES:
            _register_recomputed(library, name)


def _register_recomputed(library, name):
    def run(x, parameters):
        return getattr(getattr(torch.ops, _NAMESPACE), name)(x, parameters)

    def keep(ctx, inputs, output):
        x, parameters = inputs
        ctx.wanted = [tensor.requires_grad for tensor in (x, *parameters)]
        ctx.save_for_backward(x, *parameters)

    def backward(ctx, output_gradient):
        first, *others = _recomputed_gradients(
            _STAGES[name], ctx.saved_tensors, ctx.wanted, output_gradient
        )
        return first, others

    recomputed = f"{name}_recomputed"
    library.define(f"{recomputed}(Tensor input, Tensor[] parameters) -> Tensor")
    library.impl(recomputed, run, "CompositeExplicitAutograd")
    qualified = f"{_NAMESPACE}::{recomputed}"
    torch.library.register_fake(qualified, globals()[f"_fake_{name}"], lib=library)
    torch.library.register_autograd(qualified, backward, setup_context=keep, lib=library)
'''

RUNTIME = '''
# ----------------------------------------------------------------------------------------------------
# When a kernel runs. Every other call runs the original code and says why.

_reasons = {}  # why calls ran the original code: how many did


def _note(block, why):
    """Counts a call that runs the original code; the first of its kind warns."""
    sentence = f"ModelNew: {block} runs the original code: {why}"
    _reasons[sentence] = _reasons.get(sentence, 0) + 1
    if _reasons[sentence] == 1:
        warnings.warn(sentence, RuntimeWarning, stacklevel=4)


_note_compiled = torch.compiler.assume_constant_result(_note)  # while a compiler traces


def _say(block, why):
    if torch.compiler.is_compiling():
        _note_compiled(block, why)
    else:
        _note(block, why)


def _shown(tensor):
    """Its sizes; a compiler may have symbols for them."""
    return "" if torch.compiler.is_compiling() else f" {tuple(tensor.shape)}"


def _wants_gradients(x, parameters):
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters))


def _unusual(x, parameters):
    """Why no kernel may run now, whatever it computes; a compiler knows its own tensors and modes."""
    if torch.compiler.is_compiling():
        return "a torch.func transform is active" if torch._C._are_functorch_transforms_active() else ""
    for tensor in (x, *parameters):
        if type(tensor) not in _PLAIN:
            return f"a tensor is a {type(tensor).__name__}"
    if x.layout != torch.strided:
        return f"the input is {x.layout}"
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is active"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if torch._C._is_tracing():
        return "torch.jit traces the call"
    return ""


def _unlike(block, x, parameters):
    """Why these are not tensors that the kernels of the block are for; "" where they are."""
    dtype, sizes, memory_format, wanted = _FITTING[block]
    why = _unusual(x, parameters)
    if why:
        return why
    if not x.is_cuda:
        return "the input is not on a GPU"
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    if x.dtype != dtype:
        return f"the input is {x.dtype}, not {dtype}"
    if x.shape[1:] != sizes:
        return f"the input's sizes{_shown(x)} are not the {(-1, *sizes)} it was written for"
    if not x.is_contiguous(memory_format=memory_format):
        return f"the input is not dense in {memory_format}"
    for index, (parameter, (shape, order)) in enumerate(zip(parameters, wanted)):
        first = x.shape[:1] if shape[:1] == (-1,) else shape[:1]
        if parameter.shape[:1] != first or parameter.shape[1:] != shape[1:]:
            return f"parameter {index} has the sizes{_shown(parameter)}, not {shape}"
        if parameter.dtype != dtype or parameter.device != x.device:
            return f"parameter {index} is {parameter.dtype} on {parameter.device}, unlike the input"
        if not parameter.is_contiguous(memory_format=order):
            return f"parameter {index} is not dense"
    return ""


_gpus = {}  # by index


@torch.compiler.assume_constant_result
def _unable(name, device):
    """Why the operator does not run on this GPU; "" where it does, and is built."""
    if device not in _gpus:
        _gpus[device] = torch.cuda.get_device_properties(device)
    gpu = _gpus[device]
    if (gpu.major, gpu.minor) != @CAPABILITY@:
        return f"the GPU is sm_{gpu.major}{gpu.minor}, the kernels are for @ARCHITECTURE@"
    least = _LEAST_MULTIPROCESSORS.get(name, 1)
    if gpu.multi_processor_count < least:
        return f"the GPU has {gpu.multi_processor_count} multiprocessors, the kernel needs {least}"
    return _build(_OPERATORS[name][0])


def _too_many(name, x):
    if name in _MOST_SAMPLES and x.shape[0] > _MOST_SAMPLES[name]:
        return f"the batch has more than {_MOST_SAMPLES[name]} samples"
    return ""


def _way(block, x, parameters, gradients):
    """Names of the operators that run the block, of a training step both; why there are none, "" where
    PyTorch's convolution is the plan; and whether the next such call has the same answer.
    """
    why = _unlike(block, x, parameters)
    if why:
        return (), why, False
    mode, settled = _mode(block, x, gradients)
    name, pair, wants_input = _WAYS[block].get(mode, ("", (), True))
    device = x.device.index
    if gradients and pair and (wants_input or not x.requires_grad):
        why = _too_many(pair[0], x) or _unable(pair[0], device) or _unable(pair[1], device)
        if not why:
            return pair, "", settled
    elif gradients and block in _TRAINED_TAILS:
        return (), "", settled
    if not name:
        return (), why, settled and not why
    why = _too_many(name, x) or _unable(name, device)
    return ((), why, False) if why else ((name,), "", settled)


def _attempt(block, x, parameters):
    """The block by its kernels, and ""; or None and why not: "" where PyTorch's convolution is the plan."""
    if torch.compiler.is_compiling():
        return _attempt_compiled(block, x, parameters)
    if type(x) not in _PLAIN or x.is_nested:
        return None, f"the input is a {'nested tensor' if type(x) in _PLAIN else type(x).__name__}"
    key = _key(block, x, parameters)
    run = _known.get(key)
    if run is None:
        gradients = _wants_gradients(x, parameters)
        names, why, settled = _way(block, x, parameters, gradients)
        run = _runner(names, gradients, parameters)
        if not settled:
            return (run(x, parameters), "") if names else (None, why)
        _known[key] = run
    try:
        return run(x, parameters), ""
    except RuntimeError:  # the operators look at what the key has not: types, sizes and order in memory
        why = _unlike(block, x, parameters)
        if not why:
            raise
        return None, why


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_known = {}  # by _key: what runs such calls


def _key(block, x, parameters):
    """What decides how a call runs, besides what the operators look at."""
    gradients = torch.is_grad_enabled()
    if gradients:
        gradients = x.requires_grad
        for parameter in parameters:
            gradients = gradients or parameter.requires_grad
    return (
        block,
        x.shape,
        x.stride(),
        x.dtype,
        x.get_device(),
        gradients,
        x.requires_grad,
        torch.is_autocast_enabled(),
        torch._C._are_functorch_transforms_active(),
        torch._C._is_tracing(),
        torch.autograd.forward_ad._current_level,
        *map(type, parameters),
        *_settings(block),
    )


def _runner(names, gradients, parameters):
    """A function of x and the parameters that runs these operators; none of them: it gives None."""
    if not names:
        return _left_to_pytorch
    if not gradients:
        return _operator(names[0])
    function = _Recomputed if len(names) == 1 else _Trained
    # Function.apply without its Python part (5 us), which is for transforms; what that does for tensors that
    # outlived a transform is done for the input, and a torch.nn.Parameter is none.
    quick = super(torch.autograd.Function, function).apply
    if any(type(parameter) is not torch.nn.Parameter for parameter in parameters):
        quick = function.apply
    unwrapped = torch._C._functorch.unwrap_if_dead
    if len(names) == 1:
        return _launched_first(*names, quick, unwrapped)
    forward, backward = names
    return lambda x, parameters: quick(forward, backward, unwrapped(x), *parameters)


def _launched_first(name, attach, unwrapped):
    """Launches the kernels, then tells autograd of them, which takes as long again."""
    operator = _operator(name)

    def run(x, parameters):
        x = unwrapped(x)
        torch._C._set_grad_enabled(False)
        try:
            output = operator(x, parameters)
        finally:
            torch._C._set_grad_enabled(True)
        return attach(name, output, x, *parameters)

    return run


@functools.cache
def _operator(name):
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _left_to_pytorch(x, parameters):
    return None


def _attempt_compiled(block, x, parameters):
    gradients = _wants_gradients(x, parameters)
    names, why, _ = _way(block, x, parameters, gradients)
    if not names:
        return None, why
    if len(names) == 2:
        return _Trained.apply(*names, x, *parameters), ""
    name = f"{names[0]}_recomputed" if gradients else names[0]
    return getattr(getattr(torch.ops, _NAMESPACE), name)(x, parameters), ""


def _recomputed_gradients(stages, tensors, wanted, output_gradient):
    """Of these tensors: runs the original stages once more and differentiates them."""
    again = torch.is_grad_enabled()  # gradients of the gradients are wanted
    with torch.enable_grad():
        if again:  # views: one of the tensors may have been computed from another
            tensors = [tensor.view_as(tensor) for tensor in tensors]
        else:
            tensors = [tensor.detach().requires_grad_(want) for tensor, want in zip(tensors, wanted)]
        asked = [tensor for tensor, want in zip(tensors, wanted) if want]
        output = stages(*tensors)
        found = torch.autograd.grad(output, asked, output_gradient, create_graph=again, allow_unused=True)
    gradients = iter(found)
    return [next(gradients) if want else None for want in wanted]


class _Recomputed(torch.autograd.Function):
    """A block's output whose gradients are wanted: keeps the tensors, its backward pass is the original's."""

    @staticmethod
    def forward(ctx, name, output, *tensors):
        ctx.name = name
        ctx.mark_dirty(output)  # no copy, and no view
        ctx.save_for_backward(*tensors)
        return output

    @staticmethod
    def backward(ctx, output_gradient):
        stages, wanted = _STAGES[ctx.name], ctx.needs_input_grad[2:]
        return None, None, *_recomputed_gradients(stages, ctx.saved_tensors, wanted, output_gradient)


_global_forward_hooks = torch.nn.modules.module._global_forward_hooks
_global_forward_pre_hooks = torch.nn.modules.module._global_forward_pre_hooks
_global_backward_hooks = torch.nn.modules.module._global_backward_hooks
_global_backward_pre_hooks = torch.nn.modules.module._global_backward_pre_hooks
_module_class = torch.nn.Module
_module_call = _module_class.__call__


def _replaced(path, module, cls):
    if torch.compiler.is_compiling():
        return f"{path} was replaced"
    return f"{path} is {'None' if module is None else type(module).__name__}, not {cls.__name__}"


def _differs(name, value, wanted):
    if torch.compiler.is_compiling():  # which may have a symbol for the value
        return f"{name} was changed"
    return f"{name} is {value!r}, not {wanted!r}"
'''

# Which kernels a convolution of f32 tensors takes, by --numerics.
MODE = {
    "pytorch": '''
_asked = {}  # how PyTorch's convolution rounds its operands


def _precision(block, batch, device, gradients):
    """How PyTorch's own convolution of the block rounds its operands: "tf32", "tf32_away", "other", or
    "near_f32" where it, or one of its gradients that are computed here, does not. cuDNN decides that for
    every size by how fast it expects its kernels to be, so it is asked; "" where it cannot be now.
    """
    flags = torch.backends.cudnn
    key = (block, batch, device, gradients, flags.benchmark, flags.deterministic, flags.enabled)
    if key not in _asked:
        if batch == 0 or torch.cuda.is_current_stream_capturing():
            return ""
        try:
            _asked[key] = _ask(block, batch, torch.device("cuda", device), gradients)
        except torch.OutOfMemoryError:
            return ""
    return _asked[key]


_precision_compiled = torch.compiler.assume_constant_result(_precision)


@ASKED@


def _ask(block, batch, device, gradients):
    _, sizes, memory_format, parameters = _FITTING[block]
    with torch.no_grad():
        x = torch.empty((batch, *sizes), device=device, memory_format=memory_format)
        w = torch.empty(parameters[0][0], device=device)
        answers = _rounding_of(_CONVOLUTIONS[block], x, w, _IS_TRANSPOSED[block], gradients)
    return "near_f32" if "fp32" in answers else answers[0]


@torch.compiler.assume_constant_result
def _allows_tf32():
    """PyTorch's switch at the call; torch.compile keeps what it is at the trace."""
    return torch.backends.cudnn.conv.fp32_precision == "tf32"


def _mode(block, x, gradients):
    """The precision of the block's convolution, and whether the next such call has the same."""
    if block not in _CONVOLUTIONS:
        return "", True
    if not _allows_tf32():
        return "f32", True
    trained = gradients and any(pair for _, pair, _ in _WAYS[block].values())
    if torch.compiler.is_compiling():  # decided once, for the batch that get_inputs() gives
        return _precision_compiled(block, _BATCHES[block], x.device.index, trained) or "near_f32", True
    precision = _precision(block, x.shape[0], x.device.index, trained)
    return precision or "near_f32", bool(precision)


def _settings(block):
    """What decides the precision besides sizes. The properties of torch.backends.cudnn take 4 us, these 1."""
    if block not in _CONVOLUTIONS:
        return ()
    return (
        torch._C._get_fp32_precision_getter("cuda", "conv"),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_cudnn_enabled(),
    )
''',
    "strict": """
def _mode(block, x, gradients):
    return "f32" if block in _CONVOLUTIONS else "", True


def _settings(block):
    return ()
""",
    "fast": """
def _mode(block, x, gradients):
    return "tf32" if block in _CONVOLUTIONS else "", True


def _settings(block):
    return ()
""",
}

TRAINING = '''
class _Trained(torch.autograd.Function):
    """A block whose gradients are wanted: keeps its input, its parameters and the statistics of its slabs."""

    @staticmethod
    def forward(ctx, forward, backward, x, *parameters):
        output, statistics = getattr(getattr(torch.ops, _NAMESPACE), forward)(x, parameters)
        ctx.forward_name, ctx.name = forward, backward
        ctx.save_for_backward(x, statistics, *parameters)
        return output

    @staticmethod
    def backward(ctx, output_gradient):
        x, statistics, *parameters = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        # Gradients of these gradients too; or many at a time, of is_grads_batched: a tensor without memory.
        if not torch.compiler.is_compiling() and (
            torch.is_grad_enabled() or not torch._C._has_storage(output_gradient)
        ):
            stages = _STAGES[ctx.forward_name]
            return None, None, *_recomputed_gradients(stages, (x, *parameters), wanted, output_gradient)
        order = _ORDERS[ctx.forward_name] if output_gradient.dim() == x.dim() else torch.contiguous_format
        output_gradient = output_gradient.contiguous(memory_format=order)
        operator = getattr(getattr(torch.ops, _NAMESPACE), ctx.name)
        gradients = operator(output_gradient, x, parameters, statistics)
        return None, None, *(gradient if want else None for gradient, want in zip(gradients, wanted))
'''

REPLACE_FORWARD = '''
def _replace_forward(model, path, original, forward):
    """Gives a module of the model a class of its own with this forward, where the kernels are for it."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        _note("forward", f"it has no module {path}")
        return
    if type(module) is original:
        module.__class__ = type(original.__name__, (original,), {"forward": forward})
    else:
        _note(path, _replaced(path, module, original))
'''
