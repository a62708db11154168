"""End-to-end memory networks: they answer a question from sentences in several hops."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastattn import checks
from fastattn.ops import encode_memory, memory_hop_attention
from fastattn.ops.encode_memory import ENCODINGS

TYINGS = ("adjacent", "layerwise")


class MemN2N(nn.Module):
    r"""End-To-End Memory Network for questions about stories.

    Sukhbaatar et al. 2015, https://arxiv.org/abs/1503.08895. With the memories m_i = sum_j l_j o
    A_k x_ij + T_k(i) of hop k, and c_i likewise (:func:`fastattn.encode_memory`):

    .. math::
        u_1 = \sum_j l_j \circ B q_j, \quad
        u_{k+1} = \phi(H u_k + \sum_i softmax(u_k^T m_i) c_i), \quad
        logits = W u_{K+1}

    ``weight_tying="adjacent"``: the output table of a hop is the input table of the next, A_{k+1} =
    C_k, the question shares the first, B = A_1, the answer the last, W = C_K, and H = 1.
    ``"layerwise"``: A and C are the same in all hops, as in a recurrent network; B, W and H are
    separate parameters.

    Args:
        vocab_size: V, the number of words, including padding; the answers are words.
        dim: D, the width of the embeddings.
        hops: K.
        memory_size: the maximum number of sentences in a memory: the rows of T.
        weight_tying: "adjacent" or "layerwise".
        encoding: of the words of a sentence: "position" (the paper's formula), "centered" (which
            reproduces its results, see docs/memn2n.md) or "bow"; see ``encode_memory``.
        temporal: whether to add a learned row T(i) to memory i; i = 0 is the most recent.
        activation: phi: None, "relu", "tanh" or "sigmoid".
        random_noise: in training, insert empty time steps into each story, at most this fraction of
            its length (the paper's RN is 0.1), see :func:`insert_empty_memories`.
        padding_idx: the word that pads sentences and stories.
        mask_empty: whether to mask sentences that are all padding. False is the paper's method:
            such a sentence is a memory of zeros with a score of 0, which a question can attend to
            when no sentence is relevant. Then the answer depends on N: pad all stories to the same
            length.
        init_std: the standard deviation of the initial parameters, 0.1 in the paper.
        sparse: make the gradients of ``embedding`` and ``question`` sparse tensors of the rows that
            occur in a batch, for ``torch.optim.SparseAdam`` or SGD. Only for "layerwise": otherwise
            the output layer uses all rows of an embedding.

        While the attribute ``linear_start`` is True, the hops have no softmax (the paper trains so
        until the validation loss stops falling). It is not in the ``state_dict``.

    Attributes:
        embedding: [K + 1, V, D], A_1, C_1 = A_2, ..., C_K; layerwise: [2, V, D], A and C.
        temporal: [K + 1, memory_size, D] or [2, memory_size, D], in the same order; or None.
        question, answer, hop_proj: B [V, D], W [V, D] and H [D, D] if layerwise, else None.
    """

    linear_start: bool

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        hops: int = 3,
        memory_size: int = 50,
        weight_tying: str = "adjacent",
        encoding: str = "position",
        temporal: bool = True,
        activation: str | None = None,
        random_noise: float = 0.0,
        padding_idx: int = 0,
        mask_empty: bool = False,
        init_std: float = 0.1,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (
            ("vocab_size", vocab_size),
            ("dim", dim),
            ("hops", hops),
            ("memory_size", memory_size),
        ):
            checks.check_int(name, size)
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        checks.check_choice("weight_tying", weight_tying, TYINGS)
        checks.check_choice("encoding", encoding, ENCODINGS)
        if activation not in (None, "relu", "tanh", "sigmoid"):
            raise ValueError(
                f"activation must be None, 'relu', 'tanh' or 'sigmoid', got {activation!r}"
            )
        _check_fraction("random_noise", random_noise)
        checks.check_bool("sparse", sparse)
        if sparse and weight_tying != "layerwise":
            raise ValueError(f"sparse=True needs weight_tying='layerwise', got {weight_tying!r}")
        self.vocab_size, self.dim, self.hops = vocab_size, dim, hops
        self.memory_size, self.padding_idx, self.mask_empty = memory_size, padding_idx, mask_empty
        self.weight_tying, self.encoding, self.activation = weight_tying, encoding, activation
        self.random_noise, self.init_std, self.sparse = random_noise, init_std, sparse
        self.linear_start = False

        def make_parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        layerwise = weight_tying == "layerwise"
        tables = 2 if layerwise else hops + 1
        self.embedding = make_parameter(tables, vocab_size, dim)
        self.temporal = make_parameter(tables, memory_size, dim) if temporal else None
        self.question = make_parameter(vocab_size, dim) if layerwise else None
        self.answer = make_parameter(vocab_size, dim) if layerwise else None
        self.hop_proj = make_parameter(dim, dim) if layerwise else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every parameter from N(0, init_std^2), as the paper does."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=self.init_std)

    def forward(self, stories: Tensor, questions: Tensor, *, need_weights: bool = False) -> Any:
        """Return the logits of the answers [B, V]; with ``need_weights`` also the hops' weights.

        Args:
            stories: [B, N, J] int64 or int32, N <= memory_size; stories[:, 0] is the most recent
                sentence.
            questions: [B, J], padded to the width of the stories, because their encoding depends
                on it.
            need_weights: also return the weights [B, K, N] of the sentences in each hop.
        """
        self._check(stories, questions)
        if self.training and self.random_noise > 0:
            stories = insert_empty_memories(
                stories, self.random_noise, padding_idx=self.padding_idx, limit=self.memory_size
            )
        state, weights = self._read(stories, questions, need_weights)
        answer = self.embedding[-1] if self.answer is None else self.answer
        logits = state @ answer.mT
        return (logits, weights) if need_weights else logits

    def _read(
        self, stories: Tensor, questions: Tensor, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Read the stories by the questions; return u_{K+1} [B, D] and the weights [B, K, N]."""
        slots = stories.shape[1]
        # [B, K + 1, N, D], layerwise [B, 2, N, D]
        memory = encode_memory(
            stories,
            self.embedding,
            encoding=self.encoding,
            temporal=None if self.temporal is None else self.temporal[:, :slots],
            padding_idx=self.padding_idx,
            sparse=self.sparse,
        )
        query = encode_memory(
            questions.unsqueeze(1),
            self.embedding[0] if self.question is None else self.question,
            encoding=self.encoding,
            padding_idx=self.padding_idx,
            sparse=self.sparse,
        ).squeeze(1)
        adjacent = self.weight_tying == "adjacent"
        result = memory_hop_attention(
            query,
            memory if adjacent else memory[:, 0],
            None if adjacent else memory[:, 1],
            hops=self.hops,
            hop_proj=self.hop_proj,
            memory_mask=(stories != self.padding_idx).any(-1) if self.mask_empty else None,
            activation=self.activation,
            normalize="none" if self.linear_start else "softmax",
            need_weights=need_weights,
        )
        return result if need_weights else (result, None)

    def _check(self, stories: Tensor, questions: Tensor) -> None:
        """Raise ValueError for stories or questions of another shape."""
        if stories.ndim != 3 or stories.shape[1] > self.memory_size:
            raise ValueError(
                f"stories must be [B, N, J] with N of at most memory_size = {self.memory_size}, "
                f"got shape {tuple(stories.shape)}"
            )
        if questions.ndim != 2 or questions.shape != (stories.shape[0], stories.shape[2]):
            raise ValueError(
                f"questions must be [B, J] = [{stories.shape[0]}, {stories.shape[2]}], got shape "
                f"{tuple(questions.shape)}"
            )

    def extra_repr(self) -> str:
        return (
            f"{self.vocab_size}, {self.dim}, hops={self.hops}, memory_size={self.memory_size}, "
            f"weight_tying={self.weight_tying!r}, encoding={self.encoding!r}"
            f"{', sparse=True' if self.sparse else ''}"
        )


def insert_empty_memories(
    stories: Tensor,
    fraction: float,
    *,
    padding_idx: int = 0,
    limit: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Insert empty time steps at random: the random noise of Sukhbaatar et al. 2015, section 4.1.

    A story of n sentences gets between 0 and ceil(fraction * n) of them, with equal probability for
    each number and for each place. This trains the rows of a temporal encoding in new positions.

    Args:
        stories: [B, N, J]; the sentences of a story come first, then padding.
        fraction: at least 0.
        padding_idx: the word that fills an empty sentence.
        limit: how many time steps to keep; None is N. Later ones are dropped.
        generator: the source of the random numbers.

    Returns:
        [B, limit, J].
    """
    _check_fraction("fraction", fraction)
    batch, slots, words = stories.shape
    limit = slots if limit is None else limit
    steps = slots + math.ceil(fraction * slots)
    device = stories.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    is_sentence = (stories != padding_idx).any(-1)  # [B, N]
    length = is_sentence.sum(1, keepdim=True)
    max_empty = torch.ceil(fraction * length)
    empty_count = (uniform(batch, 1) * (max_empty + 1)).floor().clamp(max=max_empty)
    # Each time step draws a number; the sentences take the steps with the smallest ones, in order.
    draws = uniform(batch, steps)
    draws = draws.masked_fill(torch.arange(steps, device=device) >= length + empty_count, 2.0)
    slot = torch.arange(slots, device=device).expand(batch, slots)
    is_occupied = torch.zeros_like(draws, dtype=torch.bool)
    is_occupied.scatter_(1, draws.argsort(1)[:, :slots], slot < length)  # [B, steps]
    out = stories.new_full((batch, max(steps, limit), words), padding_idx)
    out[:, :steps][is_occupied] = stories[is_sentence]
    return out[:, :limit]


def _check_fraction(name: str, value: Any) -> None:
    """Raise an error unless ``value`` is a number from 0 to 1."""
    checks.check_number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {value}")
