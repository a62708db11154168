"""The Python blocks of the pages about one operator or module run.

The blocks of a page run one after the other, as in one session. Names that a page does not define
are made here. Other libraries' pages are in test_docs_snippets.py, tests/models, tests/distributed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from snippets import blocks, run, shown
from torch import Tensor, nn

import fastattn

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ("memn2n", "translation")  # which take nothing as given
OTHER_TESTS = {
    *TUTORIALS,
    *("distributed", "long_context", "sharded", "design"),
    *("first_model", "vit_weights"),  # test_docs_snippets.py
}


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def given(prefix: str, *shapes: tuple[int, ...]) -> dict[str, Any]:
    """Random tensors with the given names."""
    return {name: normal(*shape) for name, shape in zip(prefix.split(), shapes, strict=True)}


def encoder() -> dict[str, Any]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    return {"model": model, "inputs": normal(2, 7, 32), "batch": normal(2, 7, 32)}


def padding(keys: int) -> Tensor:
    """[2, keys], True is left out: the last two keys of the second sequence."""
    left_out = torch.zeros(2, keys, dtype=torch.bool)
    left_out[1, -2:] = True
    return left_out


def additive(block: int) -> dict[str, Any]:
    """The names that a block of the page on additive attention uses."""
    if block == 0:
        names = given("query key value v bias", (2, 3, 16), (2, 5, 16), (2, 5, 8), (16,), (16,))
        return names | {"padding": padding(5)}
    return given("query memory state", (2, 3, 256), (2, 5, 256), (2, 256))


def hopfield() -> dict[str, Any]:
    return given("state stored values", (2, 3, 8), (2, 6, 8), (2, 6, 4))


def luong(block: int) -> dict[str, Any]:
    """The names that a block of the page on Luong attention uses."""
    if block == 1:  # hard attention
        return given("q k v", (2, 3, 8), (2, 5, 8), (2, 5, 8))
    names = given("query key value W", (2, 30, 8), (2, 40, 8), (2, 40, 8), (8, 8))
    return names | given("W_p v_p W_concat v", (8, 8), (8,), (8, 16), (8,)) | {"keys": 40}


def transformer() -> dict[str, Any]:
    tokens = torch.randint(3, 1000, (1, 5), generator=torch.Generator().manual_seed(0))
    return {"source_tokens": tokens, "target_tokens": tokens}


def babi() -> dict[str, Any]:
    """Stories and questions as tokens."""
    tokens = torch.randint(1, 175, (2, 10, 6), generator=torch.Generator().manual_seed(0))
    return {"stories": tokens, "questions": tokens[:, 0]}


def seeing() -> dict[str, Any]:
    """The names that the page on seeing attention uses."""
    words = [f"w{n}" for n in range(5)]
    given = babi() | {"network": fastattn.nn.MemN2N(175, 8, hops=3, memory_size=10)}
    return given | {
        "model": nn.Transformer(16, 4, 6, 6, 32, batch_first=True).eval(),
        "source": normal(2, 5, 16),
        "target": normal(2, 5, 16),
        **dict.fromkeys(("source_words", "target_words", "x_tokens", "y_tokens"), words),
        "sentences": [f"s{n}" for n in range(10)],
        **dict.fromkeys("qk", normal(2, 3, 20, 8)),
    }


def sinusoidal(block: int) -> dict[str, Any]:
    """The names that a block of the page on the sinusoidal encoding uses."""
    tokens = torch.tensor([[5, 4, 3, 1], [7, 1, 1, 1]])
    names: list[dict[str, Any]] = [
        {"x": normal(2, 4, 768)},
        {"length": 3, "token": tokens[:, :1], "embed": nn.Embedding(10, 768)},
        {"x": normal(2, 4, 768), "tokens": tokens, "pad": 1, "d": 768},
    ]
    return names[block]


# Before the first block, or, as a function of its number, before each.
PAGES: dict[str, Callable[..., dict[str, Any]]] = {
    "accelerate": encoder,
    "additive_attention": additive,
    "benchmarks": encoder,
    "decode_attention": lambda block: {
        **given("q k v", (2, 4, 1, 128), (2, 2, 1, 128), (2, 2, 1, 128)),
        "B": 2,
        "Hkv": 2,
        "lengths": torch.tensor([0, 0]),  # of rows that the caches have
    },
    "flex_attention": lambda: {
        "mask": fastattn.masks.causal(),
        **given("factor bias q k v", (3,), (8,), *3 * ((2, 3, 8, 4),)),
    },
    "hopfield": hopfield,
    "index": encoder,
    "linear": lambda: {
        "model": torch.nn.Linear(768, 3072),
        **given("x weight bias", (5, 768), (3072, 768), (3072,)),
    },
    "luong_attention": luong,
    "masks": lambda: {
        "ids": torch.tensor([[0, 0, 1, 1, 1]]),
        **given("query key value", *3 * ((2, 4, 5, 8),)),
    },
    "memory_hops": lambda: {
        "tokens": torch.randint(0, 9, (2, 5, 4)),
        **given("weight tables rows", (9, 8), (4, 9, 8), (4, 5, 8)),
        **given("query in_memory out_memory", (2, 8), *2 * ((2, 6, 8),)),
        **given("stack memory", (2, 4, 6, 8), (6, 8)),
    },
    "merge_states": lambda: given(
        "q prefix_k prefix_v k v", (2, 3, 1, 8), *2 * ((1, 3, 9, 8),), *2 * ((2, 3, 4, 8),)
    ),
    "migration": encoder,
    "multihead_attention": lambda: given("src tgt", (5, 2, 512), (4, 2, 512)),
    "relative_bias": lambda: {
        **given("q k v table buckets places", *3 * ((2, 8, 49, 8),), (8, 97), (32, 8), (169, 8)),
        **given("R P u v_bias", *2 * ((513, 8, 8),), *2 * ((8, 8),)),
        "D": 8,
    },
    "seeing": seeing,
    "sinusoidal": sinusoidal,
    "transformer": transformer,
    "varlen_attention": lambda: given("q k v", *3 * ((12, 4, 8),)),
}


def test_every_page_with_code_is_run() -> None:
    with_code = {page.stem for page in (ROOT / "docs").glob("*.md") if blocks(page)}
    assert with_code - OTHER_TESTS == set(PAGES)


@pytest.mark.complete
@pytest.mark.parametrize("name", PAGES)
def test_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "flash_attn", fastattn.flash_attn)  # the same functions
    names: dict[str, Any] = {"torch": torch, "fastattn": fastattn}
    page, make = ROOT / f"docs/{name}.md", PAGES[name]
    each = "block" in inspect.signature(make).parameters
    for n, block in enumerate(blocks(page)):
        names.update(make(n) if each else make() if n == 0 else {})
        run(page, block, names)
    if isinstance(out := names.get("out"), Tensor):
        assert out.isfinite().all()


@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial_prints_what_it_shows(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    page, names = ROOT / f"docs/{name}.md", dict[str, Any]()
    for block in blocks(page):
        run(page, block, names)
    printed = capsys.readouterr().out
    assert printed
    assert printed == shown(page)
