"""Writes docs/papers.md, the table of methods and their papers, from the method registry.

python scripts/make_papers.py            writes it
python scripts/make_papers.py --check    exit code 1 and one line where it is not what the registry gives
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from apportion.credit.method import CreditMethod
from apportion.credit.registry import BUILT_IN, method_class

PAGE = Path(__file__).resolve().parents[1] / "docs/papers.md"

HEAD = """\
# Methods and papers

Written by `python scripts/make_papers.py` from the method registry; do not edit it by hand.

*Rule* is the first sentence of the method's docstring; the docstring has the rest, with the numbers that tests hold it
to. Marks say where a part comes from: [paper] stated by the paper or its authors' code, [note] read in a detailed note
on the paper, [ours] not published where we could read it, so a setting or a completion of ours.

*Stage* is a method's place in a pipeline: base (one advantage a response), then credit (spread over tokens), then
reweight. *Needs* is what the host supplies or has measured. *Conserves* is what holds between a method's credit and
its base with the default settings: each response's token mean, its token sum, the sum over its group, or nothing.
`apportion methods NAME` lists a method's settings.

| name | rule | paper | stage | needs | conserves | cost | marks |
|---|---|---|---|---|---|---|---|
"""


def built_in() -> dict[str, type[CreditMethod]]:
    """Our own methods in registry order; those of other packages have no row."""
    return {name: method_class(name) for name in BUILT_IN}


def page(methods: Mapping[str, type[CreditMethod]]) -> str:
    """The whole file, one row a method."""
    return HEAD + "".join(f"{row(name, cls)}\n" for name, cls in methods.items())


def row(name: str, cls: type[CreditMethod]) -> str:
    cells = [
        f"`{name}`", _cell(first_sentence(cls)), _linked(_cell(cls.paper)), cls.stage,
        ", ".join(f"`{need}`" for need in sorted(cls.needs)) or "–", cls.conserves.replace("_", " "),
        _cell(cls.cost), _cell(cls.marks),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def first_sentence(cls: type[CreditMethod]) -> str:
    """Of the class's own docstring; an inherited one would describe another method.

    Raises:
        ValueError: the class has none.
    """
    text = inspect.cleandoc(cls.__dict__.get("__doc__") or "").split("\n\n")[0]
    if not text:
        raise ValueError(f"{cls.__name__} has no docstring")
    # A full stop ends a sentence before a space and a capital or a code span: "Dr.GRPO" and ".5" hold none.
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", text, maxsplit=1)[0].replace("\n", " ").removesuffix(".")


def reason(committed: str, methods: Mapping[str, type[CreditMethod]]) -> str | None:
    """Why the committed text is not the page of these methods, in one line; None where it is."""
    wanted = page(methods)
    if committed == wanted:
        return None
    rows = {line.split("|")[1].strip(" `"): line for line in committed.splitlines() if line.startswith("| `")}
    for name, cls in methods.items():
        if name not in rows:
            return f"no row for {name}"
        if rows[name] != row(name, cls):
            return f"the row of {name} is not what the registry says"
    if extra := [name for name in rows if name not in methods]:
        return f"a row for {extra[0]}, which is not registered"
    return "its head or the order of its rows is another"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/papers.md from the method registry.")
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 where the file is stale")
    options = parser.parse_args()
    methods = built_in()
    if not options.check:
        PAGE.write_text(page(methods), encoding="utf-8")
        return
    found = reason(PAGE.read_text(encoding="utf-8") if PAGE.exists() else "", methods)
    if found:
        sys.exit(f"docs/papers.md: {found}. Fix: python scripts/make_papers.py")


def _cell(text: str) -> str:
    """Text as a table's cell: no bar splits it, and outside code no sign is taken for markup."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"([*<])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def _linked(text: str) -> str:
    return re.sub(r"arXiv:? ?(\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


if __name__ == "__main__":
    main()
