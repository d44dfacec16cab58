"""What a run looks at while it trains: tokens generated, held-out accuracy, the token budget."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import TrainerCallback

from apportion.engines.base import Key, Request
from apportion.engines.rng import frozen_rng
from apportion.engines.transformers import TransformersEngine
from apportion.records import json_lines
from apportion.report.beside import beside, is_predicted
from apportion.train.prepare import Run, sampling_of

Progress = Callable[[dict[str, float]], None]


class Complete(Exception):
    """A resumed run has nothing left to train: transformers would do one more step before it asks."""


class Watch(TrainerCallback):
    """Counts generated tokens, evaluates, stops at the token budget and tells the progress display."""

    def __init__(self, run: Run, progress: Progress | None) -> None:
        self.run, self.progress = run, progress
        folder = Path(run.config.run.folder)
        self.metrics, self.evaluations = folder / "metrics.jsonl", folder / "evaluations.jsonl"
        self.tokens = 0.0

    def start(self, model: Any) -> None:
        """A fresh run: forgets what an attempt without a checkpoint has left, and evaluates the policy as it came."""
        _keep_until(-1, self.metrics)
        _keep_until(-1, self.evaluations)
        self._evaluate(0, model)

    def finish(self, step: int, model: Any) -> dict[str, Any]:
        """Evaluates the end. Returns tokens, steps, accuracy at the start and the end over `samples`, and the table
        `beside` of a run that was predicted."""
        rows = json_lines(self.evaluations)
        if not rows or rows[-1]["step"] != step:
            self._evaluate(step, model)
            rows = json_lines(self.evaluations)
        result: dict[str, Any] = {"tokens": self.tokens, "steps": float(step)}
        if rows:
            result |= {"start": rows[0]["accuracy"], "end": rows[-1]["accuracy"], "samples": rows[-1]["samples"]}
        table = beside(json_lines(self.metrics))
        return result | ({"beside": table} if is_predicted(table) else {})

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = state.global_step
        if not done:
            return
        # Steps after the checkpoint are done again, and write their lines again.
        self.tokens = sum(map(_tokens, _keep_until(done, self.metrics)))
        _keep_until(done, self.evaluations)
        if done >= args.max_steps or self._spent:
            raise Complete

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        self.tokens += _tokens(logs)
        if self._spent:
            control.should_save = control.should_training_stop = True
        every = self.run.config.run.evaluate_every
        if every and state.global_step % every == 0:
            self._evaluate(state.global_step, kwargs["model"])
        if self.progress:
            self.progress({"step": state.global_step, "tokens": self.tokens, **logs})

    @property
    def _spent(self) -> bool:
        budget = self.run.config.run.tokens
        return budget is not None and self.tokens >= budget

    def _evaluate(self, step: int, model: Any) -> None:
        if not self.run.data.test:
            return
        with frozen_rng():
            found = accuracy(self.run, model)
        row = {"step": step, "tokens": self.tokens, "accuracy": found, "samples": len(self.run.data.test)}
        with self.evaluations.open("a") as file:
            file.write(json.dumps(row) + "\n")


def accuracy(run: Run, model: Any) -> float:
    """Mean reward of one sampled response to each held-out problem, sampled as the rollouts are.

    Random streams are keyed by the problem, so that two policies answer with common random numbers.
    """
    args, tokenizer, rows = run.args, run.tokenizer, run.data.test
    engine = TransformersEngine(getattr(model, "module", model), tokenizer.pad_token_id)
    requests = [
        Request(Key("evaluate", 0, str(i), 0, 0), tuple(tokenizer(row["prompt"])["input_ids"]), 1,
                args.max_completion_length)
        for i, row in enumerate(rows)
    ]  # fmt: skip
    texts = [""] * len(rows)
    for c in engine.continuations(requests, sampling_of(args, tokenizer)):
        texts[int(c.key.prompt)] = tokenizer.decode(c.token_ids, skip_special_tokens=True)
    rewards = run.data.reward(prompts=[row["prompt"] for row in rows], completions=texts)
    return fmean(r for r in rewards if r is not None)


def _tokens(row: Any) -> float:
    return float(row.get("tokens/actor", 0)) + float(row.get("probe/tokens", 0))


def _keep_until(step: int, path: Path) -> list[dict[str, Any]]:
    """Drops the lines of later steps from a file, and returns the others."""
    rows = [row for row in json_lines(path) if row["step"] <= step]
    if path.exists():
        partial = path.with_suffix(".part")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(partial, path)
    return rows
