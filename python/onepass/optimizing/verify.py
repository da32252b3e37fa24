"""Whether a result is right: against the same model in double precision and against PyTorch's own result."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Rule:
    """What must hold in one mode of arithmetic; `allowance` is in units of the largest value."""

    mode: str
    tolerance: float  # allclose(tolerance, tolerance) with PyTorch, asked of outputs
    ratio: float  # the error against fp64 is at most this times PyTorch's
    allowance: float  # plus so much: PyTorch's own error can happen to be nothing

    def __str__(self) -> str:
        allclose = f"allclose({self.tolerance:g}, {self.tolerance:g})"
        return (
            f"{self.mode}: error against fp64 at most {self.ratio:g}x PyTorch's (and {self.allowance:.1e} of "
            f"the largest value); outputs {allclose} with PyTorch where PyTorch is that close to fp64"
        )


RULES = {
    "fp32": Rule("fp32", 1e-5, 2.0, 2.0**-22),
    "tf32": Rule("tf32", 1e-4, 1.0, 2e-5),  # rounding x alone moves s27's means by 1.6e-5
    "fp16": Rule("fp16", 1e-2, 1.0, 2.0**-12),
    "bf16": Rule("bf16", 1e-1, 1.0, 2.0**-9),
    "fp64": Rule("fp64", 1e-10, 2.0, 2.0**-45),
}
_MODES = {torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}


def rule_for(dtype: torch.dtype, device: torch.device) -> Rule:
    """The rule of the mode that PyTorch computes in for tensors of this type."""
    tf32 = device.type == "cuda" and torch.backends.cudnn.conv.fp32_precision == "tf32"
    return RULES[_MODES.get(dtype, "tf32" if tf32 else "fp32")]


@dataclasses.dataclass(frozen=True)
class Check:
    """One tensor (an output or a gradient) of one variant, over all inputs it was compared on."""

    name: str
    is_gradient: bool
    error: float  # largest, against fp64
    torch_error: float  # PyTorch's own
    difference: float  # largest, against PyTorch
    scale: float  # the largest value in fp64
    close: bool  # to PyTorch, within the tolerance
    torch_close: bool  # PyTorch to fp64, within the tolerance
    kink: float = 0.0  # how far this gradient jumps in fp64 when the inputs change by rounding errors
    fault: str = ""  # another shape or type, NaN in other places

    def merge(self, other: Check) -> Check:
        """Both comparisons as one."""
        return Check(
            self.name,
            self.is_gradient,
            max(self.error, other.error),
            max(self.torch_error, other.torch_error),
            max(self.difference, other.difference),
            max(self.scale, other.scale),
            self.close and other.close,
            self.torch_close and other.torch_close,
            max(self.kink, other.kink),
            self.fault or other.fault,
        )

    def beside(self, rival: Check) -> Check:
        """The same, judged beside what Inductor alone makes of the model: its roundings are allowed too."""
        return dataclasses.replace(
            self,
            torch_error=max(self.torch_error, rival.error),
            torch_close=self.torch_close and rival.close,
        )

    def ratio(self) -> float:
        """The error in units of PyTorch's own."""
        if self.torch_error == 0:
            return 1.0 if self.error == 0 else math.inf
        return self.error / self.torch_error

    def wrong(self, rule: Rule) -> str:
        """Why the tensor is wrong by this rule; empty where it is right."""
        if self.fault:
            return f"{self.name}: {self.fault}"
        if self.error > rule.ratio * self.torch_error + rule.allowance * self.scale + self.kink:
            return f"{self.name}: error {self.error:.1e} against fp64 is {self.ratio():.1f}x PyTorch's"
        if not self.is_gradient and self.torch_close and not self.close:
            return f"{self.name}: differs from PyTorch by {self.difference:.1e}"
        return ""

    def far(self, rule: Rule) -> str:
        """Why the tensor is not even close, which is what is asked of PyTorch's own variants."""
        if self.fault:
            return f"{self.name}: {self.fault}"
        if self.error > 10 * max(self.torch_error, rule.tolerance * max(1.0, self.scale), self.kink):
            return f"{self.name}: error {self.error:.1e} against fp64, PyTorch's eager {self.torch_error:.1e}"
        return ""


def compare(name: str, is_gradient: bool, ours: Tensor, torchs: Tensor, exact: Tensor, rule: Rule) -> Check:
    """Compares one tensor with PyTorch's and with that of the model in double precision."""
    fault = _fault(ours, torchs)
    if fault:
        return Check(name, is_gradient, math.inf, 0.0, math.inf, 0.0, False, True, fault=fault)
    # A position where PyTorch itself has no number is compared by _fault alone.
    finite = torch.isfinite(torchs)
    ours64, torchs64, exact64 = (torch.where(finite, t.double(), 0.0) for t in (ours, torchs, exact))
    return Check(
        name,
        is_gradient,
        _largest(ours64 - exact64),
        _largest(torchs64 - exact64),
        _largest(ours64 - torchs64),
        _largest(exact64),
        torch.allclose(ours64, torchs64, rule.tolerance, rule.tolerance),
        torch.allclose(torchs64, exact64, rule.tolerance, rule.tolerance),
    )


def rounding_noise(x: Tensor, seed: int) -> Tensor:
    """Noise of 64 roundings to fp32 in the size of x."""
    generator = torch.Generator(x.device).manual_seed(seed)
    noise = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return noise * x.square().mean().sqrt() * 2.0**-17


def kink(above: Tensor, exact: Tensor, below: Tensor) -> float:
    """The jump of a gradient between two inputs a noise above and below: a smooth function's changes cancel.

    A relu has another gradient on either side of its kink, and rounding decides which one an element gets.
    """
    return _largest(above + below - 2 * exact)


def _fault(ours: Tensor, torchs: Tensor) -> str:
    if ours.shape != torchs.shape:
        return f"shape {tuple(ours.shape)}, PyTorch's is {tuple(torchs.shape)}"
    if ours.dtype != torchs.dtype:
        return f"type {ours.dtype}, PyTorch's is {torchs.dtype}"
    same = torch.isfinite(ours) == torch.isfinite(torchs)
    return "" if bool(same.all()) else f"{int((~same).sum())} values are NaN or infinite on one side only"


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
