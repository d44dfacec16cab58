"""The problem sets: the six of the paper's Avg-6, GSM8K, the embedded task, and the user's own.

A set is data that the user passes: a folder, a file, or `hf:ORG/NAME` for the datasets library. The package holds none
but the embedded task, which it generates.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.errors import InputError, nearest
from apportion.tasks import ArithmeticTask, generate, load_problems
from apportion.tasks.problems import Row

CHAIN = "chain"
"""The embedded task: generated, held out from training, checked by its own rule."""

_CHAIN_PROBLEMS = 256
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
_NAMED = re.compile(r"([A-Za-z0-9_.-]+)=(.+)")
_HUB = re.compile(r"hf:(?P<path>[^/@\s]+/[^/@\s]+)(?:/(?P<config>[^@\s]+))?(?:@(?P<split>\S+))?")


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

_ALIASES = {file: name for name, bench in BENCHES.items() for file in bench.files}


@dataclass(frozen=True)
class Columns:
    """Names of a file's columns. A file without the `id` column is numbered from 1."""

    problem: str = "problem"
    answer: str = "answer"
    id: str = "id"


@dataclass(frozen=True)
class Problem:
    """One problem. `gold`: the accepted answers, any of which will do. `row`: from 1, as in the file."""

    id: str
    text: str
    gold: tuple[str, ...]
    row: int


@dataclass(frozen=True)
class ProblemSet:
    """The problems of a set that are asked."""

    name: str
    bench: Bench
    problems: tuple[Problem, ...]
    source: str


def load_sets(
    names: Sequence[str], sources: Sequence[str], columns: Columns | None = None, limit: int | None = None
) -> list[ProblemSet]:
    """Loads and checks the sets.

    Args:
        names: of `BENCHES` or one of their file names; any other is a file of that name in the folder.
        sources: a folder with a file NAME.jsonl (.json, .parquet, also .gz) for each set; for one set also a file, or
            hf:ORG/NAME[/CONFIG][@SPLIT] (split test), which goes over the network. NAME=SOURCE is for that set.
        limit: only the first so many problems of each set.

    Raises:
        InputError: an unknown or repeated name, a source that is missing, ambiguous or cannot be read, a missing
            column or value, an id that stands twice, `answers` that is no list of answers.
    """
    known = [_ALIASES.get(name, name) for name in names]
    if not known:
        raise InputError("--bench", "nothing", f"one or more of {', '.join(BENCHES)}")
    if twice := next((name for name in known if known.count(name) > 1), None):
        raise InputError("--bench", f"{twice} twice", "each set once")
    if limit is not None and limit < 1:
        raise InputError("--limit", limit, "1 or more")
    own, common = _parse(sources, known)
    return [_load(name, own.get(name, common), columns or Columns(), limit) for name in known]


def _parse(sources: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], str | None]:
    own: dict[str, str] = {}
    common: list[str] = []
    for text in sources:
        named = None if Path(text).exists() else _NAMED.fullmatch(text)
        if named is None:
            common.append(text)
            continue
        name = _ALIASES.get(named[1], named[1])
        if name not in names or name == CHAIN or name in own:
            raise InputError("--data", repr(text), f"NAME=SOURCE once for one of the sets that have data: "
                             f"{', '.join(each for each in names if each != CHAIN)}{nearest(name, names)}")  # fmt: skip
        own[name] = named[2]
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
    if source.startswith("hf:"):
        rows = _from_hub(name, source, columns, limit)
        return ProblemSet(name, bench, _problems(name, source, rows, columns), source)
    path = _find(name, bench, Path(source))
    rows = _rows(name, path, str(path), columns, limit)
    return ProblemSet(name, bench, _problems(name, str(path), rows, columns), str(path))


def _find(name: str, bench: Bench, source: Path) -> Path:
    if not source.is_dir():
        return source
    found = [source / f"{file}{suffix}" for file in bench.files for suffix in _SUFFIXES]
    found = [path for path in found if path.is_file()]
    if len(found) > 1:
        raise InputError("--data", " and ".join(path.name for path in found), f"one file for {name} in {source}",
                         f"choose: {name}={found[0]}")  # fmt: skip
    if not found:
        wanted = " or ".join(f"{file}.jsonl" for file in bench.files)
        close = "" if name in BENCHES else nearest(name, BENCHES)
        raise InputError("--bench", f"{name}, which has no file in {source}", f"{wanted} there (also .json, .parquet, "
                         f".gz), or one of {', '.join(BENCHES)}{close}")  # fmt: skip
    return found[0]


def _rows(name: str, path: Path, shown: str, columns: Columns, limit: int | None) -> list[Row]:
    try:
        return load_problems(path, columns.problem, columns.answer, limit)
    except InputError as error:
        # The loader's own advice names the trainer's settings.
        fix = "--problem-column and --answer-column name the columns" if "data." in error.fix else error.fix
        field = error.field.replace(str(path), shown)
        raise InputError(f"{name}: {field}", error.got, error.expected, fix) from error


def _from_hub(name: str, source: str, columns: Columns, limit: int | None) -> list[Row]:
    spec = _HUB.fullmatch(source)
    if spec is None:
        raise InputError("--data", repr(source), "hf:ORG/NAME, hf:ORG/NAME/CONFIG or hf:ORG/NAME/CONFIG@SPLIT")
    import datasets

    try:
        data: Any = datasets.load_dataset(spec["path"], spec["config"], split=spec["split"] or "test")
        data = data.select(range(min(limit or len(data), len(data))))
    # Network, names, splits and formats fail in as many ways as there are layers below.
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise InputError(
            "--data", f"{source} ({reason})", "a data set that the datasets library can fetch from here",
            "check name, configuration and split, or download it and pass the folder",
        ) from error  # fmt: skip
    # By way of a file, so that one reader checks every source.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        data.to_parquet(path)
        return _rows(name, path, source, columns, limit)


def _problems(name: str, shown: str, rows: Sequence[Row], columns: Columns) -> tuple[Problem, ...]:
    numbered = all(row.get(columns.id) is None for row in rows)
    if numbered and columns.id != Columns.id:
        raise InputError(f"{name}: {shown}", f"no column {columns.id!r}", "the column that --id-column names")
    out: dict[str, Problem] = {}
    for number, row in enumerate(rows, 1):
        where = f"{name}: {shown}, row {number}"
        given = number if numbered else row.get(columns.id)
        key = "" if given is None else str(given).strip()
        if not key:
            raise InputError(f"{where}, column {columns.id!r}", "nothing", "an id in every row, or in none")
        if key in out:
            raise InputError(f"{where}, column {columns.id!r}", f"{key!r}, as in row {out[key].row}", "each id once")
        out[key] = Problem(key, row["problem"], _gold(where, row), number)
    return tuple(out.values())


def _gold(where: str, row: Row) -> tuple[str, ...]:
    """The answer, and what a list `answers` accepts beside it."""
    more = row.get("answers")
    if more is None:
        return (row["answer"],)
    if not isinstance(more, list) or not all(isinstance(each, str) and each.strip() for each in more):
        raise InputError(f"{where}, column 'answers'", repr(more)[:80], "a list of answers, each a text")
    return tuple(dict.fromkeys([row["answer"], *more]))
