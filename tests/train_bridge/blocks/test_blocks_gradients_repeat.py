"""Gradients of a trainer's attention block repeat under `deterministic_gradients` (R1)."""

from __future__ import annotations

import json

import pytest
import repeated_block_gradients
import torch
from block_cases import BLOCKS, BlockCase
from child_process import run_python
from repeated_block_gradients import differing_gradients

from train_bridge import env


@pytest.mark.parametrize("name", BLOCKS)
def test_block_gradients_are_run_to_run_stable(name: str) -> None:
    assert differing_gradients(BlockCase.make(name, "cpu")) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_block_gradients_are_run_to_run_stable_on_cuda() -> None:
    script = repeated_block_gradients.__file__
    done = run_python(script, **{env.CUBLAS_WORKSPACE: ":4096:8"})
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {name: [] for name in BLOCKS}


@pytest.mark.parametrize("spoiled", ["hidden", "sinks", "compress_bias", "out_a"])
def test_control_one_bit_of_one_gradient_shows(spoiled: str) -> None:
    def spoil(grads: dict[str, torch.Tensor], turn: int) -> None:
        if turn == 1:
            grads[spoiled].view(torch.uint8).view(-1)[-1] ^= 1

    assert differing_gradients(BlockCase.make("v4-csa", "cpu"), spoil) == [spoiled]
