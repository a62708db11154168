"""The operators and their equations, for ``test_compat.py``. They import fastattn when called."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def rand(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(hash(shape) % 1000 + seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def softmax_over(scores: Tensor, value: Tensor, keep: Tensor | None = None) -> Tensor:
    if keep is not None:
        scores = torch.where(keep, scores, scores.new_full((), float("-inf")))
    return scores.softmax(-1) @ value


_LENGTHS = (2, 3)  # of the packed sequences, and of the filled part of each cache
_TOKENS = [[[1, 2, 0], [3, 1, 2]]]  # no tensor: export of torch 2.6 and 2.7 takes none from outside
_FACTORS = rand(3, 4, seed=1).tolist()


def _keep() -> Tensor:
    return torch.ones(4, 5, dtype=torch.bool).tril(2)


_DOCUMENTS = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 1, 1])  # of queries, and of keys


def _pairs_of_mask() -> Tensor:
    queries, keys = _DOCUMENTS
    return (queries[:, None] == keys).tril()


def _varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = []
    for a, b in ((0, 2), (2, 5)):
        heads = [x[a:b].transpose(0, 1) for x in (q, k, v)]
        out = softmax_over(heads[0] @ heads[1].mT / q.shape[-1] ** 0.5, heads[2])
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def _decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.arange(k.shape[2]) < torch.tensor(_LENGTHS)[:, None, None, None]
    return softmax_over(q @ k.mT / q.shape[-1] ** 0.5, v, seen)


def _hops(u: Tensor, memory: Tensor, out: Tensor) -> Tensor:
    for _ in range(2):
        u = u + softmax_over((memory @ u[..., None])[..., 0][:, None], out)[:, 0]
    return u


def _hopfield(state: Tensor, stored: Tensor) -> Tensor:
    for _ in range(3):  # two steps, and the attention that reads the end of them
        state = softmax_over(0.5 * state @ stored.mT, stored)
    return state


def _sinusoids(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[-2])[:, None] / 10000.0 ** (torch.arange(0, 4, 2) / 4).double()
    return 2.0 * x + torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


def _merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    a, b = torch.stack([lse_a, lse_b]).softmax(0)[..., None]
    return a * out_a + b * out_b


def _local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    return softmax_over(q @ k.mT, v, distance.abs() <= 1)


def _additive(q: Tensor, k: Tensor, value: Tensor, v: Tensor) -> Tensor:
    return softmax_over((q[:, :, None] + k[:, None]).tanh() @ v, value)


def operators() -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]]:
    """Each public operator: a call, its equation, and the tensors to differentiate by."""
    import fastattn as fa

    attention = [rand(2, 2, 4, 3), rand(2, 2, 5, 3), rand(2, 2, 5, 3, seed=1)]
    packed = [rand(5, 2, 3, seed=n) for n in range(3)]
    sequence = [rand(2, 4, 3, seed=n) for n in range(3)]
    mask = fa.masks.causal() & fa.masks.document(*_DOCUMENTS)
    return {
        "sdpa": (
            lambda q, k, v: fa.scaled_dot_product_attention(q, k, v, _keep()),
            lambda q, k, v: softmax_over(q @ k.mT / 3**0.5, v, _keep()),
            attention,
        ),
        "sdpa-general": (
            lambda q, k, v: fa.scaled_dot_product_attention(q, k, v, softcap=2.0, scale=0.7),
            lambda q, k, v: softmax_over(2.0 * (0.35 * q @ k.mT).tanh(), v),
            attention,
        ),
        "sdpa-mask": (
            lambda q, k, v: fa.scaled_dot_product_attention(q, k, v, mask=mask),
            lambda q, k, v: softmax_over(q @ k.mT / 3**0.5, v, _pairs_of_mask()),
            attention,
        ),
        "varlen": (
            lambda q, k, v: fa.varlen_attention(q, k, v, *[torch.tensor([0, 2, 5])] * 2),
            _varlen,
            packed,
        ),
        "decode": (
            lambda q, k, v: fa.decode_attention(q, k, v, torch.tensor(_LENGTHS)),
            _decode,
            [rand(2, 2, 1, 3), *attention[1:]],
        ),
        "merge": (
            lambda *states: fa.merge_states(*states)[0],
            _merged,
            [rand(2, 4, 3), rand(2, 4), rand(2, 4, 3, seed=1), rand(2, 4, seed=1)],
        ),
        "additive": (fa.additive_attention, _additive, [*sequence, rand(3)]),
        "luong": (
            lambda q, k, v: fa.luong_attention(q, k, v, window="local-m", D=1),
            _local,
            sequence,
        ),
        "hops": (
            lambda u, m, c: fa.memory_hop_attention(u, m, c, hops=2),
            _hops,
            [rand(2, 3), *sequence[1:]],
        ),
        "hopfield": (
            lambda s, x: fa.hopfield_retrieve(
                s, x, beta=0.5, update_steps_max=2, update_steps_eps=0
            ),
            _hopfield,
            sequence[:2],
        ),
        "encode": (
            lambda w: fa.encode_memory(
                torch.tensor(_TOKENS),
                w,
                encoding=torch.tensor(_FACTORS, dtype=w.dtype),
                padding_idx=None,
            ),
            lambda w: (w[torch.tensor(_TOKENS)] * torch.tensor(_FACTORS, dtype=w.dtype)).sum(-2),
            [rand(4, 4)],
        ),
        "sinusoidal": (
            lambda x: fa.sinusoidal_encoding(x, scale=2.0),
            _sinusoids,
            [rand(2, 4, 4)],
        ),
    }


def loss_of(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *leaves: f(*leaves).sin().sum()
