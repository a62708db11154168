"""``fastattn.plot``: pictures show the weights; the page is self-contained."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from child_process import run_python

import fastattn
from fastattn import plot

matplotlib.use("Agg")

from matplotlib import pyplot as plt

pytestmark = pytest.mark.without_kernels


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    plt.close("all")


def labels(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


@pytest.mark.parametrize("form", ["tensor", "bfloat16", "array", "lists", "gradient"])
def test_heatmap_draws_the_weights(form: str) -> None:
    weights = torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.5, 0.0]])
    given: Any = {
        "tensor": weights,
        "bfloat16": weights.bfloat16(),
        "array": weights.numpy(),
        "lists": weights.tolist(),
        "gradient": weights.clone().requires_grad_(),
    }[form]
    ax = plot.heatmap(given, ["a", "$b", "c$"], ["x", "y"], title="$5 {", values=True)
    (image,) = ax.images
    np.testing.assert_array_equal(image.get_array(), weights.numpy())
    assert image.get_clim() == (0.0, 0.75)
    assert (labels(ax.xaxis), labels(ax.yaxis)) == (["a", "$b", "c$"], ["x", "y"])
    assert [text.get_text() for text in ax.texts] == "0.25 0.75 0.00 0.50 0.50 0.00".split()
    ax.figure.savefig(os.devnull, format="png")  # a dollar sign is no mathematics


def test_heatmap_in_axes_of_the_caller() -> None:
    _, (left, right) = plt.subplots(1, 2)
    assert plot.heatmap([[1.0]], ax=right, colorbar=False) is right
    assert not left.images
    assert len(plt.get_fignums()) == 1
    assert labels(right.xaxis) == ["0"]


def test_heatmap_of_negative_and_missing_weights() -> None:
    (image,) = plot.heatmap([[-2.0, 1.0], [float("nan"), 0.0]]).images
    assert image.get_clim() == (-2.0, 2.0)
    assert image.get_array().mask.tolist() == [[False, False], [True, False]]
    assert plot.heatmap(torch.zeros(2, 2)).images[0].get_clim() == (0.0, 1.0)
    assert plot.heatmap(torch.ones(2, 2), vmax=4.0).images[0].get_clim() == (0.0, 4.0)


def test_hops_has_a_panel_for_each_hop() -> None:
    weights = torch.rand(3, 4)
    figure = plot.hops(weights, list("abcd"), support=[1, 3], title="where? here")
    assert [ax.get_title() for ax in figure.axes] == ["hop 1", "hop 2", "hop 3"]
    for ax, row in zip(figure.axes, weights, strict=True):
        np.testing.assert_array_equal(ax.images[0].get_array(), row[:, None].numpy())
        assert ax.images[0].get_clim() == (0.0, float(weights.max()))
    side = figure.axes[0].get_yticklabels()
    assert [label.get_text() for label in side] == list("abcd")
    assert [label.get_fontweight() for label in side] == ["normal", "bold", "normal", "bold"]
    figure.savefig(os.devnull, format="png")


def test_hops_of_several_queries() -> None:
    weights = torch.rand(2, 3, 5)
    figure = plot.hops(weights, queries=list("xyz"))
    np.testing.assert_array_equal(figure.axes[1].images[0].get_array(), weights[1].T.numpy())
    assert labels(figure.axes[1].xaxis) == list("xyz")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plot.heatmap(torch.ones(3)), ValueError, r"weights must have 2 dimen.*\(3,\)"),
        (lambda: plot.heatmap(torch.ones(0, 2)), ValueError, r"none of them empty, got \(0, 2\)"),
        (lambda: plot.heatmap("abc"), TypeError, "weights must be a tensor, .* got str"),
        (lambda: plot.heatmap(torch.ones(1, 1, dtype=torch.cfloat)), TypeError, "must be dense an"),
        (lambda: plot.heatmap([[1.0]], ["a", "b"]), ValueError, "x_tokens must be 1, .*got 2"),
        (lambda: plot.heatmap([[1.0]], None, "a"), TypeError, "y_tokens must be a sequence .*str"),
        (lambda: plot.hops(torch.ones(3)), ValueError, "must have 2 or 3 dimensions"),
        (
            lambda: plot.hops(torch.ones(1, 2), queries=["a"]),
            ValueError,
            r"queries need weights .*K, Q",
        ),
        (lambda: plot.hops(torch.ones(1, 2), support=[2]), ValueError, "support must be .*below 2"),
        (lambda: plot.html(torch.ones(3)), ValueError, "of attention must have 2 or 3 or 4 dim"),
        (lambda: plot.html({}), ValueError, "at least one layer"),
        (lambda: plot.html(torch.ones(1, 1, 2, 2), example=1), IndexError, r"in \[0, 1\) .* got 1"),
        (lambda: plot.html({"a": [[1.0]]}, {"a": ["x", "y"]}), ValueError, "x_tokens of a must be"),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.complete
def test_without_matplotlib_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import fastattn\n"
        "fastattn.plot.html([[1.0]])\n"
        "try: fastattn.plot.heatmap([[1.0]])\n"
        "except ImportError as error: print(error)"
    )
    done = run_python("-c", code)
    assert "pip install 'fastattn[plot]'" in done.stdout


class Page(HTMLParser):
    """Tags with their attributes, and the texts within the tag of a kind."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


NASTY = ["</script><b>", "{{data}}", "{{title}}", "a&b", '"\\', "\u2028", "日本"]


def test_the_page_holds_the_weights_and_loads_nothing(tmp_path: Path) -> None:
    weights = {
        "one": torch.rand(2, 3, 4, 7),
        "two": [torch.rand(3, 7, 7), torch.rand(7, 7)],
        "": np.ones((1, 2), dtype=np.float64),
        "lists": [[0.5, float("nan")]],
    }
    text = plot.html(
        weights,
        {"one": NASTY, "two": NASTY},
        {"two": NASTY},
        path=tmp_path / "page.html",
        example=1,
        picker="hop",
        title="<i> & {{data}}",
    )
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == text
    page = Page(text)
    assert not page.open
    assert [title for tag in ("title", "h1") for title in page.texts[tag]] == ["<i> & {{data}}"] * 2
    for _, attributes in page.tags:
        assert not {"src", "href", "action", "srcset", "onload", "onclick"} & attributes.keys()
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    (policy,) = [a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none';")

    data = json.loads(page.texts["script"][0])
    assert data["picker"] == "hop"
    names = ["one", "two (call 1)", "two (call 2)", "attention", "lists"]
    assert [layer["name"] for layer in data["layers"]] == names
    given = [weights["one"][1], *weights["two"], torch.ones(1, 2), torch.tensor(weights["lists"])]
    for layer, expected in zip(data["layers"], given, strict=True):
        held = np.frombuffer(base64.b64decode(layer["data"]), "<f4").reshape(layer["shape"])
        np.testing.assert_array_equal(held, expected.reshape(layer["shape"]).numpy())
    assert data["layers"][0]["x"] == NASTY
    assert data["layers"][0]["y"] == ["0", "1", "2", "3"]
    assert data["layers"][2]["y"] == NASTY


def test_the_page_of_a_capture() -> None:
    model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with fastattn.capture(model) as weights:
        model(torch.ones(3, 4, 8))
    data = json.loads(Page(plot.html(weights)).texts["script"][0])
    assert [(layer["name"], layer["shape"]) for layer in data["layers"]] == [
        ("self_attn", [2, 4, 4])
    ]


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
ASK = """<script>
const states = [];
const tell = () => states.push([at("pick").options.length, at("map").getAttribute("aria-label"),
  [...at("all").children].findIndex(b => b.getAttribute("aria-pressed") === "true")]);
const change = (id, value) => { at(id).value = value; at(id).dispatchEvent(new Event("change")); };
tell(); change("pick", 2); tell(); at("all").children[1].click(); tell();
change("layer", 1); tell(); change("scale", "layer");
at("map").dispatchEvent(new PointerEvent("pointermove",
  {clientX: at("map").getBoundingClientRect().left + shown.left + 1.5 * shown.cell,
   clientY: at("map").getBoundingClientRect().top + shown.top + 0.5 * shown.cell}));
document.body.append(Object.assign(document.createElement("pre"),
  {textContent: JSON.stringify([states, at("readout").textContent])}));
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium, to run the page's own script")
def test_the_pickers_in_a_browser(tmp_path: Path) -> None:
    weights = {"one": torch.rand(2, 3, 4), "two": torch.tensor([[[0.125, 0.5]]])}
    text = plot.html(weights, {"two": NASTY[:2]}, {"two": [NASTY[0]]})
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", ASK), encoding="utf-8")
    options = "--headless=new --no-sandbox --disable-gpu --virtual-time-budget=2000 --dump-dom"
    command = [BROWSER, *options.split(), f"--user-data-dir={tmp_path}/profile", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    states, cell = json.loads(Page(done.stdout).texts["pre"][0])
    assert states == [
        [3, "one, mean of 2: 3 queries by 4 keys", 0],
        [3, "one, head 2: 3 queries by 4 keys", 2],
        [3, "one, head 1: 3 queries by 4 keys", 1],
        [1, "two, head 1: 1 queries by 2 keys", -1],
    ]
    assert cell == "</script><b> (0) to {{data}} (1): 0.5000"
