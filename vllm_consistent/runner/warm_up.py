"""Kernels that neither vLLM's warm-up nor graph capture reaches, run once before the first request.

Triton compiles at the first call: in the middle of a rollout that is a pause of a second.
"""

from __future__ import annotations

import torch

from consistent_kernels.attention import AttentionParameters, attention_paged
from consistent_kernels.contract import Contract
from vllm_consistent.runner.draw import draw_tokens
from vllm_consistent.runner.scoring import score


def warm_up(
    contract: Contract, pages: torch.Tensor | None, vocab: int, longest: int, *, draws: bool
) -> None:
    """Draw and score two rows, and attend over two key splits where a context can have them.

    Args:
        contract: of the engine.
        pages: [blocks, 2, block_size, Hk, D], any layer's; only its shape and device are read.
        vocab: columns of the logits.
        longest: `max_model_len`.
        draws: whether our sampler draws (V1); V2's runner has vLLM's draw.
    """
    device = torch.device("cuda") if pages is None else pages.device
    logits = torch.zeros(2, vocab, dtype=torch.float32, device=device)
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    temperature = torch.ones(2, dtype=torch.float32, device=device)
    score(logits, ids, temperature, 0, contract.implementation("token_logprobs"))
    if draws:
        draw_tokens(logits, temperature, torch.zeros(2, dtype=torch.float64, device=device))
    if pages is None:
        return
    facts = contract.model
    params = AttentionParameters(
        num_heads=facts["num_heads"],
        num_kv_heads=facts["num_kv_heads"],
        head_dim=facts["head_dim"],
        scale=facts["head_dim"] ** -0.5,
        sliding_window=facts["sliding_window"],
    )
    if longest > params.key_split:
        for queries in (1, 3):
            _attend(contract.implementation("attention"), params, pages, queries)


def _attend(impl: str, params: AttentionParameters, pages: torch.Tensor, queries: int) -> None:
    """Attend from the last positions of a context that reaches into its second split."""
    keys = params.key_split + 2
    one = torch.zeros((1, *pages.shape[1:]), dtype=pages.dtype, device=pages.device)
    k_cache, v_cache = one.unbind(1)  # every entry of the table names this page
    device = pages.device
    q = one.new_zeros(queries, params.num_heads, params.head_dim)
    attention_paged(
        q,
        k_cache,
        v_cache,
        torch.zeros(1, -(-keys // pages.shape[2]), dtype=torch.int32, device=device),
        torch.full((1,), keys, dtype=torch.int32, device=device),
        torch.tensor([0, queries], dtype=torch.int32, device=device),
        params=params,
        impl=impl,
        max_query_len=queries,
        max_seq_len=keys,
        out=torch.empty_like(q),
    )
