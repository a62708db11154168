"""The benchmark: which attention is fastest on this machine, and is its answer right?

`python -m fastattn bench run` measures, `compare` compares two results, `plot` and `report` show
one, `roofline` the machine's limits, `env` the environment of every result, `list` what can be
measured; `bench record -- python train.py`, or :func:`record` around your own code, writes down the
shapes of a program. The method is described in docs/benchmarks.md.
"""

from fastattn.bench.recording import record

__all__ = ["record"]
