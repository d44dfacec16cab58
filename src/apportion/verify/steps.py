"""Verdicts on single steps of a response: the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

# (character of the response where the step starts, whether it is right), in order.
Steps = list[tuple[int, bool]]


class StepVerifier(Protocol):
    """Judges the steps of responses, one list a response; None where it has nothing to say about one.

    It is handed whole batches: the prompts as text, the responses as text, and the data set's rows.
    """

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> list[Steps | None]: ...
