"""Run a snippet in a new Python process with a given number of threads."""

from __future__ import annotations

import os
import subprocess
import sys

_PRELUDE = """
import hashlib
import torch

torch.set_num_threads({threads})
assert torch.get_num_threads() == {threads}

def print_bits(*tensors):
    for tensor in tensors:
        data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        print(hashlib.sha256(data).hexdigest())
"""


def output_of_process(source: str, *, threads: int) -> str:
    """Return what `source` prints in a new process that computes with `threads` threads.

    Args:
        source: Python; `torch` and `print_bits(*tensors)` (SHA-256 of each) are defined.
        threads: of PyTorch and of the libraries below it, more than there are cores included.
    """
    search = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE.replace("{threads}", str(threads)) + source],
        env={
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "MKL_DYNAMIC": "FALSE",
            "PYTHONPATH": search,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout, "the snippet printed nothing"
    return done.stdout
