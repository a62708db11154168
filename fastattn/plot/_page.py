"""An interactive page: one file, with pickers of layer and head, that needs no network."""

from __future__ import annotations

import base64
import html as markup
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fastattn.plot._values import as_matrices, tokens_of


def html(
    weights: Any,
    x_tokens: Any = None,
    y_tokens: Any = None,
    *,
    path: str | os.PathLike[str] | None = None,
    example: int = 0,
    picker: str = "head",
    title: str = "Attention",
) -> str:
    """Create a page that shows one heat map at a time, with pickers of the layer and the head.

    It is one file that loads nothing, runs without a network, and shows the exact weight of the
    cell under the pointer. The mean over the heads can be picked too.

    Args:
        weights: of one layer, or a dictionary from layer names to weights, such as
            :func:`fastattn.capture` yields. Weights are [Tq, Tk], [H, Tq, Tk] or [N, H, Tq, Tk], of
            which ``example`` is shown; or a list of these, one for each call of the layer. The
            weights of the hops of one query, [K, N], are shown as a matrix with one row per hop;
            pass ``weights[:, None]`` and ``picker="hop"`` to get a picker of the hop.
        x_tokens: the Tk keys: a sequence of strings, or a dictionary from the names of layers to
            one. None, or a layer that is not in it: their numbers.
        y_tokens: the Tq queries, in the same form.
        path: the file to write the page to; None: only return it.
        example: which of the N to show.
        picker: the name of the first of three dimensions.
        title: of the page.

    Returns:
        The page.

    Raises:
        TypeError, ValueError: weights of another shape or type, tokens that are not as many.
        IndexError: ``example`` is not among the N.
    """
    layers = []
    for name, key, layer_weights in _layers(weights):
        stack = as_matrices(f"the weights of {name}", layer_weights, (2, 3, 4))
        if stack.ndim == 4:
            if not 0 <= example < len(stack):
                raise IndexError(f"example must be in [0, {len(stack)}) for {name}, got {example}")
            stack = stack[example]
        stack = stack.reshape(-1, *stack.shape[-2:])
        x, y = (
            tokens_of(
                f"{side} of {name}",
                axis_tokens.get(key) if isinstance(axis_tokens, Mapping) else axis_tokens,
                count,
            )
            for side, axis_tokens, count in (
                ("x_tokens", x_tokens, stack.shape[2]),
                ("y_tokens", y_tokens, stack.shape[1]),
            )
        )
        data = base64.b64encode(stack.contiguous().numpy().astype("<f4").tobytes()).decode()
        layers.append({"name": name, "shape": list(stack.shape), "x": x, "y": y, "data": data})
    if not layers:
        raise ValueError("weights must hold the weights of at least one layer, got none")
    payload = json.dumps({"picker": picker, "layers": layers}, ensure_ascii=False)
    template = resources.files("fastattn.plot").joinpath("page.html").read_text(encoding="utf-8")
    fields = {"title": markup.escape(title), "data": payload.replace("<", "\\u003c")}
    text = re.sub(r"{{(title|data)}}", lambda match: fields[match[1]], template)
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _layers(weights: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the name, the key in ``weights`` and the weights of each call of each layer."""
    layers = weights if isinstance(weights, Mapping) else {"attention": weights}
    for key, calls in layers.items():
        name = str(key) or "attention"  # the model itself
        if not isinstance(calls, Sequence) or not calls or not hasattr(calls[0], "shape"):
            yield name, key, calls  # includes lists of numbers
            continue
        for n, call in enumerate(calls):
            yield (name if len(calls) == 1 else f"{name} (call {n + 1})"), key, call
