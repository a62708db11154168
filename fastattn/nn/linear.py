"""Linear layers, and layers equivalent to one, on the fastest GEMM."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.ops.linear import PackedWeight, linear, products_are_scalar

PACKED = "_fastattn_packed"  # in a module's __dict__: its PackedWeight


class Linear(nn.Linear):
    """``torch.nn.Linear`` on :func:`fastattn.nn.functional.linear`.

    The parameters, their initialisation, ``state_dict`` and errors are PyTorch's.
    """

    def forward(self, input: Tensor) -> Tensor:
        """y = x Wᵀ + b, [..., K] -> [..., N]."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return F.linear(input, self.weight, self.bias)
        return apply_linear(self, input, self.weight)


def apply_linear(module: Linear | TransposedLinear, input: Tensor, weight: Tensor) -> Tensor:
    """Apply the layer, by the packed copy of its weight if that is up to date."""
    packed = module.__dict__.get(PACKED)
    if packed is not None and not torch.compiler.is_compiling() and packed.serves(module.weight):
        y: Tensor | None = packed.linear(input, weight, module.bias)
        if y is not None:
            return y
    return linear(input, weight, module.bias)


class TransposedLinear(nn.Module):
    """The forward of transformers' ``Conv1D``, whose weight is [K, N]."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """y = x W + b, [..., K] -> [..., N]."""
        return apply_linear(self, x, self.weight.t())


def pack_weights(model: nn.Module) -> dict[str, int]:
    """Keep a packed copy of each weight of fastattn's linear layers that AMX tiles multiply.

    Returns:
        The bytes of each copy, by the name of its module; 0 where memory did not suffice.
    """
    sizes = {}
    for name, module in model.named_modules():
        if not isinstance(module, (Linear, TransposedLinear)) or not _may_pack(module.weight):
            continue
        weight = module.weight
        matrix = weight.t() if isinstance(module, TransposedLinear) else weight
        packed = module.__dict__.get(PACKED)
        try:
            if packed is None or not packed.serves(weight):
                packed = module.__dict__[PACKED] = PackedWeight(weight, matrix)
        except (MemoryError, RuntimeError):
            sizes[name] = 0
            continue
        if packed.rows is not None:
            sizes[name] = packed.rows.nbytes
    return sizes


def unpack_weights(model: nn.Module) -> None:
    """Free the packed copies, which plans of encoder layers refer to as well."""
    for module in model.modules():
        packed = module.__dict__.pop(PACKED, None)
        if packed is not None:
            packed.rows = None


def _may_pack(weight: Any) -> bool:
    """Whether a weight is a plain tensor on the CPU, in a dtype and of a size worth packing."""
    regular = type(weight) in (Tensor, nn.Parameter) and weight.is_cpu and not weight.is_inference()
    return regular and weight.dtype in (torch.float32, torch.float16) and weight.numel() >= 2**14


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
        if h == 0 or w == 0 or input.shape[1] != self.in_channels or not maps_patches(self):
            return super().forward(input)  # an error, or the attributes were changed
        patches = input[:, :, : h * p, : w * q].unflatten(3, (w, q)).unflatten(2, (h, p))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)  # [B, h, w, C·p·q]
        y = linear(patches, self.weight.flatten(1), self.bias)  # [B, h, w, E]
        return y.permute(0, 3, 1, 2).contiguous()


def maps_patches(module: nn.Conv2d) -> bool:
    """Whether a convolution maps non-overlapping patches independently."""
    return (
        module.stride == module.kernel_size
        and module.kernel_size != (1, 1)
        and module.padding in (0, (0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    )
