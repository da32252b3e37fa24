"""DistributedDataParallel with the backend: each bucket's graph is compiled, in two processes of gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import onepass

PACKAGE = Path(onepass.__file__).parents[1]

_WORKER = """
import copy, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import onepass
from onepass.compiling import record

dist._DEFAULT_FIRST_BUCKET_BYTES = 4096  # else 1 MiB
rank, port, gathers = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "accumulate"
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [
            nn.Sequential(nn.Conv2d(i, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()) for i in (3, 16, 16)
        ]
        self.all = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(16 * 64, 5))

    def forward(self, x):  # Dynamo looks into frames of the user's alone
        return self.all(x)

model = Model()
twin = copy.deepcopy(model)
# Buckets of 8 KiB: the convolutions of 16 channels fill one each.
parallel = DistributedDataParallel(model, bucket_cap_mb=8 / 1024)
run = torch.compile(parallel, backend="onepass", options={"onepass.keep": "all"})
inputs = torch.randn(2, 3, 2, 3, 8, 8)  # rank, step, sample
for step in range(3):
    if gathers and step < 2:
        with parallel.no_sync():
            run(inputs[rank, step]).square().mean().backward()
    else:
        run(inputs[rank, step]).square().mean().backward()
    for other in range(2):  # one process, both halves of the batch: the mean of their gradients
        (twin(inputs[other, step]).square().mean() / 2).backward()
    if not gathers or step == 2:
        for some, wanted in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(some.grad, wanted.grad, rtol=1e-3, atol=1e-5)
        model.zero_grad(), twin.zero_grad()
torch.testing.assert_close(run(inputs[0, 0]), twin(inputs[0, 0]), rtol=1e-4, atol=1e-5)
found = record.compilations_of(model)
kept = [d.segment.block for c in found for d in c.plan.decisions if d.kept]
print("graphs", len(found), "kept", len(kept))
dist.destroy_process_group()
"""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_two(tmp_path: Path, how: str) -> list[str]:
    """What the two processes print last."""
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    env = dict(os.environ, PYTHONPATH=str(PACKAGE))
    command = [sys.executable, "-W", "ignore", str(script)]
    port = str(_free_port())
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([*command, str(rank), port, how], env=env, **pipes) for rank in range(2)]
    said = []
    try:
        for worker in workers:
            out, errors = worker.communicate(timeout=600)
            assert worker.returncode == 0, errors
            said.append(out.splitlines()[-1])
    finally:
        for worker in workers:
            worker.kill()
    return said


def test_buckets_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    first, second = run_two(tmp_path, "plain")
    assert first == second
    _, graphs, _, kept = first.split()
    assert int(graphs) >= 2, "DDPOptimizer has not split the graph"
    assert int(kept) >= 3


def test_accumulated_gradients_meet_in_the_last_step(tmp_path: Path) -> None:
    assert all(" kept " in line for line in run_two(tmp_path, "accumulate"))
