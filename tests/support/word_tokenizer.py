"""A tokenizer for the tiny models."""

from __future__ import annotations

from pathlib import Path

TOKENIZER_LENGTH = 1200
"""Below the model's vocabulary of 1280: the rollout masks the ids between."""


def write_tokenizer(folder: Path) -> None:
    """Put a tokenizer of TOKENIZER_LENGTH words into a checkpoint folder."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{index}": index for index in range(TOKENIZER_LENGTH)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")),
        bos_token="t1",
        eos_token="t2",
        pad_token="t0",
    ).save_pretrained(folder)
