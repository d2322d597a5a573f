"""Exit codes of every command; documented in `vllm-consistent demo --help`."""

from __future__ import annotations

OK = 0  # every compared token was bit-equal
MISMATCH = 1  # at least one was not
REFUSED = 1  # doctor: at least one rule is broken
USAGE = 2  # an argument, an input file, a folder or a checkpoint is not usable; nothing was changed
FAILED = 3  # the run could not go on (engine, disk, gradient); what was reached is kept
INTERRUPTED = 130  # SIGINT or SIGTERM; what was reached is kept
