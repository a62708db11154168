"""The site of `make docs`: complete, no dead link, nothing loaded from elsewhere.

Slow: it needs a package index for Sphinx.
"""

from __future__ import annotations

import importlib
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest
from installation import ROOT, run

pytestmark = [pytest.mark.slow, pytest.mark.without_kernels]

MODULES = re.findall(
    r"automodule:: (\S+)", "".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
)
# Attributes that a browser loads by itself, unlike a link.
LOADED = {"img": "src", "script": "src", "source": "srcset", "link": "href", "iframe": "src"}


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.pictures = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.pictures += tag == "img"
        if tag in LOADED and given.get(LOADED[tag]):
            self.loaded.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site() -> Path:
    run(["make", "docs"], ROOT, timeout=1800)
    return ROOT / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in site.rglob("*.html")}


def test_no_link_is_dead(pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            address, fragment = urldefrag(link)
            if urlparse(link).scheme:
                continue
            target = (path.parent / unquote(address.partition("?")[0])).resolve()
            target = target if address else path
            if not target.is_file():
                dead.append(f"{path}: {link}")
            elif fragment and target in pages and unquote(fragment) not in pages[target].ids:
                dead.append(f"{path}: {link}: no such heading")
    assert not dead


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page]) -> None:
    outside = {address for page in pages.values() for address in page.loaded if "//" in address}
    assert not {address for address in outside if not address.startswith("data:")}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str, pages: dict[Path, Page]) -> None:
    ids = {name for page in pages.values() for name in page.ids}
    found = importlib.import_module(module)
    for name in found.__all__:
        if callable(getattr(found, name)):
            assert f"{module}.{name}" in ids


def test_the_support_table_knows_every_backend(site: Path) -> None:
    text = re.sub(r"<[^>]+>", " ", (site / "docs/support.html").read_text())
    assert re.search(r"no option\s+bf16 fp16\s+all\s+fp32 bf16 fp16\s+fp32 bf16 fp16\s", text)
    for words in ("scaled_dot_product_attention", "varlen_attention", "CUDA", "Triton", "float64"):
        assert words in text
