"""An engine in this process that samples, scores and takes weights, verified before it serves.

Starting vLLM on a CPU takes most of its time in three places: importing vLLM (10 s and more), a
profiling run over `max_num_batched_tokens` rows, and pages for `gpu_memory_utilization` of the
machine's memory. `QUICK_START` bounds the last two; a second engine in the same process starts in
a few seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from consistent_kernels.contract import Contract, contract_from_dict, differences
from consistent_kernels.errors import (
    ConsistencyError,
    ContractMismatchError,
    StaleWeightsError,
    invalid,
)
from consistent_kernels.protocol.report import ConsistencyReport
from consistent_kernels.protocol.temperature import check_temperature
from vllm_consistent import env, plugin

QUICK_START: dict[str, Any] = {
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 1 << 29,
    "disable_log_stats": True,
}
"""Engine arguments that make a small CPU engine start fast; a caller's own values win."""

_ADVICE = (
    "Install vllm-consistent into the engine's environment and set VLLM_CONSISTENT=1 before vLLM "
    "is imported"
)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        prompt_index: its prompt in the call.
        prompt_ids, token_ids: what was asked and what was sampled.
        logprobs: [len(token_ids)] fp32, at the request's temperature.
        text: detokenized response, "" without a tokenizer.
        finish_reason: vLLM's: "stop" or "length".
    """

    prompt_index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: torch.Tensor
    text: str
    finish_reason: str | None


def report_violations(report: Mapping[str, Any] | None, contract: Contract | None) -> list[str]:
    """Return what is wrong with a worker's `consistency_report()`; empty when all is well.

    Args:
        report: the report, or None where the worker has no such method.
        contract: the contract that must be served, or None to accept the worker's own.
    """
    if report is None:
        return [f"the worker has no consistency_report: the plugin is not loaded there. {_ADVICE}"]
    account = ConsistencyReport.from_dict(report)
    found = account.problems()
    if not (account.requested and account.registered):
        found.append(_ADVICE)
    if not account.layers or not account.attention:
        found.append("the worker's model has no consistent layers or no attention")
    if not (account.sampler or "").startswith("vllm_consistent."):
        found.append(f"log-probs come from {account.sampler}")
    if contract is not None and account.contract is not None and account.digest != contract.digest:
        served = contract_from_dict(account.contract)
        found.extend(f"contract: {line} (served)" for line in differences(contract, served))
    return found


def verify_reports(
    reports: Sequence[Mapping[str, Any] | None], contract: Contract | None = None
) -> Contract:
    """Check every worker's report and return the contract that they serve.

    Raises:
        ContractMismatchError: one message with all differences of all workers.
    """
    lines = [
        f"worker {rank}: {line}"
        for rank, report in enumerate(reports)
        for line in report_violations(report, contract)
    ]
    if not reports:
        lines.append(f"no worker reported. {_ADVICE}")
    if lines:
        listed = "\n".join(f"  {line}" for line in lines)
        raise ContractMismatchError(f"the engine does not serve what was asked for:\n{listed}")
    return contract_from_dict(reports[0]["contract"])


class ConsistentEngine:
    """A vLLM `LLM` in this process with the plugin on.

    Args:
        model: folder or name of a checkpoint.
        contract: what must be served; the trainer's. None accepts the engine's own.
        engine_args: arguments of `vllm.LLM`; `QUICK_START` fills in what is not given.

    Raises:
        ConfigurationError: a configuration that cannot be served consistently, all reasons at once.
        ContractMismatchError: the worker serves something else.
    """

    def __init__(self, model: str, *, contract: Contract | None = None, **engine_args: Any) -> None:
        env.set_enabled(True)
        env.keep_engine_in_process()
        from vllm import LLM
        from vllm.platforms import current_platform

        # vLLM may have loaded its plugins before the switch was on.
        plugin.register()
        defaults = QUICK_START if current_platform.is_cpu() else {}
        default_dtype = torch.get_default_dtype()
        try:
            self.llm = LLM(model=str(model), **{**defaults, **engine_args})
        except BaseException:
            # vLLM leaves its own (vllm/utils/torch_utils.py: set_default_torch_dtype), for all that
            # this process computes from then on.
            torch.set_default_dtype(default_dtype)
            raise
        self.contract = verify_reports(self.reports(), contract)

    def reports(self) -> list[dict[str, Any] | None]:
        """Return `consistency_report()` of each worker, None where it has none."""
        try:
            return self.llm.collective_rpc("consistency_report")
        except (AttributeError, NotImplementedError):
            return [None]

    def consistency_report(self) -> dict[str, Any]:
        """Return the first worker's report, verified against this engine's contract."""
        reports = self.reports()
        verify_reports(reports, self.contract)
        return reports[0]

    def generate_with_logprobs(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Sample]:
        """Sample responses with the log-prob of every sampled token.

        Args:
            prompts: token ids.
            params: a SamplingParams with logprobs set, or one for each prompt.

        Returns:
            Samples by prompt, then by index.

        Raises:
            InvalidInputError: no prompt, an id outside the vocabulary, or parameters without
                log-probs.
            ConsistencyError: vLLM returned a token without its log-prob.
        """
        if not prompts:
            raise invalid("generate_with_logprobs", "prompts", "at least one", "an empty list")
        every = params if isinstance(params, Sequence) else [params]
        if any(item.logprobs is None for item in every):
            raise invalid("generate_with_logprobs", "params.logprobs", "at least 0", None)
        self._check_ids("generate_with_logprobs", prompts)
        self._refuse_stale()
        requests = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [
            _sample(index, output, completion)
            for index, output in enumerate(outputs)
            for completion in sorted(output.outputs, key=lambda item: item.index)
        ]

    def score(
        self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """Score given tokens: entry i of a result is the log-prob of token i + 1, fp32.

        Args:
            sequences: token ids, each at least 2 and shorter than max_model_len.
            temperature: as in sampling; 0 scores at 1.

        Raises:
            InvalidInputError: no sequence, an id outside the vocabulary, or a temperature that
                vLLM would raise to 0.01.
        """
        from vllm import SamplingParams

        if not sequences:
            raise invalid("score", "sequences", "at least one", "an empty list")
        check_temperature("score", temperature)
        self._check_ids("score", sequences)
        self._refuse_stale()
        # vLLM scores a prompt only on the way to a token; that token is thrown away.
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, temperature=temperature, detokenize=False
        )
        requests = [{"prompt_token_ids": list(ids)} for ids in sequences]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [
            torch.tensor(
                [
                    entry[token].logprob
                    for token, entry in zip(
                        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
                    )
                ],
                dtype=torch.float32,
            )
            for output in outputs
        ]

    def update_weights(
        self,
        weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        path: str | None = None,
        version: int | None = None,
    ) -> dict[str, Any]:
        """Load weights in place, reset the prefix cache, return the worker's receipt.

        Args:
            weights: all parameters by Hugging Face name; fp32 masters are rounded to bf16.
            path: a .safetensors file or folder instead.
            version: the trainer's counter.

        Raises:
            StaleWeightsError: requests are running, or a parameter is missing.
        """
        named = dict(weights) if weights is not None else None
        receipt = self.llm.collective_rpc(
            "update_weights_in_place", kwargs={"weights": named, "path": path, "version": version}
        )[0]
        self.reset_prefix_cache()
        return receipt

    def reset_prefix_cache(self) -> None:
        """Forget all pages; raise StaleWeightsError where running requests still hold some."""
        if not self.llm.reset_prefix_cache():
            raise StaleWeightsError(
                "the prefix cache could not be reset: requests are running. Finish or abort them; "
                "rollouts that would read old pages are refused"
            )

    def _check_ids(self, op: str, sequences: Sequence[Sequence[int]]) -> None:
        # Without a tokenizer vLLM checks no id; the worker would fail at every later step.
        vocab = int(self.contract.model["vocab_size"])
        for number, ids in enumerate(sequences):
            for token in ids:
                if not 0 <= token < vocab:
                    raise invalid(op, f"ids of sequence {number}", f"below {vocab}", int(token))

    def _refuse_stale(self) -> None:
        # The worker refuses too, but only once requests are queued, and then they stay there.
        reasons = [reason for reason in self.llm.collective_rpc("stale_reason") if reason]
        if reasons:
            raise StaleWeightsError(f"rollout refused: {reasons[0]}")

    def weight_receipt(self) -> dict[str, Any]:
        """Return version and digests of the weights served now."""
        return self.llm.collective_rpc("weight_receipt")[0]

    def close(self) -> None:
        """Release the model and its pages."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


def _sample(index: int, output: Any, completion: Any) -> Sample:
    ids = tuple(completion.token_ids)
    entries = completion.logprobs or ()
    if len(entries) != len(ids) or any(t not in e for t, e in zip(ids, entries, strict=True)):
        raise ConsistencyError(f"response to prompt {index} lacks the log-prob of a sampled token")
    values = [entry[token].logprob for token, entry in zip(ids, entries, strict=True)]
    return Sample(
        prompt_index=index,
        prompt_ids=tuple(output.prompt_token_ids),
        token_ids=ids,
        logprobs=torch.tensor(values, dtype=torch.float32),
        text=completion.text,
        finish_reason=completion.finish_reason,
    )
