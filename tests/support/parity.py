"""Engine against trainer, end to end: the relations; a subclass holds a model and a device.

(1) Sampled log-prob = trainer's log-prob = the engine's score of the same token, at one
temperature. (2) It stays so after in-place weight updates, a reload and a resume. (3) The layout of
the trainer's batch moves no bit. By (1), decode = prefill = training forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny_models import VOCAB, save_tiny_model
from transformers import PreTrainedModel

from consistent_kernels.errors import StaleWeightsError
from consistent_kernels.testing import assert_bitwise_equal, flip_lowest_bit
from train_bridge import bridge_model, compare_logprobs, push_weights, token_logprobs
from train_bridge.masters import load_masters

PROMPT_LENGTHS = (1, 15, 16, 17, 33, 129)
NEW_TOKENS = 12


def prompts(seed: int, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    """Random token ids, one prompt of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def rollout(engine: Any, seed: int, *, temperature: float = 1.0, n: int = 2) -> list[Any]:
    """Sample n responses to each of `prompts(seed)`."""
    from vllm import SamplingParams

    params = SamplingParams(
        n=n,
        temperature=temperature,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        seed=seed,
        logprobs=0,
        detokenize=False,
    )
    return engine.generate_with_logprobs(prompts(seed), params)


def padded(samples: list[Any], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (input_ids, attention_mask, response_mask), right-padded."""
    rows = [[*s.prompt_ids, *s.token_ids] for s in samples]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention, response = torch.zeros_like(ids), torch.zeros_like(ids)
    for index, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        ids[index, : len(row)] = torch.tensor(row)
        attention[index, : len(row)] = 1
        response[index, len(sample.prompt_ids) : len(row)] = 1
    return ids.to(device), attention.to(device), response.to(device)


def trainer_scores(model: Any, samples: list[Any], **options: Any) -> torch.Tensor:
    """Log-probs of all response tokens, one after the other, fp32 on the CPU."""
    device = str(next(model.parameters()).device)
    ids, attention, response = padded(samples, device)
    scores = token_logprobs(model, ids, attention, response_mask=response, **options)
    return scores.log_probs[response.bool()].cpu()


def sampled_scores(samples: list[Any]) -> torch.Tensor:
    """Log-probs that the engine returned with the samples, one after the other."""
    return torch.cat([s.logprobs for s in samples])


def rescored(engine: Any, samples: list[Any], temperature: float) -> torch.Tensor:
    """The engine's scores of the same tokens, given as prompts."""
    scores = engine.score([[*s.prompt_ids, *s.token_ids] for s in samples], temperature=temperature)
    return torch.cat([row[len(s.prompt_ids) - 1 :] for row, s in zip(scores, samples, strict=True)])


def train_step(model: Any, optimizer: torch.optim.Optimizer, samples: list[Any]) -> None:
    """One optimizer step that makes the sampled tokens likelier."""
    device = str(next(model.parameters()).device)
    ids, attention, response = padded(samples, device)
    scores = token_logprobs(model, ids, attention, response_mask=response)
    loss = -scores.log_probs[response.bool()].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class ParityRelations:
    """Subclass with a family and a device; every test is a relation of the module docstring."""

    family: ClassVar[str]
    device: ClassVar[str] = "cpu"
    engine_args: ClassVar[dict[str, Any]] = {}
    flipped: ClassVar[str] = "model.layers.0.mlp.down_proj.weight"
    """A weight that every token meets: one flipped bit of it must show."""

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return save_tiny_model(tmp_path_factory.mktemp(cls.family), cls.family)

    @pytest.fixture(scope="class")
    @classmethod
    def live_engine(cls, checkpoint: Path) -> Iterator[Any]:
        from vllm_consistent.integrations.engine import ConsistentEngine

        # Pages of a given size: vLLM's profiling fails where other processes free memory meanwhile.
        pages = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05}
        on_cuda = pages if cls.device == "cuda" else {}
        engine = ConsistentEngine(
            str(checkpoint),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=512,
            **on_cuda,
            **cls.engine_args,
        )
        yield engine
        engine.close()

    def load(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Load the checkpoint as a bridged trainer."""
        return bridge_model(load_masters(checkpoint, dtype).to(self.device))

    @pytest.fixture
    def trainer(self, checkpoint: Path) -> PreTrainedModel:
        return self.load(checkpoint)

    @pytest.fixture
    def engine(self, live_engine: Any, trainer: PreTrainedModel) -> Any:
        # Tests share one engine; each starts from the checkpoint's weights.
        push_weights(trainer, live_engine.llm)
        return live_engine

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_train_equals_infer(
        self, engine: Any, trainer: PreTrainedModel, temperature: float
    ) -> None:
        samples = rollout(engine, 1, temperature=temperature)
        sampled = sampled_scores(samples)
        assert float(sampled.mean()) > -3, "flat logits hide mismatches"
        train = trainer_scores(trainer, samples, temperature=temperature)
        assert_bitwise_equal(train.detach(), sampled, "trainer and sampler")
        again = rescored(engine, samples, temperature)
        assert_bitwise_equal(again, sampled, "prompt scoring and sampler")
        report = compare_logprobs(sampled, train, torch.ones_like(sampled))
        assert report.bitwise_equal
        assert report.k3_kl == 0.0

    def test_contracts_have_one_digest(self, engine: Any, trainer: PreTrainedModel) -> None:
        assert bridge_model(trainer, engine.contract) is trainer
        assert engine.consistency_report()["digest"] == engine.contract.digest

    def test_trainer_layouts_equal_the_engine(
        self, engine: Any, trainer: PreTrainedModel, checkpoint: Path
    ) -> None:
        samples = rollout(engine, 2)
        sampled = sampled_scores(samples)
        for options in ({"micro_batch_size": 1}, {"micro_batch_size": 5}, {"entropy": False}):
            scores = trainer_scores(trainer, samples, **options)
            assert_bitwise_equal(scores.detach(), sampled, str(options))
        with torch.no_grad():
            assert_bitwise_equal(trainer_scores(trainer, samples), sampled, "no_grad")
        rows = [[*s.prompt_ids, *s.token_ids] for s in samples]
        ids = torch.tensor([[t for row in rows for t in row]], device=self.device)
        positions = torch.tensor([[p for row in rows for p in range(len(row))]], device=self.device)
        packed = token_logprobs(trainer, ids, position_ids=positions).log_probs[0].cpu()
        parts = torch.split(packed, [len(row) for row in rows])
        responses = [part[len(s.prompt_ids) :] for part, s in zip(parts, samples, strict=True)]
        assert_bitwise_equal(torch.cat(responses).detach(), sampled, "packed")
        bf16 = self.load(checkpoint, torch.bfloat16)
        assert_bitwise_equal(trainer_scores(bf16, samples).detach(), sampled, "bf16 masters")
        trainer.train()
        trainer.gradient_checkpointing_enable()
        assert_bitwise_equal(trainer_scores(trainer, samples).detach(), sampled, "recompute")

    def test_updates_reload_and_resume_stay_equal(
        self, engine: Any, trainer: PreTrainedModel, checkpoint: Path, tmp_path: Path
    ) -> None:
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
        before = {name: p.detach().clone() for name, p in trainer.named_parameters()}
        for step in (1, 2):
            train_step(trainer, optimizer, rollout(engine, 10 + step))
            receipt = push_weights(trainer, engine.llm)
            assert receipt.version == step
            samples = rollout(engine, 20 + step)
            scores = trainer_scores(trainer, samples)
            assert_bitwise_equal(scores.detach(), sampled_scores(samples), f"update {step}")
        changed = [n for n, p in trainer.named_parameters() if not torch.equal(p, before[n])]
        assert len(changed) == len(before)
        trainer.save_pretrained(tmp_path / "saved")
        resumed = self.load(tmp_path / "saved")
        scores = trainer_scores(resumed, samples)
        assert_bitwise_equal(scores.detach(), sampled_scores(samples), "resume")
        reloaded = self.load(checkpoint)
        push_weights(reloaded, engine.llm)
        samples = rollout(engine, 30)
        scores = trainer_scores(reloaded, samples)
        assert_bitwise_equal(scores.detach(), sampled_scores(samples), "reload")

    def test_update_from_equal_weights_changes_no_bit(
        self, engine: Any, trainer: PreTrainedModel
    ) -> None:
        first = rollout(engine, 3)
        push_weights(trainer, engine.llm)
        second = rollout(engine, 3)
        assert [s.token_ids for s in first] == [s.token_ids for s in second]
        assert_bitwise_equal(sampled_scores(second), sampled_scores(first))

    def test_control_stock_forward_diverges(self, engine: Any, checkpoint: Path) -> None:
        samples = rollout(engine, 4)
        stock = load_masters(checkpoint, torch.bfloat16).to(self.device)
        ids, attention, response = padded(samples, self.device)
        with torch.no_grad():
            logits = stock(ids, attention_mask=attention).logits.float()
        logprobs = torch.log_softmax(logits[:, :-1], -1)
        chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0][response[:, 1:].bool()].cpu()
        report = compare_logprobs(sampled_scores(samples), chosen, torch.ones_like(chosen))
        assert report.mismatched_tokens > 0.9 * report.num_tokens

    def test_control_temperature_on_one_side_diverges(
        self, engine: Any, trainer: PreTrainedModel
    ) -> None:
        samples = rollout(engine, 5, temperature=0.7)
        sampled = sampled_scores(samples)
        train = trainer_scores(trainer, samples, temperature=1.0)
        assert not compare_logprobs(sampled, train, torch.ones_like(sampled)).bitwise_equal

    def test_control_one_flipped_bit_diverges(self, engine: Any, checkpoint: Path) -> None:
        samples = rollout(engine, 6)
        model = self.load(checkpoint, torch.bfloat16)
        weight = model.get_parameter(self.flipped)
        with torch.no_grad():
            largest = int(weight.abs().argmax())
            index = (largest // weight.shape[1], largest % weight.shape[1])
            weight.copy_(flip_lowest_bit(weight, index))
        bridge_version = model._bridge.version
        bridge_version.bump()
        sampled = sampled_scores(samples)
        train = trainer_scores(model, samples)
        assert not compare_logprobs(sampled, train, torch.ones_like(sampled)).bitwise_equal

    def test_control_unpushed_update_diverges(self, engine: Any, trainer: PreTrainedModel) -> None:
        train_step(trainer, torch.optim.AdamW(trainer.parameters(), lr=1e-3), rollout(engine, 7))
        samples = rollout(engine, 8)
        sampled = sampled_scores(samples)
        train = trainer_scores(trainer, samples)
        assert not compare_logprobs(sampled, train, torch.ones_like(sampled)).bitwise_equal

    def test_lost_parameter_is_refused(self, engine: Any, trainer: PreTrainedModel) -> None:
        from train_bridge.weights import exported_weights

        weights = dict(exported_weights(trainer))
        weights.pop("model.layers.1.self_attn.k_proj.weight")
        with pytest.raises(StaleWeightsError, match=r"layers\.1\.self_attn\.k_proj"):
            engine.update_weights(weights)
        push_weights(trainer, engine.llm)
