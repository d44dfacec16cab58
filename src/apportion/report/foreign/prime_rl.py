"""prime-rl's rollouts, as its orchestrator leaves them beside the batches for the trainer.

Three generations are read, told apart line by line:

* `rollouts/step_N/train_rollouts.jsonl` with one rollout of verifiers 0 a line (`example_id`, `prompt`, `completion`,
  `reward`; prime-rl 0.4 to 0.6) or one trace of verifiers 1 (`nodes`, `rewards`; from 0.7);
* `rollouts/step_N/train/{all,effective}/traces.jsonl` (up to 0.9.1.dev28): episodes, which hold traces. What is in
  `effective` was shipped to the trainer and takes the place of the same trace in `all`;
* `traces/stream/*.jsonl` or `.jsonl.zst` (from 0.9.1.dev29): episodes of all steps, with the updates in
  `traces/annotations/*/` that tell their step and their advantage. The whole stream is read to know its steps.

Of a trace with several branches the last one is shown. `.bin` files hold the same batches for the trainer and are not
read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from apportion.errors import InputError
from apportion.report.foreign.files import Entry, File, entries, number_in
from apportion.report.foreign.records import Records
from apportion.report.foreign.responses import Response, Responses, Step
from apportion.report.foreign.traces import Trace

NAME = "prime-rl"
_ROLLOUTS = "train_rollouts.jsonl"
_ROOTS = ("", "rollouts", "run_default/rollouts")
_STREAMS = ("", "stream", "traces/stream", "run_default/traces/stream")
_STEP = re.compile(r"step_([0-9]{1,9})$")
_SETTINGS = {"record": "rollouts that prime-rl saved", "reward": "the weighted sum of its rewards"}


def is_one(fields: Mapping[str, Any]) -> bool:
    """Whether the first object of a file is one of prime-rl's."""
    return "traces" in fields or {"nodes", "rewards"} <= fields.keys() or {"example_id", "completion"} <= fields.keys()


def folder_source(path: Path) -> Records | None:
    """The rollouts under a run folder, its `rollouts` or its `traces`; None where there are none."""
    for root in _ROOTS:
        if _step_files(path / root):
            return Records(path, partial(_step_files, path / root), load)
    for root in _STREAMS:
        folder = path / root
        if folder.name == "stream" and _chunks(folder):
            return Records(path, partial(_stream, folder), load)
    return None


def batches(path: Path) -> list[Path]:
    """What a run folder holds for the trainer, and is not read."""
    return sorted(found for root in _ROOTS for found in (path / root).glob("step_*/train_rollouts.bin"))


def file_source(path: Path) -> Records:
    """One file. Its step is that of its traces, or the one that its folder is named after."""
    step = next((int(match[1]) for each in path.parents[:3] if (match := _STEP.match(each.name))), None)
    return Records(path, lambda: [File(step, (path,))], load)


def _step_files(root: Path) -> list[File]:
    found = []
    for folder in (root, *root.glob("step_*")):
        if match := _STEP.match(folder.name):
            named = [folder / _ROLLOUTS, *(folder / "train" / part / "traces.jsonl" for part in ("all", "effective"))]
            if paths := tuple(path for path in named if path.is_file()):
                found.append(File(int(match[1]), paths))
    return sorted(found, key=lambda file: file.step or 0)


def _chunks(folder: Path) -> list[Path]:
    """The numbered files of a stream. One that is being packed is there twice; the plain one is whole."""
    return sorted({path.name.removesuffix(".zst"): path for path in sorted(folder.glob("*.jsonl*"), reverse=True)
                   if re.fullmatch(r"[0-9]+\.jsonl(\.zst)?", path.name)}.values())  # fmt: skip


def _stream(folder: Path) -> list[File]:
    updates = [path for each in sorted(folder.parent.glob("annotations/*")) for path in _chunks(each)]
    return [File(None, (*_chunks(folder), *updates))]


def load(file: File) -> Mapping[int, Step]:
    """The responses of a file or a stream.

    Raises:
        InputError: a line that is no rollout, trace, episode or update; names the field, the line and the file.
    """
    found: dict[str, Trace] = {}
    updates: dict[str, list[Entry]] = {}
    for entry in entries(file.paths):
        if "trace_id" in entry.fields:
            updates.setdefault(entry.word("trace_id") or "", []).append(entry)
            continue
        for trace in _traces(entry):
            found[trace.entry.word("id") or trace.entry.where] = trace
    by_step: dict[int, list[Response]] = {}
    for name, trace in found.items():
        told = trace.updated(updates.get(name, []))
        step = file.step if file.step is not None else told.step(number_in(file.paths[0].stem) or 0)
        by_step.setdefault(step, []).append(told.response())
    settings = {**_SETTINGS, "groups": "as recorded, or else responses to the same prompt in a step"}
    return {step: Responses(NAME, responses, settings) for step, responses in by_step.items()}


def _traces(entry: Entry) -> Iterator[Trace]:
    """What was sampled to train on: no evaluation, and no agent that the policy does not play."""
    if not is_one(entry.fields):
        raise InputError(entry.where, "no rollout, trace or episode", "an object as prime-rl writes it")
    for trace in entry.entries("traces") if "traces" in entry.fields else [entry]:
        info, run = trace.entry("info"), entry.entry("run")
        kind = info.word("kind") or run.entry("work").word("type") or run.word("type")
        if kind != "eval" and trace.entry("agent").fields.get("trainable") is not False:
            yield Trace(trace, entry, (info,))
