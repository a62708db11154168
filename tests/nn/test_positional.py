"""The modules that add positions."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastattn import sinusoidal_encoding
from fastattn.nn import LearnedPositionalEncoding, SinusoidalPositionalEncoding


@pytest.fixture
def x(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 5, 8, generator=generator)


def modules(**options: Any) -> list[nn.Module]:
    """Both positional encodings, of width 8."""
    return [
        SinusoidalPositionalEncoding(8, **options),
        LearnedPositionalEncoding(40, 8, **options),
    ]


def test_sinusoidal_passes_its_options_on(backend: str, x: Tensor) -> None:
    for options in (
        {},
        {"layout": "marian", "max_timescale": 50.0},
        {"scale": 3.0, "padding_idx": 2},
    ):
        got = SinusoidalPositionalEncoding(8, **options)(x, offset=1)  # type: ignore[arg-type]
        assert torch.equal(got, sinusoidal_encoding(x, offset=1, **options))  # type: ignore[arg-type]


def test_learned_adds_the_rows_of_its_weight(x: Tensor) -> None:
    module = LearnedPositionalEncoding(40, 8)
    assert torch.equal(module(x), x + module.weight[:5])
    assert torch.equal(module(x, offset=35), x + module.weight[35:])
    positions = torch.randint(40, (2, 5))
    assert torch.equal(module(x, positions=positions), x + module.weight[positions])
    per_sequence = module(x, offset=torch.tensor([3, 9]))
    assert torch.equal(per_sequence[0], x[0] + module.weight[3:8])
    assert torch.equal(per_sequence[1], x[1] + module.weight[9:14])


def test_scale(x: Tensor) -> None:
    for scale, factor in ((None, 1.0), (2.0, 2.0), ("sqrt_dim", math.sqrt(8))):
        for module in modules(scale=scale):
            difference = module(x) - module(torch.zeros_like(x))
            torch.testing.assert_close(difference, x * factor)


def test_batch_second_is_the_transpose(x: Tensor) -> None:
    torch.manual_seed(0)
    first = modules()
    torch.manual_seed(0)
    second = modules(batch_first=False)
    positions = torch.randint(40, (2, 5))
    calls: list[dict[str, Any]] = [
        {},
        {"offset": 4},
        {"offset": torch.tensor([1, 6])},
        {"positions": positions[0]},
        {"positions": positions},
    ]
    for a, b in zip(first, second, strict=True):
        for call in calls:
            want = a(x, **call)
            if call.get("positions") is positions:
                call = {"positions": positions.T}
            assert torch.equal(b(x.transpose(0, 1), **call).transpose(0, 1), want)


def test_one_sequence(x: Tensor) -> None:
    for batch_first in (True, False):
        for module in modules(batch_first=batch_first):
            batch = x[:1] if batch_first else x[:1].transpose(0, 1)
            for call in ({"offset": 2}, {"positions": torch.tensor([3, 1, 4, 1, 5])}):
                assert torch.equal(module(x[0], **call), module(batch, **call).view(5, 8))


def test_dropout_in_training_only(x: Tensor) -> None:
    for module in modules(dropout=0.5):
        assert 0 < int((module(x) == 0).sum()) < x.numel()
        module.eval()
        assert not (module(x) == 0).any()


def test_state(x: Tensor) -> None:
    sinusoidal, learned = modules()
    assert not sinusoidal.state_dict()
    assert list(learned.state_dict()) == ["weight"]
    learned.load_state_dict(nn.Embedding(40, 8).state_dict())
    for module in (sinusoidal, learned):
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(twin(x), module(x))


def test_follows_the_dtype(x: Tensor) -> None:
    for module in modules():
        assert module.double()(x.double()).dtype == torch.float64
        assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_learned_initialisation() -> None:
    torch.manual_seed(0)
    module = LearnedPositionalEncoding(500, 64, padding_idx=3)
    assert not module.weight[3].any()
    assert abs(float(module.weight.detach().std()) - 0.02) < 1e-3


def test_learned_gradients(x: Tensor) -> None:
    module = LearnedPositionalEncoding(6, 8, padding_idx=1, scale=3.0).double()
    x = x.double().requires_grad_()
    positions = torch.tensor([[2, 3, 4, 1, 1], [2, 2, 2, 5, 1]])
    module(x, positions=positions).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    assert module.weight.grad is not None
    assert module.weight.grad[:, 0].tolist() == [0, 0, 4, 1, 1, 1]


def test_learned_names_the_end_of_the_table(x: Tensor) -> None:
    module = LearnedPositionalEncoding(6, 8)
    module(x, offset=1)
    with pytest.raises(IndexError, match="positions 2 to 6 are needed, but num_embeddings is 6"):
        module(x, offset=2)
    with pytest.raises(IndexError, match="positions -1 to 3 are needed"):
        module(x, offset=-1)
    for wrong in (6, -1):
        with pytest.raises(IndexError, match="negative or not below num_embeddings = 6"):
            module(x, positions=torch.tensor([0, 1, wrong, 3, 4]))


def test_errors(x: Tensor) -> None:
    for module in modules():
        for bad in (x[..., :7], x[0, 0], x[None]):
            with pytest.raises(ValueError, match="with d_model = 8, got shape"):
                module(bad)
        with pytest.raises(ValueError, match="exclude each other"):
            module(x, offset=1, positions=torch.arange(5))
    with pytest.raises(ValueError, match="layout must be one of"):
        SinusoidalPositionalEncoding(8, layout="sin")
    with pytest.raises(ValueError, match="max_timescale must be finite"):
        SinusoidalPositionalEncoding(8, max_timescale=0.0)
    with pytest.raises(
        ValueError, match="scale must be a number, None or \"sqrt_dim\", got 'sqrt'"
    ):
        SinusoidalPositionalEncoding(8, scale="sqrt")
    with pytest.raises(
        ValueError, match=r"padding_idx must be in \[0, num_embeddings = 4\), got 4"
    ):
        LearnedPositionalEncoding(4, 8, padding_idx=4)


def test_compiles_without_a_break(x: Tensor) -> None:
    positions = torch.randint(40, (2, 5))
    for module in modules(scale="sqrt_dim", batch_first=False):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        for call in ({"offset": 0}, {"offset": 7}, {"offset": 9}, {"positions": positions.T}):
            y = x.transpose(0, 1)
            torch.testing.assert_close(compiled(y, **call), module(y, **call))


def test_repr_shows_the_options() -> None:
    text = repr(SinusoidalPositionalEncoding(8, scale="sqrt_dim", padding_idx=1, layout="marian"))
    assert "8, scale=2.82843, batch_first=True, layout='marian', max_timescale=10000" in text
    assert "padding_idx=1" in text
    assert "40, 8, batch_first=True" in repr(LearnedPositionalEncoding(40, 8))
