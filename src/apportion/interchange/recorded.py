"""A recorded step of a run as rows of the interchange file, so that `apportion assign` can work it out again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from apportion.credit.registry import method_class
from apportion.errors import InputError
from apportion.interchange.rows import Row

Record = Mapping[str, Any]
_SAME = ("group", "token_ids", "text", "old_logprob", "ref_logprob", "entropy", "boundaries", "finish", "path")


def recorded_rows(rollouts: Sequence[Record], evidence: Sequence[Record], credit: Sequence[Record]) -> list[Row]:
    """The responses of a step with what was measured of them, in the record's order.

    A continuation serves every response of its group that opens with the same tokens and has a segment that starts
    there: the method's plan measured that state once for all of them.

    Args:
        rollouts, evidence, credit: the rows of the step, as `records.RunFolder.read` returns them.
    """
    states: dict[tuple[str, tuple[int, ...]], dict[int, float | None]] = defaultdict(dict)
    readings: dict[int, list[Record]] = defaultdict(list)
    own: dict[int, set[int]] = defaultdict(set)
    for row in evidence:
        if row["kind"] == "continuations":
            own[row["row"]].add(row["position"])
            states[_state(rollouts[row["row"]], row["position"])][row["m"]] = _number(row["reward"])
        else:
            readings[row["row"]].append(row)
    weighed = bool(_needs(credit) & {"sensitivity", "divergence"})
    out = []
    for i, (row, given) in enumerate(zip(rollouts, credit, strict=True)):
        starts = own[i] | {int(segment["start"]) for segment in given["segments"] or ()}
        probed = [(at, states.get(_state(row, at))) for at in sorted(starts)]
        found = _readings(readings[i], len(row["token_ids"]))
        if weighed and "importance" not in found:
            # What the method looked for and did not find, such as a stated answer.
            found["answer_start"] = None
        if states:
            found["continuations"] = [
                {"position": at, "rewards": [rewards[m] for m in sorted(rewards)]} for at, rewards in probed if rewards
            ]
        out.append(
            {
                **{name: row[name] for name in _SAME if row[name] is not None},
                "reward": _number(row["reward"]), "mask": [int(m) for m in row["mask"]],
                **({} if row["char_start"] is None else {"offsets": row["char_start"]}),
                **({"evidence": found} if found else {}),
            }
        )  # fmt: skip
    return out


def _needs(credit: Sequence[Record]) -> frozenset[str]:
    """What the recorded method reads; nothing that is known where it is not installed here."""
    try:
        return method_class(credit[0]["method"]).needs if credit else frozenset()
    except InputError:
        return frozenset()


def _state(row: Record, position: int) -> tuple[str, tuple[int, ...]]:
    return row["group"], tuple(row["token_ids"][:position])


def _number(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _readings(rows: Sequence[Record], length: int) -> dict[str, Any]:
    """What was read of one response of `length` tokens, of the kinds that are no continuations."""
    found: dict[str, Any] = {}
    for row in rows:
        values, at = row["values"], row["position"]
        if row["kind"] == "belief":
            found.setdefault("belief", []).append({"position": at, "logprob": values[0]})
        elif row["kind"] == "confidence":
            found.setdefault("confidence", []).append({"position": at, "conf": values[0], "acc": values[1]})
        elif row["kind"] == "steps":
            found.setdefault("steps", []).append({"start": at, "ok": values[0] == 1})
        else:
            # Recorded up to the answer, which nothing bears on but itself.
            found["importance"] = [*values, *[0.0] * (length - len(values))]
            found["answer_start"] = at if at >= 0 else None
    return found
