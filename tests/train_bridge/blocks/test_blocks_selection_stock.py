"""The indexers score and select as stock does: transformers' V4 and vLLM's V3.2, on our weights.

Stock runs in fp32 on weights rounded to bf16; ours quantizes queries and keys to e4m3. A score sums
products whose errors are independent (2^-4 of a value at most, a third of it on average), so
scores are compared by their norm: below 2^-4. If no score is further than d from stock's, no
selected entry can lie more than 2 d below stock's k-th largest: that is a theorem, not a tolerance.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from block_cases import BlockCase

import train_bridge.blocks.v4 as v4
import train_bridge.blocks.v32 as v32
from consistent_kernels.rotary import rope_tables
from train_bridge.blocks import PackedSequences

TOKENS = 150


@dataclasses.dataclass
class Selection:
    """What one side scored and chose.

    Attributes:
        scores: [T, N] fp32; chosen: [T, k], -1 for none.
    """

    scores: torch.Tensor
    chosen: torch.Tensor


def ours(case: BlockCase, hidden: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Selection:
    """Run the trainer's block and catch its scores and its selection."""
    caught: dict[str, torch.Tensor] = {}
    module = v32 if case.name == "v32" else v4

    def catch(name: str) -> None:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            caught[name] = real(*args, **kwargs)
            return caught[name]

        monkeypatch.setattr(module, name, call)

    catch("indexer_scores")
    catch("sparse_topk")
    with torch.no_grad():
        case.trainer()(hidden, PackedSequences.from_lengths([TOKENS]))
    monkeypatch.undo()
    return Selection(caught["indexer_scores"], caught["sparse_topk"].long())


def rounded(case: BlockCase, name: str) -> torch.Tensor:
    return case.weights[name].bfloat16().float()


def queries(case: BlockCase, hidden: torch.Tensor) -> torch.Tensor:
    """The compressed queries in fp32."""
    compressed = hidden.float() @ rounded(case, "q_a").t()
    mean = compressed.square().mean(-1, keepdim=True)
    return compressed * (mean + case.params.norm_eps).rsqrt() * rounded(case, "q_norm")


def transformers_scores(case: BlockCase, hidden: torch.Tensor) -> Selection:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers import DeepseekV4Config

    params = case.params
    config = DeepseekV4Config(
        hidden_size=params.hidden, q_lora_rank=params.q_rank, index_n_heads=params.index_heads,
        index_head_dim=128, index_topk=params.topk, num_hidden_layers=1, head_dim=512,
        layer_types=["compressed_sparse_attention"], rms_norm_eps=params.norm_eps,
    )  # fmt: skip
    config.rope_parameters["compress"]["rope_theta"] = params.rope.theta
    indexer = modeling.DeepseekV4Indexer(config).float().eval()
    kv, gate = rounded(case, "index_compress").chunk(2)
    indexer.load_state_dict(
        {
            "kv_proj.weight": kv,
            "gate_proj.weight": gate,
            "position_bias": case.weights["index_compress_bias"],
            "kv_norm.weight": rounded(case, "index_compress_norm"),
            "q_b_proj.weight": rounded(case, "index_q"),
            "scorer.weights_proj.weight": rounded(case, "index_weights"),
        },
        strict=False,  # its rotary buffers stay
    )
    caught = []
    indexer.scorer.register_forward_hook(lambda module, args, result: caught.append(result))
    with torch.no_grad():
        chosen = indexer(
            hidden.float()[None], queries(case, hidden)[None], torch.arange(TOKENS)[None], None, 0
        )
    return Selection(caught[0][0], chosen[0])


def vllm_scores(
    case: BlockCase, hidden: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> Selection:
    """vLLM's `Indexer.forward` itself, its FP8 quantization left out; then the report's formula."""
    stock = pytest.importorskip("vllm.model_executor.models.deepseek_v2")
    from vllm.model_executor.layers.layernorm import LayerNorm
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    params = case.params
    cos, sin = rope_tables(params.index_rope, "cpu")
    norm = LayerNorm(128, eps=params.index_norm_eps)
    norm.weight.data.copy_(case.weights["index_norm"])
    norm.bias.data.copy_(case.weights["index_norm_bias"])
    keys_and_weights = torch.cat((rounded(case, "index_k"), rounded(case, "index_weights")))

    def rotary(
        positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tables = cos[positions], sin[positions]
        # is_neox_style: vLLM's `not config.indexer_rope_interleave`, which V3.2 does not set.
        return ApplyRotaryEmb.forward_static(q, *tables), ApplyRotaryEmb.forward_static(k, *tables)

    self = types.SimpleNamespace(
        n_head=params.index_heads, head_dim=128, rope_dim=64, quant_block_size=128,
        scale_fmt="ue8m0", softmax_scale=128**-0.5, n_head_scale=params.index_heads**-0.5,
        use_fused_indexer_q=False, is_inplace_rope=False, k_norm=norm,
        wq_b=lambda qr: (qr @ rounded(case, "index_q").t(), None),
        wk_weights_proj=lambda x: (x @ keys_and_weights.t(), None),
        indexer_op=lambda hidden_states, q, k, weights: (q, k, weights),
    )  # fmt: skip
    monkeypatch.setattr(
        stock, "per_token_group_quant_fp8", lambda q, *args, **kwargs: (q, torch.ones(len(q)))
    )
    with torch.no_grad():
        q, k, weights = stock.Indexer.forward(
            self, hidden.float(), queries(case, hidden), torch.arange(TOKENS), rotary
        )
    scores = torch.einsum("th,thn->tn", weights, (q @ k.t()).relu())
    seen = torch.arange(TOKENS)[None] <= torch.arange(TOKENS)[:, None]
    best = scores.masked_fill(~seen, float("-inf")).topk(params.topk)
    return Selection(scores, best.indices.where(best.values > float("-inf"), -1))


def agree(mine: Selection, theirs: Selection, counts: torch.Tensor, topk: int) -> float:
    """Assert the theorem for every query that leaves entries out; return the scores' error.

    Args:
        counts: [T] entries that each query may see.
    """
    columns = theirs.scores.shape[1]
    seen = torch.arange(columns)[None] < counts[:, None]
    difference = (mine.scores[:, :columns] - theirs.scores).masked_fill(~seen, 0.0)
    norm = theirs.scores.masked_fill(~seen, 0.0).norm()
    for token, count in enumerate(counts.tolist()):
        chosen = mine.chosen[token]
        chosen = chosen[chosen >= 0]
        assert len(chosen) == len(set(chosen.tolist())) == min(count, topk)
        if count > topk:
            scores = theirs.scores[token, :count]
            limit = scores.topk(topk).values[-1] - 2 * difference[token].abs().max()
            assert bool((scores[chosen] >= limit).all()), token
    return float(difference.norm() / norm)


def overlap(mine: Selection, theirs: Selection) -> float:
    """Share of stock's chosen entries that ours chose too, of queries that leave some out.

    A blind choice would share k of the entries seen, a third of them here.
    """
    full = (theirs.chosen >= 0).all(1)
    pairs = zip(mine.chosen[full].tolist(), theirs.chosen[full].tolist(), strict=True)
    shares = [len(set(a) & set(b)) / len(b) for a, b in pairs]
    assert len(shares) > TOKENS // 2
    return sum(shares) / len(shares)


def test_v4_selects_what_transformers_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BlockCase.make("v4-csa", "cpu")
    hidden = case.hidden(TOKENS, seed=11)
    mine = ours(case, hidden, monkeypatch)
    theirs = transformers_scores(case, hidden)
    counts = (torch.arange(TOKENS) + 1) // case.params.ratio
    assert agree(mine, theirs, counts, case.params.topk) < 2**-4
    assert overlap(mine, theirs) > 0.8


def test_v32_selects_what_vllm_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BlockCase.make("v32", "cpu")
    hidden = case.hidden(TOKENS, seed=12)
    mine = ours(case, hidden, monkeypatch)
    theirs = vllm_scores(case, hidden, monkeypatch)
    assert agree(mine, theirs, torch.arange(TOKENS) + 1, case.params.topk) < 2**-4
    assert overlap(mine, theirs) > 0.8


def test_control_another_rotation_scores_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys turned with another base are outside the bound."""
    case = BlockCase.make("v32", "cpu")
    hidden = case.hidden(TOKENS, seed=12)
    theirs = vllm_scores(case, hidden, monkeypatch)
    real = case.params.index_rope
    other = dataclasses.replace(case.params.rope, theta=real.theta * 2)
    turned = dataclasses.replace(case, params=dataclasses.replace(case.params, rope=other))
    mine = ours(turned, hidden, monkeypatch)
    difference = (mine.scores - theirs.scores).tril()
    assert float(difference.norm() / theirs.scores.tril().norm()) > 2**-4
