"""``torch.onnx.export``: the graph has PyTorch's operators only, and runs without fastattn."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import fastattn
from fastattn import masks
from fastattn.bias import Decomposed2d, Disentangled

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore"),  # of the exporter
]
Inputs = tuple[Tensor, ...]
BATCH, LENGTH, KEYS = (torch.export.Dim(name) for name in ("batch", "length", "keys"))


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Any:
        return self.attend(x, x, x, key_padding_mask=padding)


class Functional(nn.Module):
    """Code that calls PyTorch's function, which ``accelerate`` serves, and a module."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.encode = nn.Linear(16, 48), nn.TransformerEncoderLayer(16, 2, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.encode(x)


def exported(
    model: nn.Module, inputs: Inputs, shapes: Any, dynamo: bool, from_graph: bool = False
) -> bytes:
    """The ONNX file of a model, by the exporter of TorchScript or of torch.export."""
    file = io.BytesIO()
    if from_graph:
        graph = torch.export.export(model, inputs, dynamic_shapes=shapes)
        assert any("fastattn" in str(node.target) for node in graph.graph.nodes)
        program: Any = torch.onnx.export(graph, dynamo=True, verbose=False)
        program.save(file)
    elif dynamo:
        program = torch.onnx.export(
            model, inputs, dynamo=True, dynamic_shapes=shapes, verbose=False
        )
        program.save(file)
    else:
        torch.onnx.export(model, inputs, file, dynamo=False)
    return file.getvalue()


def check(
    model: nn.Module,
    inputs: Inputs,
    *others: Inputs,
    shapes: Any = None,
    dynamo: bool = True,
    from_graph: bool = False,
) -> None:
    """The graph that is exported with the first inputs gives the model's results for all."""
    model.eval()
    content = exported(model, inputs, shapes, dynamo, from_graph)
    assert b"fastattn::" not in content
    session = onnxruntime.InferenceSession(content)
    names = [entry.name for entry in session.get_inputs()]
    for tensors in (inputs, *others):
        with torch.no_grad():
            results = model(*tensors)
        wanted = [results] if isinstance(results, Tensor) else list(results)
        given = {name: x.numpy() for name, x in zip(names, tensors, strict=True)}
        found = [torch.from_numpy(x) for x in session.run(None, given)]
        assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def heads(queries: int, keys: int, kv_heads: int = 4, batch: int = 2) -> Inputs:
    """Random queries, keys and values."""
    key, value = torch.randn(2, batch, kv_heads, keys, 8)
    return torch.randn(batch, 4, queries, 8), key, value


# With fixed sizes: the function, and its tensors.
CALLS: dict[str, tuple[Callable[..., Any], Sequence[Tensor]]] = {
    "attention": (fastattn.scaled_dot_product_attention, heads(5, 7)),
    "mask": (
        lambda q, k, v, m: fastattn.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
        (*heads(5, 7, 2), torch.tensor([True, True, False, True, False, True, True])),
    ),
    "options": (
        lambda q, k, v, m: fastattn.scaled_dot_product_attention(
            q,
            k,
            v,
            m,
            softcap=2.0,
            window=(3, 2),
            alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.2]),
            causal_alignment="bottom_right",
            return_lse=True,
        ),
        (*heads(5, 7), torch.randn(5, 7)),
    ),
    "disentangled": (
        lambda q, k, v, *terms: fastattn.scaled_dot_product_attention(
            q, k, v, relative_bias=Disentangled(*terms, 20), causal_alignment="bottom_right"
        ),
        (*heads(5, 7), *torch.randn(2, 9, 4, 8), *torch.randn(2, 4, 8)),
    ),
    "decomposed2d": (
        lambda q, k, v, *sides: fastattn.scaled_dot_product_attention(
            q, k, v, relative_bias=Decomposed2d(*sides)
        ),
        (*heads(5, 6), torch.randn(2, 4, 5, 3), torch.randn(2, 4, 5, 2)),
    ),
    "additive": (
        lambda q, k, v: fastattn.additive_attention(q, k, k, v),
        (torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(8)),
    ),
    "local": (
        lambda q, k, p: fastattn.luong_attention(
            q, k, k, method="dot", window="local-p", D=2, positions=p
        ),
        (torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.rand(2, 5) * 7),
    ),
    "hops": (
        lambda u, m: fastattn.memory_hop_attention(u, m, m, hops=3),
        (torch.randn(2, 5, 8), torch.randn(2, 7, 8)),
    ),
    "varlen": (
        lambda q, k, starts: fastattn.varlen_attention(q, k, k, starts, starts),
        (torch.randn(7, 2, 8), torch.randn(7, 2, 8), torch.tensor([0, 3, 7])),
    ),
    "varlen-disentangled": (
        lambda q, k, starts, *terms: fastattn.varlen_attention(
            q, k, k, starts, starts, relative_bias=Disentangled(*terms)
        ),
        (*torch.randn(2, 7, 2, 8), torch.tensor([0, 3, 7]), *torch.randn(2, 9, 2, 8)),
    ),
    "decode": (lambda q, k, v: fastattn.decode_attention(q, k, v, 5), heads(1, 9)),
    "flex": (
        lambda q, k, v, a, n: fastattn.flex_attention(
            *(q, k, v, lambda s, b, h, i, j: s * torch.tanh(a[n[j], h]) + (i * n[b]).abs() % 3),
            enable_gqa=True,
            return_lse=True,
        ),
        (*heads(5, 7, 2), torch.randn(7, 4), torch.tensor([2, -1, 5, 3, 0, 9, 1])),
    ),
    "sinusoidal": (fastattn.sinusoidal_encoding, (torch.randn(2, 5, 8),)),
}


@pytest.mark.complete
@pytest.mark.parametrize("name", CALLS)
def test_each_operator(name: str) -> None:
    function, tensors = CALLS[name]
    check(Calling(function), tuple(tensors))


@pytest.mark.complete
@pytest.mark.parametrize("name", CALLS.keys() - {"sinusoidal", "flex"})
def test_each_operator_in_a_graph(name: str) -> None:
    function, tensors = CALLS[name]
    check(Calling(function), tuple(tensors), from_graph=True)


@pytest.mark.complete
def test_causal_attention_of_grouped_heads_and_any_size() -> None:
    model = Calling(
        lambda q, k, v, m: fastattn.scaled_dot_product_attention(
            q, k, v, m, window=(-1, 0), enable_gqa=True
        )
    )
    shapes = ({0: BATCH, 2: LENGTH}, {0: BATCH, 2: KEYS}, {0: BATCH, 2: KEYS}, {3: KEYS})
    first, second = (
        (*heads(*size, 2, batch), torch.randn(1, 1, 1, size[1]) > -1)
        for size, batch in (((5, 7), 2), ((6, 9), 3))
    )
    check(model, first, second, shapes=(shapes,))


@pytest.mark.complete
@pytest.mark.parametrize("padded", [False, True])
def test_replaced_multihead_attention_of_any_size(padded: bool) -> None:
    model = SelfAttention()
    assert fastattn.replace_mha(model) == ["attend"]
    inputs = []
    for n in (5, 9):
        padding = torch.arange(n) >= torch.tensor([[n], [n - 2]])
        inputs.append((torch.randn(2, n, 16), padding)[: 1 + padded])
    sizes = {0: BATCH, 1: LENGTH}
    check(model, *inputs, shapes=(sizes, sizes) if padded else (sizes,))


@pytest.mark.complete
def test_an_encoder_of_any_size() -> None:
    layer = fastattn.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = fastattn.nn.TransformerEncoder(layer, 2)
    check(
        model, (torch.randn(2, 5, 16),), (torch.randn(3, 9, 16),), shapes=({0: BATCH, 1: LENGTH},)
    )


def test_an_accelerated_model() -> None:
    model = Functional()
    fastattn.accelerate(model)
    try:
        check(model, (torch.randn(2, 5, 16),), (torch.randn(2, 9, 16),), shapes=({1: LENGTH},))
    finally:
        fastattn.restore(model)


def test_a_graph_of_an_accelerated_model() -> None:
    model = Functional().eval()
    fastattn.accelerate(model)
    try:
        inputs = (torch.randn(2, 5, 16),), (torch.randn(2, 9, 16),)
        check(model, *inputs, shapes=({1: LENGTH},), from_graph=True)
    finally:
        fastattn.restore(model)


def test_the_exporter_that_traces() -> None:
    model = SelfAttention()
    fastattn.replace_mha(model)
    check(model, (torch.randn(2, 5, 16),), dynamo=False)


REFUSED: dict[str, tuple[Callable[..., Any], Inputs, str]] = {
    "dropout": (
        lambda q, k, v: fastattn.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
        heads(5, 7),
        "model.eval()",
    ),
    "masks": (
        lambda q, k, v: fastattn.scaled_dot_product_attention(
            q, k, v, mask=masks.causal() & masks.chunked(3)
        ),
        heads(5, 7),
        "fastattn.masks",
    ),
    "append": (
        lambda q, k, v, row: fastattn.decode_attention(q, k, v, 5, key=row, value=row),
        (*heads(1, 9), torch.randn(2, 4, 1, 8)),
        "cache",
    ),
    "hopfield": (
        lambda x, m: fastattn.hopfield_retrieve(x, m, update_steps_max=3),
        (torch.randn(2, 5, 8), torch.randn(2, 7, 8)),
        "steps",
    ),
}


REFUSED_GRAPHS = {
    **REFUSED,
    **{
        name: (*CALLS[name], "export the model instead of its graph")
        for name in ("sinusoidal", "flex")
    },
}


@pytest.mark.parametrize(
    ("name", "from_graph"),
    [(name, False) for name in REFUSED] + [(name, True) for name in REFUSED_GRAPHS],
)
def test_unsupported_exports_are_clear_errors(name: str, from_graph: bool) -> None:
    function, tensors, reason = REFUSED_GRAPHS[name]
    model = Calling(function)
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as caught:
        exported(model, tensors, None, True, from_graph)
    assert isinstance(caught.value.__cause__, RuntimeError)
    message = str(caught.value.__cause__)
    assert reason in message
    assert "fastattn.restore(model)" in message
