"""The name under which verl looks for the engine's distribution."""

from __future__ import annotations

from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.25.1+cpu\n"


def name_vllm(folder: Path) -> Path:
    """Make a distribution called `vllm` in `folder`, to be put on sys.path; returns the folder.

    verl looks the version of `vllm` up; the CPU build of it is a distribution of another name.
    """
    info = folder / "vllm-0.25.1+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(METADATA)
    return folder
