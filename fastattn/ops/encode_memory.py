"""Encodes sentences as memories: weighted sums of word embeddings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn._derivative import Derivative
from fastattn.backends.primitives import EncodeMemoryBackwardOptions, EncodeMemoryOptions
from fastattn.call import Plans, with_arguments_of
from fastattn.compat import is_unintercepted
from fastattn.library import Operator
from fastattn.ops._sparse_rows import keep_used_rows

plans = Plans()
_INTEGERS = (torch.int64, torch.int32)
ENCODINGS = ("position", "centered", "bow")


def encode_memory(
    tokens: Tensor,
    weight: Tensor,
    *,
    encoding: str | Tensor = "position",
    temporal: Tensor | None = None,
    padding_idx: int | None = 0,
    sparse: bool = False,
) -> Tensor:
    r"""Encode sentences of words as the memories of a memory network, in one pass.

    .. math:: m_i = \sum_j l_j \circ A_{x_{ij}} + T_i

    x_ij is word j of sentence i, A ``weight``, T ``temporal``, and l_j one factor for each column:

    ============== ================================================================================
    ``"position"`` l_jk = (1 - j/J) - (k/D) (1 - 2j/J), with j and k counted from 1
    ``"centered"`` l_jk = 1 + 4 (j - (J+1)/2) (k - (D+1)/2) / (J D)
    ``"bow"``      l_jk = 1, a bag of words
    a tensor       l itself, [J, D]
    ============== ================================================================================

    J is the width of ``tokens``, including padding, so it is the same for every sentence: pad all
    batches of a model to the same width (Sukhbaatar et al. 2015, End-To-End Memory Networks,
    https://arxiv.org/abs/1503.08895, section 4.1). ``"centered"`` is about twice ``"position"``,
    with a mean of 1; many implementations compute it instead, see docs/memory_hops.md.
    The embeddings [B, N, J, D] are never stored.

    Args:
        tokens: [B, N, J] int64 or int32, rows of ``weight``; any strides, sizes may be 0.
        weight: [V, D] float32, float64, bfloat16 or float16. Or [G, V, D]: G tables that encode
            the same tokens, such as the K + 1 of a network with K hops.
        encoding: one of the above; a tensor must have a floating dtype and is differentiable (by
            the reference backend).
        temporal: [N, D], or [G, N, D] with G tables; row i is added to memory i, in the order of
            ``tokens``. The paper counts from the most recent sentence, so tokens[:, 0] must be
            the most recent one there.
        padding_idx: a token that contributes nothing: its row is not read and gets no gradient, and
            it may be outside [0, V). None: every token counts.
        sparse: make the gradient of ``weight`` a sparse tensor (COO) that holds each row used by
            ``tokens`` once, for tables much larger than a batch. As with ``nn.Embedding``, the
            optimizer must support it (SparseAdam, SGD, Adagrad). It is differentiable once, not
            under ``torch.func`` and not in batches, and it causes a graph break in a compiler.

    Returns:
        [B, N, D], or [B, G, N, D] with G tables, in the dtype of ``weight``; 16-bit results are
        summed in float32 and rounded once. A sentence that is all padding has the memory 0, without
        T_i, as with the paper's null symbol. Differentiable in ``weight`` (a dense gradient unless
        ``sparse``, the same bits for every number of threads) and ``temporal``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes that do not match, an unknown encoding, or tensors on different devices.
        IndexError: a token that is neither ``padding_idx`` nor in [0, V); nothing is read.
    """
    signature, plan = plans.find((tokens, weight, temporal), encoding, padding_idx, sparse)
    if plan is not None:
        factors = _check_encoding(encoding, tokens.shape[-1], weight)
        return plan.all((tokens, weight, factors, temporal))
    operator, call = prepare(tokens, weight, encoding, temporal, padding_idx, sparse)
    plan = plans.keep(signature, operator, call, (tokens, weight, None, temporal))
    out = operator(*call) if plan is None else plan.all(call[:-1], call[-1])
    out = out.squeeze(0)  # [B, G, N, D]
    return out.squeeze(1) if weight.ndim == 2 else out


def _validate(args: Any) -> tuple[Operator, tuple[Any, ...]]:
    """Validate the named arguments; return the operator and its arguments."""
    tokens, weight, encoding, temporal, padding_idx, sparse = args
    _check(tokens, weight, temporal, padding_idx)
    checks.check_bool("sparse", sparse)
    if sparse:
        tokens, weight, padding_idx = keep_used_rows(tokens, weight, padding_idx)
    factors = _check_encoding(encoding, tokens.shape[-1], weight)
    if weight.ndim == 2:
        weight = weight.unsqueeze(0)
        temporal = None if temporal is None else temporal.unsqueeze(0)
    return encode, (
        tokens.to(torch.int64).unsqueeze(0),
        weight.unsqueeze(0),
        factors,
        None if temporal is None else temporal.unsqueeze(0),
        EncodeMemoryOptions(padding_idx),
    )


prepare = with_arguments_of(encode_memory, _validate)


def encoding_factors(
    encoding: str,
    words: int,
    dim: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the factors l [words, dim] of an encoding; they are computed in float64."""
    if encoding == "bow":
        return torch.ones(dim, dtype=dtype, device=device).expand(words, dim)
    j = torch.arange(1, words + 1, dtype=torch.float64, device=device).unsqueeze(1)
    k = torch.arange(1, dim + 1, dtype=torch.float64, device=device)
    if encoding == "centered":
        factors = 1 + 4 * (j - (words + 1) / 2) * (k - (dim + 1) / 2) / max(words * dim, 1)
    else:
        j, k = j / max(words, 1), k / max(dim, 1)
        factors = (1 - j) - k * (1 - 2 * j)
    return factors.to(dtype or torch.get_default_dtype())


@functools.lru_cache(maxsize=64)
def _cached_factors(
    encoding: str, words: int, dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return encoding_factors(encoding, words, dim, dtype=dtype, device=device)


def _check_encoding(encoding: str | Tensor, words: int, weight: Tensor) -> Tensor:
    """Check ``encoding``; return its factors l [J, D] in the dtype of the computation."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    dim = weight.shape[-1]
    if isinstance(encoding, Tensor):
        if not encoding.is_floating_point():
            raise TypeError(f"encoding must be floating, got {encoding.dtype}")
        if tuple(encoding.shape) != (words, dim):
            raise ValueError(
                f"encoding must be [J, D] = [{words}, {dim}], got shape {tuple(encoding.shape)}"
            )
        checks.check_same_device("encoding", encoding, "weight", weight)
        return encoding.to(dtype)
    if not isinstance(encoding, str):
        raise TypeError(f"encoding must be a str or a Tensor, got {type(encoding).__name__}")
    if encoding not in ENCODINGS:
        raise ValueError(
            f"encoding must be one of {', '.join(ENCODINGS)}, or a Tensor, got {encoding!r}"
        )
    # Cached between calls, except under a tracer or a mode, which may replace the tensor.
    factors_of = _cached_factors if is_unintercepted() else _cached_factors.__wrapped__
    return factors_of(encoding, words, dim, dtype, weight.device)


def _check(tokens: Tensor, weight: Tensor, temporal: Tensor | None, padding_idx: Any) -> None:
    checks.check_dense("encode_memory", tokens=tokens, weight=weight)
    if tokens.dtype not in _INTEGERS:
        raise TypeError(f"tokens must be int64 or int32, got {tokens.dtype}")
    checks.check_floating("weight", weight)
    if tokens.ndim != 3:
        raise ValueError(f"tokens must be [B, N, J], got shape {tuple(tokens.shape)}")
    if weight.ndim not in (2, 3):
        raise ValueError(f"weight must be [V, D] or [G, V, D], got shape {tuple(weight.shape)}")
    checks.check_same_device("tokens", tokens, "weight", weight)
    if padding_idx is not None:
        checks.check_int("padding_idx", padding_idx, "an integer or None")
        checks.check_int64("padding_idx", padding_idx)
    if temporal is None:
        return
    if not isinstance(temporal, Tensor):
        raise TypeError(f"temporal must be a Tensor or None, got {type(temporal).__name__}")
    checks.check_dense("encode_memory", temporal=temporal)
    if temporal.dtype != weight.dtype:
        raise TypeError(f"temporal is {temporal.dtype}, but weight is {weight.dtype}")
    checks.check_same_device("temporal", temporal, "weight", weight)
    shape = (*weight.shape[:-2], tokens.shape[1], weight.shape[-1])
    if tuple(temporal.shape) != shape:
        raise ValueError(
            f"temporal must be {'[N, D]' if weight.ndim == 2 else '[G, N, D]'} = {list(shape)}, "
            f"got shape {tuple(temporal.shape)}"
        )


# --- the operator -----------------------------------------------------------------------------


def _fake_backward(
    grad: Tensor, tokens: Tensor, factors: Tensor, options: EncodeMemoryBackwardOptions
) -> tuple[Tensor, Tensor]:
    models, _, tables, slots, dim = grad.shape
    return (
        grad.new_empty((models, tables, options.rows, dim)),
        grad.new_empty((models, tables, slots, dim) if options.temporal else (0,)),
    )


def _backward_options(
    tokens: Tensor,
    weight: Tensor,
    factors: Tensor,
    temporal: Tensor | None,
    options: EncodeMemoryOptions,
) -> EncodeMemoryBackwardOptions:
    return EncodeMemoryBackwardOptions(
        rows=weight.shape[-2], temporal=temporal is not None, padding_idx=options.padding_idx
    )


def _flops(results: Any, tokens: Tensor, *_: Any, backward: bool = False) -> int:
    """Count a multiplication and an addition for each word, and the temporal row."""
    out = results[0] if isinstance(results, list) else results
    return int(out.numel() * (2 * tokens.shape[-1] + 1))


class _Backward(Operator):
    def lifted(self, tensors: Sequence[Any]) -> list[Any]:
        """Add the dimension of models R, and for a single table G, which a plan omits."""
        grad, tokens, factors = tensors
        if grad.dim() < 5:
            grad = grad[None] if grad.dim() == 4 else grad[None, :, None]
        return [grad, tokens if tokens.dim() == 4 else tokens[None], factors]


encode = Operator(
    "encode_memory",
    "tokens: R B N J; weight: R G V D; factors: J D; temporal?: R G N D",
    "out: R B G N D",
    options=EncodeMemoryOptions,
    # dA[x_ij] += l_j o dm_i, dT_i += dm_i; l is a constant.
    derivative=Derivative(
        grads="out",
        reads="tokens factors",
        gives="weight temporal",
        options=EncodeMemoryBackwardOptions,
        opaque="factors",
        operator=_Backward,
        fake=_fake_backward,
        of_call=_backward_options,
    ),
    flops=_flops,
    opaque=("factors",),
    checked_by=("cpu",),
)
