"""The configurations that are shipped."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = {
    path.stem: path
    for folder in (ROOT / "train_bridge" / "verl" / "config", ROOT / "configs" / "recipes")
    for path in sorted(folder.rglob("*.yaml"))
    if "\nhydra:" in path.read_text()  # a primary configuration; others are parts of one
}
"""Primary configurations by their file's stem."""
