"""A model file, as the commands read it."""

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x):
        return nn.functional.hardswish(self.norm(nn.functional.silu(self.conv(x))))

def get_inputs():
    return [torch.rand(6, 3, 20, 20)]

def get_init_inputs():
    return [8]
"""
