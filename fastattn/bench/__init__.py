"""The benchmark: compares the speed of attention on this machine, and checks every result.

`python -m fastattn bench run` measures, `compare` compares two results, `plot` and `report` present
one, `roofline` measures the machine's limits, `env` prints the environment of a result, `list`
shows what can be measured. `bench record -- python train.py`, or :func:`record` around other code,
records the shapes of a program. docs/benchmarks.md describes the method.
"""

from fastattn.bench.recording import record

__all__ = ["record"]
