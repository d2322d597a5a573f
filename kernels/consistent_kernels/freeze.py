"""`python -m consistent_kernels.freeze NAME`: print the specs that a contract file freezes."""

from __future__ import annotations

import argparse
import json
import sys

from consistent_kernels.resolve import DENSE_BF16, OPS_OF_CONTRACT, contract_specs


def main() -> int:
    """Write the JSON of every op's spec to stdout."""
    parser = argparse.ArgumentParser(description="Print the specs of a contract's ops as JSON.")
    parser.add_argument("name", nargs="?", default=DENSE_BF16, choices=sorted(OPS_OF_CONTRACT))
    name = parser.parse_args().name
    specs = {op: spec.to_dict() for op, spec in sorted(contract_specs(name).items())}
    sys.stdout.write(json.dumps({"name": name, "specs": specs}, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
