"""Heat maps, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastattn.plot._values import as_matrices, tokens_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELL_INCHES = 0.28  # inches per row or column
_MAX_INCHES = 14.0


def heatmap(
    weights: Any,
    x_tokens: Sequence[str] | None = None,
    y_tokens: Sequence[str] | None = None,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    vmax: float | None = None,
    cmap: str | None = None,
    colorbar: bool = True,
    values: bool = False,
) -> Axes:
    """Draw a matrix of attention weights: a row for each query, a column for each key.

    Args:
        weights: [Tq, Tk]: a tensor of any dtype and device, an array, or lists. NaN is left grey.
        x_tokens: the Tk keys, along the top. None: their numbers.
        y_tokens: the Tq queries, from the top down. None: their numbers.
        ax: the axes to draw into; None: a new figure, large enough for all tokens.
        title: above the plot.
        vmax: the weight that gets the full colour; None: the largest weight.
        cmap: a colour map of matplotlib; None: white to blue, with negative weights red to blue.
        colorbar: also draw the colour scale.
        values: write each weight into its cell.

    Returns:
        The axes; ``ax.figure.savefig(path)`` writes the picture.

    Raises:
        TypeError, ValueError: weights of another shape or type, tokens that are not as many.
        ImportError: matplotlib is missing.
    """
    matrix = as_matrices("weights", weights, (2,))
    rows, columns = matrix.shape
    x = tokens_of("x_tokens", x_tokens, columns)
    y = tokens_of("y_tokens", y_tokens, rows)
    if ax is None:
        size = (_side_inches(y, columns) + 1.0 * colorbar, _side_inches(x, rows))
        ax = _pyplot().figure(figsize=size, layout="constrained").add_subplot()
    image = _draw(ax, matrix, vmax, cmap, values)
    _label(ax, x, y)
    if title is not None:
        ax.set_title(title, parse_math=False)
    if colorbar:
        ax.figure.colorbar(image, ax=ax, shrink=0.8)
    return ax


def hops(
    weights: Any,
    sentences: Sequence[str] | None = None,
    queries: Sequence[str] | None = None,
    *,
    support: Sequence[int] = (),
    title: str | None = None,
    vmax: float | None = None,
    cmap: str | None = None,
) -> Figure:
    """Draw the attention of each hop of a memory network, one panel per hop.

    Args:
        weights: [K, N] for one query in K hops, or [K, Q, N] for Q queries.
        sentences: the N memories, in the order of the weights. None: their numbers.
        queries: the Q queries of [K, Q, N]. None: their numbers.
        support: the indices of the memories with the answer, printed in bold.
        title: above the panels, such as the question and its answer.
        vmax: the weight that gets the full colour in all panels; None: the largest weight.
        cmap: as for :func:`heatmap`.

    Returns:
        The figure; ``savefig(path)`` writes it.

    Raises:
        TypeError, ValueError: weights of another shape or type, tokens that are not as many, a
            support that is not among the memories.
        ImportError: matplotlib is missing.
    """
    stack = as_matrices("weights", weights, (2, 3))
    is_single = stack.ndim == 2
    if is_single and queries is not None:
        raise ValueError("queries need weights [K, Q, N], got [K, N]")
    panels = (stack[:, None] if is_single else stack).transpose(1, 2)  # [K, N, Q]
    count, memories, n_queries = panels.shape
    y = tokens_of("sentences", sentences, memories)
    x = [""] if is_single else tokens_of("queries", queries, n_queries)
    for n in support:
        if not 0 <= n < memories:
            raise ValueError(f"support must be indices below {memories}, got {n}")
    width = _side_inches(y, 0) + count * max(n_queries * _CELL_INCHES, 0.7)
    figure = _pyplot().figure(
        figsize=(min(width, _MAX_INCHES), _side_inches(x, memories) + 0.3), layout="constrained"
    )
    if title is not None:
        figure.suptitle(title, parse_math=False)
    vmax = float(panels.nan_to_num(0.0).max()) if vmax is None else vmax
    axes = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for hop, (ax, panel) in enumerate(zip(axes, panels, strict=True)):
        _draw(ax, panel, vmax, cmap, values=is_single)
        _label(ax, x, y, left=hop == 0)
        ax.set_title(f"hop {hop + 1}", fontsize="medium")
    for n in support:
        axes[0].get_yticklabels()[n].set_fontweight("bold")
    return figure


def _draw(ax: Axes, matrix: Tensor, vmax: float | None, cmap: str | None, values: bool) -> Any:
    """Draw one matrix as a heat map, with its numbers if ``values``."""
    finite = matrix.nan_to_num(0.0)
    largest = float(finite.abs().max()) if vmax is None else vmax
    signed = bool((finite < 0).any())
    image = ax.imshow(
        matrix.numpy(),
        cmap=_pyplot().get_cmap(cmap or ("RdBu" if signed else "Blues")),
        vmin=-largest if signed else 0.0,
        vmax=largest or 1.0,
        aspect="auto",
        interpolation="nearest",
    )
    ax.set_facecolor("lightgrey")
    if values:
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": "x-small"}
        for row, line in enumerate(matrix.tolist()):
            for column, value in enumerate(line):
                colour = "white" if abs(value) > 0.6 * largest else "black"
                ax.text(column, row, f"{value:.2f}", color=colour, **style)
    return image


def _label(ax: Axes, x: list[str], y: list[str], left: bool = True) -> None:
    """Label the columns at the top, and the rows at the left."""
    ax.xaxis.tick_top()
    # parse_math=False, because a token may be a dollar sign.
    ax.set_xticks(range(len(x)), x, rotation=90, fontsize="small", parse_math=False)
    ax.tick_params(length=0, labelleft=left)
    if left:
        ax.set_yticks(range(len(y)), y, fontsize="small", parse_math=False)


def _side_inches(labels: list[str], count: int) -> float:
    """Return the size of a side: its labels plus ``count`` cells."""
    return min(0.6 + 0.085 * max(map(len, labels)) + _CELL_INCHES * count, _MAX_INCHES)


def _pyplot() -> Any:
    """Return matplotlib.pyplot, or raise an ImportError with the command that installs it."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "fastattn.plot draws with matplotlib, which is missing: pip install 'fastattn[plot]'"
        ) from error
    return pyplot
