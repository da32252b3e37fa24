"""Models with batch norms, and their statistics as after some training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onepass import fuse

AFFINE = "channel_mul | channel_add"


def image(*sizes: int) -> Tensor:
    return torch.randn(sizes or (2, 3, 6, 5), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def with_statistics(model: nn.Module) -> nn.Module:
    """Statistics and weights as after some training: none is 0 or 1."""
    generator = torch.Generator().manual_seed(11)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            tensors = (module.running_mean, module.running_var, module.weight, module.bias)
            for tensor, low, high in zip(tensors, (-2, 0.3, -1.5, -1), (2, 3, 1.5, 1), strict=True):
                if tensor is not None:
                    tensor.uniform_(low, high, generator=generator)
    return model


def simple(activation: nn.Module | None = None, **options: Any) -> nn.Sequential:
    conv, norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, **options)
    return with_statistics(nn.Sequential(conv, norm, activation or nn.ReLU(inplace=True)))


class Basic(nn.Module):
    """The basic block of a ResNet, as torchvision writes it."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A narrow ResNet-18."""

    def __init__(self, width: int = 8, blocks: tuple[int, ...] = (2, 2, 2)) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        layers, channels = [], width
        for number, count in enumerate(blocks):
            for i in range(count):
                layers.append(Basic(channels, width << number, 2 if number and not i else 1))
                channels = width << number
        self.layers = nn.Sequential(*layers)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


def resnet() -> nn.Module:
    return with_statistics(ResNet())


def pair(make: Callable[[], nn.Module] = simple) -> tuple[nn.Module, nn.Module]:
    """A model in evaluation, and its fused copy."""
    eager = make().eval()
    return eager, fuse(copy.deepcopy(eager))
