"""Benchmarks: each checks its own relations first and reports no speed where they fail."""
