"""The model that is evaluated: its tokenizer and fingerprint at once, its weights when the first sample is missing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from apportion.engines.base import ContinuationEngine
from apportion.errors import InputError

# What decides a model's samples: weights, shapes, tokenizer, chat template.
_PARTS = (".safetensors", ".json", ".jinja", ".model", ".txt")


@dataclass(frozen=True)
class Policy:
    """A model to sample from.

    Attributes:
        fingerprint: a hash of its files and the dtype; the cache of samples goes by it.
        context: the most tokens of prompt and response together; None where the config does not say.
        stop_ids: what ends a response, before the prompt style adds its own.
        engine: loads the weights; takes how many continuations are decoded at once.
    """

    name: str
    fingerprint: str
    model_type: str
    tokenizer: Any
    context: int | None
    stop_ids: tuple[int, ...]
    engine: Callable[[int], ContinuationEngine]


def open_policy(name: str, dtype: str = "float32") -> Policy:
    """Opens `embedded`, `smollm2`, or a local folder, without loading the weights.

    Raises:
        InputError: a folder or tokenizer that cannot be loaded; from `engine`, weights that cannot.
    """
    from apportion.train.models import load_model, load_tokenizer, model_folder

    if dtype not in ("float32", "bfloat16"):
        raise InputError("--dtype", repr(dtype), "float32 or bfloat16")
    try:
        folder = model_folder(name)
        tokenizer: Any = load_tokenizer(folder)
    except InputError as error:
        raise InputError("--model", error.got, error.expected, error.fix) from None
    config, generation = (_json(folder / f"{part}.json") for part in ("config", "generation_config"))

    def engine(batch: int) -> ContinuationEngine:
        import torch

        from apportion.engines.transformers import TransformersEngine

        try:
            model: Any = load_model(folder, dtype)
        except InputError as error:
            raise InputError("--model", error.got, error.expected, error.fix) from None
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        return TransformersEngine(model, tokenizer.pad_token_id, max_batch=batch)

    # Some models name more ends of a response than their tokenizer does.
    ends = generation.get("eos_token_id", config.get("eos_token_id")) or []
    stop = dict.fromkeys([tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])])
    return Policy(
        name, fingerprint(folder, dtype), str(config.get("model_type", "")), tokenizer,
        config.get("max_position_embeddings"), tuple(stop), engine,
    )  # fmt: skip


def fingerprint(folder: Path, dtype: str) -> str:
    """A hash of the contents of the files that decide a model's samples, weights included."""
    total = hashlib.blake2b(dtype.encode(), digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in _PARTS and path.is_file():
            with path.open("rb") as file:
                total.update(f"\0{path.name}\0".encode() + hashlib.file_digest(file, "blake2b").digest())
    return total.hexdigest()


def _json(path: Path) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except ValueError as error:
        raise InputError("--model", f"{path} ({error})", "valid JSON") from None
