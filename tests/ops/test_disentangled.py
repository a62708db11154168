"""Relative attention whose terms depend on the content: what the case table does not show."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fastattn import scaled_dot_product_attention, use_backend
from fastattn.backends.primitives import AttentionOptions
from fastattn.bias import Decomposed2d, Disentangled
from fastattn.ops._disentangled import distance_buckets
from fastattn.ops.sdpa import attention

pytestmark = pytest.mark.usefixtures("seeded")
WRONG: Any = Disentangled  # with arguments of other types
SIZES: dict[str, Any] = {"few": (6, 9, {}), "long": (70, 300, {"is_causal": True}),
         "last": (40, 130, {"causal_alignment": "bottom_right", "window": (50, 9)})}  # fmt: skip


def leaves(q_len: int, k_len: int, rows: int = 17, **like: Any) -> dict[str, Tensor]:
    """Operands, and the terms R [rows, Hkv, D], P [rows, Hq, D], u and v [Hq, D]."""
    shapes = {"query": (2, 4, q_len, 8), "key": (2, 2, k_len, 8), "value": (2, 2, k_len, 8),
              "R": (rows, 2, 8), "P": (rows, 4, 8), "u": (4, 8), "v": (4, 8)}  # fmt: skip
    like = {"dtype": torch.float64, "requires_grad": True, **like}
    return {name: torch.randn(shape, **like) for name, shape in shapes.items()}


def attend(x: dict[str, Tensor], bias: Any, mask: Any = None, **options: Any) -> Any:
    """Attention with a bias, and the log-sum-exp."""
    qkv = x["query"], x["key"], x["value"]
    return scaled_dot_product_attention(
        *qkv, mask, enable_gqa=True, relative_bias=bias, return_lse=True, **options
    )


def stored(x: dict[str, Tensor], limit: int | None, offset: int) -> Tensor:
    """The terms of all pairs, as a mask."""
    query, key = x["query"], x["key"].repeat_interleave(2, 1)
    d = torch.arange(query.shape[2])[:, None] + offset - torch.arange(key.shape[2])
    farthest = x["P"].shape[0] // 2
    at, back = (distance_buckets(s * d, farthest, limit).long() for s in (1, -1))
    table = x["R"].repeat_interleave(2, 1)
    terms = torch.einsum("hd,bhjd->bhj", x["u"], key)[:, :, None]
    terms = terms + torch.einsum("bhid,ijhd->bhij", query + x["v"][:, None], table[at])
    return (terms + torch.einsum("bhjd,ijhd->bhij", key, x["P"][back])) / math.sqrt(8)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("limit", [None, 40])
@pytest.mark.parametrize("name", SIZES)
def test_content_terms_equal_the_terms_of_all_pairs(
    backend: str, limit: int | None, name: str
) -> None:
    q_len, k_len, options = SIZES[name]
    x, results = leaves(q_len, k_len), []
    offset = k_len - q_len if "causal_alignment" in options else 0
    bias = Disentangled(x["R"], x["P"], x["u"], x["v"], limit)
    mask = stored(x, limit, offset)
    if options.get("is_causal"):
        mask = mask + torch.full((q_len, k_len), -math.inf).triu(1)
    others = {name: option for name, option in options.items() if name != "is_causal"}
    with use_backend(backend):
        for out, lse in (attend(x, bias, **options), attend(x, None, mask, **others)):
            loss = out.square().sum() + lse.sin().sum()
            results.append((out, lse, *torch.autograd.grad(loss, list(x.values()))))
    assert_close(*results)


@pytest.mark.parametrize("terms", ["R", "P", "R u", "P u", "R v"])
def test_each_term_is_optional(terms: str) -> None:
    x = leaves(20, 33)
    given: Any = [x[name] if name in terms.split() else None for name in "RPuv"]
    x |= {name: torch.zeros_like(x[name]) for name in "RPuv" if name not in terms.split()}
    out, _ = attend(x, Disentangled(*given))
    want, _ = attend(x, None, stored(x, None, 0))
    assert_close(out, want)


@pytest.mark.parametrize(("span", "limit"), [(256, 512), (16, 40), (4, 100), (8, 9)])
def test_the_logarithmic_map_equals_debertas(span: int, limit: int) -> None:
    deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    d = torch.arange(-3000, 3001)
    want = deberta.make_log_bucket_position(d, span, limit).long().clamp(-span, span) + span
    assert torch.equal(distance_buckets(d, span, limit).long(), want)


def test_bits_depend_on_neither_threads_nor_batch_mates(threads: Any) -> None:
    x = leaves(600, 600, 301, dtype=torch.float32)
    found = []
    for count, batch in ((1, slice(None)), (2, slice(None)), (2, slice(1))):
        part = {n: t[batch] if n in ("query", "key", "value") else t for n, t in x.items()}
        threads(count)
        out, _ = attend(part, Disentangled(x["R"], x["P"], x["u"], x["v"], 500))
        grads = torch.autograd.grad(out.square().sum(), list(part.values()))
        found.append((out, *grads))
    assert all(map(torch.equal, found[0], found[1]))
    assert torch.equal(found[0][0][:1], found[2][0])
    assert torch.equal(found[0][1][:1], found[2][1])


def test_gradients_have_the_dtypes_of_the_tables() -> None:
    x = leaves(9, 9, dtype=torch.bfloat16)
    tables: Any = {name: x[name].detach().float().requires_grad_() for name in "RPuv"}
    attend(x, Disentangled(*tables.values()))[0].sum().backward()
    for leaf in (*tables.values(), x["query"], x["key"]):
        assert leaf.grad is not None
        assert leaf.grad.dtype is leaf.dtype


def test_compiled_once_for_any_length() -> None:
    x = leaves(9, 9, dtype=torch.float32, requires_grad=False)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def call(x: dict[str, Tensor]) -> Tensor:
        return attend(x, Disentangled(x["R"], x["P"], max_distance=20))[0]

    for n in (5, 6, 9):
        part = {name: t[:, :, :n] if t.dim() == 4 else t for name, t in x.items()}
        assert_close(call(part), attend(part, Disentangled(x["R"], x["P"], max_distance=20))[0])


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (lambda x: Disentangled(), RuntimeError, "query_table or key_table.*without a table"),
        (lambda x: Disentangled(x["R"], x["P"][:15]), RuntimeError, "got 17 and 15"),
        (lambda x: Disentangled(x["R"][:16]), RuntimeError, r"query_t.*n odd, got \(16, 2, 8\)"),
        (lambda x: Disentangled(x["R"][:, :1]), RuntimeError, r"\(n, 4 or 2, 8\).*\(17, 1, 8\)"),
        (lambda x: Disentangled(key_table=x["P"][..., :7]), RuntimeError, "key_table .*shape"),
        (lambda x: Disentangled(x["R"], None, x["u"][0]), RuntimeError, r"content_bias.*\(4, 8\)"),
        (lambda x: Disentangled(None, x["P"], None, x["v"]), RuntimeError, "needs query_table"),
        (lambda x: Disentangled(x["R"], max_distance=5), ValueError, "int above 5.*got 5 and 17"),
        (lambda x: WRONG(x["R"], max_distance=9.0), ValueError, "got 9.0"),
        (lambda x: Disentangled(x["R"].half()), RuntimeError, "query_table .*got float16"),
        (lambda x: Disentangled(x["R"].to("meta")), RuntimeError, "query_table .*got meta"),
        (lambda x: WRONG(1.0), TypeError, "'query_table of relative_bias' must be Tensor"),
    ],
)  # fmt: skip
def test_errors(bias: Any, error: type[Exception], message: str) -> None:
    x = leaves(6, 9)
    with pytest.raises(error, match=message):
        attend(x, bias(x))


def test_operands_that_do_not_fit_are_not_read() -> None:
    """The registered operator can be called without the checks of the public function."""
    query, key = torch.ones(1, 2, 6, 8), torch.ones(1, 2, 9, 8)
    table, buckets = torch.ones(1, 2, 17, 8), torch.arange(17, dtype=torch.int32)

    def call(*terms: Any) -> Any:
        return attention(query, key, key, *[None] * 7, *terms, AttentionOptions(scale=1.0))

    call(query, table, table, buckets, None, None)
    for terms, message in (
        ((None, table, None, buckets), "must be given together"),
        ((query, table, None, None), "distance_buckets must be given"),
        ((query, table, None, buckets[:15]), "odd number of elements, at least 17, got 15"),
        ((query, table, None, buckets + 1), "less than 17, got 17"),
        ((query, table, None, buckets - 1), "at least 0 .* got -1"),
        ((query, table, table[:, :, :9], buckets), "key_table must have 17 buckets"),
        ((query, table[0], None, buckets), "query_table must have four dimensions"),
        ((query, table[..., :7], None, buckets), "query_table"),
        ((query[:, :, :5], table, None, buckets), "position_query"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*terms, None, None)
    rows = torch.ones(1, 2, 6, 3)
    call(None, None, None, None, rows, rows)
    for given, message in (
        ((rows, None), "row_bias and column_bias must be given together"),
        ((rows, rows[..., :2]), "must be of 9 keys, got 3 x 2"),
        ((rows[:, :, :5], rows), "row_bias"),
        ((rows[0], rows), "row_bias must have four dimensions"),
        ((rows, rows.double()), "column_bias .*float32"),
    ):
        with pytest.raises(ValueError, match=message):
            call(None, None, None, None, *given)


# -- the bias of an image -------------------------------------------------------------------------


def image(height: int = 5, width: int = 7, **like: Any) -> dict[str, Tensor]:
    """Queries, keys and values of an image, and a table for the distances of each axis."""
    x = leaves(height * width, height * width, **like)
    like = {"dtype": x["query"].dtype, "requires_grad": True}
    tables = {n: torch.randn(2 * k - 1, 8, **like) for n, k in (("h", height), ("w", width))}
    return {name: x[name] for name in ("query", "key", "value")} | tables


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_an_image_bias_equals_the_bias_of_all_pairs(backend: str) -> None:
    x, results = image(), []
    y, z = torch.arange(35) // 7, torch.arange(35) % 7
    vectors = x["h"][y[:, None] - y + 4], x["w"][z[:, None] - z + 6]
    pairs = sum(torch.einsum("bhid,ijd->bhij", x["query"], table) for table in vectors)
    with use_backend(backend):
        bias = Decomposed2d.of_tables(x["query"], x["h"], x["w"])
        for out, lse in (attend(x, bias), attend(x, None, pairs)):
            loss = out.square().sum() + lse.sin().sum()
            grads = torch.autograd.grad(loss, list(x.values()), retain_graph=True)
            results.append((out, lse, *grads))
    assert_close(*results)


def test_bits_of_an_image_do_not_depend_on_threads(threads: Any) -> None:
    x, found = image(30, 40, dtype=torch.float32), []
    for count in (1, 2):
        threads(count)
        out, _ = attend(x, Decomposed2d.of_tables(x["query"], x["h"], x["w"]))
        found.append((out, *torch.autograd.grad(out.square().sum(), list(x.values()))))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("rows", "columns", "error", "message"),
    [
        ((2, 4, 35, 5), (2, 4, 35, 6), RuntimeError, "must be of 35 keys, got 5 x 6"),
        (
            (2, 4, 34, 5),
            (2, 4, 35, 7),
            RuntimeError,
            r"rows .*shape \(2, 4, 35, n\), got \(2, 4, 34",
        ),
        ((2, 4, 35, 5), (2, 2, 35, 7), RuntimeError, r"columns .*shape \(2, 4, 35, n\)"),
        ((2, 4, 35, 5), None, TypeError, "'columns of relative_bias' must be Tensor"),
    ],
)
def test_errors_of_images(rows: Any, columns: Any, error: type[Exception], message: str) -> None:
    x = image()
    given = (None if shape is None else torch.ones(shape).double() for shape in (rows, columns))
    bias: Any = Decomposed2d(*given)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        attend(x, bias)
    with pytest.raises(ValueError, match="for 35 queries of an h x w image, got 9 and 9"):
        Decomposed2d.of_tables(x["query"], x["h"], x["h"])
