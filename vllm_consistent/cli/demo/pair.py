"""The consistent pair: the live engine with the plugin on, and the bridged trainer beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from consistent_kernels.contract import Contract
from consistent_kernels.protocol import compare_logprobs
from consistent_kernels.protocol.report import ConsistencyReport, check_reports
from train_bridge.hf import bridge_model, bridge_state
from train_bridge.logprobs import token_logprobs
from train_bridge.reporting import consistency_report
from train_bridge.weights import push_weights, require_finite, weight_version
from vllm_consistent.cli.demo import stock
from vllm_consistent.cli.demo.errors import CheckpointError, RunError
from vllm_consistent.cli.demo.grpo import policy_loss
from vllm_consistent.cli.demo.metrics import Row
from vllm_consistent.cli.demo.rollout import (
    Batch,
    Rollout,
    SamplingPlan,
    response_positions,
    sample,
)
from vllm_consistent.cli.demo.run import Backends
from vllm_consistent.cli.demo.speed import Rates, time_rollout, warm_up

LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 1.0
_MICRO_BATCH_TOKENS = 512
_CPU_BLOCK = 8
"""Tokens of a KV page on a CPU. The samples of a prompt share its full pages, each reads the rest;
prompts are shorter than vLLM's default, 128, which stock keeps. Attention reads all sizes alike."""

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class LiveEngine:
    """vLLM in this process with the plugin on; see `integrations.engine.ConsistentEngine`."""

    def __init__(self, model: Path, arguments: dict[str, Any], contract: Contract) -> None:
        from vllm_consistent.integrations.engine import ConsistentEngine

        pages = {} if torch.cuda.is_available() else {"block_size": _CPU_BLOCK}
        self.engine = ConsistentEngine(str(model), contract=contract, **arguments, **pages)

    def sample(self, prompt_ids: list[list[int]], plan: SamplingPlan) -> Rollout:
        """Sample with log-probs."""
        return sample(self.engine.llm, prompt_ids, plan)

    def warm_up(self, work: dict[str, Any]) -> None:
        """Let first calls be over."""
        warm_up(self.engine.llm, work)

    def time_rollout(self, work: dict[str, Any]) -> Rates:
        """Return tokens/s of the timed work."""
        return time_rollout(self.engine.llm, work)

    def consistency_report(self) -> dict[str, Any]:
        """Return what the worker serves; raises ContractMismatchError if that is something else."""
        return self.engine.consistency_report()


class BridgedTrainer:
    """A Hugging Face model on the engine's kernels: fp32 masters, AdamW, one update per rollout.

    Args:
        model: Hugging Face folder.
        temperature: the rollout's.

    Raises:
        ConfigurationError: no contract covers the model.
        InvalidInputError: a weight is NaN or infinite.
    """

    def __init__(self, model: Path, temperature: float) -> None:
        self.temperature = temperature
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = bridge_model(loaded.to(device).eval())
        require_finite(self.model, "demo")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
        )
        self._changed = 0
        self._stepped = False

    @property
    def contract(self) -> Contract:
        """What the forward computes."""
        return bridge_state(self.model).contract

    def score(self, batch: Batch) -> Tensor:
        """Return the log-prob of every response token, [B, R] fp32 on the CPU."""
        with torch.no_grad():
            return self._log_probs(batch)[0].cpu()

    def update(self, batch: Batch, advantages: Tensor) -> Row:
        """Make one optimizer step on the clipped, token-mean policy loss.

        Args:
            batch: the rollout.
            advantages: [B] fp32.

        Raises:
            LogprobMismatchError: the training forward differs from the rollout in a bit.
            RunError: the gradient is not finite; the weights are as before.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total = batch.num_tokens
        sums = dict.fromkeys(("loss", "clipped", "kl", "entropy"), 0.0)
        ratio_max = 0.0
        for start, stop in _micro_batches(batch):
            part = batch.rows(start, stop)
            log_probs, entropy = self._log_probs(part)
            old = part.rollout_log_probs.to(log_probs.device)
            mask = part.response_mask.to(log_probs.device)
            compare_logprobs(old, log_probs.detach(), mask).raise_if_mismatched()
            result = policy_loss(log_probs, old, advantages[start:stop].to(old.device), mask)
            (result.loss / total).backward()
            sums["loss"] += result.loss.item()
            sums["clipped"] += result.clipped
            sums["kl"] += result.negative_log_ratio
            sums["entropy"] += entropy[mask].double().sum().item()
            ratio_max = max(ratio_max, result.ratio_max)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM).item()
        if not torch.isfinite(torch.tensor(norm)):
            raise RunError(f"the gradient's norm is {norm}; the step was not made")
        self._changed = self._step()
        self._stepped = True
        return {
            "actor/pg_loss": sums["loss"] / total,
            "actor/pg_clipfrac": sums["clipped"] / total,
            "actor/ppo_kl": sums["kl"] / total,
            "actor/entropy": sums["entropy"] / total,
            "actor/ratio_diff_max": ratio_max,
            "actor/grad_norm": norm,
            "actor/lr": LEARNING_RATE,
        }

    def push(self, engine: LiveEngine) -> Row:
        """Write the weights into the engine in place; verify its receipt, and what both sides ran.

        Raises:
            StaleWeightsError: the engine does not prove that it has them.
            ContractMismatchError: contract, device, versions, binaries or weights are not alike.
        """
        receipt = push_weights(self.model, engine.engine.llm)
        workers = [ConsistencyReport.from_dict(report) for report in engine.engine.reports()]
        # The first push comes before any forward: no op has served yet.
        check_reports(consistency_report(self.model), workers, served=self._stepped)
        return {
            "weights/version": receipt.version,
            "weights/digest": receipt.digest.total,
            "weights/changed_values": self._changed,
        }

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return masters, optimizer and random state as named tensors."""
        masters, moments = {}, {}
        for name, parameter in self.model.named_parameters():
            masters[name] = parameter.detach()
            held = self.optimizer.state.get(parameter, {})
            moments |= {f"{name}.{key}": held[key] for key in _MOMENTS if key in held}
        counters = {
            "torch_cpu": torch.get_rng_state(),
            "weight_version": torch.tensor(weight_version(self.model).value),
        }
        return {"masters": masters, "optimizer": moments, "random": counters}

    def restore(self, groups: dict[str, dict[str, Tensor]]) -> None:
        """Take over what `state` returned.

        Raises:
            CheckpointError: names or shapes are not those of this model.
        """
        missing = [name for name in ("masters", "optimizer", "random") if name not in groups]
        if missing:
            raise CheckpointError(
                f"demo --resume: the checkpoint is damaged: it lacks {', '.join(missing)}"
            )
        named = dict(self.model.named_parameters())
        masters = groups["masters"]
        wrong = sorted(
            name
            for name in named.keys() | masters.keys()
            if name not in named or name not in masters or named[name].shape != masters[name].shape
        )
        if wrong:
            raise CheckpointError(
                f"demo --resume: the checkpoint does not fit the model: {', '.join(wrong[:5])}"
            )
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(masters[name])
                # Loaded tensors map the file: kept, they would hold its space once it is deleted.
                held = {
                    key: groups["optimizer"][f"{name}.{key}"].to(parameter.device, copy=True)
                    for key in _MOMENTS
                    if f"{name}.{key}" in groups["optimizer"]
                }
                if held:
                    self.optimizer.state[parameter] = held
        torch.set_rng_state(groups["random"]["torch_cpu"])
        weight_version(self.model).value = int(groups["random"]["weight_version"])

    def _log_probs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the response tokens, [B, R] each."""
        rows, positions = response_positions(batch)
        scored = torch.zeros_like(batch.input_ids)
        spots = batch.response_mask.nonzero(as_tuple=True)
        scored[spots[0], positions[spots]] = 1
        device = next(self.model.parameters()).device
        scores = token_logprobs(
            self.model,
            batch.input_ids.to(device),
            batch.attention_mask.to(device),
            temperature=self.temperature,
            response_mask=scored.to(device),
            micro_batch_tokens=_MICRO_BATCH_TOKENS,
        )
        return scores.log_probs[rows, positions], scores.entropy[rows, positions]

    def _step(self) -> int:
        """Make the step; returns how many bf16 values, the engine's, it changed."""
        before = [p.detach().to(torch.bfloat16) for p in self.model.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sum(
            int((old != p.detach().to(torch.bfloat16)).sum())
            for old, p in zip(before, self.model.parameters(), strict=True)
        )


def _micro_batches(batch: Batch) -> Iterator[tuple[int, int]]:
    """Yield row ranges of at most _MICRO_BATCH_TOKENS tokens; a longer row goes alone."""
    lengths = batch.attention_mask.sum(dim=1).tolist()
    start, tokens = 0, 0
    for row, length in enumerate(lengths):
        if row > start and tokens + length > _MICRO_BATCH_TOKENS:
            yield start, row
            start, tokens = row, 0
        tokens += length
    yield start, len(lengths)


BACKENDS = Backends(engine=LiveEngine, trainer=BridgedTrainer, stock=stock.StockPair)
