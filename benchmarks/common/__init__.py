"""What the benchmarks share: statistics, result files and what a result must record."""
