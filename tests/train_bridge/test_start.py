"""What a trainer has probed before it calls DeepGEMM: every number of rows that a call has."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, tiny_model

from consistent_kernels import deep_gemm_start
from consistent_kernels.linear.deep_gemm_start import GemmShape
from train_bridge import bridge_model, causal_lm, token_logprobs
from train_bridge.start import prepare_head, prepare_kernels


@pytest.fixture
def model() -> Any:
    return bridge_model(tiny_model("llama"))


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[set[Any]]:
    """The shapes of each start, which is not run: there is no GPU."""
    starts: list[set[Any]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(deep_gemm_start, "prepare", lambda shapes, device: starts.append(shapes))
    return starts


def state_of(linear: str) -> Any:
    impls = {"linear": linear, "token_logprobs": "triton"}
    return types.SimpleNamespace(
        impl=impls.__getitem__,
        contract=types.SimpleNamespace(programs=impls),
        prepared_rows=0,
        prepared_head=0,
    )


def head_rows(starts: list[set[Any]]) -> int:
    return max(shape.max_rows for shapes in starts for shape in shapes if shape.out_fp32)


@pytest.mark.parametrize("rows", [1, 4096, 8191, 8192, 9000, 16384, 40000])
def test_no_call_of_whole_logits_is_larger_than_what_was_probed(
    rows: int, model: Any, probed: list[set[Any]]
) -> None:
    state = state_of("deep_gemm")
    prepare_kernels(model, state, rows)
    if rows >= 8192:
        called = max(deep_gemm_start.pieces(rows))
        assert head_rows(probed) < called, "control: tiles of logits are smaller"
    prepare_head(model, state, rows)
    assert head_rows(probed) >= max(deep_gemm_start.pieces(rows))
    starts = len(probed)
    prepare_head(model, state, rows)
    assert len(probed) == starts, "once"


def test_only_the_head_is_probed_again(model: Any, probed: list[set[Any]]) -> None:
    prepare_head(model, state_of("deep_gemm"), 9000)
    hidden = model.config.hidden_size
    assert probed == [{GemmShape(model.lm_head.weight.shape[0], hidden, 8192, True)}]
    prepare_head(model, state_of("triton"), 9000)
    assert len(probed) == 1


def test_logits_prepare_their_rows_and_scores_none(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(causal_lm, "prepare_head", lambda model, state, rows: asked.append(rows))
    ids = torch.arange(12).view(2, 6) % VOCAB
    with torch.no_grad():
        token_logprobs(model, ids)
        assert asked == []
        model(ids)
        model(ids, logits_to_keep=2)
    assert asked == [12, 4]
