"""docs/papers.md is what the registry gives: a method without its row, or with an old one, fails here.

Planted faults seen caught: a class added to the registry, a class taken out, two classes in another order, a cost
reworded, a row edited by hand, a docstring's first sentence reworded.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from apportion.credit.baselines import GRPO
from apportion.credit.record import Conserves

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "make_papers.py"
MAKE = runpy.run_path(str(SCRIPT))
COMMITTED = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")


class Sharp(GRPO):
    """Sharp [note]: A_t = A_i·|w_t| with `w*` of ℓ < 1 tokens. A second sentence.

    More of it.
    """

    name: ClassVar[str] = "sharp"
    needs: ClassVar[Any] = frozenset({"entropy", "belief"})
    conserves: ClassVar[Conserves] = "group_sum"
    cost: ClassVar[str] = "2*3 passes"
    paper: ClassVar[str] = "Sharp, arXiv 2401.01234 and arXiv 2402.00001"


def changed(field: str, value: str) -> dict[str, Any]:
    """Our methods, one of them with another class variable."""
    methods = MAKE["built_in"]()
    name, cls = next(iter(methods.items()))
    return {**methods, name: type(cls.__name__, (cls,), {"__doc__": cls.__doc__, field: value})}


def test_the_committed_page_is_what_the_registry_gives() -> None:
    methods = MAKE["built_in"]()
    assert MAKE["reason"](COMMITTED, methods) is None
    assert MAKE["page"](methods) == COMMITTED


def test_a_row() -> None:
    assert MAKE["row"]("sharp", Sharp) == (
        r"| `sharp` | Sharp [note]: A_t = A_i·\|w_t\| with `w*` of ℓ \< 1 tokens "
        "| Sharp, [arXiv 2401.01234](https://arxiv.org/abs/2401.01234) "
        "and [arXiv 2402.00001](https://arxiv.org/abs/2402.00001) "
        r"| base | `belief`, `entropy` | group sum | 2\*3 passes | [paper] |"
    )


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("Dr.GRPO: A_i = r_i − μ, from .5 up. Next.", "Dr.GRPO: A_i = r_i − μ, from .5 up"),
        ("Over two\n    lines. `Code` next.\n\n    More.", "Over two lines"),
        ("No full stop", "No full stop"),
        ("A sum (i.e. all of it) counts.", "A sum (i.e. all of it) counts"),
    ],
)
def test_the_first_sentence(text: str, wanted: str) -> None:
    assert MAKE["first_sentence"](type("C", (), {"__doc__": text})) == wanted


def test_a_class_without_a_docstring_of_its_own_has_no_row() -> None:
    with pytest.raises(ValueError, match="Bare has no docstring"):
        MAKE["first_sentence"](type("Bare", (GRPO,), {}))


def test_a_stale_page_says_why_in_one_line() -> None:
    methods, reason = MAKE["built_in"](), MAKE["reason"]
    first, second = list(methods)[:2]
    fewer = {name: cls for name, cls in methods.items() if name != first}
    assert reason(COMMITTED, {**methods, "sharp": Sharp}) == "no row for sharp"
    assert reason(COMMITTED, fewer) == f"a row for {first}, which is not registered"
    assert reason(COMMITTED, {**fewer, first: methods[first]}) == "its head or the order of its rows is another"
    for field, value in (("cost", "more"), ("marks", "[ours]"), ("paper", "another"), ("__doc__", "Reworded.")):
        assert reason(COMMITTED, changed(field, value)) == f"the row of {first} is not what the registry says"
    edited = COMMITTED.replace(f"| `{second}` | ", f"| `{second}` | so called ")
    assert reason(edited, methods) == f"the row of {second} is not what the registry says"
    assert reason("", methods) == f"no row for {first}"
    assert reason(COMMITTED.replace("# Methods", "# The methods"), methods) is not None


def test_check_as_a_command(tmp_path: Path) -> None:
    """A copy of the script beside a stale page: exit code 1, one line, and the page left as it was."""
    for folder in ("scripts", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts" / SCRIPT.name).write_text(SCRIPT.read_text())
    page = tmp_path / "docs" / "papers.md"

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "scripts" / SCRIPT.name), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    page.write_text(COMMITTED.replace("| `rloo`", "| `looo`"))
    before = page.read_text()
    done = run("--check")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "docs/papers.md: no row for rloo. Fix: python scripts/make_papers.py\n"
    assert page.read_text() == before
    assert run().returncode == 0 and page.read_text() == COMMITTED
