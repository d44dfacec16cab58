"""`methods` and `doctor`: what there is, and whether it would run here."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any

import typer


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show its settings; of a pipeline (a,b) those of each.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, settings included.")] = False,
) -> None:
    """List the credit methods: what each needs, conserves and costs, and where its rule comes from."""
    from apportion.credit.registry import method_class, method_names, method_names_of

    found = [_about(method_class(each)) for each in (method_names_of(name) if name else method_names())]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif name:
        for each in found:
            rows = [[key, *map(str, setting.values())] for key, setting in each["settings"].items()]
            _table(f"Settings of {each['name']}", ["setting", "default", "meaning"], rows)
    else:
        rows = [
            [
                m["name"],
                "\n".join(m["needs"]) or "–",
                m["conserves"],
                m["cost"],
                f"{m['paper']}\n{m['marks']}",
            ]
            for m in found
        ]
        _table("Credit methods", ["name", "needs", "conserves", "cost", "paper and marks"], rows, leading=1)


def _about(cls: Any) -> dict[str, Any]:
    return {
        "name": cls.name,
        "needs": sorted(cls.needs),
        "conserves": cls.conserves,
        "grouped": cls.grouped,
        "cost": cls.cost,
        "paper": cls.paper,
        "marks": cls.marks,
        "settings": {
            key: {"default": field.default, "meaning": field.description or ""}
            for key, field in cls.model_fields.items()
        },
    }


def _table(title: str, columns: list[str], rows: list[list[str]], leading: int = 0) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Narrow gaps: the methods fit into 80 columns.
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, leading=leading)
    for column in columns:
        prose = column in ("cost", "paper and marks", "meaning")
        # What one copies into a command is never broken over lines, but for a default that is a list of patterns.
        long = column == "default"
        table.add_column(
            column, no_wrap=not (prose or long), min_width=13 if prose else None,
            max_width=24 if long else None, overflow="fold",
        )  # fmt: skip
    for row in rows:
        # As text and not as markup: [paper] is a word here.
        table.add_row(*map(Text, row))
    Console().print(table)


@dataclass(frozen=True)
class Check:
    """One line of `doctor`: what was looked at, what was seen, and the fix where that is not enough."""

    what: str
    ok: bool
    seen: str
    fix: str = ""
    required: bool = True


def doctor() -> None:
    """Check that this machine can run apportion. No network; exit code 1 if a required part is missing."""
    failed = False
    for check in (*_python(), *_packages(), *_hardware(), *_parts()):
        failed |= check.required and not check.ok
        mark = "ok  " if check.ok else "FAIL" if check.required else "--  "
        typer.echo(f"{mark}  {check.what}: {check.seen}" + ("" if check.ok else f". Fix: {check.fix}"))
    raise typer.Exit(1 if failed else 0)


def _python() -> Iterator[Check]:
    wanted = metadata.metadata("apportion")["Requires-Python"] or ""
    low = tuple(int(part) for part in wanted.removeprefix(">=").split("."))
    yield Check("python", sys.version_info >= low, platform.python_version(), f"use Python {wanted}")


def _packages() -> Iterator[Check]:
    """Every requirement of the package as installed; what only extras ask for is optional."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Check("packaging", False, "missing", "pip install packaging")
        return
    needs = [Requirement(line) for line in metadata.requires("apportion") or []]
    extras = metadata.metadata("apportion").get_all("Provides-Extra") or []
    asked_by: dict[str, list[str]] = {}
    for need in needs:
        asked_by.setdefault(need.name, []).extend(
            extra for extra in extras if need.marker and need.marker.evaluate({"extra": extra})
        )
    for need in {need.name: need for need in needs}.values():
        wanted_by = asked_by[need.name]
        what = need.name + (f" [{', '.join(wanted_by)}]" if wanted_by else "")
        fix = f"pip install '{need.name}{need.specifier}'"
        try:
            version = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            yield Check(what, False, "missing", fix, required=not wanted_by)
            continue
        fits = need.specifier.contains(version, prereleases=True)
        seen = version if fits else f"{version}, expected {need.specifier}"
        yield Check(what, fits, seen, fix, required=not wanted_by)


def _hardware() -> Iterator[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Check("torch loads", False, str(error), "install torch again for this machine")
        return
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        gpus.append("Apple MPS")
    yield Check("devices", True, ", ".join([*gpus, "cpu"]))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("threads", True, f"torch uses {torch.get_num_threads()} of {cores} cores")


def _parts() -> Iterator[Check]:
    from apportion.tasks import policy_path

    try:
        yield Check("embedded policy", True, str(policy_path()))
    except FileNotFoundError:
        yield Check("embedded policy", False, "missing", "pip install --force-reinstall apportion")
    from apportion.verify.sandbox import LocalSandbox, SandboxError

    try:
        tier = LocalSandbox().tier()
    except SandboxError as error:
        yield Check("code sandbox", False, str(error), "grade programs on Linux", required=False)
        return
    seen = f"isolation reaches {tier!r}"
    fix = "allow user namespaces (sysctl user.max_user_namespaces) before grading hostile programs"
    yield Check("code sandbox", tier != "process", seen, fix, required=False)
