"""Schedules that move no bit, timed in turn with stock; see `benchmarks/README.md`."""
