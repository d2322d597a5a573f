"""Which weight version wrote each KV page: a page of older weights must never be read.

vLLM's prefix cache is not told when weights change. The worker therefore notes, for each page, the
version that its request started with, and refuses a step that would read older ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from consistent_kernels.errors import StaleWeightsError

_RESET = "call reset_prefix_cache() after each weight update, before the next request"


class PageVersions:
    """Versions by page and by running request."""

    def __init__(self) -> None:
        self._pages = np.zeros(0, dtype=np.int64)
        self._requests: dict[str, int] = {}
        self._version: int | None = None
        self._older: set[str] = set()  # running requests that started on another version

    def check(self, step: Any, version: int, block_sizes: Sequence[int]) -> None:
        """Note this step's pages; raise StaleWeightsError if one of them holds older keys.

        Args:
            step: vLLM's SchedulerOutput.
            version: the weights served now.
            block_sizes: positions a page, for each group of layers (a window has its own pages).
        """
        for request in step.finished_req_ids:
            self._requests.pop(request, None)
            self._older.discard(request)
        if version != self._version:
            self._version = version
            self._older = {name for name, begun in self._requests.items() if begun != version}
        for request in step.scheduled_new_reqs:
            cached = request.num_computed_tokens
            self._start(request.req_id, request.block_ids, cached, version, block_sizes)
        running = step.scheduled_cached_reqs
        if self._older or running.resumed_req_ids:
            self._check_running(running, version, block_sizes)
            return
        # The common step, which no request may slow down by a look at each.
        for blocks in running.new_block_ids:
            if blocks:
                self._mark(blocks, version)

    def _check_running(self, running: Any, version: int, block_sizes: Sequence[int]) -> None:
        for index, name in enumerate(running.req_ids):
            blocks = running.new_block_ids[index]
            if name in running.resumed_req_ids:
                computed = running.num_computed_tokens[index]
                self._start(name, blocks or (), computed, version, block_sizes)
                continue
            if name in self._older:
                raise StaleWeightsError(
                    f"request {name} started on weight version {self._requests[name]} and would "
                    f"continue on {version}; finish or abort all requests before a weight update"
                )
            if blocks:
                self._mark(blocks, version)

    def _start(
        self, name: str, blocks: Any, cached: int, version: int, block_sizes: Sequence[int]
    ) -> None:
        for group, block_size in zip(blocks, block_sizes, strict=False):
            hit = group[: cached // block_size]
            self._grow(group)
            stale = [page for page in hit if page and self._pages[page] != version]
            if stale:
                raise StaleWeightsError(
                    f"request {name} would read {len(stale)} cached KV page(s) of weight version "
                    f"{self._pages[stale[0]]}, while {version} is served; {_RESET}"
                )
        self._mark(blocks, version)
        self._requests[name] = version
        self._older.discard(name)

    def _mark(self, blocks: Any, version: int) -> None:
        for group in blocks:
            if group:
                self._grow(group)
                self._pages[group] = version

    def _grow(self, group: list[int]) -> None:
        needed = max(group, default=-1) + 1
        if needed > len(self._pages):
            size = max(needed, 2 * len(self._pages))
            grown = np.full(size, -1, dtype=np.int64)
            grown[: len(self._pages)] = self._pages
            self._pages = grown
