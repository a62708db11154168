"""Attention with scores that a function modifies: the specification and the fast path."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import checks, compat, dispatch, masks
from fastattn._derivative import Derivative
from fastattn._flops import flops_of_pairs
from fastattn._untraced import untraced
from fastattn.backends._score_program import Op
from fastattn.backends.primitives import FlexOptions
from fastattn.call import Plans, with_arguments_of
from fastattn.checks import default_scale
from fastattn.compat import constant_for_compiler, is_unintercepted
from fastattn.library import Operator
from fastattn.masks import values_of
from fastattn.ops import sdpa
from fastattn.ops._score_compile import Graph
from fastattn.ops._score_known import KnownForm, join_flat, recognise
from fastattn.ops._score_trace import Tracer, place_of

__all__ = ["flex_attention"]

_OP = "flex_attention"
_MAX_CACHED = 256  # traces, and programs of each trace
_WHOLE_BLOCK = 2**30  # the block of the BlockMask that PyTorch makes where no mask is given
plans = Plans(rows=3)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    r"""Attention whose scores are modified by a function, without storing the matrix of scores.

    For query i and key j of query head h in entry b of the batch:

    .. math:: s_{ij} = score\_mod(scale \cdot query_i \cdot key_j, b, h, i, j), \quad
        out_i = \sum_j softmax_j(s_{ij}) \, value_j

    over the pairs that ``block_mask`` leaves. (Dong et al. 2024, https://arxiv.org/abs/2412.05496.)
    Arguments and results are as in ``torch.nn.attention.flex_attention.flex_attention``. No
    compiler is needed: the function is called once to record its operations, and the CPU's kernels
    interpret them, and their derivative, on tiles of scores.

    ``score_mod(score, b, h, q_idx, kv_idx)`` gets tensors without dimensions and returns one. It
    may use arithmetic, comparisons, ``torch.where``, minima, maxima, elementary functions
    (docs/flex_attention.md lists them), integer arithmetic of the indices (as int32; a division by
    0 gives 0), elements of captured tensors of any shape, ``bias[h, q_idx - kv_idx]``, and sums
    over short rows of captured tensors. A negative index counts from the end; others are clamped to
    the tensor, where PyTorch raises or reads outside. All is computed in float32 (float64 for
    float64). A score of -inf excludes its pair. The function is recorded again when its code, a
    number or a shape that it captures has changed; captured tensors are read in each call, and
    receive gradients.

    Args:
        query: [B, Hq, Lq, D], float32, bfloat16, float16 or float64, any strides.
        key: [B, Hkv, Lk, D], of query's dtype and device.
        value: [B, Hkv, Lk, Dv], of query's dtype and device.
        score_mod: None, or the function above.
        block_mask: None, a ``BlockMask`` of ``torch.nn.attention.flex_attention``, or a mask of
            :mod:`fastattn.masks`. ``score_mod`` has no effect on the pairs that it excludes.
        scale: None is ``1 / sqrt(D)``.
        enable_gqa: allow Hkv < Hq: query head h uses head ``h // (Hq // Hkv)`` of key and value.
        return_lse: also return the log-sum-exp of the scores.
        kernel_options: ignored: they tune PyTorch's kernels for GPUs.
        return_aux: None, or an ``AuxRequest`` of ``torch.nn.attention.flex_attention``.

    Returns:
        ``out`` [B, Hq, Lq, Dv] in query's dtype. With ``return_lse``, a tuple with ``lse``
        [B, Hq, Lq] in float32 (float64 for float64). With ``return_aux``, a tuple with an
        ``AuxOutput``. A fully masked row has ``out = 0``, ``lse = -inf``, and passes no gradient.
        All are differentiable, any number of times: derivatives beyond the first, forward mode, and
        GPUs use the reference backend, which stores the scores.

    ``torch.compile`` has the call in its graph, for all sizes. Under autocast, query, key and value
    are cast as PyTorch casts them.

    Raises:
        TypeError: an argument of the wrong type, or a result of ``score_mod`` that is no tensor
            without dimensions.
        NotImplementedError: ``score_mod`` uses another operation, which the error names with its
            line; ``max_scores`` in ``return_aux``, as in PyTorch on the CPU.
        ValueError: shapes that do not match, heads that do not match without ``enable_gqa``, or
            ``return_lse`` with ``return_aux``.
        RuntimeError: dtypes or devices that do not match, or a mask of other lengths.

    Examples:
        >>> import torch
        >>> from fastattn import flex_attention
        >>> query, key, value = torch.ones(3, 1, 2, 10, 64)
        >>> slopes = torch.tensor([0.5, 0.25])
        >>> def alibi(score, b, h, q_idx, kv_idx):
        ...     return score - slopes[h] * (q_idx - kv_idx).abs()
        >>> flex_attention(query, key, value, alibi).shape
        torch.Size([1, 2, 10, 64])
    """
    if torch.compiler.is_dynamo_compiling() and not compat.COMPILES_RECORDERS:
        arguments = (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)
        return _untraced(*arguments, return_aux=return_aux)
    wants_lse = return_lse
    if return_aux is not None:
        if return_lse:
            raise ValueError(f"{_OP}: return_lse must be False with return_aux, got True")
        if return_aux.max_scores:
            raise NotImplementedError(f"{_OP}: max_scores of return_aux must be False, got True")
        wants_lse = return_aux.lse
    checks.check_flag(_OP, "return_lse", return_lse)
    block_mask = _drop_whole_mask(block_mask)
    if torch.compiler.is_dynamo_compiling() and type(block_mask).__name__ == "BlockMask":
        score_mod, block_mask = _merge_block_mask(score_mod, block_mask)
    options = (block_mask, scale, enable_gqa)
    if score_mod is None:
        results = _attend_by_options(query, key, value, *options, return_lse=wants_lse)
    else:
        results = _attend(query, key, value, score_mod, *options, wants_lse)
    if return_aux is None:
        return results
    out, lse = results if wants_lse else (results, None)
    return out, sys.modules[type(return_aux).__module__].AuxOutput(lse=lse)


_untraced = untraced(flex_attention)


def _drop_whole_mask(block_mask: Any) -> Any:
    """Replace the ``BlockMask`` that PyTorch makes where no mask is given by None."""
    is_whole = type(block_mask).__name__ == "BlockMask" and block_mask.BLOCK_SIZE[0] == _WHOLE_BLOCK
    return None if is_whole else block_mask


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any],
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    wants_lse: bool,
) -> Any:
    """Attend with ``score_mod``, by equivalent options of attention if there are any."""
    originals, options = (query, key, value), (block_mask, scale, enable_gqa)
    traced = _BoundTrace(score_mod, originals)
    if (equivalent := traced.options(query, key)) is not None:
        return _attend_by_options(*originals, *options, return_lse=wants_lse, **equivalent)
    data = traced.data()
    signature, plan = plans.find((*originals, data), block_mask is None, scale, enable_gqa)
    if compat.exports_onnx():
        results = _run_onnx(originals, traced, data, *options)
        results = results if wants_lse else results[0]
    elif plan is not None:
        tensors = _operands(originals, traced, data, block_mask)
        results = plan.all(tensors) if wants_lse else plan.first(tensors)
    else:
        *tensors, scale = _check(*originals, *options)
        call = (*_operands(tensors, traced, data, block_mask), FlexOptions(scale))
        if any(x is not y for x, y in zip(call, originals, strict=False)):
            signature = None  # a call whose tensors were converted has no plan
        rebuilt = (None, None, None)  # the program, its data and the mask
        inputs = (*originals, data)
        plan = plans.keep(signature, attention, call, (*originals, *rebuilt), inputs)
        results = attention(*call) if plan is None else plan.all(call[:-1], call[-1])
        results = results if wants_lse else results[0]
    if not wants_lse:
        return results
    out, lse = results
    return out, lse if query.dtype is torch.float64 else lse.float()


def _merge_block_mask(score_mod: Any, block_mask: Any) -> tuple[Callable[..., Any], Any]:
    """Return a function that excludes pairs as a ``BlockMask`` does, and a mask of its blocks."""
    mask, full, (rows, columns) = masks.mask_of_listed_blocks(block_mask)

    def masked_score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        visible = block_mask.mask_mod(b, h, q_idx, kv_idx)
        if full is not None:
            whole = full[b, h, q_idx // rows, kv_idx // columns]
            visible = torch.logical_or(whole, visible)
        if score_mod is not None:
            score = score_mod(score, b, h, q_idx, kv_idx)
        return torch.where(visible, score, -math.inf)

    return masked_score_mod, mask


def _run_onnx(originals: Any, traced: Any, data: Any, block_mask: Any, scale: Any, gqa: Any) -> Any:
    """Run the reference, because an ONNX graph cannot interpret a program that is a tensor."""
    if block_mask is not None:
        raise compat.not_in_onnx(_OP, "the pairs that block_mask leaves visible depend on values")
    query, key, value = originals
    *tensors, scale = _check(query, key, value, None, scale, gqa)
    captured = traced.captured() if traced.integers else None
    program = traced.trace.program_words(), traced.trace.numbers, captured
    reference: Any = dispatch.load("reference")
    return reference.flex_attention(*tensors, program, data, options=FlexOptions(scale))


def _operands(
    tensors: Sequence[Any], traced: _BoundTrace, data: Tensor | None, block_mask: Any
) -> tuple[Any, ...]:
    """Return query, key and value, which are ``tensors``, the program, its data and the mask."""
    query, key, _ = tensors
    mask = None
    if block_mask is not None:
        mask = masks.program(_OP, block_mask, query, key.shape[2], offset=0)
    return *tensors, *traced.operands(query, data), mask


def _attend_by_options(
    query: Any, key: Any, value: Any, block_mask: Any, scale: Any, enable_gqa: Any, **options: Any
) -> Any:
    """Attend without a function, or with one that equals ``options`` of ordinary attention."""
    *tensors, scale = _check(query, key, value, block_mask, scale, enable_gqa)
    options |= {"scale": scale, "enable_gqa": enable_gqa, "mask": block_mask}
    return sdpa.scaled_dot_product_attention(*tensors, **options)


def _check(query: Any, key: Any, value: Any, block_mask: Any, scale: Any, enable_gqa: Any) -> Any:
    """Check the arguments; return query, key and value as autocast casts them, and the scale."""
    for place, (name, x) in enumerate((("query", query), ("key", key), ("value", value)), 1):
        checks.check_strided(_OP, name, x, place)
        checks.check_tensor(_OP, name, x, "[B, H, L, D]", 4, query.device)
    checks.check_flag(_OP, "enable_gqa", enable_gqa)
    query, key, value = checks.autocast(query, key, value)
    checks.check_dtypes(_OP, query, key, value)
    checks.check_widths(_OP, query, key)
    checks.check_heads(_OP, query, key, value, dim=1)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"{_OP}: query and key must have the same number of heads without enable_gqa=True, got "
            f"{query.shape[1]} and {key.shape[1]}"
        )
    if key.shape[0] == value.shape[0] == 1 and block_mask is not None:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[2] != value.shape[2]:
        raise ValueError(
            f"{_OP}: query, key and value must have the same batch, and key and value the same "
            f"length, got shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if scale is not None:
        scale = checks.check_real(_OP, "scale", scale)
    return query, key, value, default_scale(query.shape[3]) if scale is None else scale


# --- traces ----------------------------------------------------------------------------------


class _Trace:
    """The graph of a function, with the indices of the captured tensors that it reads."""

    def __init__(self, tracer: Tracer, value: int, captured: Sequence[Tensor]) -> None:
        self.graph, self.value, self.numbers = tracer.graph, value, tracer.numbers
        self.floating = [place_of(x, captured) for x in tracer.floating]
        self.integers = [place_of(x, captured) for x in tracer.integers]
        self.is_reusable = tracer.is_reusable and -1 not in (*self.floating, *self.integers)
        self.programs: dict[Any, Tensor] = {}
        self.known_form: KnownForm | None = _recognise_graph(*self._constants())

    def _constants(self) -> tuple[Any, Any, int]:
        """Return the graph as constants, which functions for the compiler's constants need."""
        return tuple(self.graph.nodes), tuple(self.graph.gathers.items()), self.value

    def program_words(self, targets: tuple[int, ...] = ()) -> Sequence[int]:
        return _compile(*self._constants(), targets, len(self.numbers))

    def program(self, batch: int, targets: tuple[int, ...], tensors: Sequence[Tensor]) -> Tensor:
        """Return the program without captured integers, for a gradient of ``targets``."""
        may_cache = is_unintercepted()  # a traced tensor must not stay
        program = self.programs.get((batch, targets)) if may_cache else None
        if program is None:
            words = torch.tensor(self.program_words(targets), dtype=torch.int32, device="cpu")
            indices = (Op.BATCH, Op.HEAD)
            counts = (self.graph.count_disjoint(op, targets, tensors) for op in indices)
            with torch.inference_mode(False):  # autograd must be able to save it
                numbers = [max(batch, 1), *counts, *self.numbers]
                program = torch.cat([words, torch.tensor(numbers, dtype=torch.int32, device="cpu")])
            if may_cache:
                _cache(self.programs, (batch, targets), program)
        return program


def _rebuild_graph(nodes: Any, gathers: Any) -> Graph:
    graph = Graph()
    graph.nodes, graph.gathers = list(nodes), dict(gathers)
    graph.node_numbers = {node: n for n, node in enumerate(nodes)}
    return graph


@constant_for_compiler
def _compile(nodes: Any, gathers: Any, value: int, targets: Any, numbers: int) -> tuple[int, ...]:
    return tuple(_rebuild_graph(nodes, gathers).write_program(value, targets, numbers))


@constant_for_compiler
def _recognise_graph(nodes: Any, gathers: Any, value: int) -> KnownForm | None:
    return recognise(_rebuild_graph(nodes, gathers), value)


_traces: dict[Any, _Trace] = {}
_lock = threading.Lock()


def _cache(entries: dict[Any, Any], key: Any, value: Any) -> None:
    """Add an entry to a cache; the oldest entries make room for it."""
    with _lock:
        while len(entries) >= _MAX_CACHED:
            del entries[next(iter(entries))]
        entries[key] = value


class _BoundTrace:
    """The trace of a function, bound to the tensors that the function captures in one call."""

    def __init__(self, score_mod: Any, tensors: Sequence[Any]) -> None:
        if not callable(score_mod):
            raise checks.wrong_type(_OP, "score_mod", score_mod, "a function")
        query = tensors[0]
        checks.check_strided(_OP, "query", query, 1)
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        key, captured = _key(score_mod, self.dtype, query.device)
        trace = None if key is None else _traces.get(key)
        if trace is not None:
            self.floating = [captured[n] for n in trace.floating]
            self.integers = [captured[n] for n in trace.integers]
        else:
            tracer = Tracer(self.dtype, query.device)
            trace = _Trace(tracer, tracer.trace(score_mod), captured)
            self.floating, self.integers = tracer.floating, tracer.integers
            if key is not None and trace.is_reusable:
                _cache(_traces, key, trace)
        self.trace = trace

    def data(self) -> Tensor | None:
        """Return the elements of all captured floating tensors, [n]; None if there are none."""
        return join_flat(self.floating, self.dtype)

    def options(self, query: Any, key: Any) -> dict[str, Any] | None:
        """Return the options of attention that equal the function; None if it is interpreted."""
        form = self.trace.known_form
        if form is None or query.dim() != 4 or not isinstance(key, Tensor):
            return None
        k_len, numbers = key.shape[-2], self.trace.numbers
        return form.attention_arguments(query, k_len, self.floating, numbers)

    def operands(self, query: Tensor, data: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the program, and its data, detached if no captured tensor needs a gradient."""
        # Where modes or transforms are active, a tensor may not say that it requires a gradient.
        all_need_grad = not is_unintercepted() and not torch.compiler.is_dynamo_compiling()
        floating = self.floating if torch.is_grad_enabled() else []
        targets = tuple([n for n, x in enumerate(floating) if all_need_grad or x.requires_grad])
        program = self.trace.program(query.shape[0], targets, self.floating).to(query.device)
        if self.integers:
            program = torch.cat([program, self.captured().to(torch.int32)])
        return program, data if data is None or targets else data.detach()

    def captured(self) -> Tensor:
        """Return the elements of all captured tensors of integers, limited to int32."""
        least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
        parts = [x.reshape(-1).to(torch.int64).clamp(least, most) for x in self.integers]
        return torch.cat(parts)


def _key(score_mod: Any, dtype: torch.dtype, device: torch.device) -> tuple[Any, list[Tensor]]:
    """Return the key of a function's trace, None if it cannot be known, and the captured tensors.

    The key holds all that a trace depends on: constants, and the layouts of captured tensors.
    """
    captured: list[Tensor] = []
    if not is_unintercepted() or (values := values_of(score_mod)) is None:
        return None, captured
    key: list[Any] = [dtype, device]
    for x in values:
        if isinstance(x, Tensor):
            if (place := place_of(x, captured)) < 0:
                place = len(captured)
                captured.append(x)
            key.append((place, x.dtype, x.shape, x.device))
        else:
            key.append((type(x), x))
    return tuple(key), captured


def _validate(args: Any) -> tuple[Any, tuple[Any, ...], list[str]]:
    """Validate the named arguments; return the operator, its arguments, and notes to explain."""
    score_mod, enable_gqa = args.score_mod, args.enable_gqa
    block_mask = _drop_whole_mask(args.block_mask)
    *tensors, scale = _check(args.query, args.key, args.value, block_mask, args.scale, enable_gqa)
    query, key, _ = tensors
    notes = []
    if args.kernel_options is not None:
        notes.append("kernel_options are ignored: they tune PyTorch's kernels for GPUs")
    traced = None if score_mod is None else _BoundTrace(score_mod, tensors)
    equivalent = None if traced is None else traced.options(query, key)
    if traced is not None and equivalent is None:
        call = (*_operands(tensors, traced, traced.data(), block_mask), FlexOptions(scale))
        if (device := query.device.type) != "cpu":
            notes.append(f"only the CPU has kernels: on {device} the reference stores all scores")
        return attention, call, [*notes, "second derivatives run on the reference"]
    if traced is not None and traced.trace.known_form is not None:
        notes.append(traced.trace.known_form.reason())
    options = {"scale": scale, "enable_gqa": enable_gqa, "mask": block_mask} | (equivalent or {})
    operator, call, _ = sdpa.prepare(*tensors, **options)
    return operator, call, notes


prepare = with_arguments_of(flex_attention, _validate)


# --- the operator -----------------------------------------------------------------------------


def _count_pairs(query: Tensor, key: Tensor, *_: Any) -> int:
    """Count all pairs, because which of them are visible depends on values."""
    return query.shape[:3].numel() * key.shape[2]


attention = Operator(
    "flex_attention",
    "query: B Hq Lq D; key: B Hkv Lk D; value: B Hkv Lk Dv; score_program: *; score_data?: *; "
    "mask_program?; Hq % Hkv",
    "out: B Hq Lq Dv; lse: B Hq Lq",
    options=FlexOptions,
    out_like="query",
    derivative=Derivative(
        grads="out lse",
        reads="query key value score_program out lse score_data mask_program",
        gives="query key value score_data",
        in_order="query key value",
        options=FlexOptions,
    ),
    flops=flops_of_pairs(_count_pairs),
    not_in_onnx={"": "its steps are in a tensor; export the model instead of its graph"},
    checked_by=("cpu",),
    derived={"scale": lambda query, *_: default_scale(query.shape[-1])},
)
