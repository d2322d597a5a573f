"""`python -m consistent_kernels.freeze NAME`: print the specs that a contract file freezes."""

from __future__ import annotations

import argparse
import json
import sys

from consistent_kernels.resolve import DENSE_BF16, dense_specs


def main() -> int:
    """Write the JSON of every op's spec to stdout."""
    parser = argparse.ArgumentParser(description="Print the specs of the dense ops as JSON.")
    parser.add_argument("name", nargs="?", default=DENSE_BF16, help="contract name and version")
    name = parser.parse_args().name
    specs = {op: spec.to_dict() for op, spec in sorted(dense_specs().items())}
    sys.stdout.write(json.dumps({"name": name, "specs": specs}, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
