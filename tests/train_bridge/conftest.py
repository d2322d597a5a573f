"""Tiny models and batches for the bridge's tests, on every device that this machine has."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, tiny_model

from train_bridge import bridge_model

LENGTHS = (5, 1, 17, 2, 33, 16, 70)
"""Around the GEMM's 16 rows and attention's 64 keys; a lone token has nothing to score."""
SAMPLED = 12
"""Tokens drawn from the model itself at the end of each sequence that has room for them."""
PADDING = 3


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Token sequences, and the same as padded or packed tensors."""

    tokens: tuple[torch.Tensor, ...]

    def padded(self, side: str, fill: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, attention_mask), both [B, longest + PADDING]."""
        width = max(len(tokens) for tokens in self.tokens) + PADDING
        ids = torch.full((len(self.tokens), width), fill)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(self.tokens):
            where = slice(width - len(tokens), width) if side == "left" else slice(len(tokens))
            ids[row, where], mask[row, where] = tokens.cpu(), 1
        device = self.tokens[0].device
        return ids.to(device), mask.to(device)

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, position_ids), both [1, T]."""
        positions = [torch.arange(len(tokens), device=tokens.device) for tokens in self.tokens]
        return torch.cat(self.tokens)[None], torch.cat(positions)[None]

    def to(self, device: str) -> Sequences:
        """Copy to a device."""
        return Sequences(tuple(tokens.to(device) for tokens in self.tokens))


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Where the forward runs."""
    return request.param


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Llama, Qwen2 or Qwen3."""
    return request.param


_STOCK: dict[str, torch.nn.Module] = {}
_SEQUENCES: dict[str, Sequences] = {}


@pytest.fixture
def make_stock() -> Callable[..., torch.nn.Module]:
    """Return a function (family, dtype=bf16, device="cpu") -> fresh Hugging Face model."""

    def make(
        family: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
    ) -> torch.nn.Module:
        if family not in _STOCK:
            _STOCK[family] = tiny_model(family, dtype=torch.float32)
        return copy.deepcopy(_STOCK[family]).to(device, dtype)

    return make


@pytest.fixture
def make_bridged(make_stock: Callable) -> Callable[..., torch.nn.Module]:
    """Return a function (family, dtype=bf16, device="cpu") -> fresh bridged model."""

    def make(
        family: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
    ) -> torch.nn.Module:
        return bridge_model(make_stock(family, dtype, device))

    return make


@pytest.fixture
def make_sequences(make_stock: Callable) -> Callable[..., Sequences]:
    """Return a function (family, device="cpu") -> Sequences of LENGTHS with sampled endings."""

    def make(family: str, device: str = "cpu") -> Sequences:
        if family not in _SEQUENCES:
            _SEQUENCES[family] = _sample(make_stock(family))
        return _SEQUENCES[family].to(device)

    return make


def _sample(model: torch.nn.Module) -> Sequences:
    generator = torch.Generator().manual_seed(11)
    tokens = []
    for length in LENGTHS:
        prompt = max(length - SAMPLED, 1)
        ids = torch.randint(3, VOCAB, (1, prompt), generator=generator)
        cache = None
        while ids.shape[1] < length:
            with torch.no_grad():
                fed = ids if cache is None else ids[:, -1:]
                out = model(fed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            probs = out.logits[0, -1].float().softmax(-1)
            drawn = torch.multinomial(probs, 1, generator=generator)
            ids = torch.cat((ids, drawn[None]), dim=1)
        tokens.append(ids[0])
    return Sequences(tuple(tokens))
