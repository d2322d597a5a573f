"""The V2 runner's sampler and prompt scorer (CUDA's default), with its state faked on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.linear import linear
from consistent_kernels.testing import assert_bitwise_equal
from consistent_kernels.token_logprobs import token_logprobs_from_logits
from vllm_consistent.runner import runner_v2

VOCAB = 700
WIDTH = 24
TEMPERATURES = torch.tensor([1.0, 0.7, 0.0, 1.3])


@pytest.fixture
def head() -> torch.Tensor:
    return torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(0))


def states() -> SimpleNamespace:
    temperature, seeds = SimpleNamespace(gpu=TEMPERATURES), SimpleNamespace(gpu=None)
    return SimpleNamespace(temperature=temperature, seeds=seeds)


def scorer(head: torch.Tensor, tops: list[int]) -> runner_v2.ConsistentPromptLogprobsWorker:
    worker = runner_v2.ConsistentPromptLogprobsWorker(
        len(tops), SimpleNamespace(sampling_states=states()), "reference"
    )
    for i, top in enumerate(tops):
        worker.add_request(f"r{i}", i, SimpleNamespace(prompt_logprobs=top))
    return worker


def head_of(head: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A head whose rows do not depend on their number; a plain fp32 matmul's do."""
    return lambda x: linear(x, head, impl="reference", out_dtype=torch.float32)


def expected(head: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor, t: float) -> torch.Tensor:
    logits = head_of(head)(hidden)
    rows = torch.full((len(ids),), t)
    return token_logprobs_from_logits(logits, ids, temperature=rows, impl="reference").logprob


def step(
    worker: Any,
    head: torch.Tensor,
    hidden: dict[int, torch.Tensor],
    tokens: dict[int, torch.Tensor],
    spans: dict[int, tuple[int, int]],
) -> dict[str, Any]:
    """Run one step in which request i computes positions [start, stop) of its prompt."""
    order = list(spans)
    lens = [stop - start for start, stop in spans.values()]
    starts = np.cumsum([0, *lens])
    prompt_lens = np.array([len(tokens[i]) for i in sorted(tokens)])
    batch = SimpleNamespace(
        idx_mapping_np=np.array(order),
        idx_mapping=torch.tensor(order),
        num_computed_prefill_tokens_np=np.array([spans[i][0] for i in order]),
        num_scheduled_tokens=np.array(lens),
        prefill_len_np=prompt_lens[order],
        query_start_loc_np=starts,
        query_start_loc=torch.tensor(starts),
        num_tokens=int(starts[-1]),
        req_ids=[f"r{i}" for i in order],
    )
    rows = torch.cat([hidden[i][slice(*spans[i])] for i in order])
    return worker.compute_prompt_logprobs(
        head_of(head), rows, batch, tokens, torch.zeros(4), prompt_lens
    )


@pytest.fixture
def fake_targets(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand in for vLLM's Triton kernel that gathers the next token of each row."""
    plan: dict[str, Any] = {}

    def gather(num_tokens: int, *_: Any) -> torch.Tensor:
        pieces = []
        for i, (start, stop) in plan["spans"].items():
            following = torch.cat([plan["tokens"][i][1:], torch.tensor([0])])
            pieces.append(following[start:stop])
        return torch.cat(pieces).int()

    monkeypatch.setattr(runner_v2, "get_prompt_logprobs_token_ids", gather)
    return plan


def test_prompt_scores_at_each_temperature_whole_and_chunked(
    head: torch.Tensor, fake_targets: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = {i: torch.randint(VOCAB, (n,), generator=generator) for i, n in enumerate((9, 14, 5))}
    hidden = {i: torch.randn(len(t), WIDTH, generator=generator) for i, t in tokens.items()}
    want = {
        i: expected(head, hidden[i][:-1], t[1:], float(TEMPERATURES[i])) for i, t in tokens.items()
    }
    schedule = [{0: (0, 9), 1: (0, 6)}, {1: (6, 13), 2: (0, 5)}, {1: (13, 14)}]
    worker = scorer(head, [0, 2, 0])
    results: dict[str, Any] = {}
    for spans in schedule:
        fake_targets.update(spans=spans, tokens=tokens)
        results |= step(worker, head, hidden, tokens, spans)
    assert set(results) == {"r0", "r1", "r2"}
    for i, t in tokens.items():
        got = results[f"r{i}"]
        assert_bitwise_equal(got.logprobs[:, 0], want[i], f"request {i}")
        assert torch.equal(got.logprob_token_ids[:, 0], t[1:])
    assert results["r1"].logprobs.shape == (13, 3)


def test_a_request_without_prompt_logprobs_is_skipped(
    head: torch.Tensor, fake_targets: dict[str, Any]
) -> None:
    worker = scorer(head, [None, 0])
    tokens = {0: torch.arange(4), 1: torch.arange(6)}
    hidden = {i: torch.randn(len(t), WIDTH) for i, t in tokens.items()}
    spans = {0: (0, 4), 1: (0, 6)}
    fake_targets.update(spans=spans, tokens=tokens)
    assert set(step(worker, head, hidden, tokens, spans)) == {"r1"}


@pytest.mark.parametrize("biased", [False, True])
def test_sampled_tokens_score_at_their_temperature(
    monkeypatch: pytest.MonkeyPatch, biased: bool
) -> None:
    """`biased`: a request has min_tokens, so vLLM draws from a restricted copy of the logits."""
    sampler = object.__new__(runner_v2.ConsistentSamplerV2)
    sampler.impl = "reference"
    sampler.sampling_states = states()
    sampler.sampling_states.max_num_logprobs = lambda mapping: 2
    sampler.req_states = SimpleNamespace(prefill_len=SimpleNamespace(gpu=None))
    sampler.use_fp64_gumbel = False
    bias = np.array([False, biased, False, True])  # the last request is not in this step
    sampler.logit_bias_state = SimpleNamespace(use_logit_bias=bias)
    sampled = torch.tensor([5, 6, 7])
    drawn: list[str] = []

    def restricted(self: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        drawn.append("restricted")
        return sampled, None

    def raw(rows: torch.Tensor, *_: Any, apply_temperature: bool, **__: Any) -> torch.Tensor:
        assert rows is logits
        assert apply_temperature
        drawn.append("raw")
        return sampled

    monkeypatch.setattr(runner_v2.ConsistentSamplerV2, "sample", restricted)
    monkeypatch.setattr(runner_v2, "gumbel_sample", raw)
    monkeypatch.setattr(
        runner_v2, "get_num_sampled_and_rejected", lambda *a: (torch.ones(3), torch.zeros(3))
    )
    order = [2, 0, 1]
    batch = SimpleNamespace(
        expanded_idx_mapping=torch.tensor(order),
        idx_mapping_np=np.array(order),
        idx_mapping=torch.tensor(order),
        positions=torch.zeros(3),
        logits_indices=torch.arange(3),
        input_ids=torch.zeros(3),
        expanded_local_pos=None,
        seq_lens=torch.ones(3),
        num_reqs=3,
        cu_num_logits=None,
    )
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    output = sampler(logits, batch)
    assert drawn == ["restricted" if biased else "raw"]
    want = token_logprobs_from_logits(
        logits, sampled, temperature=TEMPERATURES[order], impl="reference"
    ).logprob
    assert_bitwise_equal(output.logprobs_tensors.logprobs[:, 0], want)
    assert output.sampled_token_ids.tolist() == [[5], [6], [7]]
    with pytest.raises(UnsupportedError, match="speculative decoding"):
        sampler(logits.repeat(2, 1), batch)
