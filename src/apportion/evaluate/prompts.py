"""How a problem is put to a model: by its chat template and family, or by a style that is forced. [ours]

| style | for | the model reads |
|---|---|---|
| qwen | Qwen models with a chat template | the instruction as system message, the problem as the user's |
| r1 | DeepSeek-R1 distillations | problem and instruction as the user's message, then an opened <think> |
| chat | other chat templates | problem and instruction as the user's message |
| plain | no chat template | "Problem: ... Solution:", and the answer ends where it writes the next "Problem:" |
| task | the embedded task | the problem as it is |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from apportion.errors import InputError, nearest

Style = Literal["qwen", "r1", "chat", "plain"]
TASK = "task"
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."

_THINK = "<think>"
_NEXT = "\nProblem:"
# What ends the assistant's turn; base models with a chat template do not name it as their end of text.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endofturn|>")


@dataclass(frozen=True)
class Prompt:
    """A prompt as text and as token ids."""

    style: str
    text: str
    ids: tuple[int, ...] = field(repr=False)

    def graded(self, response: str) -> str:
        """What is graded of a response: with the <think> that the prompt opened, without a next problem."""
        if self.text.rstrip().endswith(_THINK):
            return _THINK + response
        return response.partition(_NEXT)[0] if self.style == "plain" else response


def style_of(tokenizer: Any, model_type: str, forced: str | None) -> str:
    """The style for a model, by its chat template and the `model_type` of its config.

    Raises:
        InputError: an unknown style, or one that needs a chat template and the model has none.
    """
    template = tokenizer.chat_template
    if forced is not None:
        if forced not in get_args(Style):
            known = get_args(Style)
            raise InputError("--prompt", repr(forced), f"one of {', '.join(known)}{nearest(forced, known)}")
        if forced != "plain" and not template:
            raise InputError("--prompt", forced, "plain, since the model has no chat template",
                             "leave it out, or add a chat_template.jinja to the model's folder")  # fmt: skip
        return forced
    if not template:
        return "plain"
    if "<｜Assistant｜>" in str(template):
        return "r1"
    return "qwen" if model_type.startswith("qwen") else "chat"


def render(style: str, tokenizer: Any, problem: str) -> Prompt:
    """The prompt of a problem. A chat template brings its own special tokens; plain text gets the tokenizer's."""
    if style in (TASK, "plain"):
        text = problem if style == TASK else f"Problem: {problem}\n{INSTRUCTION}\n\nSolution:"
        return Prompt(style, text, tuple(tokenizer(text)["input_ids"]))
    asked = {"role": "user", "content": problem if style == "qwen" else f"{problem}\n{INSTRUCTION}"}
    messages = [{"role": "system", "content": INSTRUCTION}, asked] if style == "qwen" else [asked]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if style == "r1" and not text.rstrip().endswith(_THINK):
        text += f"{_THINK}\n"
    return Prompt(style, text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))


def turn_ends(style: str, tokenizer: Any) -> list[int]:
    """Token ids that end a response in a chat style: the chat template's own end of a turn."""
    if style in (TASK, "plain"):
        return []
    own = [mark for mark in _TURN_ENDS if mark in str(tokenizer.chat_template)]
    vocabulary = tokenizer.get_vocab() if own else {}
    return [vocabulary[mark] for mark in own if mark in vocabulary]
