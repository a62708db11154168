"""``MultiheadAttention`` under the compiler, export, ``torch.func``, tracing and autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from within_bound import assert_right

from fastattn import replace_mha, restore_mha
from fastattn.nn import MultiheadAttention

EMBED, HEADS = 16, 4
X = torch.randn(3, 6, EMBED, generator=torch.Generator().manual_seed(0))
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [True] + [False] * 5])
FUTURE = torch.ones(6, 6, dtype=torch.bool).triu(1)
CALLS: list[dict[str, Any]] = [
    {},
    {"need_weights": False},
    {"average_attn_weights": False, "attn_mask": FUTURE},
    {"key_padding_mask": PADDING, "need_weights": False},
    {"key_padding_mask": PADDING, "attn_mask": FUTURE, "is_causal": True},
]


class SelfAttention(nn.Module):
    """A model that calls an attention."""

    def __init__(self, attention: nn.Module, **keywords: Any) -> None:
        super().__init__()
        self.attention, self.keywords = attention, keywords

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, **self.keywords)[0]


@pytest.fixture
def fused() -> MultiheadAttention:
    torch.manual_seed(0)
    return MultiheadAttention(EMBED, HEADS, batch_first=True)


def close(got: Any, want: Any, tolerance: float = 1e-6) -> bool:
    """Whether two tuples of tensors are close."""
    return all(
        a is b or torch.allclose(a, b, atol=tolerance) for a, b in zip(got, want, strict=True)
    )


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "keywords",
    [pytest.param(k, marks=() if "attn_mask" in k else pytest.mark.complete) for k in CALLS],
    ids=lambda k: ",".join(k) or "plain",
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic: bool, keywords: dict[str, Any], fused: MultiheadAttention) -> None:
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    x, y = (X.clone().requires_grad_() for _ in range(2))
    want, got = fused(x, x, x, **keywords), compiled(y, y, y, **keywords)
    assert close(got, want)
    want[0].square().sum().backward()
    grads = [p.grad for p in fused.parameters()]
    fused.zero_grad()
    got[0].square().sum().backward()
    assert close([y.grad, *(p.grad for p in fused.parameters())], [x.grad, *grads], 1e-5)


@pytest.mark.complete
@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_with_inductor(fused: MultiheadAttention) -> None:
    compiled = torch.compile(fused, fullgraph=True)
    assert close(
        compiled(X, X, X, key_padding_mask=PADDING), fused(X, X, X, key_padding_mask=PADDING)
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_a_replaced_model_compiles_whole() -> None:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    replace_mha(model)
    with torch.no_grad():
        want = model(X, src_key_padding_mask=PADDING)
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(
            X, src_key_padding_mask=PADDING
        )
    assert close([got], [want], 1e-5)


def test_exports(fused: MultiheadAttention) -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        fused.eval(), (X, X, X), {"need_weights": False}, dynamic_shapes=None
    )
    assert close(program.module()(X, X, X, need_weights=False), fused(X, X, X, need_weights=False))

    dynamic = torch.export.export(SelfAttention(fused).eval(), (X,), dynamic_shapes=({0: batch},))
    wide = torch.cat([X, X])
    assert close([dynamic.module()(wide)], [fused(wide, wide, wide)[0]])


def test_functional_call_reads_the_given_parameters(fused: MultiheadAttention) -> None:
    other = MultiheadAttention(EMBED, HEADS, batch_first=True)
    nn.init.normal_(other.in_proj_bias)
    got = functional_call(fused, dict(other.named_parameters()), (X, X, X))
    assert close(got, other(X, X, X), 0)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"add_bias_kv": True}, {"kdim": EMBED, "vdim": EMBED}], ids=str
)
def test_autocast(options: dict[str, Any], masked: bool, need_weights: bool) -> None:
    """bfloat16 results, also with a float32 mask; float32 gradients."""
    stock = nn.MultiheadAttention(EMBED, HEADS, **options)
    fused = MultiheadAttention(EMBED, HEADS, **options)
    fused.load_state_dict(stock.state_dict())
    mask = torch.randn(3, 3) if masked else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, weights = fused(X, X, X, attn_mask=mask, need_weights=need_weights)
    assert out.dtype == torch.bfloat16
    assert weights is None or weights.dtype == torch.bfloat16
    out.float().square().sum().backward()
    got = {"out": out} | {name: p.grad for name, p in fused.named_parameters()}
    assert all(g.dtype == torch.float32 for name, g in got.items() if name != "out")
    wide = stock.double()

    def definition() -> dict[str, Tensor]:
        wide.zero_grad()
        x = X.double()
        with sdpa_kernel(SDPBackend.MATH):
            out, _ = wide(x, x, x, attn_mask=None if mask is None else mask.double())
        out.square().sum().backward()
        return {"out": out} | {name: p.grad.clone() for name, p in wide.named_parameters()}

    assert_right(got, definition, torch.bfloat16)


def test_a_leaf_for_symbolic_tracing(fused: MultiheadAttention) -> None:
    block = SelfAttention(fused, need_weights=False)
    traced = torch.fx.symbolic_trace(block)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["attention"]
    assert close([traced(X)], [block(X)], 0)


def test_torchscript_is_refused_with_advice_and_without_a_trace() -> None:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True)
    want = layer(X)
    replace_mha(layer)
    with pytest.raises(RuntimeError, match=r"restore_mha\(model\) first"):
        torch.jit.script(layer)
    assert isinstance(layer.self_attn, MultiheadAttention)
    restore_mha(layer)
    assert close([torch.jit.script(layer)(X)], [want])


def test_meta_tensors_have_shapes(fused: MultiheadAttention) -> None:
    x = torch.empty(3, 6, EMBED, device="meta")
    out, weights = MultiheadAttention(EMBED, HEADS, batch_first=True, device="meta")(x, x, x)
    assert (out.shape, weights.shape, out.device.type) == ((3, 6, EMBED), (3, 6, 6), "meta")


class Tagged(Tensor):
    """A subclass that changes nothing."""


def test_tensor_subclasses_pass(fused: MultiheadAttention) -> None:
    out, _ = fused(*(X.as_subclass(Tagged),) * 3)
    assert type(out) is Tagged
    assert close([out.as_subclass(Tensor)], [fused(X, X, X)[0]])
