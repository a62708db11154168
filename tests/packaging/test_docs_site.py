"""The site of `make docs`: complete, no dead link, nothing loaded from elsewhere, a working search.

Slow: it needs a package index for Sphinx. Without Chromium the pages are read, but not drawn.
"""

from __future__ import annotations

import functools
import html
import http.server
import importlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlparse

import pytest
from installation import ROOT, run

pytestmark = [pytest.mark.slow, pytest.mark.without_kernels]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MODULES = re.findall(
    r"automodule:: (\S+)", "".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
)
# What a browser loads by itself, unlike a link that a reader may follow.
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
    done = run(["make", "docs"], ROOT, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
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


# In a browser


needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium"
)

# Opens each page of location.search in a frame, and writes what the browser has of it as JSON: its
# background, and the width of each picture, which is 0 if it was not loaded or not decoded.
INSPECTOR = """<!doctype html><pre id="found"></pre><script>
(async () => {
  const found = {};
  for (const name of location.search.slice(1).split("&")) {
    const frame = document.createElement("iframe");
    frame.width = 1200;
    frame.src = "/" + name;
    await new Promise(resolve => { frame.onload = resolve; document.body.append(frame); });
    const page = frame.contentDocument, pictures = {};
    for (const image of page.images) pictures[image.currentSrc] = image.naturalWidth;
    found[name] = {background: getComputedStyle(page.body).backgroundColor, pictures};
    frame.remove();
  }
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """The files of the site, and the inspector beside them: it may read pages of its own host."""

    def do_GET(self) -> None:
        if not self.path.startswith("/inspector?"):
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(INSPECTOR.encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site, served on this machine; a browser may refuse scripts of files."""
    handler = functools.partial(Handler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def drawn(address: str, *options: str) -> str:
    """A page as a browser has it when its scripts have run; every other host is out of reach."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]
    command += ["--virtual-time-budget=20000", *options, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@needs_chromium
@pytest.mark.parametrize(
    ("question", "answer", "places"),
    [
        ("attention+weights+ViT", "vit_weights", 1),
        ("slow", "installation", 3),
        ("window", "masks", 20),
    ],
)
def test_the_search_works_without_a_network(
    address: str, question: str, answer: str, places: int
) -> None:
    page = drawn(f"{address}/search.html?q={question}")
    found = re.findall(r'<a [^>]*href="([^"]+)"', page.partition('id="search-results"')[2])
    assert any(answer in link for link in found[:places]), found


@needs_chromium
def test_the_first_page_is_drawn(address: str) -> None:
    page = drawn(f"{address}/docs/index.html")
    assert "fused C++ SIMD kernels" in page
    assert 'data-theme="' in page  # light, dark, or what the system has


@needs_chromium
def test_pictures_are_decoded_in_a_light_and_a_dark_theme(
    address: str, site: Path, pages: dict[Path, Page]
) -> None:
    names = [
        path.relative_to(site.resolve()).as_posix() for path, page in pages.items() if page.pictures
    ]
    assert "README.html" in names
    backgrounds, shown = [], []
    for scheme in (1, 0):  # light, dark
        option = f"--blink-settings=preferredColorScheme={scheme}"
        page = drawn(f"{address}/inspector?{'&'.join(names)}", option)
        written = re.search(r'<pre id="found">(.*?)</pre>', page)
        assert written
        found = json.loads(html.unescape(written[1]))
        assert found.keys() == set(names)
        assert all(one["pictures"] for one in found.values())
        widths = {source: w for one in found.values() for source, w in one["pictures"].items()}
        assert not [source for source, width in widths.items() if not width]
        backgrounds.append({one["background"] for one in found.values()})
        shown.append({source.rpartition("/")[2] for source in widths})
    assert len(backgrounds[0]) == len(backgrounds[1]) == 1
    assert backgrounds[0] != backgrounds[1]
    assert "dropin-light.png" in shown[0] - shown[1]
    assert "dropin-dark.png" in shown[1] - shown[0]
