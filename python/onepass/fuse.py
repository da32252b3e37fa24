"""Fusing a model in place: every chain of stages that its modules' forwards compute runs as one block."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from onepass import _fallback, _library, _numerics, _swap, freezing
from onepass._refused import Refused
from onepass._rewriter import NORMS, Rewriter
from onepass._shadow import shared_classes
from onepass._state import root_name, skipped_reasons
from onepass._trace import Pattern, call_patterns, is_leaf

FilterFn = Callable[[str, nn.Module], bool]


def fuse(
    model: nn.Module,
    *,
    conv: str = "fuse",
    filter_fn: FilterFn | None = None,
    numerics: str | None = None,
    freeze: bool = False,
) -> nn.Module:
    """Makes every matching chain of the model run as one block, in place, and returns the model.

    Parameters, names, order, state_dict, hooks and optimizers stay as they are. A call that leaves the fused
    path warns once per module and reason with FallbackWarning, and onepass.report(model) counts it. Replicas
    of torch.nn.DataParallel run fused too.

    A pickled fused model loads only where onepass is installed: call onepass.unfuse before pickling it for
    elsewhere. Otherwise loading says "No module named 'onepass_unfuse_before_saving'".

    Args:
        model: Any module; its submodules are fused too.
        conv: "keep" leaves convolutions to PyTorch and fuses what follows them.
        filter_fn: Says by name and module whether a module's forward may be rewritten.
        numerics: "pytorch", "strict" or "fast" for this model's blocks; by default that of
            onepass.numerics().
        freeze: Keeps packed weights from call to call, as onepass.freeze.

    Returns:
        The same model.

    Examples:
        >>> import onepass
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
        >>> onepass.fuse(model) is model
        True
        >>> onepass.report(model).fused[0].block
        'conv2d(3,8,k=3) | group_norm(2) | swish'
    """
    if conv not in ("fuse", "keep"):
        raise ValueError(f'conv is {conv!r}, must be "fuse" or "keep"')
    if numerics is not None:
        _numerics.checked(numerics)
    unfuse(model)
    reasons: dict[str, str] = {}
    skipped_reasons[model] = reasons
    if not _library.available():
        reasons[root_name(model)] = f"onepass cannot run: {_library.unavailable_reason()}"
        _fallback.warn(f"{root_name(model)} is not fused: {reasons[root_name(model)]}")
        return model
    with shared_classes():
        Session(model, conv, filter_fn or (lambda name, module: True), reasons, numerics=numerics).run()
    return freezing.freeze(model) if freeze else model


def unfuse(model: nn.Module) -> nn.Module:
    """Gives every fused module of the model its own class back.

    Args:
        model: A model that fuse was called with; one that is not fused stays as it is.

    Returns:
        The same model.

    Examples:
        >>> import onepass
        >>> from torch import nn
        >>> model = onepass.fuse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()))
        >>> type(onepass.unfuse(model)) is nn.Sequential
        True
    """
    for module in model.modules():
        _swap.uninstall(module)
    skipped_reasons.pop(model, None)
    return model


class Session:
    """One run of fuse over a model, outer modules first: they show how the inner ones are called."""

    def __init__(
        self,
        model: nn.Module,
        conv: str,
        filter_fn: FilterFn,
        reasons: dict[str, str],
        rewriter: type[Rewriter] | None = None,
        numerics: str | None = None,
    ) -> None:
        self.rewriter = rewriter or Rewriter
        self.numerics = numerics
        self.model = model
        self.conv = conv
        self.filter_fn = filter_fn
        self.reasons = reasons
        self.observed: dict[nn.Module, set[Pattern]] = {}
        self.unfused: dict[nn.Module, str] = {}  # norms, and why each runs by itself
        self.fused: set[nn.Module] = set()

    def rewriters(self) -> list[Rewriter]:
        """Those of the modules in whose forwards something fuses."""
        return [r for name, module in self.model.named_modules() if (r := self._analyse(name, module))]

    def run(self) -> None:
        """Fuses them all."""
        for rewriter in reversed(self.rewriters()):  # inner ones first: outer ones watch the classes
            _swap.install(rewriter)
            self.fused |= rewriter.replaced | {rewriter.module}
        for name, module in self.model.named_modules():
            if isinstance(module, NORMS) and module not in self.fused:
                self.reasons[name] = self.unfused.get(
                    module, "it is called by a module that cannot be traced"
                )

    def _analyse(self, name: str, module: nn.Module) -> Rewriter | None:
        if is_leaf(module):
            return None
        rewriter = self.rewriter(module, name, self.conv, self.numerics)
        try:
            rewriter.run([*call_patterns(module), *self.observed.get(module, ())])
        except Refused as refused:
            if type(module).forward is not nn.Module.forward and _has_norms(module):
                self.reasons[name or root_name(self.model)] = str(refused)
            return None
        finally:
            self._learn(rewriter)
        if not rewriter.variants:
            return None
        if not self.filter_fn(name, module):
            self.unfused.update(dict.fromkeys(rewriter.replaced, "filter_fn leaves its module out"))
            return None
        return rewriter

    def _learn(self, rewriter: Rewriter) -> None:
        for module, patterns in rewriter.observed.items():
            self.observed.setdefault(module, set()).update(patterns)
        self.unfused = rewriter.unfused | self.unfused


def _has_norms(module: nn.Module) -> bool:
    return any(isinstance(inner, NORMS) for inner in module.modules())
