"""Real models with random weights: the same outputs and gradients fused, and how many of their norms are."""

from __future__ import annotations

import copy

import pytest
import torch
from fuse_support import assert_same
from real_models import MODELS, RealModel
from torch import nn

from onepass import fuse, report

_NORMS = (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)


def fused_norms(model: nn.Module) -> tuple[int, int]:
    """How many norms run inside blocks in the model's present mode, and how many there are."""
    mode = "train" if model.training else "eval"
    inside = {name for entry in report(model).fused if mode in entry.modes for name in entry.modules}
    norms = [name for name, module in model.named_modules() if isinstance(module, _NORMS)]
    return sum(name in inside for name in norms), len(norms)


@pytest.mark.parametrize("real", MODELS, ids=lambda real: real.name)
def test_real_model(real: RealModel) -> None:
    pytest.importorskip(real.package)
    torch.manual_seed(0)
    model = real.build()
    torch.manual_seed(0)
    fused = fuse(copy.deepcopy(model))
    for training in (False, True):
        inputs = real.inputs()
        assert_same(fused.train(training), model.train(training), *inputs, output=real.output)
        count, norms = fused_norms(fused)
        assert norms == real.norms
        assert count >= real.least_fused, report(fused)
    assert not report(fused).fallbacks
