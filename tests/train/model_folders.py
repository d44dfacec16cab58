"""Model folders and problem files for tests of whole runs: a random character-level Llama of a few thousand weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ASCII = "\n" + "".join(map(chr, range(32, 127))) + "’"
SUMS = "\n 123+=?"
CHAT = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '\n' }}{% endfor %}"


def save_policy(folder: Path, alphabet: str = SUMS, *, chat: bool = False, context: int = 128) -> Path:
    """A folder as `save_pretrained` leaves it, always the same for the same arguments."""
    words = ["<pad>", "<eos>", *alphabet]
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokens.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", padding_side="left",
        clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    tokenizer.chat_template = CHAT if chat else None
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=context, bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=None, eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_problems(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums() -> list[dict[str, str]]:
    """Problems in the alphabet SUMS, whose answers a random policy hits now and then."""
    return [{"problem": f"{a}+{b}=?", "answer": str(1 + (a + b) % 3)} for a in (1, 2, 3) for b in (1, 2, 3)]
