"""Context parallelism of modules: the rows of their inputs are on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from fastattn.masks import Mask
from fastattn.nn._masks import merge_masks

# fastattn.distributed is imported in functions, so that modules on one process do not load it.
if TYPE_CHECKING:
    from fastattn.distributed import Layout

AnyContext = TypeVar("AnyContext", bound="Context")
Module = TypeVar("Module", bound="ContextParallel")


@dataclass(frozen=True)
class Context:
    """The distribution of the inputs' rows over the ranks."""

    group: Any
    method: str
    layout: str | Layout

    @classmethod
    def create(cls: type[AnyContext], group: Any, method: Any, layout: Any) -> AnyContext:
        """Check the options, and return a context with them."""
        from fastattn.distributed import Layout
        from fastattn.distributed._call import LAYOUTS, METHODS

        if method not in METHODS:
            raise ValueError(
                f"context_parallel: method must be one of {', '.join(METHODS)}, got {method!r}"
            )
        if not isinstance(layout, Layout) and layout not in LAYOUTS:
            raise ValueError(
                f"context_parallel: layout must be a Layout or one of {', '.join(LAYOUTS)}, got "
                f"{layout!r}"
            )
        return cls(group, method, layout)

    def attend(
        self,
        q: Tensor,  # [N, H, L of this rank, D]
        k: Tensor,  # [N, H, S of this rank, D]
        v: Tensor,
        key_padding_mask: Tensor | None,  # [N, S of this rank]
        attn_mask: Tensor | None,  # [L of this rank, S of all ranks], or [N·H, ...]
        is_causal: bool,
        dropout_p: float,
        mask: Mask | None,
    ) -> Tensor:
        """Attention between the projections, [N, H, L of this rank, D]."""
        from fastattn.distributed import attention
        from fastattn.distributed._columns import gather_columns

        # As in MultiheadAttention: without padding, the hint replaces the mask.
        causal = is_causal and (attn_mask is None or key_padding_mask is None)
        attn_mask = None if causal else attn_mask
        if key_padding_mask is not None:
            key_padding_mask = gather_columns(key_padding_mask, self.group, self.layout)
        any_mask = key_padding_mask if attn_mask is None else attn_mask
        merged = merge_masks(
            key_padding_mask,
            attn_mask,
            batch=q.shape[0],
            num_heads=q.shape[1],
            q_len=q.shape[2],
            k_len=0 if any_mask is None else any_mask.shape[-1],
            appended=0,
        )
        return attention(
            q,
            k,
            v,
            group=self.group,
            method=self.method,
            layout=self.layout,
            attn_mask=merged,
            window=(-1, 0) if causal else None,  # as is_causal, but allows a mask
            mask=mask,
            dropout_p=dropout_p,
        )


class ContextParallel(nn.Module):
    """Adds :meth:`context_parallel` to a module with attention."""

    _context: Context | None = None

    def context_parallel(
        self: Module,
        group: Any = None,
        *,
        method: str = "auto",
        layout: str | Layout = "contiguous",
        enabled: bool = True,
    ) -> Module:
        """Let ``forward`` take this rank's rows of sequences, and attend to the keys of all ranks.

        It applies to every :class:`fastattn.nn.MultiheadAttention` in the module. Inputs, outputs
        and padding masks then cover only this rank's rows; an ``attn_mask`` has this rank's rows
        and a column for each key of all ranks, and a mask of :mod:`fastattn.masks` covers the whole
        sequences. ``is_causal=True`` needs no mask and counts in positions of the whole sequence.
        All other layers work row by row: the caller adds positional encodings, with
        :meth:`fastattn.distributed.Layout.positions`. Each rank has a part of the gradients of the
        parameters; their sum over the ranks is the gradient, as in data parallelism.

        Args:
            group, method, layout: as in :func:`fastattn.distributed.attention`. In the named
                layouts queries and memory of a decoder may have different lengths.
            enabled: False undoes an earlier call.

        Returns:
            The module itself. It is not part of the ``state_dict``.

        Raises:
            ValueError: an unknown ``method`` or ``layout``.
            NotImplementedError: ``add_bias_kv``, ``add_zero_attn`` or ``relative_bias`` in an
                attention; a :class:`fastattn.nn.Transformer` of tokens. In ``forward``: attention
                weights, a cache, NestedTensors.
        """
        context = Context.create(group, method, layout) if enabled else None
        modules = [m for m in self.modules() if isinstance(m, ContextParallel)]
        for part in modules if enabled else []:
            part._check_context()
        for part in modules:
            part._context = context
        for module in self.modules():
            if isinstance(module, nn.TransformerEncoder):  # it would pack padded sequences
                packs_padding = module.__dict__.setdefault(
                    "_packs_padding", module.use_nested_tensor
                )
                module.use_nested_tensor = packs_padding and not enabled
        return self

    def _check_context(self) -> None:
        """Raise if an option of the module does not work on shards; overridden by modules."""


def unsupported(feature: str) -> NotImplementedError:
    """Return the error for a feature that works on one process only."""
    return NotImplementedError(f"{feature} is not supported under context_parallel()")
