"""Boosted trees of three levels: the factor between PyTorch's time for a convolution and what bytes and
operations take. The features are the library's own (src/cuda/costs/convolution.cc).
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench" / "sweep"), str(ROOT / "python"), str(ROOT / "scripts")]

import sweep_convolutions  # noqa: E402
import torch  # noqa: E402

import onepass  # noqa: E402, F401  # its operators

DEVICE = "cuda:sm_90a"  # whose rates the features are of
MODES = {"tf32": "tf32", "strict": "f32", "bf16": "bf16", "fp16": "f16"}
TREES, RATE = 100, 0.14
SPLITS = 7  # of three levels
LEAST_PROBLEMS = 4  # of a branch
MOST_RESIDUAL = 1.0  # of a logarithm: rare ones, of 10 and more, must not decide
SHARE = 0.7  # of the problems, for each tree
CANDIDATES = 24  # thresholds of a feature
DOUBT = 2.0  # a leaf is drawn towards 0 as by so many problems
FOLDS = 5

Array = Any  # of numpy


@dataclasses.dataclass(frozen=True)
class Data:
    """Problems as rows of features, the logarithms of their factors, and which are drawn and which layers."""

    features: Array
    targets: Array
    of: Array


@dataclasses.dataclass(frozen=True)
class Errors:
    """How far predictions are off, as factors."""

    problems: int
    typical: float
    rarely: float

    def __str__(self) -> str:
        return f"off by {self.typical:.2f} typically, {self.rarely:.2f} in one of ten"


@dataclasses.dataclass
class Tree:
    """As the library reads it: splits from the root on, level after level, then leaves."""

    features: list[int]
    thresholds: list[float]
    leaves: list[float]

    def values(self, rows: Array) -> Array:
        """For each problem."""
        at = np.zeros(len(rows), dtype=int)
        features, thresholds = np.array(self.features), np.array(self.thresholds)
        for _ in range(3):
            goes_left = rows[np.arange(len(rows)), features[at]] <= thresholds[at]
            at = 2 * at + np.where(goes_left, 1, 2)
        return np.array(self.leaves)[at - SPLITS]

    def text(self) -> str:
        """A line of the table."""
        written = (f"{value:.5g}" for value in self.thresholds)
        thresholds = ", ".join(f"{value}F" if "." in value else value for value in written)
        leaves = ", ".join(f"{value:.4f}F" for value in self.leaves)
        return f"{{{{{', '.join(map(str, self.features))}}}, {{{thresholds}}}, {{{leaves}}}}},"


def data_of(entries: list[dict[str, Any]], name: str) -> Data:
    """Of the entries that have measured a pass."""
    rows, targets, of = [], [], []
    for entry in entries:
        if name not in entry:
            continue
        problem = sweep_convolutions.problem_of(entry)
        layout = "nhwc" if problem.layout == "channels_last" else "nchw"
        how = (problem.conv.text(problem.rank), problem.shape, MODES[problem.precision], layout, DEVICE)
        *features, base = map(float, torch.ops.onepass.cuda_convolution_features(*how).split())
        rows.append(features)
        targets.append(np.log2(entry[name] / base))
        of.append(entry["of"])
    return Data(np.array(rows), np.array(targets), np.array(of))


def fit(rows: Array, targets: Array) -> list[Tree]:
    """The first tree is the median, the others what is left, one after the other."""
    random = np.random.default_rng(0)
    begin = round(float(np.median(targets)), 4)
    trees = [Tree([0] * SPLITS, [0.0] * SPLITS, [begin] * (SPLITS + 1))]
    predicted = np.full(len(rows), begin)
    quantiles = np.linspace(0, 1, CANDIDATES + 2)[1:-1]
    candidates = [_written(np.unique(np.quantile(column, quantiles))) for column in rows.T]
    for _ in range(TREES):
        residuals = np.clip(targets - predicted, -MOST_RESIDUAL, MOST_RESIDUAL)
        picked = random.permutation(len(rows))[: int(SHARE * len(rows))]
        trees.append(_tree(rows, residuals, picked, candidates))
        predicted += trees[-1].values(rows)
    return trees


def _written(values: Array) -> Array:
    """As the table has them."""
    return np.array([float(f"{value:.5g}") for value in values])


def _tree(rows: Array, residuals: Array, picked: Array, candidates: list[Array]) -> Tree:
    tree = Tree([0] * SPLITS, [0.0] * SPLITS, [0.0] * (SPLITS + 1))
    members: dict[int, Array] = {0: picked}
    for node in range(SPLITS):
        own = members[node]
        feature, threshold = _best_split(rows[own], residuals[own], candidates)
        tree.features[node], tree.thresholds[node] = feature, threshold
        goes_left = rows[own, feature] <= threshold
        members[2 * node + 1], members[2 * node + 2] = own[goes_left], own[~goes_left]
    for leaf in range(SPLITS + 1):
        own = residuals[members[SPLITS + leaf]]
        tree.leaves[leaf] = round(float(RATE * own.sum() / (len(own) + DOUBT)), 4)
    return tree


def _best_split(rows: Array, residuals: Array, candidates: list[Array]) -> tuple[int, float]:
    """Everything goes left where no split leaves enough problems on both sides."""
    best, found, total = 0.0, (0, 1e9), residuals.sum()
    for feature, thresholds in enumerate(candidates):
        left = rows[:, feature, None] <= thresholds
        counts, sums = left.sum(0), residuals @ left
        others = len(rows) - counts
        fits = (counts >= LEAST_PROBLEMS) & (others >= LEAST_PROBLEMS)
        gains = np.where(
            fits, sums**2 / np.maximum(counts, 1) + (total - sums) ** 2 / np.maximum(others, 1), -1.0
        )
        if gains.size and gains.max() > best:
            best, found = gains.max(), (feature, float(thresholds[gains.argmax()]))
    return found


def cross_validated(data: Data) -> dict[str, Errors]:
    """Errors of problems that the trees have not seen, for drawn ones and for layers."""
    order = np.random.default_rng(1).permutation(len(data.targets))
    off = np.zeros(len(order))
    for fold in range(FOLDS):
        hidden = order[fold::FOLDS]
        seen = np.setdiff1d(order, hidden)
        trees = fit(data.features[seen], data.targets[seen])
        off[hidden] = sum(tree.values(data.features[hidden]) for tree in trees) - data.targets[hidden]
    found = {}
    for of in np.unique(data.of):
        own = np.abs(off[data.of == of])
        typical, rarely = np.exp2(np.quantile(own, [0.5, 0.9]))
        found[str(of)] = Errors(len(own), float(typical), float(rarely))
    return found
