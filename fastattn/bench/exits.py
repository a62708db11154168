"""Exit codes, as documented in docs/benchmarks.md."""

OK, FAULTS, USAGE, UNWRITTEN, INTERRUPTED = 0, 1, 2, 3, 130
