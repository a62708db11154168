"""The documentation site: `make docs`. The pages are Markdown files of the repository, as they are.

Sphinx, because it makes the reference from the docstrings, checks every link, and its search works
without a network.
"""

import support
from docutils import nodes
from docutils.utils.math import latex2mathml

import fastattn

project = "fastattn"
author = "the fastattn contributors"
version = release = fastattn.__version__

# The source is the repository, so that links between files are the same there and on the site.
root_doc = "docs/index"
include_patterns = ["docs/**.md", "*.md", "benchmarks/**.md"]
exclude_patterns = [".*", "build", "site", "tests"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4  # as the links of the pages have them
nitpicky = False

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say more: shapes, dtypes, what None means
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"  # light and dark, and everything that a page loads is on the site
html_title = f"fastattn {version}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"  # which browsers draw themselves: no script, no network


def _inline_math(self, node: nodes.math) -> None:
    self.body.append(latex2mathml.tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block_math(self, node: nodes.math_block) -> None:
    self.body.append(f"<p>{latex2mathml.tex2mathml(node.astext(), as_block=True)}</p>")
    raise nodes.SkipNode


def setup(app) -> None:
    app.add_html_math_renderer("mathml", (_inline_math, None), (_block_math, None))
    app.add_directive("support", support.Support)
