"""Modules that add position encodings to a sequence: sinusoids, or a learned table."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastattn.checks import check_dense
from fastattn.nn._sizes import check_sizes
from fastattn.ops.sinusoidal import check_options, locate, sinusoidal_encoding


class _PositionalEncoding(nn.Module):
    """The common part: the order of the dimensions, the scale, and dropout."""

    def __init__(
        self, d_model: int, dropout: float, scale: float | str | None, batch_first: bool
    ) -> None:
        super().__init__()
        if isinstance(scale, str) and scale != "sqrt_dim":
            raise ValueError(f'scale must be a number, None or "sqrt_dim", got {scale!r}')
        check_sizes(d_model=d_model)
        self.d_model = d_model
        self.scale = math.sqrt(d_model) if isinstance(scale, str) else scale
        self.batch_first = batch_first
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, *, offset: int | Tensor = 0, positions: Tensor | None = None
    ) -> Tensor:
        """Return ``dropout(x * scale + encoding)``, in the shape of ``x``.

        Args:
            x: [B, L, d_model], or [L, B, d_model] with ``batch_first=False``, or [L, d_model].
            offset: the position of the first row: an integer, or an int64/int32 tensor, scalar or
                [B]. In incremental decoding it is the number of tokens that came before.
            positions: instead of ``offset``, the position of every row: int64 or int32, [L] or the
                shape of x without its last dimension.
        """
        check_dense(type(self).__name__, x=x)
        if x.ndim not in (2, 3) or x.shape[-1] != self.d_model:
            raise ValueError(
                f"x must be a sequence or a batch of sequences with d_model = {self.d_model}, "
                f"got shape {tuple(x.shape)}"
            )
        if self.batch_first or x.ndim == 2:
            return self.dropout(self._encode(x, offset, positions))
        if positions is not None and positions.ndim == 2:
            positions = positions.transpose(0, 1)
        return self.dropout(self._encode(x.transpose(0, 1), offset, positions)).transpose(0, 1)

    def _encode(self, x: Tensor, offset: int | Tensor, positions: Tensor | None) -> Tensor:
        """x * scale + encoding, batch first."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        scale = "" if self.scale is None else f", scale={self.scale:g}"
        return f"{self.d_model}{scale}, batch_first={self.batch_first}"


class SinusoidalPositionalEncoding(_PositionalEncoding):
    """``dropout(x * scale + PE(position))``, see :func:`fastattn.sinusoidal_encoding`.

    There is no table: any length and any position is supported, the ``state_dict`` is empty, and
    the module follows the dtype and the device of its input.

    Args:
        d_model: the last dimension of the input.
        dropout: the probability of zeroing an element of the result, in training.
        layout: ``"interleaved"``, ``"tensor2tensor"``, ``"marian"`` or ``"split_exponent"``.
        scale: multiplies the input: a number, None for 1, ``"sqrt_dim"`` for ``d_model ** 0.5`` as
            in the paper (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.4).
        max_timescale: the longest wavelength is at most 2 pi times this.
        padding_idx: a row at this position gets no encoding.
        batch_first: whether inputs are [B, L, d_model] or [L, B, d_model].
    """

    def __init__(
        self,
        d_model: int,
        *,
        dropout: float = 0.0,
        layout: str = "interleaved",
        scale: float | str | None = None,
        max_timescale: float = 10000.0,
        padding_idx: int | None = None,
        batch_first: bool = True,
    ) -> None:
        super().__init__(d_model, dropout, scale, batch_first)
        self.layout = layout
        self.max_timescale = max_timescale
        self.padding_idx = padding_idx
        check_options(layout, max_timescale, self.scale, padding_idx)

    def _encode(self, x: Tensor, offset: int | Tensor, positions: Tensor | None) -> Tensor:
        """x * scale + PE, batch first."""
        return sinusoidal_encoding(
            x,
            offset=offset,
            positions=positions,
            layout=self.layout,
            max_timescale=self.max_timescale,
            scale=self.scale,
            padding_idx=self.padding_idx,
        )

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return (
            f"{super().extra_repr()}, layout={self.layout!r}, "
            f"max_timescale={self.max_timescale:g}{padding}"
        )


class LearnedPositionalEncoding(_PositionalEncoding):
    """``dropout(x * scale + weight[position])``; the table ``weight`` is trained.

    As in BERT (Devlin et al. 2019, https://arxiv.org/abs/1810.04805) and fairseq. ``weight``,
    [num_embeddings, d_model], has the same name as in ``nn.Embedding``, whose parameters can be
    loaded.

    Args:
        num_embeddings: the number of positions. A position that is negative or at least this
            raises an ``IndexError``; on a GPU, PyTorch's device-side assertion.
        d_model: the last dimension of the input.
        dropout: the probability of zeroing an element of the result, in training.
        scale: multiplies the input: a number, None for 1, ``"sqrt_dim"`` for ``d_model ** 0.5``.
        padding_idx: the row of ``weight`` that is initially zero and gets no gradient.
        batch_first: whether inputs are [B, L, d_model] or [L, B, d_model].
        device, dtype: of ``weight``.
    """

    def __init__(
        self,
        num_embeddings: int,
        d_model: int,
        *,
        dropout: float = 0.0,
        scale: float | str | None = None,
        padding_idx: int | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, dropout, scale, batch_first)
        check_sizes(num_embeddings=num_embeddings)
        if padding_idx is not None and not 0 <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx must be in [0, num_embeddings = {num_embeddings}), got {padding_idx}"
            )
        self.num_embeddings = num_embeddings
        self.padding_idx = padding_idx
        self.weight = nn.Parameter(torch.empty(num_embeddings, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw ``weight`` from N(0, 0.02^2), as BERT does; the padding row is zero."""
        nn.init.normal_(self.weight, std=0.02)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def _encode(self, x: Tensor, offset: int | Tensor, positions: Tensor | None) -> Tensor:
        """x * scale + weight[position], batch first."""
        first_position, positions = locate(x, offset, positions)
        if positions is None:
            end = first_position + x.shape[-2]
            if first_position < 0 or end > self.num_embeddings:
                raise IndexError(
                    f"positions {first_position} to {end - 1} are needed, but num_embeddings is "
                    f"{self.num_embeddings}"
                )
            positions = torch.arange(first_position, end, device=x.device)
        try:
            encoding = F.embedding(positions, self.weight, self.padding_idx)
        except IndexError as error:
            raise IndexError(
                f"a position is negative or not below num_embeddings = {self.num_embeddings}"
            ) from error
        return encoding + (x if self.scale is None else x * self.scale)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {super().extra_repr()}{padding}"
