"""Freezing a model: the packed weights of its blocks are kept from call to call."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from onepass import _fallback
from onepass._fallback import Site
from onepass._frozen import Frozen
from onepass._state import root_name, sites_of
from onepass._swap import settle
from onepass.block import Block


def freeze(model: nn.Module) -> nn.Module:
    """Keeps the packed weights of the model's fused blocks and of its Blocks, and returns the model.

    The first call without gradients packs the weights, and later calls read them. On a GPU that call waits
    for the packing. Calls that need gradients pack as before, and so does what torch.compile has traced.
    Packed weights take memory beside the parameters; onepass.report(model) has the bytes.

    Each call looks whether a weight was replaced or changed in place, by an optimizer too. Then all are
    packed once more, as after a call that asked for their gradients. Moving the model and load_state_dict
    drop what was packed. Writes that PyTorch does not count are not seen: other ones through `.data` (PEFT
    merges a LoRA so), of inference tensors, through NumPy, by torch.distributed, by a replayed CUDA graph.
    Call freeze again after them. A captured graph reads the weights as they were packed before its capture.

    Copies and pickles of the model are not frozen.

    Args:
        model: A fused model, or one that holds Blocks.

    Returns:
        The same model.

    Examples:
        >>> import onepass, torch
        >>> from torch import nn
        >>> model = onepass.fuse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()).eval())
        >>> onepass.freeze(model) is model
        True
    """
    found = False
    for site in _sites(model):
        site.frozen = Frozen()
        found = True
    if not found:
        _fallback.warn(f"nothing of {root_name(model)} is frozen: it has no fused modules and no Blocks")
    return model


def unfreeze(model: nn.Module) -> nn.Module:
    """Lets the model's blocks pack their weights in each call again, and frees what was packed.

    What a captured CUDA graph reads lives as long as the parameters.

    Args:
        model: A model; one that is not frozen stays as it is.

    Returns:
        The same model.

    Examples:
        >>> import onepass
        >>> from torch import nn
        >>> model = onepass.fuse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)), freeze=True)
        >>> onepass.report(onepass.unfreeze(model)).frozen
        []
    """
    for site in _sites(model):
        site.frozen = None
    return model


def _sites(model: nn.Module) -> Iterator[Site]:
    for module in model.modules():
        settle(module)
        yield from sites_of(module)
        if isinstance(module, Block) and module._site is not None:
            yield module._site
