"""A block as a module that owns its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onepass import _numerics, _ops
from onepass._description import Conv, Description, Norm, Pointwise, Stage, describe
from onepass._fallback import Site

_CONVS = {
    False: (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    True: (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
}
_CALL_ARGUMENTS = ("channel", "tensor")  # kinds of arguments that a call gives, not the module


class Block(nn.Module):
    """Runs a block of the onepass language, as a module that owns its parameters.

    Parameters have the language's names: `conv_weight`, `conv_bias`, `norm_weight`, `norm_bias`, `prelu`.
    They are initialised as PyTorch's modules of the same stages, built in order.

    A call may leave the fused path: in torch.func transforms, on a type or device without kernels. It warns
    once per reason with FallbackWarning, and `fallbacks` counts all such calls.

    Args:
        text: The block, as "conv2d(3,16,k=3) | relu | group_norm(4)".
        channels: How many the input has, for a block without a convolution that has parameters per channel.
        device: Of the parameters.
        dtype: Of the parameters.
        numerics: That of onepass.fuse.

    Examples:
        >>> import onepass, torch
        >>> block = onepass.Block("conv2d(3,16,k=3,p=1) | silu | group_norm(4)")
        >>> block(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 16, 8, 8])
        >>> [name for name, _ in block.named_parameters()]
        ['conv_weight', 'conv_bias', 'norm_weight', 'norm_bias']
    """

    _site: Site | None = None  # of Blocks saved before there were any

    def __init__(
        self,
        text: str,
        *,
        channels: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        numerics: str | None = None,
    ) -> None:
        super().__init__()
        if numerics is not None:
            _numerics.checked(numerics)
        description = describe(text)
        self.text = description.text
        self._site = Site(description.text, numerics=numerics)
        self.argument_names = tuple(_argument_names(description))
        for name, parameter in _initial_parameters(description, channels, device, dtype):
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor, **arguments: Tensor) -> Tensor:
        """Runs the block.

        Args:
            x: Batch, channels, then space.
            **arguments: The operands of channel_mul, channel_add and residual_add, by name.

        Returns:
            The block's output, in the type of x.

        Examples:
            >>> import onepass, torch
            >>> x = torch.randn(2, 8, 4, 4)
            >>> y = onepass.Block("residual_add | relu")(x, residual_add=x)
            >>> torch.equal(y, torch.relu(2 * x))
            True
        """
        if len(arguments) != len(self.argument_names) or any(n not in arguments for n in self.argument_names):
            raise TypeError(f"{self.text}: {_mistake(arguments, self.argument_names)}")
        own = self._parameters
        parameters = [own[name] if name in own else arguments[name] for name in describe(self.text).names]
        return _ops.apply(self.text, x, parameters, site=self._site)

    @property
    def fallbacks(self) -> dict[str, int]:
        """How many calls left the fused path, by what ran instead and why; a copy starts at zero.

        Calls inside torch.compile are not counted: its graph shows whether it holds onepass's operators.

        Returns:
            Counts by reason.

        Examples:
            >>> import onepass, torch
            >>> block = onepass.Block("relu | mean")
            >>> y = block(torch.randn(1, 2, 4))
            >>> block.fallbacks
            {}
        """
        return {} if self._site is None else dict(self._site.counts)

    def _apply(self, *args: Any, **kwargs: Any) -> nn.Module:
        self._drop_packed()  # before, too: PyTorch swaps no parameter that is weakly referred to
        super()._apply(*args, **kwargs)
        self._drop_packed()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._drop_packed()
        super()._load_from_state_dict(*args, **kwargs)
        self._drop_packed()

    def _drop_packed(self) -> None:
        if self._site is not None and self._site.frozen is not None:
            self._site.frozen.drop()

    def extra_repr(self) -> str:
        """The block's text."""
        return self.text


def _mistake(given: dict[str, Tensor], wanted: tuple[str, ...]) -> str:
    names = ", ".join(given) or "no arguments"
    return f"the call gives {names}, must give {', '.join(wanted) or 'none'}"


def _argument_names(description: Description) -> Iterator[str]:
    for parameter in description.parameters:
        stage = description.stages[parameter.stage]
        if isinstance(stage, Pointwise) and stage.argument in _CALL_ARGUMENTS:
            yield parameter.name


def _conv_module(conv: Conv, options: dict) -> nn.Module:
    padding = conv.padding_before if conv.padding_before == conv.padding_after else "same"
    shared = {
        "stride": conv.stride,
        "dilation": conv.dilation,
        "groups": conv.groups,
        "bias": conv.bias,
        **options,
    }
    if conv.transposed:
        shared["output_padding"] = conv.output_padding
    module = _CONVS[conv.transposed][conv.rank - 1]
    return module(conv.in_channels, conv.out_channels, conv.kernel, padding=padding, **shared)


def _module(stage: Stage, channels: int | None, options: dict) -> nn.Module | None:
    """The PyTorch module whose parameters the stage takes over."""
    if isinstance(stage, Conv):
        return _conv_module(stage, options)
    per_channel = isinstance(stage, Norm) and stage.affine
    per_channel = per_channel or (
        isinstance(stage, Pointwise) and stage.op == "prelu" and stage.per == "channel"
    )
    if per_channel and channels is None:
        raise ValueError(f"{stage.text}: how many channels? Without a convolution Block needs channels=")
    if isinstance(stage, Norm) and stage.affine:
        return nn.GroupNorm(stage.group_count(channels), channels, stage.eps, **options)
    if isinstance(stage, Pointwise) and stage.op == "prelu":
        return nn.PReLU(channels if per_channel else 1, **options)
    return None


def _initial_parameters(
    description: Description,
    channels: int | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, nn.Parameter]]:
    conv = description.conv
    if conv is not None:
        if channels not in (None, conv.out_channels):
            raise ValueError(f"{conv.text}: channels is {channels}, must be {conv.out_channels} or left out")
        channels = conv.out_channels
    names = iter(description.names)
    arguments = set(_argument_names(description))
    for stage in description.stages:
        module = _module(stage, channels, {"device": device, "dtype": dtype})
        for parameter in module.parameters() if module is not None else ():
            yield next(name for name in names if name not in arguments), parameter
