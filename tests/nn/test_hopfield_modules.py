"""nn.Hopfield, nn.HopfieldPooling and nn.HopfieldLayer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import nn


def plain(module: nn.Hopfield, stored: Tensor, state: Tensor, value: Tensor, steps: int) -> Tensor:
    """The association of a module with all of its projections, by the equations."""
    core, heads = module.association_core, module.association_core.num_heads
    assert module.norm_stored_pattern is not None
    assert module.norm_state_pattern is not None
    assert module.norm_pattern_projection is not None
    x = (module.norm_state_pattern(state), module.norm_stored_pattern(stored),
         module.norm_pattern_projection(value))  # fmt: skip
    if core.in_proj_weight is not None:
        weights = core.in_proj_weight.split(heads * core.head_dim)
    else:
        weights = (core.q_proj_weight, core.k_proj_weight, core.v_proj_weight)
    at, parts = 0, []
    for t, w in zip(x, weights, strict=True):
        parts.append(F.linear(t, w, core.in_proj_bias[at : at + len(w)]))
        at += len(w)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in parts)
    beta = module.scaling
    beta = beta.view(-1, 1, 1) if isinstance(beta, Tensor) else beta
    for _ in range(steps):
        q = torch.softmax(beta * q @ k.mT, -1) @ k
    out = (torch.softmax(beta * q @ k.mT, -1) @ v).transpose(1, 2).flatten(2)
    return F.linear(out, core.out_proj.weight, core.out_proj.bias)


def made(kind: type = nn.Hopfield, *args: Any, **options: Any) -> Any:
    """A module with large parameters, so that errors show."""
    torch.manual_seed(1)
    module = kind(*args, **options, dtype=torch.float64)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_heads": 2, "hidden_size": 5},
        {"num_heads": 2, "pattern_size": 7, "output_size": 3, "hidden_size": 4},
        {"num_heads": 2, "scaling": torch.tensor([0.3, 1.0]).double()},
        {"stored_pattern_size": 5, "pattern_projection_size": 9, "num_heads": 4},
    ],
    ids=str,
)
def test_follows_the_equations(
    options: dict[str, Any], steps: int, normal: Callable[..., Tensor]
) -> None:
    limits = {"update_steps_max": steps, "update_steps_eps": 1e-300}
    module = made(nn.Hopfield, 8, **options, **limits)
    state = normal(2, 3, 8)
    stored = normal(2, 6, options.get("stored_pattern_size", 8))
    value = normal(2, 6, options.get("pattern_projection_size", 8))
    out = module((stored, state, value))
    torch.testing.assert_close(out, plain(module, stored, state, value, steps))
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_one_tensor_as_state_stored_and_value(normal: Callable[..., Tensor]) -> None:
    module, x = made(nn.Hopfield, 8, num_heads=2), normal(2, 5, 8)
    assert torch.equal(module(x), module((x, x, x)))


def test_batch_second(normal: Callable[..., Tensor]) -> None:
    x = normal(2, 5, 8)
    for kind, options in (
        (nn.Hopfield, {}),
        (nn.HopfieldPooling, {"quantity": 3}),
        (nn.HopfieldLayer, {"quantity": 7}),
    ):
        module = made(kind, 8, **options)
        other = made(kind, 8, **options, batch_first=False)
        keys = module.state_dict()
        other.load_state_dict(
            {
                n: x.transpose(0, 1) if n.endswith(("pooling_weights", "lookup_weights")) else x
                for n, x in keys.items()
            }
        )
        want, got = module(x), other(x.transpose(0, 1))
        torch.testing.assert_close(got if got.ndim == 2 else got.transpose(0, 1), want)


def test_static_patterns_belong_to_their_batch_entry(normal: Callable[..., Tensor]) -> None:
    """Every head sees all of a static pattern, of its own example."""
    off = dict.fromkeys(
        [
            f"normalize_{name}{affine}"
            for name in ("stored_pattern", "state_pattern", "pattern_projection")
            for affine in ("", "_affine")
        ],
        False,
    )
    static = dict.fromkeys(
        ["stored_pattern_as_static", "state_pattern_as_static", "pattern_projection_as_static"],
        True,
    )
    module = nn.Hopfield(
        num_heads=2, scaling=0.7, disable_out_projection=True, update_steps_max=2,
        update_steps_eps=1e-300, **off, **static,
    )  # fmt: skip
    assert not list(module.parameters())
    stored, state = normal(3, 6, 4), normal(3, 2, 4)
    xi = state
    for _ in range(3):
        xi = torch.softmax(0.7 * xi @ stored.mT, -1) @ stored
    torch.testing.assert_close(module((stored, state, stored)), torch.cat([xi, xi], -1))
    assert nn.Hopfield(disable_out_projection=True, **off, **static).scaling == 1.0


def test_connected_projection(normal: Callable[..., Tensor]) -> None:
    """V = (X W_K) W_V."""
    module = made(nn.Hopfield, 8, num_heads=2, pattern_projection_as_connected=True)
    core = module.association_core
    assert core.v_proj_weight.shape == (8, 8)
    stored, state = normal(2, 5, 8), normal(2, 3, 8)
    k = F.linear(
        module.norm_pattern_projection(stored), core.k_proj_weight, core.in_proj_bias[8:16]
    )
    v = F.linear(k, core.v_proj_weight, core.in_proj_bias[16:])
    got = module.get_projected_pattern_matrix((stored, state, stored))
    torch.testing.assert_close(got, v.unflatten(-1, (2, -1)).transpose(1, 2))


def test_normalized_space(normal: Callable[..., Tensor]) -> None:
    module = made(
        nn.Hopfield, 8, num_heads=2, normalize_hopfield_space=True,
        normalize_hopfield_space_affine=True,
    )  # fmt: skip
    assert module.association_core.p_norm_weight.shape == (4,)
    x = normal(2, 5, 8)
    q, k, _ = module.association_core.project(x, x, x)
    bare = made(nn.Hopfield, 8, num_heads=2).association_core
    bare.load_state_dict(module.association_core.state_dict(), strict=False)
    weight, bias = module.association_core.p_norm_weight, module.association_core.p_norm_bias
    for got, raw in zip((q, k), bare.project(x, x, x)[:2], strict=True):
        torch.testing.assert_close(got, F.layer_norm(raw, (4,), weight, bias))


def test_appended_patterns(normal: Callable[..., Tensor]) -> None:
    """A learned one, which hflayers cannot append, and zeros; no mask hides them."""
    x = normal(2, 5, 8)
    module = made(nn.Hopfield, 8, num_heads=2, concat_bias_pattern=True, add_zero_association=True)
    padding = torch.ones(2, 5, dtype=torch.bool)
    matrix = module.get_association_matrix(x, padding)
    assert matrix.shape == (2, 2, 5, 7)
    assert not matrix[..., :5].any()
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 2, 5).double())


@pytest.mark.parametrize("steps", [0, None])
def test_masks(steps: int | None, normal: Callable[..., Tensor]) -> None:
    module = made(nn.Hopfield, 8, num_heads=2, update_steps_max=steps)
    x = normal(2, 5, 8)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    matrix = module.get_association_matrix(x, padding, mask)
    hidden = padding[:, None, None] | mask
    assert not matrix[hidden.expand_as(matrix)].any()
    floating = torch.zeros(5, 5).double().masked_fill(mask, -math.inf)
    torch.testing.assert_close(module(x, padding, floating), module(x, padding, mask))
    many = mask.expand(4, 5, 5)
    torch.testing.assert_close(module(x, padding.to(torch.uint8), many), module(x, padding, mask))
    poison = x.clone()
    poison[0, 3:] = math.nan
    clean = module((x, x[:, :3], x), padding)
    assert torch.equal(module((poison, x[:, :3], poison), padding), clean)
    padding[0] = True
    assert torch.isfinite(module(x, padding)).all()  # a fully masked row is 0, not NaN


def test_limits_of_each_head(normal: Callable[..., Tensor]) -> None:
    x = normal(2, 5, 8)
    tensors = {
        "update_steps_max": torch.tensor([0, 2]),
        "update_steps_eps": torch.tensor([1e-4, 1e-300], dtype=torch.float64),
    }
    module = made(nn.Hopfield, 8, num_heads=2, disable_out_projection=True, **tensors)
    out = module(x)
    for head, steps in enumerate((0, 2)):
        one = made(
            nn.Hopfield, 8, num_heads=2, disable_out_projection=True, update_steps_max=steps,
            update_steps_eps=1e-300,
        )  # fmt: skip
        assert torch.equal(out[..., 4 * head : 4 * head + 4], one(x)[..., 4 * head : 4 * head + 4])


def test_pooling(normal: Callable[..., Tensor]) -> None:
    module = made(nn.HopfieldPooling, 8, num_heads=2, quantity=3, output_size=5)
    assert module.pooling_weights.shape == (1, 3, 8)
    x = normal(2, 6, 8)
    out = module(x)
    assert out.shape == (2, 15)
    states = module.pooling_weights.expand(2, 3, 8)
    torch.testing.assert_close(out, module.hopfield((x, states, x)).flatten(1))
    assert module.get_association_matrix(x).shape == (2, 2, 3, 6)
    assert (module.quantity, module.output_size, module.batch_first) == (3, 5, True)
    frozen = nn.HopfieldPooling(8, trainable=False)
    assert not frozen.pooling_weights.requires_grad


@pytest.mark.parametrize("separated", [False, True])
def test_layer(separated: bool, normal: Callable[..., Tensor]) -> None:
    """One set of learned patterns for all of the batch, projected once."""
    module = made(
        nn.HopfieldLayer, 8, num_heads=2, quantity=7, update_steps_max=2,
        lookup_weights_as_separated=separated,
    )  # fmt: skip
    x = normal(3, 4, 8)
    stored = module.lookup_weights.expand(3, 7, 8)
    value = module.target_weights.expand(3, 7, 8) if separated else stored
    torch.testing.assert_close(module(x), module.hopfield((stored, x, value)))
    assert module.get_projected_pattern_matrix(x).shape == (1, 2, 7, 4)
    module(x).sum().backward()
    assert module.lookup_weights.grad is not None


def test_names_of_the_parameters() -> None:
    """Parameters have the names of a checkpoint of hflayers."""
    norms = [
        f"norm_{name}.{kind}"
        for name in ("stored_pattern", "state_pattern", "pattern_projection")
        for kind in ("weight", "bias")
    ]
    core = ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]
    want = {*norms, *(f"association_core.{name}" for name in core)}
    assert set(nn.Hopfield(8).state_dict()) == want
    separate = nn.Hopfield(8, stored_pattern_size=5).state_dict()
    assert {"association_core.q_proj_weight", "association_core.v_proj_weight"} <= set(separate)
    wrapped = {f"hopfield.{name}" for name in want}
    assert set(nn.HopfieldPooling(8).state_dict()) == {"pooling_weights", *wrapped}
    layer = nn.HopfieldLayer(8, lookup_weights_as_separated=True).state_dict()
    assert set(layer) == {"lookup_weights", "target_weights", *wrapped}


def test_arguments_by_position() -> None:
    names = list(inspect.signature(nn.Hopfield).parameters)
    assert names[:8] == [
        "input_size", "hidden_size", "output_size", "pattern_size", "num_heads", "scaling",
        "update_steps_max", "update_steps_eps",
    ]  # fmt: skip
    pooling = nn.HopfieldPooling(8, 4, 8, None, 2, None, 1, 1e-3, True, False)
    assert pooling.hopfield.norm_stored_pattern is not None
    assert pooling.hopfield.norm_stored_pattern.weight is None
    everything = (False,) * 12
    rest = (*everything, None, None, True, "relu", 0.1, True, False, False, False, 5, False)
    layer = nn.HopfieldLayer(8, 4, 8, None, 2, None, 1, 1e-3, False, True, *rest)
    assert layer.quantity == 5
    assert not layer.lookup_weights.requires_grad
    with pytest.raises(TypeError, match="multiple values for argument 'batch_first'"):
        nn.HopfieldPooling(8, 4, 8, None, 2, None, 1, 1e-3, *rest, batch_first=True)


def test_activation_and_dropout(normal: Callable[..., Tensor]) -> None:
    x = normal(2, 5, 8)
    plain_out = made(nn.Hopfield, 8)(x)
    torch.testing.assert_close(
        made(nn.Hopfield, 8, association_activation="relu")(x), plain_out.relu()
    )
    dropping = made(nn.Hopfield, 8, dropout=0.5)
    assert not torch.equal(dropping(x), dropping(x))
    assert torch.equal(dropping.eval()(x), plain_out)


def test_compiles_without_a_break(normal: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    module, x = (
        made(nn.Hopfield, 8, num_heads=2, update_steps_max=2),
        normal(2, 5, 8),
    )
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


BAD = [
    ((), {}, "input_size is needed"),
    ((7,), {"num_heads": 2}, "num_heads 2 must divide input_size 7"),
    ((8,), {"num_heads": 0}, "num_heads must be a positive integer"),
    ((8,), {"dropout": 2.0}, "dropout must be between 0 and 1"),
    ((8,), {"association_activation": "nonsense"}, "must be the name of a function of torch"),
    ((8,), {"scaling": torch.ones(3)}, r"scaling must be a number or \[num_heads\]"),
    ((8,), {"normalize_state_pattern": False}, "normalize_state_pattern_affine needs"),
    (
        (8,),
        {"pattern_projection_as_connected": True, "pattern_size": 3},
        "pattern_size must be hidden_size",
    ),
    (
        (8,),
        {"concat_bias_pattern": True, "stored_pattern_as_static": True},
        "concat_bias_pattern needs patterns that are not static",
    ),
]


@pytest.mark.parametrize(("args", "options", "message"), BAD)
def test_bad_arguments_are_named(args: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nn.Hopfield(*args, **options)
    with pytest.raises(ValueError, match="quantity must be a positive integer"):
        nn.HopfieldPooling(8, quantity=0)
