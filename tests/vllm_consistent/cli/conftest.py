"""A tiny checkpoint with a tokenizer, small enough to run the whole demo on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import VOCAB, save_tiny_model

CHAT = (
    "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


def save_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per byte and filler words up to the model's vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*special, *alphabet]
    words += [f"w{index}" for index in range(len(words), VOCAB)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = CHAT
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with peaked logits and a byte tokenizer, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_model(folder, "llama")
    save_byte_tokenizer(folder)
    return folder
