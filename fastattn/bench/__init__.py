"""The benchmark: compares the speed of attention on this machine, and checks every result.

docs/benchmarks.md describes its commands and its method. `bench record -- python train.py`, or
:func:`record` around other code, records the shapes of a program.
"""

from fastattn.bench.recording import record

__all__ = ["record"]
