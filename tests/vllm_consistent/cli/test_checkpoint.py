"""Checkpoints: whole or not at all, and damage is named, never repaired or deleted."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest
import torch

from consistent_kernels.testing import assert_bitwise_equal
from vllm_consistent.cli.demo import checkpoint
from vllm_consistent.cli.demo.errors import CheckpointError, RunError

GROUPS = {
    "masters": {"w": torch.tensor([1.0, -0.0, float("nan")]), "b": torch.arange(4.0)},
    "optimizer": {"w.exp_avg": torch.full((3,), 1e-30)},
    "random": {"cpu": torch.arange(16, dtype=torch.uint8)},
}


def test_checkpoint_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, GROUPS, {"rows": [{"a": 1}]})
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded.step == 3
    assert loaded.state["rows"] == [{"a": 1}]
    for group, tensors in GROUPS.items():
        for name, tensor in tensors.items():
            assert_bitwise_equal(loaded.groups[group][name], tensor, f"{group} {name}")


def test_checkpoint_keeps_the_newest_only(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, step, GROUPS, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]


def test_checkpoint_missing_is_an_error_with_what_to_do(tmp_path: Path) -> None:
    assert not checkpoint.exists(tmp_path)
    with pytest.raises(CheckpointError, match="start without --resume"):
        checkpoint.load_latest(tmp_path)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, Path.unlink])
@pytest.mark.parametrize("group", GROUPS)
def test_checkpoint_damage_is_named_and_left_alone(tmp_path: Path, damage, group: str) -> None:
    folder = checkpoint.save(tmp_path, 1, GROUPS, {})
    damage(folder / f"{group}.safetensors")
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(CheckpointError, match=rf"damaged: {group}\.safetensors"):
        checkpoint.load_latest(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "step": 1}'])
def test_checkpoint_broken_state_is_named(tmp_path: Path, text: str) -> None:
    folder = checkpoint.save(tmp_path, 1, GROUPS, {})
    (folder / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"damaged: state\.json"):
        checkpoint.load_latest(tmp_path)


def test_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 1, GROUPS, {})
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load_latest(tmp_path)


def test_checkpoint_interrupted_while_writing_keeps_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 1, GROUPS, {})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_flush_and_crc", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, GROUPS, {})
    assert checkpoint.load_latest(tmp_path).step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_checkpoint_on_a_full_disk_keeps_the_last(tmp_path: Path) -> None:
    """A file-size limit makes the kernel refuse the bytes, as a full disk does."""
    checkpoint.save(tmp_path, 1, GROUPS, {})
    big = {"masters": {"w": torch.zeros(100_000)}}
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(RunError, match=r"step 2 could not be written .* GB free"):
            checkpoint.save(tmp_path, 2, big, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoint.load_latest(tmp_path).step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
