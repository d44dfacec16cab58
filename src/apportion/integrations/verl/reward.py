"""apportion's verifiers as verl's reward function.

In verl's configuration: `reward.custom_reward_function.path=pkg://apportion.integrations.verl.reward`, with
`reward.custom_reward_function.name=compute_score`.
"""

from __future__ import annotations

from typing import Any

from apportion.verify import grade


class Abstained(Exception):
    """The verifier could not judge a response."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    kind: str = "math",
    **settings: Any,
) -> float:
    """1.0 correct, 0.0 wrong, in the form verl's reward managers call.

    A response that the verifier cannot judge has no reward, and verl knows no such thing: NaN would make the advantages
    of its whole group NaN, and 0 would be a wrong answer. So it raises, which is verl's own way to lose one response:
    verl logs the reason, the response is not there, and the group goes on with the others (in asynchronous trainers,
    and with `sync_refill_failed_groups`, another prompt takes the group's place). In validation verl counts it as 0 in
    `acc`, and leaves it out of `acc_success_only`.

    Args:
        data_source: not looked at. extra_info: not looked at.
        solution_str: the response's text.
        ground_truth: the right answer, or several that are accepted (a list or an array).
        kind: of verifier, see `apportion.verify`. settings: of that verifier. Both go into
            `+reward.custom_reward_function.reward_kwargs`.

    Raises:
        Abstained: the verifier abstained.
        InputError: an unknown kind or setting.
    """
    gold = ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth
    verdict = grade(kind, gold, solution_str, **settings)
    if verdict.outcome == "abstain":
        raise Abstained(f"no reward for this response: {verdict.reason}")
    return float(verdict.reward)
