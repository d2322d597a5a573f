"""Tiny GPTModels with the weights of the tiny Hugging Face models, on one gloo rank."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core (extra: megatron)")

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from tiny_gpt import gpt_model, named

from train_bridge.megatron import bridge_gpt_model, from_hf_state


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A gloo group of one rank, gone after the file: an engine in this process makes its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def make_gpt(make_stock: Callable) -> Callable[..., GPTModel]:
    """Return a function (family, dtype, device, vocab_rows, **config) -> bridged GPTModel."""

    def make(
        family: str,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        vocab_rows: int | None = None,
        **changes: Any,
    ) -> GPTModel:
        stock = named(make_stock(family, dtype))
        model = gpt_model(stock.config, vocab_rows=vocab_rows, params_dtype=dtype, **changes)
        bridge_gpt_model(model.to(device), stock.config)
        state = from_hf_state(stock.state_dict(), model.state.facts, vocab_rows=vocab_rows)
        model.load_state_dict(state)
        return model

    return make
