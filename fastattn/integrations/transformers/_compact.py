"""Relative position biases of models of transformers, as tables instead of a bias of all pairs."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.bias import T5, Window2d
from fastattn.integrations._registration import Undoable


@dataclass(frozen=True)
class CompactBias:
    """What a layer returns and passes on instead of a bias: its table, and the mask added to it."""

    relative_bias: T5 | Window2d
    offset: int = 0  # the position of query 0 among the keys
    mask: Tensor | None = None
    embedding: nn.Module | None = None  # of T5: its rows are the table

    def with_gradient(self) -> CompactBias:
        """Return a copy whose table passes gradients, in a layer that runs a second time.

        A reentrant checkpoint first runs the layers without gradients. When they run again, it
        connects the tensors that one layer passes to the next to the graph, but not the table in
        this object.
        """
        table, embedding = self.relative_bias.table, self.embedding
        if table.requires_grad or embedding is None or not torch.is_grad_enabled():
            return self
        weight: Any = embedding.weight
        if not weight.requires_grad:
            return self
        if not weight.untyped_storage().size():  # FSDP shards the table between two layers
            raise RuntimeError(
                "compact_relative_bias: the table of relative positions is sharded in a layer that "
                "a reentrant checkpoint runs again; pass use_reentrant=False to the checkpoint"
            )
        return replace(self, relative_bias=self.relative_bias._replace(table=_rows_of(embedding)))

    def __add__(self, mask: Tensor) -> CompactBias:
        """Add a mask, as the stock layers add theirs to the bias."""
        return replace(self, mask=mask if self.mask is None else self.mask + mask)


def compact_relative_bias(model: nn.Module) -> CompactBiases:
    """Pass the tables of T5, MT5 and Swin to the kernels, until it is undone.

    These models expand a small table to a bias [Hq, L, L]. Afterwards, while they run with
    ``attn_implementation="fastattn"``, the kernels read the table, and sum its gradient in place.
    Results are the same up to rounding. Other implementations, a T5 with a static cache and a
    compiled Swin get the bias as before. ``model`` is changed, but not its class and its
    ``state_dict``; layers that an earlier call changed are skipped.

    Returns:
        A :class:`CompactBiases`: ``undo()`` restores the model; so does the end of a ``with``
        block.

    Raises:
        ValueError: the model has no such layer that asks transformers' registry for attention.

    >>> import torch
    >>> from fastattn.integrations.transformers import compact_relative_bias
    >>> compact_relative_bias(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    ValueError: compact_relative_bias: Linear has no relative position bias of T5, MT5 or Swin
    """
    layers = list(_layers(model))
    if not layers:
        name = type(model).__name__
        raise ValueError(
            f"compact_relative_bias: {name} has no relative position bias of T5, MT5 or Swin"
        )
    changed = CompactBiases()
    for module, name, function in layers:
        changed.replace(module, name, function)
    return changed


class CompactBiases(Undoable):
    """The layers that one call of :func:`compact_relative_bias` changed; a context manager."""

    def __init__(self) -> None:
        self._replaced: list[tuple[weakref.ref[nn.Module], str]] = []

    def replace(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        """Replace a method of one module by a function, unless an earlier call has."""
        if name not in vars(module):
            vars(module)[name] = function
            self._replaced.append((weakref.ref(module), name))

    def undo(self) -> None:
        """Restore the layers. A second call does nothing."""
        for reference, name in self._replaced:
            module = reference()
            if module is not None:
                del vars(module)[name]
        self._replaced = []


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
    """Yield each module that makes a bias, the name of its method, and the wrapper for it."""
    for module in model.modules():
        if _is_of(module, "t5 mt5", "Attention") and hasattr(module, "relative_attention_bias"):
            yield module, "compute_bias", functools.partial(_bias_of_t5, module)
        elif _is_of(module, "swin", "SwinAttention"):
            bias: Any = module.relative_position_bias
            yield bias, "forward", functools.partial(_bias_of_swin, bias, module.config)


def _is_of(module: nn.Module, packages: str, name: str) -> bool:
    """Whether a module's class is in one of the packages, ends in ``name``, uses the registry."""
    source = type(module).__module__
    models = [f"transformers.models.{model}.modeling_{model}" for model in packages.split()]
    return (
        source in models
        and type(module).__name__.endswith(name)
        and hasattr(sys.modules[source], "ALL_ATTENTION_FUNCTIONS")
    )


def _runs_on_fastattn(config: Any) -> bool:
    """Whether models of this configuration run on fastattn's attention."""
    return getattr(config, "_attn_implementation", None) == "fastattn"


def _bias_of_t5(
    layer: Any,
    query_length: int,
    key_length: int,
    device: Any = None,
    past_seen_tokens: Any = 0,
) -> CompactBias | Tensor:
    """Replaces ``T5Attention.compute_bias``."""
    offset = past_seen_tokens
    # A static cache counts its tokens in a tensor, and has keys beyond the last token.
    aligned = isinstance(offset, int) and offset in (0, key_length - query_length)
    if not (aligned and _runs_on_fastattn(layer.config)):
        return type(layer).compute_bias(
            layer, query_length, key_length, device=device, past_seen_tokens=offset
        )
    # Later layers read the table too, when FSDP may have sharded the parameter, but not its rows.
    embedding = layer.relative_attention_bias
    bias = T5(_rows_of(embedding), not layer.is_decoder, layer.relative_attention_max_distance)
    return CompactBias(bias, offset, embedding=embedding)


def _rows_of(embedding: Any) -> Tensor:
    """All rows of an embedding, through its forward."""
    rows: Tensor = embedding(torch.arange(embedding.num_embeddings, device=embedding.weight.device))
    return rows


def _bias_of_swin(layer: Any, config: Any) -> CompactBias | Tensor:
    """Replaces ``SwinRelativePositionBias.forward``."""
    # The compiler cannot trace the sum of a CompactBias and the mask.
    if not _runs_on_fastattn(config) or torch.compiler.is_compiling():
        return type(layer).forward(layer)
    height, width = layer.window_size
    return CompactBias(Window2d(layer.relative_position_bias_table, (height, width)))
