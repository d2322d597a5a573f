"""The demo's own errors, each with the exit code it leads to."""

from __future__ import annotations

from consistent_kernels.errors import ConsistencyError, InvalidInputError


class OutputFolderError(InvalidInputError):
    """A folder cannot be used as it is: read-only, not empty, in use, too little space."""


class CheckpointError(InvalidInputError):
    """A checkpoint is missing, damaged, or belongs to another model or run."""


class RunError(ConsistencyError):
    """The run began and cannot go on; what it reached is kept."""
