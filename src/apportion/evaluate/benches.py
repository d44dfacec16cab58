"""The problem sets: the six of the paper's Avg-6, GSM8K, the embedded task, and the user's own.

A set is data that the user passes: a folder, a file, or `hf:ORG/NAME` for the datasets library. The package holds none
but the embedded task, which it generates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from apportion.errors import InputError, nearest
from apportion.evaluate.sources import Columns, Problem, find, plain_name, read
from apportion.tasks import ArithmeticTask, generate

CHAIN = "chain"
"""The embedded task: generated, held out from training, checked by its own rule."""

_CHAIN_PROBLEMS = 256
# A set's name is also that of its folder of records.
_NAME = re.compile(r"\w[\w.-]*")
_NAMED = re.compile(r"(\w[\w.-]*)=(.+)")


@dataclass(frozen=True)
class Bench:
    """What is known of a set beforehand.

    Attributes:
        n: samples a problem by default. [ours: the paper's printed figures fit 16, and 32 on AIME24]
        files: names that its file may have, without the ending.
        sizes: published numbers of problems; empty where none is.
    """

    title: str
    n: int
    files: tuple[str, ...]
    sizes: tuple[int, ...] = ()


BENCHES: dict[str, Bench] = {
    "math500": Bench("MATH-500", 16, ("math500",), (500,)),
    "olympiadbench": Bench("OlympiadBench", 16, ("olympiadbench",), (674, 675)),
    "collegemath": Bench("CollegeMath", 16, ("collegemath", "college_math"), (2818,)),
    "amc": Bench("AMC", 16, ("amc", "amc_83"), (83,)),
    "minerva": Bench("Minerva", 16, ("minerva", "minerva_math"), (272,)),
    "aime24": Bench("AIME24", 32, ("aime24",), (30,)),
    "gsm8k": Bench("GSM8K", 16, ("gsm8k", "gsm8k_test"), (1319,)),
    CHAIN: Bench("chained arithmetic", 16, ()),
}
AVG6 = ("math500", "olympiadbench", "collegemath", "amc", "minerva", "aime24")
"""The sets of the paper's Avg-6."""

_ALIASES = {plain_name(file): name for name, bench in BENCHES.items() for file in bench.files} | {CHAIN: CHAIN}


@dataclass(frozen=True)
class ProblemSet:
    """The problems of a set that are asked."""

    name: str
    bench: Bench
    problems: tuple[Problem, ...]
    source: str


def load_sets(
    names: Sequence[str],
    sources: Sequence[str],
    columns: Columns | Mapping[str, Columns] | None = None,
    limit: int | None = None,
) -> list[ProblemSet]:
    """Loads and checks the sets.

    Args:
        names: of `BENCHES` or one of their file names, in capitals or not, with - or _ or without; any other is a file
            of that name in the folder.
        sources: a folder with a file NAME.jsonl (.json, .parquet, also .gz) for each set; for one set also a file, or
            hf:ORG/NAME[/CONFIG][@SPLIT] (split test), which goes over the network unless there is a folder of that
            name. NAME=SOURCE is for that set.
        columns: of all sets, or of each set by its name.
        limit: only the first so many problems of each set.

    Raises:
        InputError: an unknown or repeated name, a source that is missing, ambiguous or cannot be read, a missing
            column or value, an id that stands twice, `answers` that is no list of answers.
    """
    known = bench_names(names)
    if limit is not None and limit < 1:
        raise InputError("--limit", limit, "1 or more")
    own, common = _sources(sources, known)
    of_set = columns if isinstance(columns, Mapping) else dict.fromkeys(known, columns)
    return [_load(name, own.get(name, common), of_set.get(name) or Columns(), limit) for name in known]


def bench_names(names: Sequence[str]) -> list[str]:
    """The names as `BENCHES` has them; others as they are.

    Raises:
        InputError: no name, one that stands twice, or one that no folder may have.
    """
    known = [_ALIASES.get(plain_name(name), name) for name in names]
    if not known:
        raise InputError("--bench", "nothing", f"one or more of {', '.join(BENCHES)}")
    if odd := next((name for name in known if not _NAME.fullmatch(name)), None):
        raise InputError("--bench", repr(odd), "a name of letters, digits and _ . -, the first a letter or digit",
                         "a file elsewhere goes to --data: --bench NAME --data NAME=FILE")  # fmt: skip
    if twice := next((name for name in known if known.count(name) > 1), None):
        raise InputError("--bench", f"{twice} twice", "each set once")
    return known


def columns_by_set(
    names: Sequence[str], problem: Sequence[str] = (), answer: Sequence[str] = (), identity: Sequence[str] = ()
) -> dict[str, Columns]:
    """Each set's columns, from COLUMN for all sets and NAME=COLUMN for one.

    Raises:
        InputError: as `bench_names`; two columns for one set.
    """
    known = bench_names(names)
    chosen = {}
    for option, texts, usual in (
        ("problem", problem, Columns.problem), ("answer", answer, Columns.answer), ("id", identity, Columns.id),
    ):  # fmt: skip
        own, common = _by_set(f"--{option}-column", "COLUMN", texts, known)
        if len(common) > 1:
            raise InputError(f"--{option}-column", " and ".join(common), "one column for all sets",
                             "name the others: NAME=COLUMN")  # fmt: skip
        chosen[option] = {name: own.get(name, (common or [usual])[0]) for name in known}
    return {name: Columns(**{option: of_set[name] for option, of_set in chosen.items()}) for name in known}


def _by_set(option: str, kind: str, texts: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """What NAME=TEXT gives to single sets, and what stands for all."""
    own: dict[str, str] = {}
    common: list[str] = []
    for text in texts:
        if not text.strip():
            raise InputError(option, repr(text), "a name")
        named = None if Path(text).exists() else _NAMED.fullmatch(text)
        if named is None:
            common.append(text)
            continue
        name = _ALIASES.get(plain_name(named[1]), named[1])
        if name not in names or name == CHAIN or name in own:
            raise InputError(option, repr(text), f"NAME={kind} once for one of the sets that have data: "
                             f"{', '.join(each for each in names if each != CHAIN)}{nearest(name, names)}")  # fmt: skip
        own[name] = named[2]
    return own, common


def _sources(sources: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], str | None]:
    own, common = _by_set("--data", "SOURCE", sources, names)
    if len(common) > 1:
        raise InputError("--data", " and ".join(common), "one folder for all sets", "name the others: NAME=SOURCE")
    shared = [name for name in names if name not in own and name != CHAIN]
    if common and len(shared) > 1 and not Path(common[0]).is_dir():
        raise InputError("--data", repr(common[0]), f"a folder, for {' and '.join(shared)} share it",
                         f"name the set it is: {shared[0]}={common[0]}")  # fmt: skip
    return own, common[0] if common else None


def _load(name: str, source: str | None, columns: Columns, limit: int | None) -> ProblemSet:
    bench = BENCHES.get(name, Bench(name, 16, (name,)))
    if name == CHAIN:
        made = generate(ArithmeticTask(), "test", limit or _CHAIN_PROBLEMS)
        chains = [Problem(p.prompt.removesuffix("=?\n"), p.prompt, (p.answer,), row) for row, p in enumerate(made, 1)]
        return ProblemSet(name, bench, tuple(chains), "generated")
    if source is None:
        raise InputError("--data", f"nothing for {name}", "a folder of problem sets, a file, or hf:ORG/NAME")
    if not source.startswith("hf:"):
        source = str(_file(name, bench, Path(source)))
    return ProblemSet(name, bench, read(name, source, columns, limit), source)


def _file(name: str, bench: Bench, source: Path) -> Path:
    """The set's file in a folder, or the file itself."""
    if not source.is_dir():
        return source
    found = find(source, bench.files)
    if len(found) > 1:
        raise InputError("--data", " and ".join(path.name for path in found), f"one file for {name} in {source}",
                         f"choose: {name}={found[0]}")  # fmt: skip
    if not found:
        wanted = " or ".join(f"{file}.jsonl" for file in bench.files)
        close = "" if name in BENCHES else nearest(name.casefold(), BENCHES)
        raise InputError("--bench", f"{name}, which has no file in {source}", f"{wanted} there (also .json, .parquet, "
                         f".gz), or one of {', '.join(BENCHES)}{close}")  # fmt: skip
    return found[0]
