"""Modules that hold the table of a relative position bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastattn.bias import T5, Disentangled, Window2d


def _check_size(name: str, size: int, minimum: int) -> None:
    """Raise ValueError unless ``size`` is an int of at least ``minimum``."""
    if not isinstance(size, int) or size < minimum:
        raise ValueError(f"{name} must be an int of at least {minimum}, got {size!r}")


class _Tables(nn.Module):
    """The common part: tables, initialised as in Swin."""

    weight: nn.Parameter

    def __init__(
        self,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        **shapes: tuple[int, ...] | None,
    ) -> None:
        super().__init__()
        for name, shape in shapes.items():
            tensor = None if shape is None else torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters from a normal distribution of standard deviation 0.02."""
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)


class RelativeBias(_Tables):
    """A bias for each head and each distance of a query and a key.

    Pass ``module()`` as ``relative_bias`` of :func:`fastattn.scaled_dot_product_attention`.

    Args:
        num_heads: H.
        max_length: L, the maximum length of sequences.
        device, dtype: of the table.

    Attributes:
        weight: [H, 2 L - 1].
    """

    def __init__(
        self,
        num_heads: int,
        max_length: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_size("num_heads", num_heads, 1)
        _check_size("max_length", max_length, 1)
        super().__init__(device, dtype, weight=(num_heads, 2 * max_length - 1))

    def forward(self) -> Tensor:
        """The table, as a ``relative_bias`` argument."""
        return self.weight


class T5RelativeBias(_Tables):
    """The relative position bias of T5, see :class:`fastattn.bias.T5`.

    Pass ``module()`` as ``relative_bias`` of :func:`fastattn.scaled_dot_product_attention`.

    Args:
        num_heads: H.
        num_buckets: the number of rows of the table.
        max_distance: larger distances share a bucket.
        bidirectional: True for an encoder, False for a decoder.
        device, dtype: of the table.

    Attributes:
        weight: [num_buckets, H], as ``relative_attention_bias.weight`` of T5.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_size("num_heads", num_heads, 1)
        _check_size("num_buckets", num_buckets, 4 if bidirectional else 2)
        _check_size("max_distance", max_distance, 1)
        super().__init__(device, dtype, weight=(num_buckets, num_heads))
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def forward(self) -> T5:
        """The ``relative_bias`` argument."""
        return T5(self.weight, self.bidirectional, self.max_distance)

    def extra_repr(self) -> str:
        return f"max_distance={self.max_distance}, bidirectional={self.bidirectional}"


class WindowRelativeBias(_Tables):
    """The relative position bias of Swin, see :class:`fastattn.bias.Window2d`.

    Pass ``module()`` as ``relative_bias`` of :func:`fastattn.scaled_dot_product_attention`.

    Args:
        num_heads: H.
        window: (h, w), the size of the windows in tokens.
        device, dtype: of the table.

    Attributes:
        weight: [(2 h - 1) (2 w - 1), H], as ``relative_position_bias_table`` of Swin.
    """

    def __init__(
        self,
        num_heads: int,
        window: tuple[int, int],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_size("num_heads", num_heads, 1)
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ValueError(f"window must be (height, width), got {window!r}")
        height, width = window
        _check_size("the height of window", height, 1)
        _check_size("the width of window", width, 1)
        rows = (2 * height - 1) * (2 * width - 1)
        super().__init__(device, dtype, weight=(rows, num_heads))
        self.window = (height, width)

    def forward(self) -> Window2d:
        """The ``relative_bias`` argument."""
        return Window2d(self.weight, self.window)

    def extra_repr(self) -> str:
        return f"window={self.window}"


class DisentangledBias(_Tables):
    """The tables of terms that depend on distance and content, :class:`fastattn.bias.Disentangled`.

    ``module()`` is what ``relative_bias`` of :func:`fastattn.scaled_dot_product_attention` takes.
    Tables and biases are initialised as the tables of the other modules.

    Args:
        num_heads: H.
        head_dim: D.
        farthest: K; greater distances share the last row, or, with ``max_distance``, those above
            K / 2 share rows.
        max_distance: None, or where the logarithmic rows end.
        of_keys: whether there is a table P for keys, as in DeBERTa.
        added: whether there are the biases u and v, as in Transformer-XL.
        device, dtype: of the parameters.

    Attributes:
        query_table: R [2 K + 1, H, D].
        key_table: P, as R, or None.
        content_bias, position_bias: u and v [H, D], or None.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        farthest: int,
        max_distance: int | None = None,
        of_keys: bool = True,
        added: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (("num_heads", num_heads), ("head_dim", head_dim)):
            _check_size(name, size, 1)
        _check_size("farthest", farthest, 0 if max_distance is None else 2)
        if max_distance is not None:
            _check_size("max_distance", max_distance, farthest // 2 + 2)
        table, bias = (2 * farthest + 1, num_heads, head_dim), (num_heads, head_dim)
        super().__init__(
            device,
            dtype,
            query_table=table,
            key_table=table if of_keys else None,
            content_bias=bias if added else None,
            position_bias=bias if added else None,
        )
        self.max_distance = max_distance

    def forward(self) -> Disentangled:
        """The ``relative_bias`` argument."""
        tensors = (self.query_table, self.key_table, self.content_bias, self.position_bias)
        return Disentangled(*tensors, self.max_distance)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"max_distance={self.max_distance}"
