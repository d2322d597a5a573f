"""Log-probs of given tokens: from logits (sampler) and from hidden states (trainer).

Stock's sampler runs vLLM's Triton log-softmax on fp32 logits; a stock trainer runs bf16 logits
through `log_softmax` in fp32 and gathers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.linear import prepare_weight
from consistent_kernels.linear.spec import IMPLEMENTATIONS as LINEAR_IMPLEMENTATIONS
from consistent_kernels.testing import peaked_logits
from consistent_kernels.token_logprobs import token_logprobs, token_logprobs_from_logits
from consistent_kernels.token_logprobs.spec import IMPLEMENTATIONS

OP = "token_logprobs"


def cases(setting: Setting) -> Iterator[Case]:
    """One row a request from logits; 4,096 packed tokens from hidden states."""
    yield from _from_logits(setting)
    yield from _from_hidden(setting)


def _from_logits(setting: Setting) -> Iterator[Case]:
    vocab, batches = (1500, (1, 5)) if setting.small else (151936, (1, 64, 256))
    logits = peaked_logits(max(batches), vocab, seed=1).to(setting.device)
    ids = logits.argmax(-1)
    heat = torch.linspace(0.5, 1.5, max(batches), device=setting.device)
    for impl in setting.implementations(IMPLEMENTATIONS):
        run = functools.partial(_scored_logits, logits, ids, heat, impl)
        relations = functools.partial(check_rows, run, max(batches))
        for m in batches:
            yield Case(
                op="token_logprobs_from_logits",
                shape=f"M={m} V={vocab}",
                impl=impl,
                ours=functools.partial(run, slice(0, m)),
                stock=functools.partial(_stock_logits, setting.device, logits[:m], ids[:m]),
                relations=relations,
            )


def _from_hidden(setting: Setting) -> Iterator[Case]:
    vocab, hidden_size, rows = (1500, 64, 9) if setting.small else (151936, 4096, 4096)
    hidden = setting.hazards(rows, hidden_size, seed=2)
    master = setting.normal(vocab, hidden_size, seed=3, scale=0.05)
    ids = (torch.arange(rows, device=setting.device) * 7919) % vocab
    for impl in setting.implementations(IMPLEMENTATIONS):
        for linear_impl in setting.implementations(LINEAR_IMPLEMENTATIONS):
            weight = prepare_weight(
                master, dtype=torch.bfloat16, impl=linear_impl, out_dtype=torch.float32
            )
            run = functools.partial(_scored_hidden, hidden, weight, ids, impl, linear_impl)
            relations = functools.partial(check_rows, run, min(rows, 300))
            yield Case(
                op=OP,
                shape=f"M={rows} V={vocab} H={hidden_size}",
                impl=f"{impl}, linear {linear_impl}",
                ours=functools.partial(run, slice(0, rows)),
                stock=functools.partial(_stock_hidden, hidden, master, ids),
                relations=relations,
            )


def _scored_logits(
    logits: torch.Tensor, ids: torch.Tensor, heat: torch.Tensor, impl: str, part: slice
) -> torch.Tensor:
    return token_logprobs_from_logits(
        logits[part], ids[part], temperature=heat[part], entropy=False, impl=impl
    ).logprob


def _stock_logits(device: str, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    if device == "cpu":
        return logits.log_softmax(-1).gather(1, ids.unsqueeze(1))
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    return compute_token_logprobs(logits, ids.unsqueeze(1))


def _scored_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    impl: str,
    linear_impl: str,
    part: slice,
) -> torch.Tensor:
    return token_logprobs(
        hidden[part],
        weight,
        ids[part],
        temperature=1.0,
        entropy=False,
        impl=impl,
        linear_impl=linear_impl,
    ).logprob


def _stock_hidden(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight).float()
    return logits.log_softmax(-1).gather(1, ids.unsqueeze(1))
