"""Rules about the model folder: architecture, rope, vocabulary, lengths, the contract's digest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from consistent_kernels.errors import ConfigurationError, UnsupportedError
from consistent_kernels.model_facts import ModelFacts, model_facts
from consistent_kernels.resolve import resolve_contract
from consistent_kernels.rotary import RopeParameters
from train_bridge.masters import served_quantization
from train_bridge.verl.preflight.view import View, Violation

_PATH = "actor_rollout_ref.model.path"
_DIGEST = "true_on_policy.contract_digest"


def violations(view: View) -> Iterator[Violation]:
    """Yield what the folder breaks; a model that is not on this disk is left to the workers."""
    folder = local_folder(view)
    if folder is None:
        return
    try:
        config = _config(folder)
    except Exception as error:  # whatever transformers raises of a damaged file
        yield Violation(_PATH, str(folder), f"config.json is unusable ({error})", "another folder")
        return
    try:
        facts = model_facts(config, "bfloat16")
    except (ConfigurationError, UnsupportedError) as error:
        for line in getattr(error, "violations", [str(error)]):
            yield Violation(_PATH, str(folder), line, "a supported model")
        return
    if served_quantization(config, None):
        why = "block-FP8 model: verl streams bf16 weights, FP8 ones are not wired yet"
        yield Violation(_PATH, str(folder), why, "a bfloat16 checkpoint")
        return
    yield from _vocabulary(folder, facts)
    yield from _positions(view, config)
    yield from _digest(view, facts)


def local_folder(view: View) -> Path | None:
    """Return the model folder, or None where it is a hub name or elsewhere."""
    folder = Path(str(view.get(_PATH, ""))).expanduser()
    return folder if (folder / "config.json").is_file() else None


def contract_digest(view: View) -> str | None:
    """Return the contract's digest on this machine, or None where it cannot be known here."""
    folder = local_folder(view)
    if folder is None:
        return None
    try:
        facts = model_facts(_config(folder), "bfloat16")
        device = str(view.get("trainer.device", "cuda"))
        program = view.get(f"actor_rollout_ref.actor.{view.section}.program")
        return resolve_contract(facts, device, only=program).digest
    except Exception:  # no such device on this machine, a model that no contract covers
        return None


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


def _vocabulary(folder: Path, facts: ModelFacts) -> Iterator[Violation]:
    from transformers import AutoTokenizer

    # transformers makes up a tokenizer of the architecture where there is none.
    if not any(folder.glob("tokenizer*")):
        yield Violation(_PATH, str(folder), "it holds no tokenizer", "a folder with its tokenizer")
        return
    try:
        size = len(AutoTokenizer.from_pretrained(folder))
    except Exception as error:  # whatever transformers raises of a damaged file
        why = f"its tokenizer cannot be read ({error})"
        yield Violation(_PATH, str(folder), why, "a folder with its tokenizer")
        return
    if size > facts.vocab_size:
        yield Violation(
            _PATH,
            str(folder),
            f"the tokenizer has {size} ids, the model {facts.vocab_size}: prompts could hold ids "
            "that the model lacks",
            "the tokenizer that belongs to the model",
        )


def _positions(view: View, config: Any) -> Iterator[Violation]:
    # With rope scaling the table is longer than max_position_embeddings.
    limit = RopeParameters.from_hf_config(config).max_position
    longest = view.get("actor_rollout_ref.rollout.max_model_len") or view.longest_sequence
    if isinstance(longest, int) and longest > limit:
        yield Violation(
            "data.max_response_length",
            view.get("data.max_response_length"),
            f"{longest} positions are asked for, the model has {limit}",
            f"at most {limit} with data.max_prompt_length",
        )


def _digest(view: View, facts: ModelFacts) -> Iterator[Violation]:
    expected = view.get(_DIGEST)
    if expected is None:
        return
    found = contract_digest(view)
    if found is not None and found != expected:
        yield Violation(
            _DIGEST, expected, f"this machine's contract is {found}", f"{found}, or null"
        )
