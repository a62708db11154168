"""``HeadNetwork``: the network that ``nonlinear_heads`` applies to the heads of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fastattn.nn._sizes import check_sizes


class HeadNetwork(nn.Module):
    r"""A separate feed-forward network for each head.

    .. math:: g_h(x) = W_{2,h} \, relu(W_{1,h} \, x + b_{1,h}) + b_{2,h}

    Args:
        num_heads: H.
        head_dim: D, the width of a head, both input and output.
        hidden: F, the width of the hidden layer.
        device, dtype: of the parameters.

    Attributes:
        weight1 [H, F, D], bias1 [H, F], weight2 [H, D, F], bias2 [H, D]: initialized as in
            ``nn.Linear``.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads, head_dim=head_dim, nonlinear_heads=hidden)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight1 = Parameter(torch.empty(num_heads, hidden, head_dim, **factory))
        self.bias1 = Parameter(torch.empty(num_heads, hidden, **factory))
        self.weight2 = Parameter(torch.empty(num_heads, head_dim, hidden, **factory))
        self.bias2 = Parameter(torch.empty(num_heads, head_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly within 1 / sqrt(inputs)."""
        for weight, bias in ((self.weight1, self.bias1), (self.weight2, self.bias2)):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, heads: Tensor) -> Tensor:
        """[N, H, L, D] -> [N, H, L, D]"""
        hidden = torch.relu(heads @ self.weight1.mT + self.bias1.unsqueeze(1))
        return hidden @ self.weight2.mT + self.bias2.unsqueeze(1)

    def extra_repr(self) -> str:
        heads, hidden, width = self.weight1.shape
        return f"num_heads={heads}, head_dim={width}, hidden={hidden}"
