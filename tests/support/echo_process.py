"""A benchmark process that answers, raises, or dies, for `test_process.py`."""

import os
import sys

from benchmarks.rollout.process import serve


class Echo:
    def say(self, text: str) -> tuple[str, str | None]:
        return text, os.environ.get("ECHO")

    def fail(self) -> None:
        raise ValueError("no such weight")

    def die(self) -> None:
        sys.stdout.write("the last words\n")
        sys.stdout.flush()
        os._exit(7)


if __name__ == "__main__":
    serve(Echo())
