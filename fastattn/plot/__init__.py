"""Pictures of attention: heat maps and hops by matplotlib, and a page to look around in.

matplotlib is an optional dependency (``pip install 'fastattn[plot]'``); :func:`html` needs nothing.
What to draw comes from ``need_weights=True``, or from :func:`fastattn.capture`.
"""

from fastattn.plot._figures import heatmap, hops
from fastattn.plot._page import html

__all__ = ["heatmap", "hops", "html"]
