"""R2 batch, R3 chunks, R4 prefix cache, R5 preemption on a CUDA engine with graphs.

The CPU's `tests/vllm_consistent/test_engine_relations.py` holds the same relations with more cases.
Two engines a model, one after the other: a roomy one, and one whose steps take 64 tokens and whose
pages do not hold all requests. Controls: a fault of stock kernels, from 17 rows on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, save_tiny_model

from consistent_kernels.testing import assert_bitwise_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (1, 15, 16, 17, 33, 129)
GRAPHS = [1, 2, 4, 8, 16]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [3 + (salt * 131 + 17 * i * i + 7 * i) % (VOCAB - 3) for i in range(length)]


LONG = [prompt(n) for n in LENGTHS]
GROWING = [prompt(20, salt=i) for i in range(6)]


def sample(engine: Any, prompts: Sequence[Sequence[int]], tokens: int = 12) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, logprobs=0, seed=11, detokenize=False
    )
    return engine.generate_with_logprobs(prompts, params)


def cached_tokens(engine: Any, tokens: Sequence[int]) -> int:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, detokenize=False)
    return engine.llm.generate([{"prompt_token_ids": list(tokens)}], params, use_tqdm=False)[
        0
    ].num_cached_tokens


def assert_same(got: Sequence[Any], expected: Sequence[Any]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert_bitwise_equal(ours.logprobs, theirs.logprobs, f"prompt of {len(ours.prompt_ids)}")


def differ(got: Sequence[Any], expected: Sequence[Any]) -> bool:
    return any(
        not torch.equal(ours.logprobs.view(torch.int32), theirs.logprobs.view(torch.int32))
        for ours, theirs in zip(got, expected, strict=True)
    )


def start(folder: Path, **changes: Any) -> Any:
    from vllm_consistent.integrations.engine import ConsistentEngine

    arguments = {
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "block_size": 16,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 1 << 28,
        "compilation_config": {"cudagraph_capture_sizes": GRAPHS},
    }
    return ConsistentEngine(str(folder), **(arguments | changes))


@dataclasses.dataclass
class Tight:
    """What the engine with few pages and short steps gave."""

    long: list[Any]
    growing: list[Any]
    preemptions: int


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def tight(folder: Path) -> Tight:
    engine = start(
        folder,
        max_model_len=160,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=14,
        enable_prefix_caching=False,
    )
    seen = count_preemptions(engine)
    found = Tight(sample(engine, LONG), sample(engine, GROWING, 60), 0)
    found.preemptions = seen()
    engine.close()
    return found


def count_preemptions(engine: Any) -> Callable[[], int]:
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    stock, seen = scheduler._preempt_request, []

    def counting(request: Any, *args: Any, **options: Any) -> None:
        seen.append(request.request_id)
        stock(request, *args, **options)

    scheduler._preempt_request = counting
    return lambda: len(seen)


@pytest.fixture(scope="module")
def engine(folder: Path, tight: Tight) -> Iterator[Any]:
    engine = start(folder, enable_prefix_caching=True)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _no_pages(engine: Any) -> None:
    engine.reset_prefix_cache()


def test_decode_is_batch_invariant(engine: Any) -> None:
    alone = [sample(engine, [tokens])[0] for tokens in LONG]
    for size in (2, 5, 16):
        others = [prompt(5 + 7 * i, salt=i + 1) for i in range(size - 1)]
        for place, tokens in enumerate(LONG):
            at = place % size
            batch = [*others[:at], tokens, *others[at:]]
            engine.reset_prefix_cache()
            assert_same([sample(engine, batch)[at]], [alone[place]])


def test_chunked_prefill_equals_one_shot(engine: Any, tight: Tight) -> None:
    assert_same(tight.long, sample(engine, LONG))


def test_preempted_equals_uninterrupted(engine: Any, tight: Tight) -> None:
    assert tight.preemptions > 0
    assert_same(tight.growing, sample(engine, GROWING, 60))


@pytest.mark.parametrize("hit", [16, 48])
def test_prefix_hit_equals_miss(engine: Any, hit: int) -> None:
    whole = prompt(60, salt=3)
    miss = sample(engine, [whole])
    engine.reset_prefix_cache()
    sample(engine, [[*whole[:hit], 5, 6]])
    assert cached_tokens(engine, [*whole[:hit], 7]) == hit
    assert_same(sample(engine, [whole]), miss)


def test_multi_turn_prefix_equals_miss(engine: Any) -> None:
    first = sample(engine, [prompt(30, salt=4)], 40)[0]
    turn = [*first.prompt_ids, *first.token_ids, *prompt(9, salt=5)]
    # Pages that decode wrote are read back: 64 of them begin inside the response.
    assert cached_tokens(engine, turn) == 64
    warm = sample(engine, [turn])
    engine.reset_prefix_cache()
    assert_same(sample(engine, [turn]), warm)


@pytest.fixture
def faulty(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Above 16 rows, where no graph was captured, K is added in two halves."""
    from consistent_kernels.linear import deep_gemm

    stock = deep_gemm.gemm

    def split_k(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
        if x.shape[0] <= max(GRAPHS):
            return stock(x, weight, y)
        half = x.shape[1] // 2
        low, high = x.clone(), x.clone()
        low[:, half:], high[:, :half] = 0, 0
        other = torch.empty_like(y)
        stock(low, weight, y)
        stock(high, weight, other)
        y.copy_(y.float() + other.float())
        return None

    monkeypatch.setattr(deep_gemm, "gemm", split_k)
    return engine


def test_control_batch_sees_the_fault(faulty: Any) -> None:
    alone = [sample(faulty, [prompt(n)])[0] for n in (15, 16)]
    faulty.reset_prefix_cache()
    assert differ(sample(faulty, [prompt(15), prompt(16)]), alone)


def test_control_prefix_sees_the_fault(faulty: Any) -> None:
    whole = prompt(60, salt=3)
    miss = sample(faulty, [whole])
    faulty.reset_prefix_cache()
    sample(faulty, [[*whole[:48], 5]])
    assert differ(sample(faulty, [whole]), miss)
