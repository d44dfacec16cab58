"""A policy whose answers are written down: no model, one character a token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from apportion.engines.base import Continuation, Request, Sampling
from apportion.evaluate import Policy

CUT = "…"


class Tokenizer:
    """Characters as ids; `chat_template` as given."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(c) for c in text]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in ids if i > 1)

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt and not tokenize
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def get_vocab(self) -> dict[str, int]:
        return {"<|im_end|>": 7, "<end_of_turn>": 8}


class Engine:
    """Says what `answer(set/id, m)` writes; its answers come back in reverse order.

    Attributes:
        asked: (set/id, m) of every sample that was asked for.
    """

    def __init__(self, answer: Callable[[str, int], str]) -> None:
        self.answer = answer
        self.asked: list[tuple[str, int]] = []
        self.sampling: Sampling | None = None

    def continuations(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Continuation]:
        self.sampling = sampling
        every = [(each.key, m) for each in requests for m in range(each.first, each.first + each.samples)]
        self.asked += [(key.prompt, m) for key, m in every]
        for key, m in reversed(every):
            text = self.answer(key.prompt, m)
            finish = "length" if text.endswith(CUT) else "stop"
            yield Continuation(key, m, (*map(ord, text), 0)[: -1 if finish == "length" else None], finish)


def policy(engine: Engine, template: str | None = None, **changes: Any) -> Policy:
    """The written-down policy, with a fingerprint of its own."""
    settings = {"name": "scripted", "fingerprint": "weights", "model_type": "llama", "context": 4096, **changes}
    return Policy(tokenizer=Tokenizer(template), stop_ids=(0,), engine=lambda batch: engine, **settings)


def write_set(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> Path:
    """A JSONL file of problems."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def samples(output: Path, name: str) -> dict[tuple[str, int], dict[str, Any]]:
    """All columns of every sample on disk but the file it lies in, by id and m; every one must be there once."""
    rows = [row for path in (output / "samples" / name).glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    found = {(row["key"], row["m"]): row for row in rows}
    assert len(found) == len(rows)
    return {(row["id"], row["m"]): row for row in rows}


def silent(doing: str, done: int, total: int) -> None:
    """No progress shown."""
