"""``MultiheadAttention``: a drop-in replacement for ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Bound at import, so that patching this module's class into torch.nn later causes no recursion.
from torch.nn import MultiheadAttention as _Stock

from fastattn import compat
from fastattn.checks import is_jagged
from fastattn.compat import mha_is_batched
from fastattn.masks import Mask
from fastattn.nn._cache import KeyValueCache
from fastattn.nn._context import ContextParallel, unsupported
from fastattn.nn._head_network import HeadNetwork
from fastattn.nn._leaf import call_as_leaf, is_symbolic
from fastattn.nn._masks import append_rows, check_mask_dtypes, is_causal_mask, merge_masks
from fastattn.nn._nested import nested_attention
from fastattn.nn._projections import project, project_out, project_query
from fastattn.nn._small import self_attention
from fastattn.ops.sdpa import scaled_dot_product_attention


def keep_forward_called(module: torch.nn.Module, args: Any) -> None:
    """A forward-pre-hook that does nothing; its presence makes the encoder layer call ``forward``.

    In eval mode without gradients ``torch.nn.TransformerEncoderLayer`` passes the *weights* of its
    attention to a fused operator of PyTorch. It then never calls ``self_attn.forward``, whatever
    its class, unless a submodule has a hook.
    """


class Options(NamedTuple):
    """The masks and flags of a call, under the names of its arguments."""

    key_padding_mask: Tensor | None  # [N, S]
    attn_mask: Tensor | None  # [L, S] or [N·H, L, S]
    mask: Mask | None
    is_causal: bool
    need_weights: bool
    average_attn_weights: bool


class MultiheadAttention(_Stock, ContextParallel):
    """Multi-head attention on fused kernels, with the contract of ``torch.nn.MultiheadAttention``.

        head_h = softmax(Q_h K_hᵀ / √D + masks) V_h       D = E / H
        out = [head_1, …, head_H] W_oᵀ + b_o              Q = query W_qᵀ + b_q, K and V likewise

    Constructor, ``forward``, parameters, ``state_dict``, initial values, random numbers, warnings
    and errors are as in ``torch.nn.MultiheadAttention``, see its documentation:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html. The paper is
    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762. Intended differences:

    - A fully masked row gets attention output 0, so its result is ``out_proj.bias``. Its weights
      are 0, and it passes no gradient. PyTorch gives NaN on some of its paths and the same result
      on others.
    - There is one path: ``need_weights=True`` stays on the fused kernel, keys hidden by
      ``key_padding_mask`` are skipped, and ``is_causal=True`` without ``attn_mask`` always raises.
    - The output is contiguous. With ``batch_first=True``, PyTorch's is contiguous only on its fast
      path.
    - ``nonlinear_heads`` (keyword only) is the hidden width of a separate network g_h for each head
      between attention and ``out_proj``: out = [g_1(head_1), …, g_H(head_H)] W_oᵀ + b_o, see
      :class:`fastattn.nn.HeadNetwork`. None, the default, adds no network.
    - ``relative_bias`` (keyword only) is a module such as
      :class:`fastattn.nn.T5RelativeBias`, which returns the ``relative_bias`` of
      :func:`fastattn.scaled_dot_product_attention`. Layers may share it. Not together with
      ``add_bias_kv`` or ``add_zero_attn``, whose keys have no position.
    - ``mask`` of ``forward`` (keyword only) is a mask of :mod:`fastattn.masks`.
    - :meth:`context_parallel` lets ``forward`` take one rank's rows of a sequence.
    """

    _watch: Callable[..., Any] | None = None  # set by fastattn.capture
    _causal_needs_mask = True  # as in PyTorch

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        nonlinear_heads: int | None = None,
        relative_bias: torch.nn.Module | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self.register_forward_pre_hook(keep_forward_called)
        if nonlinear_heads is not None:
            factory = {"device": device, "dtype": dtype}
            self.head_network = HeadNetwork(num_heads, self.head_dim, nonlinear_heads, **factory)
        if relative_bias is not None:
            if not isinstance(relative_bias, torch.nn.Module):
                raise TypeError(
                    "relative_bias must be a torch.nn.Module, such as fastattn.nn.RelativeBias, or "
                    f"None, got {type(relative_bias).__name__}"
                )
            if add_bias_kv or add_zero_attn:
                raise ValueError(
                    "relative_bias must be None with add_bias_kv or add_zero_attn, whose keys have "
                    "no position"
                )
            self.relative_bias = relative_bias

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        mask: Mask | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``query`` to ``key`` and ``value``.

        Args:
            query: [L, N, E], or [N, L, E] with ``batch_first``, or [L, E] unbatched.
            key: [S, N, kdim], [N, S, kdim] or [S, kdim].
            value: [S, N, vdim], [N, S, vdim] or [S, vdim].
            key_padding_mask: [N, S] or [S]; True is ignored, floating is added to the scores.
            need_weights: whether to return the attention weights, as applied, after dropout.
            attn_mask: [L, S] or [N·H, L, S]; True is not allowed, floating is added.
            average_attn_weights: weights averaged over the heads, [N, L, S], else [N, H, L, S].
            is_causal: a hint that ``attn_mask`` is causal. Without weights and padding the hint is
                trusted and the mask is not read; otherwise the mask is used. Jagged NestedTensors
                have no ``attn_mask``: there it means causal attention.
            mask: a mask of :mod:`fastattn.masks` or a ``BlockMask``: which pairs take part, unless
                the other masks exclude them. Not together with ``add_bias_kv`` or
                ``add_zero_attn``. For jagged NestedTensors it applies to each sequence, as in
                :func:`fastattn.varlen_attention`, and returns no weights.

        Returns:
            The output, shaped as ``query``, and the weights (without N if unbatched) or None. Keys
            that ``add_bias_kv`` and ``add_zero_attn`` append count in S of the weights.

        Raises:
            AssertionError, RuntimeError: as ``torch.nn.MultiheadAttention``, with the same texts;
                a ``mask`` that does not fit.
            ValueError: ``mask`` with ``add_bias_kv`` or ``add_zero_attn``.
        """
        if is_symbolic(query):
            flags = (need_weights, attn_mask, average_attn_weights, is_causal)
            return call_as_leaf(self, query, key, value, key_padding_mask, *flags, mask=mask)
        if self._watch is not None:
            flags = (need_weights, attn_mask, average_attn_weights, is_causal)
            implementation = MultiheadAttention.forward
            return self._watch(
                implementation, self, query, key, value, key_padding_mask, *flags, mask=mask
            )
        check_mask_dtypes(key_padding_mask, attn_mask, query.dtype)
        if mask is not None and (self.bias_k is not None or self.add_zero_attn):
            raise ValueError(
                "mask must be None with add_bias_kv or add_zero_attn, whose keys have no position"
            )
        children = compat.children_of(self)
        network, relative_bias = children.get("head_network"), children.get("relative_bias")
        has_no_option = network is None and relative_bias is None and self._context is None
        if self._context is not None:
            self._check_context_call(query, need_weights)
        if query.is_nested or key.is_nested or value.is_nested:
            if network is not None or (relative_bias is not None and not is_jagged(query)):
                raise AssertionError(
                    "nonlinear_heads does not support NestedTensor, "
                    "and relative_bias only jagged ones"
                )
            causal = is_causal and (is_jagged(query) or not self._causal_needs_mask)
            options = (need_weights, average_attn_weights, causal)
            masks = (key_padding_mask, attn_mask)
            return nested_attention(self, query, key, value, *masks, *options, mask)
        batched = mha_is_batched(query, key, value, key_padding_mask, attn_mask, self.num_heads)
        needs_mask = self._causal_needs_mask and self._context is None
        if is_causal and attn_mask is None and needs_mask:
            raise RuntimeError(
                "Need attn_mask if specifying the is_causal hint. "
                "You may use the Transformer module method "
                "`generate_square_subsequent_mask` to create this mask."
            )
        has_no_option = has_no_option and mask is None
        if has_no_option and query is key and key is value and batched and not need_weights:
            # With a mask, the hint is trusted if there is no padding.
            causal = is_causal and (key_padding_mask is None or attn_mask is None)
            if attn_mask is None or causal:
                result = self_attention(self, query, key_padding_mask, causal)
                if result is not None:
                    return result, None
        masks = (key_padding_mask, attn_mask)
        record = Options(*masks, mask, is_causal, need_weights, average_attn_weights)
        return self._forward_general(query, key, value, record, batched)

    def __prepare_scriptable__(self) -> None:
        """Called by ``torch.jit.script``."""
        raise RuntimeError(
            "torch.jit.script cannot compile fastattn.nn.MultiheadAttention: call "
            "fastattn.restore_mha(model) first, or use torch.compile or torch.export"
        )

    def _forward_general(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: Options,
        batched: bool,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the projections and attention, for tensors of any size and all options.

        With a cache, ``key`` and ``value`` follow the cached positions (self-attention), or are the
        memory from which the cached keys and values were computed (cross-attention). Causal queries
        are then at the last positions of the keys.
        """
        batch_dim = 0 if self.batch_first or not batched else 1
        if not batched:
            query, key, value = _add_batch(query, key, value)
            if options.key_padding_mask is not None:
                options = options._replace(key_padding_mask=options.key_padding_mask[None])
        self._check_shapes(query, key, value, batch_dim)
        if cache is None:
            q, k, v = project(self, query, key, value, batch_dim)
        elif key is query:
            q, k, v = project(self, query, key, value, batch_dim)
            k, v = cache.append(k, v)
        else:
            q = project_query(self, query, batch_dim)
            k, v = cache.get_or_compute(lambda: project(self, query, key, value, batch_dim)[1:])
        alignment = "upper_left" if cache is None else "bottom_right"
        out, weights = self._attend(q, k, v, options, alignment)
        network = compat.children_of(self).get("head_network")  # from `nonlinear_heads`
        if network is not None:
            out = network(out)
        out = project_out(self, out, batch_dim)
        if not batched:
            out = out.squeeze(0)
            weights = None if weights is None else weights.squeeze(0)
        return out, weights

    def _attend(
        self,
        q: Tensor,  # [N, H, L, D]
        k: Tensor,  # [N, H, S, D]
        v: Tensor,  # [N, H, S, D]
        options: Options,
        causal_alignment: str,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend between the projections: out [N, H, L, D], weights [N, (H,) L, S'] or None."""
        key_padding_mask, attn_mask, block_mask, is_causal, need_weights, average = options
        dropout_p = self.dropout if self.training else 0.0
        if need_weights and dropout_p > 1:  # without weights, attention raises PyTorch's error
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
        if self._context is not None:
            masks = (key_padding_mask, attn_mask, is_causal, dropout_p, block_mask)
            return self._context.attend(q, k, v, *masks), None
        k_len = k.shape[2]
        k, v = self._append_rows(k, v)
        appended = k.shape[2] - k_len
        uses_causal = is_causal and attn_mask is None
        if is_causal and attn_mask is not None:
            # PyTorch would read the mask here; the hint can be used if the mask is really causal.
            # (A mask never hides appended keys, but a causal hint would.)
            trusts_hint = key_padding_mask is None and not need_weights
            uses_causal = trusts_hint or (appended == 0 and is_causal_mask(attn_mask))
        mask = merge_masks(
            key_padding_mask,
            None if uses_causal else attn_mask,
            batch=q.shape[0],
            num_heads=q.shape[1],
            q_len=q.shape[2],
            k_len=k_len,
            appended=appended,
        )
        relative_bias = compat.children_of(self).get("relative_bias")
        result = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout_p,
            window=(-1, 0) if uses_causal else None,  # as is_causal, but allows a mask
            relative_bias=None if relative_bias is None else relative_bias(),
            mask=block_mask,
            causal_alignment=causal_alignment,
            need_weights=bool(need_weights),
            average_weights=bool(need_weights and average),
        )
        return result if need_weights else (result, None)

    def _check_context(self) -> None:
        """Raise if an option of the module does not work on shards."""
        options = {"add_bias_kv": self.bias_k is not None, "add_zero_attn": self.add_zero_attn}
        options["relative_bias"] = "relative_bias" in compat.children_of(self)
        for name, enabled in options.items():
            if enabled:
                raise unsupported(name)

    def _check_context_call(self, query: Tensor, need_weights: bool, cache: Any = None) -> None:
        """Raise if a call is not supported under ``context_parallel``."""
        for feature, used in (
            ("need_weights=True", need_weights),
            ("a NestedTensor", query.is_nested),
            ("a cache", cache is not None),
        ):
            if used:
                raise unsupported(feature)

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor, batch_dim: int) -> None:
        """Raise PyTorch's errors for widths, lengths and batches that do not fit."""
        if query.shape[-1] != self.embed_dim:
            raise AssertionError(
                f"was expecting embedding dimension of {self.embed_dim}, but got {query.shape[-1]}"
            )
        is_joint = self._qkv_same_embed_dim
        shared_dims = 3 if is_joint else 2  # of separate projections, the widths may differ
        if key.shape[:shared_dims] != value.shape[:shared_dims]:
            # PyTorch's messages assume [S, N, E]
            k, v = (x.shape if batch_dim == 1 else x.transpose(0, 1).shape for x in (key, value))
            if is_joint:
                raise AssertionError(f"key shape {k} does not match value shape {v}")
            raise AssertionError(
                f"key's sequence and batch dims {k[:2]} do not match value's {v[:2]}"
            )
        if key.shape[batch_dim] != query.shape[batch_dim]:
            raise RuntimeError(
                f"the batch size of key and value is {key.shape[batch_dim]}, that of query is "
                f"{query.shape[batch_dim]}; they must be equal"
            )

    def _append_rows(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the rows of ``add_bias_kv`` (learned) and ``add_zero_attn`` to [N, H, S, D]."""
        if (self.bias_k is None) != (self.bias_v is None):
            names = ("bias_k", "bias_v") if self.bias_v is None else ("bias_v", "bias_k")
            raise AssertionError("{} is set but {} is None".format(*names))
        return (
            append_rows(k, self.bias_k, self.add_zero_attn),
            append_rows(v, self.bias_v, self.add_zero_attn),
        )


def _add_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add a batch dimension of size 1; inputs that are the same tensor stay the same tensor."""
    q = query[None]
    k = q if key is query else key[None]
    return q, k, (k if value is key else value[None])
