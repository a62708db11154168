"""The benchmark: which attention is fastest on this machine, and is its answer right?

`python -m fastattn bench run` measures, `list` shows what can be measured, `plot` draws a result
file again, `env` prints the environment that goes into every result file. The method is described
in docs/benchmarks.md.
"""
