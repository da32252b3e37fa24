"""What an installed wheel does with nothing but PyTorch: a fused block with the gradients of the original."""

import copy

import torch

import onepass

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.GroupNorm(2, 8), torch.nn.SiLU())
fused = onepass.fuse(copy.deepcopy(model))
x = torch.randn(2, 3, 9, 11)
for network in (model, fused):
    network(x).square().sum().backward()
for ours, theirs in zip(fused.parameters(), model.parameters(), strict=True):
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
report = onepass.report(fused)
assert len(report.fused) == 1 and not report.fallbacks, report
print(report)
