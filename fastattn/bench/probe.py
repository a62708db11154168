"""The state of the cores beside a sample: the time of a short kernel, and what the system counts.

A core that others share is alone or has a neighbour, such as another machine on its second
hyperthread, and its state lasts 10 milliseconds to many seconds. A neighbour slows one kernel down
more than another, so a ratio of two samples means something only if both ran in the same state.
A neighbour shows in the time of a short kernel. Another process of this machine does not, because
it takes the core for milliseconds at a time; the system counts that.
"""

from __future__ import annotations

import resource
import time

import torch

from fastattn import scaled_dot_product_attention, use_backend
from fastattn.dispatch import PRIORITY, load

# Of which the fastest counts: the first ones load the code, and an interrupt is no neighbour.
_TRIES = 6


class Probe:
    """Attention on one small head per thread, in the caches: about 30 microseconds.

    In bf16, which runs on the tiles of AMX, if there are any: a neighbour slows them down most. On
    one thread of a Zen 3 it takes 21 microseconds alone, and 31 to 44 with a neighbour.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.rows = torch.ones(threads, 1, 64, 64, dtype=torch.bfloat16)
        self.backend = next(name for name in PRIORITY["cpu"] if not isinstance(load(name), str))

    def __call__(self) -> float:
        """The microseconds of the kernel."""
        usual = torch.get_num_threads()
        if usual != self.threads:  # only then, because it empties the caches of oneDNN
            torch.set_num_threads(self.threads)
        best = float("inf")
        with torch.no_grad(), use_backend(self.backend):  # whatever the provider forces
            for _ in range(_TRIES):
                start = time.perf_counter()
                scaled_dot_product_attention(self.rows, self.rows, self.rows)
                best = min(best, time.perf_counter() - start)
        if usual != self.threads:
            torch.set_num_threads(usual)
        return best * 1e6


def times_pushed() -> int:
    """How often another process took a core from a thread of this one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
