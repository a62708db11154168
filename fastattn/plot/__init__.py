"""Plots of attention: heat maps and hops with matplotlib, and an interactive HTML page.

matplotlib is an optional dependency (``pip install 'fastattn[plot]'``); :func:`html` needs none.
The weights come from ``need_weights=True``, or from :func:`fastattn.capture`.
"""

from fastattn.plot._figures import heatmap, hops
from fastattn.plot._page import html

__all__ = ["heatmap", "hops", "html"]
