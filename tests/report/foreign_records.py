"""Records of other trainers, written by hand after their published formats, and what every source must keep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from apportion.records import CREDIT, EVIDENCE, ROLLOUTS
from apportion.report.source import Source
from apportion.report.view import StepView


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]], end: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + end, encoding="utf-8")
    return path


def checked(source: Source, step: int) -> StepView:
    """Whether the rows of a step fit the schemas and its view is JSON; the view."""
    for kind, schema in (("rollouts", ROLLOUTS), ("credit", CREDIT), ("evidence", EVIDENCE)):
        rows = source.read(kind, step)
        assert all(set(row) == set(schema.names) for row in rows)
        pa.Table.from_pylist(rows, schema=schema)
    view = StepView(source, step)
    details = [view.detail(row["row"]) for row in view.rollouts]
    json.dumps([view.summary, details], allow_nan=False).encode()
    return view


def dump(prompt: str, output: str, score: float | None, **more: Any) -> dict[str, Any]:
    """A line of verl's dump, in the order of its keys."""
    return {"input": prompt, "output": output, "gts": "42", "score": score, "step": 7, **more}


def rollout(example: int, answer: str, reward: float, **more: Any) -> dict[str, Any]:
    """A line of prime-rl's train_rollouts.jsonl in the days of verifiers 0."""
    return {
        "example_id": example, "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
        "completion": [{"role": "assistant", "content": answer}], "reward": reward, "metrics": {"correct": reward},
        "answer": "42", "error": None, "is_completed": True, "is_truncated": False, "stop_condition": None, **more,
    }  # fmt: skip


def node(role: str, content: str, parent: int | None, ids: int = 0, sampled: int = 0, **more: Any) -> dict[str, Any]:
    """A node of a trace: `ids` tokens, of which the last `sampled` were sampled."""
    return {
        "parent": parent, "message": {"role": role, "content": content}, "sampled": sampled > 0,
        "token_ids": list(range(10, 10 + ids)), "mask": [k >= ids - sampled for k in range(ids)],
        "logprobs": [-0.5] * sampled, **more,
    }  # fmt: skip


def trace(name: str, nodes: list[dict[str, Any]], rewards: Mapping[str, Any], **info: Any) -> dict[str, Any]:
    """A trace of verifiers 1."""
    return {
        "version": 1, "id": name, "task": {"type": "Sum", "data": {"prompt": "2+2", "answer": "4"}, "key": "sum/1"},
        "agent": {"name": "solver", "trainable": True}, "nodes": nodes, "rewards": rewards, "metrics": {},
        "info": {"kind": "train", **info}, "ok": True, "stop_condition": "stop",
    }  # fmt: skip


def episode(name: str, traces: list[dict[str, Any]], step: int = 0, group: str = "group-1") -> dict[str, Any]:
    return {
        "id": name, "env": {"id": "sums"}, "group": {"id": group}, "ok": True, "errors": [], "traces": traces,
        "run": {"type": "train", "id": "run", "work": {"type": "train", "step": step}},
    }  # fmt: skip


def talk(answer: str, **more: Any) -> list[dict[str, Any]]:
    """System, user and one sampled answer of two tokens behind a scaffold token."""
    return [
        node("system", "Be brief.", None, 2), node("user", "2+2", 0, 3),
        node("assistant", answer, 1, 3, 2, finish_reason="stop", **more),
    ]  # fmt: skip
