"""Linear layers, and layers equivalent to one, on the fastest GEMM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.ops.linear import linear, products_are_scalar


class Linear(nn.Linear):
    """``torch.nn.Linear`` on :func:`fastattn.nn.functional.linear`.

    The parameters, their initialisation, ``state_dict`` and errors are PyTorch's.
    """

    def forward(self, input: Tensor) -> Tensor:
        """y = x Wᵀ + b, [..., K] -> [..., N]."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return F.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias)


class TransposedLinear(nn.Module):
    """The forward of transformers' ``Conv1D``, whose weight is [K, N]."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """y = x W + b, [..., K] -> [..., N]."""
        return linear(x, self.weight.t(), self.bias)


class PatchEmbedding(nn.Conv2d):
    """``torch.nn.Conv2d`` whose stride is its kernel, as a linear layer where that is faster.

    .. math:: y_{b e i j} = \\sum_{c u v} W_{e c u v}\\, x_{b c (i p + u) (j q + v)} + b_e

    The patches of an image do not overlap, so y is a linear function of each. PyTorch's
    convolution is as fast, except in 16 bits on processors without 16-bit arithmetic.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, E, H / p, W / q]."""
        dtype = input.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        if not (input.is_cpu and input.dim() == 4 and products_are_scalar(dtype)):
            return super().forward(input)
        p, q = self.kernel_size
        h, w = input.shape[2] // p, input.shape[3] // q
        if h == 0 or w == 0 or input.shape[1] != self.in_channels or not is_of_patches(self):
            return super().forward(input)  # an error, or the attributes were changed
        patches = input[:, :, : h * p, : w * q].unflatten(3, (w, q)).unflatten(2, (h, p))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)  # [B, h, w, C·p·q]
        y = linear(patches, self.weight.flatten(1), self.bias)  # [B, h, w, E]
        return y.permute(0, 3, 1, 2).contiguous()


def is_of_patches(module: nn.Conv2d) -> bool:
    """Whether a convolution maps non-overlapping patches independently."""
    return (
        module.stride == module.kernel_size
        and module.kernel_size != (1, 1)
        and module.padding in (0, (0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    )
