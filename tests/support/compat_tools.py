"""The modules and the tools of the library, for ``test_compat.py``."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from compat_cases import operators, rand, softmax_over
from torch import nn
from torch.testing import assert_close


def _layer() -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)


def a_layer_of_an_encoder() -> None:
    import fastattn as fa

    layer, x = _layer(), rand(2, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    parameters = list(layer.parameters())

    def run() -> Any:
        out = layer(x, src_key_padding_mask=padding)
        with torch.no_grad():
            inferred = layer.eval()(x)
        layer.train()
        return out, inferred, torch.autograd.grad(out.sin().sum(), parameters)

    expected = run()
    assert fa.replace_mha(layer) == ["self_attn"]
    assert isinstance(layer.self_attn, fa.MultiheadAttention)
    assert_close(run(), expected)
    assert fa.restore_mha(layer) == ["self_attn"]
    assert type(layer.self_attn) is nn.MultiheadAttention
    assert_close(run(), expected)


def a_layer_of_a_decoder() -> None:
    import fastattn as fa

    torch.manual_seed(0)
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    for norm_first in (False, True):
        stock = nn.TransformerDecoderLayer(8, 2, 16, norm_first=norm_first, **options)
        ours = fa.nn.TransformerDecoderLayer(8, 2, 16, norm_first=norm_first, **options)
        ours.load_state_dict(stock.state_dict())
        x, memory = rand(2, 5, 8), rand(2, 3, 8)
        assert_close(ours(x, memory), stock(x, memory))


def small_self_attention() -> None:
    import fastattn as fa

    torch.manual_seed(0)
    stock = nn.MultiheadAttention(16, 2, batch_first=True)
    ours = fa.MultiheadAttention(16, 2, batch_first=True)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 9, 16)
    with torch.no_grad():
        assert_close(ours(x, x, x, need_weights=False), stock(x, x, x, need_weights=False))


def linear_layers() -> None:
    from fastattn.nn.functional import linear

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, w, b = (torch.randn(*shape).to(dtype) for shape in ((512, 96), (192, 96), (192,)))
        leaves = [t.requires_grad_() for t in (x, w, b)]
        ours = linear(*leaves)
        wide = F.linear(*(t.detach().double() for t in (x, w, b)))
        close = {"rtol": 0.05, "atol": 0.05}  # the way is asked about, not the rounding
        assert_close(ours.double(), wide, **close)
        grads = torch.autograd.grad(ours.float().sum(), leaves)
        assert_close(grads[2].double(), torch.full((192,), 512.0).double(), **close)


def explained() -> None:
    from fastattn import cli

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["explain", "--shapes", "B=1,H=2,L=8,D=4"]) == 0
    assert "scaled_dot_product_attention" in printed.getvalue()


def recorded() -> None:
    from fastattn.bench import record

    with record() as recording:
        for name in ("sdpa", "additive", "hops"):
            ours, _, leaves = operators()[name]
            ours(*(x.float() for x in leaves))
    assert len(recording.lines) == 3, recording.lines


def captured() -> None:
    import fastattn as fa

    layer, x = _layer(), rand(2, 5, 8)
    with fa.capture(layer) as weights:
        layer(x)
    assert list(weights) == ["self_attn"]


def a_mask_for_transformers() -> None:
    from fastattn.integrations.transformers._masks import StructuredMask
    from fastattn.integrations.transformers._patterns import Pattern

    padding = torch.tensor([[True, True, True, True], [False, True, True, True]])
    pattern = Pattern(left=2, right=0)
    mask = StructuredMask((2, 1, 3, 4), pattern, 1, padding, torch.device("cpu"))
    distance = torch.arange(3)[:, None] + 1 - torch.arange(4)
    expected = (distance >= 0) & (distance <= 2) & padding[:, None, None]
    assert mask.shape == expected.shape
    assert_close(mask & True, expected)
    assert_close(torch.cat([mask.detach(), mask]), torch.cat([expected, expected]))


def a_mask_of_a_function() -> None:
    """One that indexes with scalar tensors, as functions for FlexAttention do."""
    from fastattn import masks, scaled_dot_product_attention

    document, seen = torch.arange(6) // 4, rand(2, 8, 6, 6) > 0
    mask = masks.from_function(
        lambda b, h, q, k: (document[q] == document[k - 1]) & seen[b, 7, q][k] | seen[0, 3, k, q],
        2, None, 6, 6,
    )  # fmt: skip
    neighbours = document[:, None] == document[torch.arange(6) - 1]
    pairs = neighbours & seen[:, 7] | seen[0, 3].mT
    query = rand(2, 3, 6, 8)
    assert_close(
        scaled_dot_product_attention(query, query, query, mask=mask),
        F.scaled_dot_product_attention(query, query, query, pairs[:, None]),
    )


def a_step_on_a_cache_of_fp8(step: Callable[..., Any] | None = None) -> None:
    """Of entries, and of pages of three rows: one more row of each of two sequences."""
    import fastattn as fa

    query, key, value = (rand(2, 2, 1, 4, seed=n).float() for n in range(3))
    filled, lengths = rand(2, 2, 2, 6, 4).clamp(-2, 2).float(), torch.tensor([2, 4])
    seen = torch.arange(6) <= lengths[:, None, None, None]
    for name in ("cache_batch_idx", "block_table"):
        rows = [x.to(torch.float8_e4m3fn) for x in filled]  # of both sequences in order
        given: dict[str, Any] = {name: torch.tensor([1, 0])}
        caches = [torch.stack([x[1], x[0]]) for x in rows]
        if name == "block_table":
            given[name] = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
            caches = [x.unflatten(2, (2, 3)).transpose(1, 2).flatten(0, 1) for x in rows]
        scales = [torch.ones(x.shape[:3]) for x in caches]
        given |= {"key": key, "value": value, "key_scales": scales[0], "value_scales": scales[1]}
        out = (step or fa.decode_attention)(query, *caches, lengths, **given)
        found = []
        for x, of_x, new in zip(caches, scales, (key, value), strict=True):
            whole = x.float() * of_x[..., None]
            if name == "block_table":
                whole = whole.unflatten(0, (2, 2)).transpose(1, 2).flatten(2, 3)
            else:
                whole = torch.stack([whole[1], whole[0]])
            written = torch.stack([whole[b, :, n, None] for b, n in enumerate(lengths.tolist())])
            assert_close(written, new, rtol=1 / 16, atol=0.01)
            found.append(whole)
        assert_close(out, softmax_over(query @ found[0].mT / 2, found[1], seen))


def a_step_of_the_reference_on_a_cache_of_fp8() -> None:
    import fastattn as fa

    with fa.use_backend("reference"):
        a_step_on_a_cache_of_fp8()


def a_compiled_step_on_a_cache_of_fp8() -> None:
    import fastattn as fa

    torch.compiler.reset()
    step = torch.compile(fa.decode_attention, backend="aot_eager", fullgraph=True)
    a_step_on_a_cache_of_fp8(step)


TOOLS: list[Callable[[], None]] = [
    a_layer_of_an_encoder,
    a_layer_of_a_decoder,
    small_self_attention,
    linear_layers,
    explained,
    recorded,
    captured,
    a_mask_for_transformers,
    a_mask_of_a_function,
    a_step_on_a_cache_of_fp8,
    a_step_of_the_reference_on_a_cache_of_fp8,
]
SLOW_TOOLS: list[Callable[[], None]] = [a_compiled_step_on_a_cache_of_fp8]
