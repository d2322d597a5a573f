"""Time of each op against stock's kernel for the same work; see `benchmarks/README.md`."""
