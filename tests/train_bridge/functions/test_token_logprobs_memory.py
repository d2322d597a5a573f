"""[tokens, vocabulary] in fp32 exists in neither direction: the largest allocation is measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from consistent_kernels.linear import prepare_weight
from consistent_kernels.linear.spec import choose
from consistent_kernels.token_logprobs.spec import BACKWARD_ROWS, STREAM_ROWS
from train_bridge import token_logprobs
from train_bridge.functions.token_logprobs import TokenLogprobsFunction

FP32 = torch.float32.itemsize


def largest_allocation(run: Callable[[], object]) -> int:
    """Return bytes of the largest tensor that `run` allocates on the CPU, inside opaque ops too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        run()
    return max(event.self_cpu_memory_usage for event in record.events())


def inputs(
    tokens: int, vocab: int, linear_impl: str, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden, master, prepared, ids) of hidden size 64."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, 64, generator=generator).bfloat16().to(device).requires_grad_()
    master = (torch.randn(vocab, 64, generator=generator) / 4).to(device).requires_grad_()
    prepared = prepare_weight(
        master, dtype=torch.bfloat16, impl=linear_impl, out_dtype=torch.float32
    )
    return hidden, master, prepared, torch.randint(vocab, (tokens,), generator=generator).to(device)


def score_and_train(tensors: tuple[torch.Tensor, ...], impl: str, linear_impl: str) -> None:
    logprob, _, entropy = TokenLogprobsFunction.apply(
        *tensors, 0.7, None, None, True, impl, linear_impl
    )
    (logprob.sum() + entropy.sum()).backward()


@pytest.mark.parametrize("linear_impl", ["reference", choose("cpu")])
@pytest.mark.parametrize("impl", ["reference", "llvm"])
def test_no_logits_of_all_tokens_exist(impl: str, linear_impl: str) -> None:
    tokens, vocab = 300, 2112
    tensors = inputs(tokens, vocab, linear_impl)
    most = max(STREAM_ROWS[impl], BACKWARD_ROWS[impl])
    assert 2 * most < tokens
    assert largest_allocation(lambda: score_and_train(tensors, impl, linear_impl)) <= (
        most * vocab * FP32
    )
    assert bool((tensors[1].grad != 0).any())


def test_control_a_plain_head_holds_all_logits() -> None:
    tokens, vocab = 300, 2112
    hidden, master, _, ids = inputs(tokens, vocab, "reference")

    def plain() -> None:
        logits = torch.nn.functional.linear(hidden.float(), master)
        logits.log_softmax(-1).gather(1, ids[:, None]).sum().backward()

    assert largest_allocation(plain) >= tokens * vocab * FP32


def test_no_logits_of_all_tokens_exist_in_a_model(make_bridged: Callable) -> None:
    model = make_bridged("qwen3", torch.float32)
    tokens, vocab = 300, model.config.vocab_size
    ids = torch.randint(3, vocab, (3, 100), generator=torch.Generator().manual_seed(4))

    def step() -> None:
        scores = token_logprobs(model, ids)
        (scores.log_probs.sum() + scores.entropy.sum()).backward()

    # The largest that is wanted: q, k and v in fp32, in the backward.
    assert largest_allocation(step) < 0.9 * tokens * vocab * FP32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_logits_of_all_tokens_exist_on_cuda() -> None:
    tokens, vocab = 6 * BACKWARD_ROWS["triton"], 8192
    tensors = inputs(tokens, vocab, "triton", "cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    score_and_train(tensors, "triton", "triton")
    # Of some rows: fp32 logits, their bf16 gradient, and room for another copy of each.
    room = 3 * BACKWARD_ROWS["triton"] * vocab * FP32
    assert torch.cuda.max_memory_allocated() - before <= room < tokens * vocab * FP32
