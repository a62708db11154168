"""``Hopfield``, ``HopfieldPooling`` and ``HopfieldLayer``, under the names of hflayers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastattn.nn._association import Association
from fastattn.nn._sizes import check_dropout, check_optional_sizes, check_sizes

_Input = Tensor | tuple[Tensor, ...]


class Hopfield(nn.Module):
    r"""The association of states with stored patterns by a continuous Hopfield network.

    .. math:: R = state \, W_Q, \quad X = stored \, W_K, \quad V = projection \, W_V, \qquad
              \xi \leftarrow X^T softmax(\beta X \xi), \quad out = V^T softmax(\beta X \xi) \, W_O

    (Hopfield Networks is All You Need, Ramsauer et al. 2021, https://arxiv.org/abs/2008.02217.)
    :math:`\xi` starts as a row of R and takes the steps of :func:`fastattn.hopfield_retrieve`.

    The arguments with their order and defaults, the parameters and the results are named as in
    hflayers (https://github.com/ml-jku/hopfield-layers), whose checkpoints load. docs/hopfield.md
    lists the intended differences.

    Args:
        input_size: the width of the states, and the default of all other widths.
        hidden_size: the width of a head of states and stored patterns; None is input_size /
            num_heads.
        output_size: the width of the result; None is input_size.
        pattern_size: the width of a head of the projection; None is hidden_size.
        num_heads: the number of heads.
        scaling: beta, a number or a tensor [num_heads]; None is 1 / sqrt(hidden_size), or 1 if
            nothing is projected.
        update_steps_max, update_steps_eps: as for ``hopfield_retrieve``, or a tensor [num_heads];
            None or a negative number of steps means no limit.
        normalize_stored_pattern, normalize_state_pattern, normalize_pattern_projection: apply a
            layer norm to these; ``_affine`` adds learned scales, ``_eps`` is its epsilon.
        normalize_hopfield_space: apply a layer norm to every head of R and X.
        stored_pattern_as_static, state_pattern_as_static, pattern_projection_as_static: skip the
            projection: every head gets the full input.
        pattern_projection_as_connected: V is a projection of X.
        stored_pattern_size, pattern_projection_size: their widths; None is input_size.
        batch_first: [N, L, E], else [L, N, E].
        association_activation: the name of a function of ``torch`` applied to the result, such as
            "relu".
        dropout: the probability of dropping an association in training, in the final reading.
        input_bias: add biases to all projections.
        concat_bias_pattern: append a learned pattern to the stored ones.
        add_zero_association: append a pattern of zeros.
        disable_out_projection: the result is the heads, [N, L, num_heads * pattern_size].
        stop, grad: as for ``hopfield_retrieve``.
        device, dtype: of the parameters.

    Raises:
        ValueError: incompatible arguments.
    """

    norm_stored_pattern: nn.LayerNorm | None
    norm_state_pattern: nn.LayerNorm | None
    norm_pattern_projection: nn.LayerNorm | None

    def __init__(
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        scaling: float | Tensor | None = None,
        update_steps_max: int | Tensor | None = 0,
        update_steps_eps: float | Tensor = 1e-4,
        normalize_stored_pattern: bool = True,
        normalize_stored_pattern_affine: bool = True,
        normalize_stored_pattern_eps: float = 1e-5,
        normalize_state_pattern: bool = True,
        normalize_state_pattern_affine: bool = True,
        normalize_state_pattern_eps: float = 1e-5,
        normalize_pattern_projection: bool = True,
        normalize_pattern_projection_affine: bool = True,
        normalize_pattern_projection_eps: float = 1e-5,
        normalize_hopfield_space: bool = False,
        normalize_hopfield_space_affine: bool = False,
        normalize_hopfield_space_eps: float = 1e-5,
        stored_pattern_as_static: bool = False,
        state_pattern_as_static: bool = False,
        pattern_projection_as_static: bool = False,
        pattern_projection_as_connected: bool = False,
        stored_pattern_size: int | None = None,
        pattern_projection_size: int | None = None,
        batch_first: bool = True,
        association_activation: str | None = None,
        dropout: float = 0.0,
        input_bias: bool = True,
        concat_bias_pattern: bool = False,
        add_zero_association: bool = False,
        disable_out_projection: bool = False,
        *,
        stop: str = "query",
        grad: str = "unroll",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads)
        check_optional_sizes(
            input_size=input_size,
            hidden_size=hidden_size,
            output_size=output_size,
            pattern_size=pattern_size,
            stored_pattern_size=stored_pattern_size,
            pattern_projection_size=pattern_projection_size,
        )
        check_dropout(dropout)
        for name, limit in (
            ("scaling", scaling),
            ("update_steps_max", update_steps_max),
            ("update_steps_eps", update_steps_eps),
        ):
            if isinstance(limit, Tensor) and limit.shape != (num_heads,):
                raise ValueError(
                    f"{name} must be a number or [num_heads] = ({num_heads},), "
                    f"got {tuple(limit.shape)}"
                )
        self._activation = None
        if association_activation is not None:
            self._activation = getattr(torch, association_activation, None)
            if not callable(self._activation):
                raise ValueError(
                    "association_activation must be the name of a function of torch, "
                    f"got {association_activation!r}"
                )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.association_core = Association(
            embed_dim=input_size,
            num_heads=num_heads,
            head_dim=hidden_size,
            pattern_dim=pattern_size,
            out_dim=output_size,
            kdim=stored_pattern_size,
            vdim=pattern_projection_size,
            dropout=dropout,
            bias=input_bias,
            add_bias_kv=concat_bias_pattern,
            add_zero_attn=add_zero_association,
            disable_out_projection=disable_out_projection,
            key_as_static=stored_pattern_as_static,
            query_as_static=state_pattern_as_static,
            value_as_static=pattern_projection_as_static,
            value_as_connected=pattern_projection_as_connected,
            normalize_pattern=normalize_hopfield_space,
            normalize_pattern_affine=normalize_hopfield_space_affine,
            normalize_pattern_eps=normalize_hopfield_space_eps,
            factory=factory,
        )
        stored_size = input_size if stored_pattern_size is None else stored_pattern_size
        projection_size = input_size if pattern_projection_size is None else pattern_projection_size
        norms = (
            (
                "stored_pattern",
                stored_size,
                normalize_stored_pattern,
                normalize_stored_pattern_affine,
                normalize_stored_pattern_eps,
            ),
            (
                "state_pattern",
                input_size,
                normalize_state_pattern,
                normalize_state_pattern_affine,
                normalize_state_pattern_eps,
            ),
            (
                "pattern_projection",
                projection_size,
                normalize_pattern_projection,
                normalize_pattern_projection_affine,
                normalize_pattern_projection_eps,
            ),
        )
        for name, size, enabled, affine, eps in norms:
            if affine and not enabled:
                raise ValueError(f"normalize_{name}_affine needs normalize_{name}")
            if enabled and size is None:
                raise ValueError(f"normalize_{name} needs the width of its input")
            norm = (
                nn.LayerNorm(size, eps, affine, **factory) if enabled and size is not None else None
            )
            setattr(self, f"norm_{name}", norm)
        if normalize_hopfield_space_affine and not normalize_hopfield_space:
            raise ValueError("normalize_hopfield_space_affine needs normalize_hopfield_space")

        core = self.association_core
        if scaling is None:
            scaling = 1.0 if core.static_execution else (core.head_dim or 1) ** -0.5
        self.scaling, self.batch_first = scaling, batch_first
        self.update_steps_max, self.update_steps_eps = update_steps_max, update_steps_eps
        self.stop, self.grad = stop, grad
        self.stored_pattern_dim, self.state_pattern_dim = core.kdim, core.embed_dim
        self.pattern_projection_dim, self.input_size = core.vdim, core.embed_dim
        self.hidden_size, self.output_size = core.head_dim, core.out_dim
        self.pattern_size = core.pattern_dim

    def reset_parameters(self) -> None:
        """Draw all parameters again."""
        norms = (self.norm_stored_pattern, self.norm_state_pattern, self.norm_pattern_projection)
        for module in (self.association_core, *norms):
            if module is not None:
                module.reset_parameters()

    def _normalize_inputs(self, input: _Input) -> tuple[Tensor, Tensor, Tensor]:
        """Check the inputs; return stored, state and projection, batch first and normalized."""
        if isinstance(input, Tensor):
            input = (input, input, input)
        if len(input) != 3:
            raise ValueError(
                "input must be one tensor, or (stored_pattern, state_pattern, pattern_projection), "
                f"got {len(input)} tensors"
            )
        stored, state, value = input if self.batch_first else [x.transpose(0, 1) for x in input]
        for name, x in (
            ("stored_pattern", stored),
            ("state_pattern", state),
            ("pattern_projection", value),
        ):
            if x.ndim != 3:
                raise ValueError(f"{name} must have 3 dimensions, got shape {tuple(x.shape)}")
        if self.norm_stored_pattern is not None:
            stored = self.norm_stored_pattern(stored)
        if self.norm_state_pattern is not None:
            state = self.norm_state_pattern(state)
        if self.norm_pattern_projection is not None:
            value = self.norm_pattern_projection(value)
        return stored, state, value

    def _associate(
        self, input: _Input, padding: Tensor | None, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Retrieve with the module's limits; return the result, and the weights or None."""
        return self.association_core(
            *self._normalize_inputs(input),
            padding,
            mask,
            self.scaling,
            self.update_steps_max,
            self.update_steps_eps,
            self.stop,
            self.grad,
            need_weights,
        )

    def forward(
        self,
        input: _Input,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the result, [N, L, output_size].

        Args:
            input: (stored_pattern [N, S, E_k], state_pattern [N, L, E], pattern_projection [N, S,
                E_v]), or one tensor for all three. The batch of stored_pattern and
                pattern_projection may be 1: the same for all.
            stored_pattern_padding_mask: [N, S], True is ignored.
            association_mask: [L, S] or [N * num_heads, L, S]; True is not allowed, floating is
                added.
        """
        out = self._associate(input, stored_pattern_padding_mask, association_mask, False)[0]
        out = out if self.batch_first else out.transpose(0, 1)
        return out if self._activation is None else self._activation(out)

    def get_association_matrix(
        self,
        input: _Input,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor | None:
        """Return the associations [N, num_heads, L, S], without a gradient."""
        with torch.no_grad():
            return self._associate(input, stored_pattern_padding_mask, association_mask, True)[1]

    def get_projected_pattern_matrix(
        self,
        input: _Input,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the projected values, [N, num_heads, S, pattern_size], without a gradient."""
        with torch.no_grad():
            core = self.association_core
            _, k, v = core.project(*self._normalize_inputs(input))
            return core._append_rows(k, v)[1]


class _LearnedInput(nn.Module):
    """A ``Hopfield`` with one learned input."""

    def __init__(self, quantity: int, options: dict[str, Any], *positional: Any) -> None:
        super().__init__()
        self.hopfield, self.quantity = Hopfield(*positional, **options), quantity

    def __getattr__(self, name: str) -> Any:
        """Read attributes that hflayers has on this module from the inner one."""
        if name in _INNER_ATTRIBUTES:
            return getattr(self.hopfield, name)
        return super().__getattr__(name)

    def _new_input(self, width: int, trainable: bool, options: dict[str, Any]) -> nn.Parameter:
        """Return a learned input, [1, quantity, width] or [quantity, 1, width]."""
        leading = (1, self.quantity) if self.hopfield.batch_first else (self.quantity, 1)
        factory = {"device": options.get("device"), "dtype": options.get("dtype")}
        parameter = torch.empty(*leading, width, **factory)
        return nn.Parameter(nn.init.normal_(parameter, std=0.02), requires_grad=trainable)

    def reset_parameters(self) -> None:
        """Draw all parameters again."""
        self.hopfield.reset_parameters()
        for learned in self.parameters(recurse=False):
            nn.init.normal_(learned, std=0.02)

    def _complete_inputs(self, input: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the inner module, (stored, state, projection), from the caller's."""
        raise NotImplementedError

    def get_association_matrix(
        self,
        input: _Input,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor | None:
        """Return the associations [N, num_heads, L, S], without a gradient."""
        masks = (stored_pattern_padding_mask, association_mask)
        return self.hopfield.get_association_matrix(self._complete_inputs(input), *masks)

    def get_projected_pattern_matrix(
        self,
        input: _Input,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the projected values, [N, num_heads, S, pattern_size], without a gradient."""
        return self.hopfield.get_projected_pattern_matrix(self._complete_inputs(input))


_INNER_ATTRIBUTES = frozenset(
    "batch_first scaling stored_pattern_dim state_pattern_dim pattern_projection_dim input_size "
    "hidden_size output_size pattern_size update_steps_max update_steps_eps".split()
)


class HopfieldPooling(_LearnedInput):
    """Pool a bag of patterns by learned states: :class:`Hopfield` with ``quantity`` states.

    Args:
        input_size, ...: as for :class:`Hopfield`, in the order of hflayers; pass the arguments
            after ``update_steps_eps`` by name.
        quantity: the number of learned states.
        trainable: whether they are learned.

    Attributes:
        pooling_weights: [1, quantity, E] ([quantity, 1, E] without ``batch_first``).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        scaling: float | Tensor | None = None,
        update_steps_max: int | Tensor | None = 0,
        update_steps_eps: float | Tensor = 1e-4,
        *positional: Any,
        quantity: int = 1,
        trainable: bool = True,
        **options: Any,
    ) -> None:
        options, quantity, trainable = _name_arguments(positional, options, quantity, trainable)
        sizes = input_size, hidden_size, output_size, pattern_size, num_heads
        limits = scaling, update_steps_max, update_steps_eps
        super().__init__(quantity, options, *sizes, *limits)
        core = self.hopfield.association_core
        width = core.head_dim if core.query_as_static else core.embed_dim
        width = input_size if width is None else width
        self.pooling_weights = self._new_input(width, trainable, options)

    def _complete_inputs(self, input: _Input) -> tuple[Tensor, Tensor, Tensor]:
        """Add the learned states, as the state patterns."""
        stored, value = (input, input) if isinstance(input, Tensor) else input
        batch = stored.shape[0 if self.batch_first else 1]
        sizes = (batch, -1, -1) if self.batch_first else (-1, batch, -1)
        return stored, self.pooling_weights.expand(sizes), value

    def forward(
        self,
        input: _Input,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """Return [N, quantity * output_size] for patterns [N, S, E], or (stored, projection)."""
        masks = (stored_pattern_padding_mask, association_mask)
        out = self.hopfield(self._complete_inputs(input), *masks)
        return (out if self.batch_first else out.transpose(0, 1)).flatten(1)


class HopfieldLayer(_LearnedInput):
    """Look up learned patterns: :class:`Hopfield` with ``quantity`` learned stored patterns.

    Args:
        input_size, ...: as for :class:`Hopfield`, in the order of hflayers; pass the arguments
            after ``lookup_targets_as_trainable`` by name.
        lookup_weights_as_separated: the values are a separate parameter, not the stored patterns.
        lookup_targets_as_trainable: whether the values are learned.
        quantity: the number of stored patterns.
        trainable: whether they are learned.

    Attributes:
        lookup_weights: [1, quantity, E] ([quantity, 1, E] without ``batch_first``).
        target_weights: as ``lookup_weights``, for the values; or None.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        scaling: float | Tensor | None = None,
        update_steps_max: int | Tensor | None = 0,
        update_steps_eps: float | Tensor = 1e-4,
        lookup_weights_as_separated: bool = False,
        lookup_targets_as_trainable: bool = True,
        *positional: Any,
        quantity: int = 1,
        trainable: bool = True,
        **options: Any,
    ) -> None:
        options, quantity, trainable = _name_arguments(positional, options, quantity, trainable)
        sizes = input_size, hidden_size, output_size, pattern_size, num_heads
        limits = scaling, update_steps_max, update_steps_eps
        super().__init__(quantity, options, *sizes, *limits)
        core = self.hopfield.association_core
        width = core.head_dim if core.key_as_static else core.kdim
        width = input_size if width is None else width
        self.lookup_weights = self._new_input(width, trainable, options)
        self.target_weights = None
        if lookup_weights_as_separated:
            value_width = options.get("pattern_projection_size")
            value_width = width if value_width is None else value_width
            self.target_weights = self._new_input(value_width, lookup_targets_as_trainable, options)

    def _complete_inputs(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add the learned patterns, which are stored; the input holds the states."""
        stored = self.lookup_weights  # shared by the batch, so it is projected once
        return stored, input, stored if self.target_weights is None else self.target_weights

    def forward(
        self,
        input: Tensor,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """Return [N, L, output_size] for states [N, L, E]."""
        masks = (stored_pattern_padding_mask, association_mask)
        return self.hopfield(self._complete_inputs(input), *masks)


# The arguments that hflayers takes by position after the arguments named above.
_POSITIONAL_NAMES = tuple(
    "normalize_stored_pattern normalize_stored_pattern_affine normalize_state_pattern "
    "normalize_state_pattern_affine normalize_pattern_projection "
    "normalize_pattern_projection_affine normalize_hopfield_space normalize_hopfield_space_affine "
    "stored_pattern_as_static state_pattern_as_static pattern_projection_as_static "
    "pattern_projection_as_connected stored_pattern_size pattern_projection_size batch_first "
    "association_activation dropout input_bias concat_bias_pattern add_zero_association "
    "disable_out_projection quantity trainable".split()
)


def _name_arguments(
    positional: tuple[Any, ...], options: dict[str, Any], quantity: int, trainable: bool
) -> tuple[dict[str, Any], int, bool]:
    """Add the arguments that hflayers takes by position to ``options``, by their names."""
    if len(positional) > len(_POSITIONAL_NAMES):
        raise TypeError(f"{len(positional) - len(_POSITIONAL_NAMES)} too many positional arguments")
    by_name = dict(zip(_POSITIONAL_NAMES, positional))  # noqa: B905  (see checks.expands_to)
    duplicates = by_name.keys() & options.keys()
    if duplicates:
        raise TypeError(f"got multiple values for argument {sorted(duplicates)[0]!r}")
    quantity, trainable = by_name.pop("quantity", quantity), by_name.pop("trainable", trainable)
    check_sizes(quantity=quantity)
    return by_name | options, quantity, trainable
