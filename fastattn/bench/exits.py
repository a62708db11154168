"""The exit codes, see docs/benchmarks.md."""

OK, FAULTS, USAGE, UNWRITTEN, INTERRUPTED = 0, 1, 2, 3, 130
