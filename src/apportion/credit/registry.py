"""The methods by name: one line each. Other packages add theirs under the entry point `apportion.methods`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from apportion.credit.method import CreditMethod
from apportion.errors import InputError, nearest

BUILT_IN = {
    "grpo": "apportion.credit.baselines:GRPO",
    "dr_grpo": "apportion.credit.baselines:DrGRPO",
    "rloo": "apportion.credit.baselines:RLOO",
    "opo": "apportion.credit.baselines:OPO",
    "reinforce_pp": "apportion.credit.reinforce_pp:ReinforcePP",
    "reinforce_pp_baseline": "apportion.credit.reinforce_pp:ReinforcePPBaseline",
    "vineppo": "apportion.credit.vineppo:VinePPO",
    "probepo": "apportion.credit.probepo:ProbePO",
}


@cache
def _paths() -> Mapping[str, str]:
    """Names and where their classes are. A plug-in may not take the name of a method that is here already."""
    found = dict(BUILT_IN)
    for point in entry_points(group="apportion.methods"):
        if found.setdefault(point.name, point.value) != point.value:
            raise InputError(
                f"entry point apportion.methods:{point.name}", point.value, "a name not taken yet",
                f"rename it; {point.name!r} is {found[point.name]}",
            )  # fmt: skip
    return found


def method_names() -> list[str]:
    """All registered names, ours first."""
    return list(_paths())


def method_class(name: str) -> type[CreditMethod]:
    """The class registered under `name`.

    Raises:
        InputError: nothing is registered under that name.
    """
    if name not in _paths():
        known = method_names()
        raise InputError("method", repr(name), f"one of {', '.join(known)}{nearest(name, known)}")
    module, _, attribute = _paths()[name].partition(":")
    return getattr(import_module(module), attribute)


def make_method(name: str, settings: Mapping[str, Any] | None = None) -> CreditMethod:
    """The method with these settings; values may be strings, as a command line gives them.

    Raises:
        InputError: an unknown method or setting, or a value its setting does not take.
    """
    cls, settings = method_class(name), dict(settings or {})
    for key in settings:
        if key not in cls.model_fields:
            known = sorted(cls.model_fields)
            raise InputError(f"{name}.{key}", "an unknown setting", f"one of {', '.join(known)}{nearest(key, known)}")
        if isinstance(settings[key], bool) and cls.model_fields[key].annotation is not bool:
            raise InputError(f"{name}.{key}", str(settings[key]).lower(), "a value that is no true or false")
    try:
        return cls.model_validate(settings)
    except ValidationError as error:
        raise setting_error(name, error) from None


def setting_error(prefix: str, error: ValidationError) -> InputError:
    """The first thing that pydantic found, as an error about the setting `prefix.NAME`."""
    first = error.errors()[0]
    if isinstance(cause := first.get("ctx", {}).get("error"), InputError):
        return InputError(f"{prefix}.{cause.field}", cause.got, cause.expected, cause.fix)
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ").split(", unable to")[0]
    if not first["loc"]:
        return InputError(prefix, message, "settings that fit together")
    return InputError(".".join(filter(None, [prefix, *map(str, first["loc"])])), repr(first["input"]), message)
