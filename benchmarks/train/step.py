"""One training step, forward and backward, of the bridged and of the stock model.

Both models share their parameters, so that both fit and neither's memory counts in the other's.
The loss is that of a policy gradient: -mean(ratio * advantage), whose ratio is 1 here.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.rollout.models import Shape, random_weights
from train_bridge import bridge_model, token_logprobs

CHUNK = 2048
"""Tokens whose logits the chunked stock trainer holds at once."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The two models of one set of parameters.

    Attributes:
        ours: bridged; stock: Hugging Face's own, with PyTorch's flash attention.
    """

    ours: nn.Module
    stock: nn.Module

    def forget_gradients(self) -> None:
        """Drop the gradients of both."""
        for parameter in self.stock.parameters():
            parameter.grad = None


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of one length without padding, as a packed batch holds them.

    Attributes:
        ids: [B, L] int64.
        advantages: [B, L - 1] fp32.
    """

    ids: torch.Tensor
    advantages: torch.Tensor


def build(shape: Shape, layers: int, device: str, *, recompute: bool) -> Pair:
    """Return both models with `layers` layers of `shape`, bf16, on the device."""
    from transformers import AutoModelForCausalLM

    shape = dataclasses.replace(shape, num_hidden_layers=layers)
    with torch.device(device):
        stock = AutoModelForCausalLM.from_config(
            shape.config(), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    parameters = dict(stock.named_parameters())
    with torch.no_grad():
        for name, value in random_weights(shape):
            parameters[name].copy_(value)
    stock.train()
    stock.config.use_cache = False
    ours = copy.deepcopy(stock, {id(p): p for p in parameters.values()})
    for model in (stock, ours):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return Pair(bridge_model(ours), stock)


def make_batch(shape: Shape, sequences: int, length: int, device: str) -> Batch:
    """Return random tokens and advantages in [-1, 1]."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(16, shape.vocab_size, (sequences, length), generator=generator)
    advantages = torch.rand((sequences, length - 1), generator=generator) * 2 - 1
    return Batch(ids.to(device), advantages.to(device))


def our_logprobs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """[B, L - 1] fp32, of every token but the first."""
    return token_logprobs(model, batch.ids, entropy=False).log_probs[:, 1:]


def stock_full_logprobs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """As a plain trainer: all logits at once, `log_softmax` in fp32, gather."""
    with flash_attention(batch.ids.device.type):
        logits = model(input_ids=batch.ids).logits[:, :-1]
    return _gathered(logits, batch.ids[:, 1:])


def stock_chunked_logprobs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """As a thrifty trainer: logits of `CHUNK` tokens at once, computed again in the backward."""
    with flash_attention(batch.ids.device.type):
        hidden = model.model(input_ids=batch.ids).last_hidden_state[:, :-1]
    weight = model.lm_head.weight
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), batch.ids[:, 1:].reshape(-1)
    parts = [
        checkpoint(_head, rows[i : i + CHUNK], weight, targets[i : i + CHUNK], use_reentrant=False)
        for i in range(0, len(rows), CHUNK)
    ]
    return torch.cat(parts).view(hidden.shape[:2])


def _head(rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _gathered(F.linear(rows, weight), targets)


def _gathered(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


@contextlib.contextmanager
def flash_attention(device: str) -> Iterator[None]:
    """On CUDA allow scaled_dot_product_attention its flash kernel only."""
    if device == "cpu":
        yield
        return
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield


STOCK = {"chunked": stock_chunked_logprobs, "full": stock_full_logprobs}
"""How the stock trainer gets its log-probs from hidden states."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step cost.

    Attributes:
        seconds: forward and backward.
        peak_bytes: largest allocation of PyTorch's allocator, 0 on a CPU.
    """

    seconds: float
    peak_bytes: int


def timed_step(
    logprobs: Callable[[nn.Module, Batch], torch.Tensor], model: nn.Module, batch: Batch, pair: Pair
) -> Step:
    """Run forward and backward once, without gradients from before."""
    on_cuda = batch.ids.device.type == "cuda"
    pair.forget_gradients()
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    scores = logprobs(model, batch)
    ratio = (scores - scores.detach()).exp()
    (-(ratio * batch.advantages).mean()).backward()
    if on_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    pair.forget_gradients()
    return Step(seconds, peak)
