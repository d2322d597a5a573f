"""The exceptions of all three packages: one family, so a caller can catch `ConsistencyError`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ConsistencyError(Exception):
    """Base of every error this project raises on purpose."""


class InvalidInputError(ConsistencyError, ValueError):
    """An argument has the wrong shape, dtype, layout or value.

    Built through `invalid(op, arg, expected, actual)` so that every text reads alike.
    """


class UnsupportedError(ConsistencyError, NotImplementedError):
    """A valid request that no implementation serves; names what would work."""

    def __init__(self, op: str, got: object, supported: Iterable[object]) -> None:
        self.op = op
        self.got = got
        self.supported = tuple(supported)
        choices = ", ".join(str(item) for item in self.supported)
        super().__init__(f"{op}: {got} is not supported; supported: {choices}")


class MissingBinaryError(ConsistencyError, ImportError):
    """A library that an implementation is made of is not installed, or does not load here."""

    def __init__(self, name: str, problem: str, looked_in: object, remedy: str) -> None:
        self.name = name
        super().__init__(f"{name}: {problem}; looked in {looked_in}. {remedy}")


class NumericsError(ConsistencyError):
    """A probe found that a program does not keep its promise on this machine."""


class ContractMismatchError(ConsistencyError):
    """Two sides hold different contracts, or a worker serves another one than was asked for."""


class ConfigurationError(ConsistencyError, ValueError):
    """A configuration breaks one or more rules; all of them are listed at once."""

    def __init__(self, violations: Sequence[str], subject: str = "configuration") -> None:
        self.violations = tuple(violations)
        lines = "\n".join(f"  {i}. {text}" for i, text in enumerate(self.violations, start=1))
        super().__init__(f"{subject} is refused for {len(self.violations)} reason(s):\n{lines}")


class StaleWeightsError(ConsistencyError):
    """Weights changed, or were not updated, between two points that need the same ones."""


class LogprobMismatchError(ConsistencyError):
    """Rollout and trainer log-probs differ in at least one bit."""


def invalid(
    op: str, arg: str, expected: object, actual: object, hint: str = ""
) -> InvalidInputError:
    """Return (not raise) an `InvalidInputError` in the project's one wording.

    Args:
        op: the operation, e.g. "rms_norm".
        arg: the argument's name.
        expected: what it must be.
        actual: what was given.
        hint: what to do, as a sentence; optional.
    """
    text = f"{op}: {arg} must be {expected}, got {actual}"
    return InvalidInputError(f"{text}. {hint}" if hint else text)


def require_implementation(op: str, impl: str, implementations: Iterable[str]) -> None:
    """Raise `UnsupportedError` naming the choices unless `impl` is one of them."""
    choices = tuple(implementations)
    if impl not in choices:
        raise UnsupportedError(op, f"impl {impl!r}", choices)
