"""What is measured: models, works, and the prompts of each round."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from benchmarks.rollout.prompts import PromptSource
from consistent_kernels.errors import UnsupportedError

THROUGHPUT, DECODE, FIRST_TOKEN = "throughput", "decode", "first token"
PROFILE_TOKENS = 96
"""New tokens of each request of a profile; most are decoded while the last prompts are read."""

_FEW_STEPS, _MANY_STEPS = 8, 32

UNITS = {THROUGHPUT: "tokens/s", DECODE: "tokens/s", FIRST_TOKEN: "ms"}


@dataclasses.dataclass(frozen=True)
class Work:
    """One row of the table.

    Attributes:
        key: how `--work` names it.
        name: how the table names it.
        model: a key of `models.MODELS`.
        requests: how many run at once; with FIRST_TOKEN one after the other.
        prompt: shortest and longest prompt, drawn uniformly.
        new_tokens: sampled tokens of each request.
        measure: THROUGHPUT (all tokens over the whole time, prompts included), DECODE (tokens
            after the first, from when every request has one) or FIRST_TOKEN (median time to it).
        cached: whether the prompts are the same in every round and their pages stay cached.
        parity: (requests at once, tokens each) of a further rollout for the parity check, or None
            where the timed rounds' own samples serve, topped up until there are enough.
        aim: ratio to stock that our engine is meant to reach: at least, or at most where it is a
            time; None where none was set.
        top_up: requests at once of a rollout that tops up; `requests` by default. One request at a
            time would take minutes for enough tokens.
    """

    key: str
    name: str
    model: str
    requests: int
    prompt: tuple[int, int]
    new_tokens: int
    measure: str = THROUGHPUT
    cached: bool = False
    parity: tuple[int, int] | None = None
    top_up: int | None = None
    aim: float | None = None

    @property
    def slice_steps(self) -> int | None:
        """Engine steps before the next engine takes its turn: 50 to 100 ms of decoding.

        None where whole rollouts take turns.
        """
        if self.measure == FIRST_TOKEN:
            return None
        return _FEW_STEPS if self.requests > 1 else _MANY_STEPS

    @property
    def unit(self) -> str:
        """Unit of what is measured."""
        return UNITS[self.measure]

    @property
    def lower_is_better(self) -> bool:
        """Whether it is a time."""
        return self.measure == FIRST_TOKEN

    def longest(self) -> int:
        """Tokens of the longest sequence, the one that re-scoring adds included."""
        new = max(self.new_tokens, self.parity[1] if self.parity else 0)
        return self.prompt[1] + new + 1

    def pages_tokens(self) -> int:
        """Tokens whose keys and values are held at once, at most."""
        timed = self.requests * (self.prompt[1] + self.new_tokens)
        if self.measure == THROUGHPUT:  # lengths average out over many requests
            mean = (self.prompt[0] + self.prompt[1]) / 2 + self.new_tokens
            timed = int(1.03 * self.requests * mean) + self.prompt[1]
        parity = self.parity[0] * (self.prompt[1] + self.parity[1]) if self.parity else 0
        topped = (self.top_up or 0) * (self.prompt[1] + self.new_tokens)
        return max(timed, parity, topped, self.longest())

    def prompts(self, round_index: int, source: PromptSource) -> list[list[int]]:
        """Return the prompts of a round; the same ones in every round where `cached`."""
        seed = f"{self.key}/{0 if self.cached else round_index}"
        return source(seed, self.requests, self.prompt)

    def parity_prompts(self, turn: int, source: PromptSource) -> list[list[int]]:
        """Return the prompts of one rollout of the parity check."""
        count = self.parity[0] if self.parity else (self.top_up or self.requests)
        return source(f"{self.key}/parity/{turn}", count, self.prompt)


_MIXED = (7, 777)

WORKS = (
    Work("qwen3_8b.256", "Qwen3-8B shape, 256 requests x 256 tokens, mixed prompts",
         "qwen3_8b", 256, _MIXED, 256, aim=0.98),
    Work("qwen3_8b.1", "Qwen3-8B shape, 1 request x 256 tokens", "qwen3_8b", 1, (392, 392), 256,
         top_up=32, aim=0.97),
    Work("qwen3_8b.32k", "Qwen3-8B shape, 8 requests at 32k context", "qwen3_8b", 8,
         (32_768, 32_768), 128, DECODE, cached=True, parity=(8, 2_048), aim=0.95),
    Work("qwen3_8b.ttft2k", "Qwen3-8B shape, time to first token, 2k prompt", "qwen3_8b", 32,
         (2_048, 2_048), 1, FIRST_TOKEN, parity=(32, 512), aim=1.05),
    Work("qwen3_8b.ttft16k", "Qwen3-8B shape, time to first token, 16k prompt", "qwen3_8b", 6,
         (16_384, 16_384), 1, FIRST_TOKEN, parity=(8, 2_048), aim=1.05),
    Work("qwen3_0_6b.256", "Qwen3-0.6B shape, 256 requests x 256 tokens, mixed prompts",
         "qwen3_0_6b", 256, _MIXED, 256, aim=0.97),
    Work("qwen3_0_6b.1", "Qwen3-0.6B shape, 1 request x 256 tokens", "qwen3_0_6b", 1, (392, 392),
         256, top_up=32, aim=0.97),
    Work("qwen3_30b_a3b.256", "Qwen3-30B-A3B shape, 8 layers, 256 requests x 256 tokens",
         "qwen3_30b_a3b", 256, _MIXED, 256, aim=0.95),
    Work("qwen3_30b_a3b.64", "Qwen3-30B-A3B shape, 8 layers, 64 requests x 256 tokens",
         "qwen3_30b_a3b", 64, _MIXED, 256, aim=0.95),
    Work("qwen3_30b_a3b_fp8.256", "Qwen3-30B-A3B shape in block FP8, 8 layers, 256 requests x 256 "
         "tokens", "qwen3_30b_a3b_fp8", 256, _MIXED, 256, aim=0.95),
    Work("qwen3_30b_a3b_fp8.64", "Qwen3-30B-A3B shape in block FP8, 8 layers, 64 requests x 256 "
         "tokens", "qwen3_30b_a3b_fp8", 64, _MIXED, 256, aim=0.95),
    Work("smollm2.256", "SmolLM2-135M real weights, 256 requests x 256 tokens, mixed prompts",
         "smollm2", 256, (64, 777), 256, aim=0.95),
)  # fmt: skip


def tiny(work: Work) -> Work:
    """Return the same work in a size that two CPU cores finish in seconds, under another name."""
    long = work.prompt[0] > 1000
    return dataclasses.replace(
        work,
        name=f"tiny: {work.name}",
        requests=min(work.requests, 3),
        prompt=(150, 150) if long else (7, 40),
        new_tokens=min(work.new_tokens, 6),
        parity=(2, 5) if work.parity else None,
        top_up=2 if work.top_up else None,
    )


def chosen(keys: Iterable[str], works: Sequence[Work] = WORKS) -> list[Work]:
    """Return the works of the given keys, or of the given models, in the table's order.

    Raises:
        UnsupportedError: a key of neither.
    """
    known = {work.key for work in works} | {work.model for work in works}
    wanted = set(keys) or known
    for key in sorted(wanted - known):
        raise UnsupportedError("benchmarks.rollout", f"work {key!r}", [w.key for w in works])
    return [work for work in works if work.key in wanted or work.model in wanted]
