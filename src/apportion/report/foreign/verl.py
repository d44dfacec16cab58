"""verl's dumps: `STEP.jsonl` in `trainer.rollout_data_dir` or `trainer.validation_data_dir`.

Read as verl 0.9 writes them (both its trainers): one object a line with `input`, `output`, `gts`, `score`, `step` and
what the reward function returned beside. The newer trainer's `uid` is `prompt_sample_output`; the older one has none.
There are no tokens and no advantages in them, so the base is GRPO's, worked out from the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from apportion.report.foreign.files import Entry, File, entries, number_in
from apportion.report.foreign.records import Records
from apportion.report.foreign.responses import Response, Responses, Step
from apportion.report.foreign.text import conversation, gold, messages, parts

NAME = "verl"
FIELDS = frozenset({"input", "output", "score"})


def dumps(folder: Path) -> list[File]:
    """The dumps of a folder, by the step that each is named after."""
    found = sorted((int(path.stem), path) for path in folder.glob("*.jsonl") if path.stem.isdecimal())
    return [File(step, (path,)) for step, path in found if step < 10**9]


def folder_source(folder: Path) -> Records:
    return Records(folder, lambda: dumps(folder), load)


def file_source(path: Path) -> Records:
    """One dump. Its step is that of its rows, or the number in its name."""
    return Records(path, lambda: [File(None, (path,))], load)


def load(file: File) -> Mapping[int, Step]:
    """The responses of a dump.

    Raises:
        InputError: a line that is no object of such a dump; names the field, the line and the file.
    """
    by_step: dict[int, list[Entry]] = {}
    for entry in entries(file.paths):
        entry.require(*FIELDS)
        by_step.setdefault(_step(entry, file), []).append(entry)
    return {step: _responses(found) for step, found in by_step.items()}


def _step(entry: Entry, file: File) -> int:
    if file.step is not None:
        return file.step
    step = entry.fields.get("step")
    if step is None:
        step = number_in(file.paths[0].stem) or 0
    if type(step) is not int or not 0 <= step < 10**9:
        raise entry.wrong("step", "a whole number from 0")
    return step


def _responses(found: Sequence[Entry]) -> Step:
    groups = [_group(entry) for entry in found]
    grouped = None not in groups
    settings = {
        "record": "rollouts that verl dumped", "reward": "score",
        "groups": "responses of one uid" if grouped else "responses to the same prompt in a step",
    }  # fmt: skip
    responses = [
        Response(
            prompt=conversation(messages(entry, "input")), parts=parts(messages(entry, "output")),
            reward=entry.number("score"), gold=gold(entry.fields.get("gts")), group=group if grouped else None,
        )
        for entry, group in zip(found, groups, strict=True)
    ]  # fmt: skip
    return Responses(NAME, responses, settings)


def _group(entry: Entry) -> str | None:
    """The prompt's own part of `uid`."""
    name, *numbers = (entry.word("uid") or "").rsplit("_", 2)
    return name if name and len(numbers) == 2 and all(part.isdecimal() for part in numbers) else None
