"""A rollout, or a trace of verifiers 1 with the episode around it, as a response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from apportion.errors import InputError
from apportion.report.foreign.files import Entry
from apportion.report.foreign.responses import Response, Tokens
from apportion.report.foreign.text import Part, conversation, gold, message, messages, parts

# Limits of verifiers that cut a response short.
_CUT = frozenset({"max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed"})


@dataclass(frozen=True)
class Trace:
    """A trace or a rollout, and the episode that holds it, or itself.

    Attributes:
        info: the trace's own, newer updates first. streams: values for each token of its branches, newer first.
    """

    entry: Entry
    episode: Entry
    info: tuple[Entry, ...]
    streams: tuple[Entry, ...] = ()

    def updated(self, updates: Sequence[Entry]) -> Trace:
        newer = tuple(update.entry("info") for update in reversed(updates))
        streams = tuple(branch for update in reversed(updates) for branch in update.entries("branches"))
        return Trace(self.entry, self.episode, (*newer, *self.info), streams)

    def step(self, otherwise: int) -> int:
        work = self.episode.entry("run").entry("work")
        named = [*(info.entry(name) for name in ("ship", "arrival") for info in self.info), work, *self.info]
        for entry in (*named, self.episode.entry("run")):
            if type(step := entry.fields.get("step")) is int:
                if not 0 <= step < 10**9:
                    raise entry.wrong("step", "a whole number from 0")
                return step
        return otherwise

    def response(self) -> Response:
        if "nodes" not in self.entry.fields:
            return self._rollout()
        path = _path(self.entry.entries("nodes"), self.entry)
        first = next((k for k, node in enumerate(path) if node.fields.get("sampled")), len(path))
        asked, answered = path[:first], path[first:]
        said = [message(node.entry("message")) for node in answered]
        task = self.entry.entry("task")
        data = task.entry("data") if task.fields.get("data") else task
        prompt = [message(node.entry("message")) for node in asked] or messages(data, "prompt")
        tokens, advantage = self._credit(path, answered)
        return Response(
            prompt=conversation(prompt), parts=_parts(answered, said), reward=self._reward(), group=self._group(task),
            advantage=advantage, gold=gold(data.fields.get("answer")), finish=self._finish(answered), tokens=tokens,
        )  # fmt: skip

    def _rollout(self) -> Response:
        entry = self.entry
        entry.require("prompt", "completion", "reward")
        cut = entry.fields.get("is_truncated")
        example, env = entry.word("example_id"), entry.word("env_name") or entry.word("task")
        return Response(
            prompt=conversation(messages(entry, "prompt")), parts=parts(messages(entry, "completion")),
            # prime-rl leaves what failed out of its group, whatever its reward says.
            reward=None if entry.fields.get("error") else entry.number("reward"),
            group=None if example is None else f"{env}/{example}" if env else f"example-{example}",
            advantage=entry.number("advantage"), gold=gold(entry.fields.get("answer")),
            finish={True: "length", False: "stop"}.get(cut) if isinstance(cut, bool) else None,
        )  # fmt: skip

    def _reward(self) -> float | None:
        rewards = self.entry.entry("rewards")
        values = []
        for name, value in rewards.fields.items():
            if isinstance(value, dict):
                scored = rewards.entry(name)
                score, weight = scored.number("score"), scored.number("weight")
                values.append(None if score is None else score * (1.0 if weight is None else weight))
            else:
                values.append(rewards.number(name))
        known = [value for value in values if value is not None]
        return Entry(self.entry.where, {"rewards": sum(known)}).number("rewards") if known else None

    def _group(self, task: Entry) -> str | None:
        places = [
            *(info.entry("prime_rl") for info in self.info), *self.info, self.episode.entry("prime_rl"), self.episode,
        ]  # fmt: skip
        named = [entry.word("group_id") for entry in places] + [self.episode.entry("group").word("id")]
        return next((name for name in (*named, task.word("key"), task.word("idx")) if name is not None), None)

    def _finish(self, answered: Sequence[Entry]) -> str | None:
        reason = answered[-1].word("finish_reason") if answered else None
        if self.entry.word("stop_condition") in _CUT or reason == "length":
            return "length"
        return "stop" if reason == "stop" else None

    def _credit(self, path: Sequence[Entry], answered: Sequence[Entry]) -> tuple[Tokens | None, float | None]:
        """Tokens where their advantages differ; else the one advantage, None where none is recorded."""
        tokens = _tokens(answered, self._stream(path, answered))
        if tokens is not None:
            ours = [a for a, m in zip(tokens.advantage, tokens.mask, strict=True) if m]
            mean = math.fsum(ours) / len(ours) if ours else 0.0
            return (tokens if len(set(ours)) > 1 else None), mean
        places = (*self.info, *(info.entry("prime_rl") for info in self.info), self.entry)
        return None, next((a for entry in places if (a := entry.number("advantage")) is not None), None)

    def _stream(self, path: Sequence[Entry], answered: Sequence[Entry]) -> list[float] | None:
        """An update's advantages of the response's tokens: its branch is the last, and as long as the path."""
        lengths = [len(node.counts("token_ids")) for node in path]
        last = max((k for each in self.streams if type(k := each.fields.get("index")) is int), default=None)
        for branch in self.streams:
            values = branch.numbers("advantages")
            if branch.fields.get("index") == last and values and len(values) == sum(lengths):
                return values[sum(lengths[: len(path) - len(answered)]) :]
        return None


def _path(nodes: Sequence[Entry], trace: Entry) -> list[Entry]:
    """The nodes from the root to the last one.

    Raises:
        InputError: a parent that does not stand before its node.
    """
    found = []
    at: int | None = len(nodes) - 1 if nodes else None
    while at is not None:
        node = nodes[at]
        found.append(node)
        parent = node.fields.get("parent")
        if parent is not None and not (type(parent) is int and 0 <= parent < at):
            raise node.wrong("parent", f"the number of a node before it, below {at}, or null")
        at = parent
    return found[::-1]


def _parts(answered: Sequence[Entry], said: Sequence[tuple[str, str]]) -> list[Part]:
    if len(said) < 2:
        return parts(said)
    # The role alone does not tell: an assistant's message may have been put there.
    sampled = [bool(node.fields.get("sampled")) for node in answered]
    found = parts(said)
    return [(text, sampled[k // 2] and k % 2 == 1) for k, (text, _) in enumerate(found)]


def _tokens(answered: Sequence[Entry], stream: list[float] | None) -> Tokens | None:
    """The tokens of a response with their recorded advantages; None where there are none.

    Raises:
        InputError: lists of one node that do not fit together.
    """
    ids: list[int] = []
    mask: list[bool] = []
    found: dict[str, list[float]] = {"logprobs": [], "advantages": []}
    given = {name: any(node.fields.get(name) for node in answered) for name in found}
    if stream is None and not given["advantages"]:
        return None
    for node in answered:
        own, flags = node.counts("token_ids"), [bool(flag) for flag in node.counts("mask", 1)]
        if len(own) != len(flags):
            raise InputError(f"mask of {node.where}", f"{len(flags)} values", f"{len(own)}, one a token")
        ids += own
        mask += flags
        for name, gap in (("logprobs", math.nan), ("advantages", 0.0)):
            values = node.numbers(name) or []
            if values and len(values) != sum(flags):
                raise InputError(
                    f"{name} of {node.where}", f"{len(values)} values", f"{sum(flags)}, one a sampled token"
                )
            left = iter(values)
            found[name] += [next(left, gap) if flag else gap for flag in flags]
    known = stream if stream is not None else found["advantages"]
    advantage = [a if m and not math.isnan(a) else 0.0 for a, m in zip(known, mask, strict=True)]
    return Tokens(ids, mask, found["logprobs"] if given["logprobs"] else None, advantage) if ids else None
