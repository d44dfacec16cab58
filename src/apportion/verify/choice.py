"""Multiple choice: one letter from A to J.

What a response settles on is the last clause that affirms an option. A clause that affirms several ("A or B") settles
on none, and neither does one that denies it ("not B", "B is wrong").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from apportion.errors import InputError
from apportion.verify.extract import after_thinking, final_answer
from apportion.verify.normalise import normalise
from apportion.verify.verdict import Verdict

# No space may be read in two ways: the repeats below would go through all of them.
_ITEM = r"(?:(?:option|choice|answer) ?)?(?:[(\[] ?)?([A-Za-z])(?![A-Za-z])(?: ?[)\]])?[.:]?"
_JOINT = r"(?:\bor\b|\band\b|\bnor\b|[,;/&\n ])"
# Nothing but options: "B", "(b)", "option B", "A, B", "A and B".
_ITEMS = re.compile(rf"(?:both |either )?{_ITEM}(?:{_JOINT}+{_ITEM})*", re.IGNORECASE)
# An option and its text: "B) the second one". What is joined to it would be another option.
_LABELLED = re.compile(
    r"(?:(?:option|choice|answer) ?)?(?:\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Za-z])[.:)])\s"
    r"(?!\s*(?:or|and|nor|not|is|are|isn|seems?|[,;/&]|\(?[A-J]\)?(?:\W*$|\W+(?:or|and)\b)))",
    re.IGNORECASE,
)
# In prose, "A" and "I" are words too: a bare letter must end its clause, be joined to another, or be spoken of.
_MENTION = re.compile(
    r"(?<![A-Za-z\\'])(?:\(([A-J])\)|\[([A-J])\]|(?:[Oo]ption|[Cc]hoice|[Aa]nswer) ([A-J])(?![A-Za-z'])|"
    r"([A-J])(?=\s*(?:$|[,;/&)]|(?:or|and|nor|not|is|are|isn't|aren't|seems?|rather|instead|cannot|can't)\b)))"
)
_SENTENCE = re.compile(r"[.!?](?!\s*(?:or|and|nor)\b)(?=\W|$)|\n")
_CLAUSE = re.compile(
    r"(?<![A-J)\]])[,;]|[,;](?!\s*(?:or|and|nor|maybe|perhaps|possibly|\(?[A-J]\)?(?:\s*[,;]|\s*$|\s+(?:or|and)\b)))|"
    r"\b(?:but|so|hence|thus|therefore|because|since|while|whereas)\b"
)
# What is said before a denial stands ("B, not A") unless the denial is said of it ("B is not right").
_DENIAL = re.compile(
    r"(?P<of>\b(?:wrong|incorrect|false|impossible|eliminated|cannot)\b|"
    r"\b(?:is|are|was|were|be|can|could|does|do|did|would|seems?) not\b|n't\b)|"
    r"\b(?:not|never|neither|nor|none|except|unlike|rather than|instead of|other than)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ChoiceSettings:
    """`letters`: the options that exist, in order. `any_case`: "b" is B. [ours]"""

    letters: str = "ABCDEFGHIJ"
    any_case: bool = True

    def __post_init__(self) -> None:
        if not self.letters.isalpha() or self.letters != self.letters.upper():
            raise InputError("letters", repr(self.letters), "capital letters such as 'ABCD'")


def _plain(text: str) -> str:
    """Without LaTeX's and Markdown's wrapping."""
    return re.sub(r"\\text\{ ?([^{}]*?) ?\}", r"\1 ", normalise(re.sub(r"[*_`]", "", text))).strip()


def _options(letters: list[str], settings: ChoiceSettings) -> str:
    found = {letter.upper() if settings.any_case else letter for letter in letters}
    return "".join(letter for letter in settings.letters if letter in found)


def _listed(plain: str, settings: ChoiceSettings) -> str:
    """The options that an answer string consists of or begins with as a label."""
    if _ITEMS.fullmatch(plain):
        return _options(re.findall(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])", plain), settings)
    label = _LABELLED.match(plain)
    return _options([letter for letter in label.groups() if letter], settings) if label else ""


def _affirmed(clause: str, settings: ChoiceSettings, marked: bool) -> tuple[str, bool]:
    """The options that a clause affirms, and whether it denies any. `marked`: bare letters do not count by
    themselves."""
    denial = _DENIAL.search(clause)
    mentions = list(_MENTION.finditer(clause))
    if marked and not any(mention.group(1) or mention.group(2) or mention.group(3) for mention in mentions):
        return "", False
    standing = [m for m in mentions if denial is None or (m.start() < denial.start() and not denial["of"])]
    letters = [letter for mention in standing for letter in mention.groups() if letter]
    return _options(letters, settings), len(standing) < len(mentions)


def _settled(text: str, settings: ChoiceSettings) -> tuple[str, bool]:
    """The options of the last clause that affirms any, and whether some clause after it denies one."""
    denied = False
    sentences = [sentence for sentence in _SENTENCE.split(text) if sentence.strip()]
    for position, sentence in enumerate(reversed(sentences)):
        for clause in reversed(_CLAUSE.split(sentence)):
            options, denies = _affirmed(clause.strip(), settings, marked=position > 0)
            if options:
                return options, denied
            denied = denied or denies
    return "", denied


def choose(response: str, settings: ChoiceSettings) -> tuple[str, bool]:
    """The options that a response settles on, and whether it only denied some: those of its final answer, else of
    its last clause with an option."""
    answer, tail = final_answer(response), after_thinking(response)
    texts = [text for text in (answer, tail if tail and "\\boxed" not in tail else None) if text]
    denied = False
    for text in texts:
        plain = _plain(text) if text is answer else re.sub(r"[*_`$]", "", text)
        if options := _listed(plain, settings):
            return options, False
        options, denies = _settled(plain, settings)
        if options:
            return options, False
        denied = denied or denies
    return "", denied


def unreadable_gold(gold: object, settings: ChoiceSettings) -> str | None:
    """Why `gold` names no option, or more than one; None if it names one."""
    if len(_listed(_plain(str(gold)), settings)) != 1:
        return f"the gold {str(gold)[:80]!r} names none of the options {settings.letters}, or several"
    return None


def grade(gold: object, prediction: str, settings: ChoiceSettings) -> Verdict:
    """Correct when the prediction settles on the gold's letter and on no other."""
    if reason := unreadable_gold(gold, settings):
        return Verdict("abstain", reason, str(gold), None)
    wanted = _listed(_plain(str(gold)), settings)
    chosen, denied = choose(prediction, settings)
    if not chosen:
        return Verdict("wrong", "option negated" if denied else "no option named", wanted, None)
    if len(chosen) > 1:
        return Verdict("wrong", "several options named", wanted, ", ".join(chosen))
    if wanted == chosen:
        return Verdict("correct", "same option", wanted, chosen)
    return Verdict("wrong", "another option", wanted, chosen)
