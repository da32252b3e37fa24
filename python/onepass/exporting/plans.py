"""The library's plans for an exported file: problems, their operators and the kernels of these."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch

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
        except (ValueError, RuntimeError) as error:
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
        except (ValueError, RuntimeError) as error:
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
