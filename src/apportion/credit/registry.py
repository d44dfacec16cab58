"""The methods by name: one line each. Other packages add theirs under the entry point `apportion.methods`.

Several names are a pipeline (see `pipeline`), in a list or in one string: `avspo,probepo,cw_grpo`, or with `+` as
records have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import compose, pipeline_class
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
    "spo_chain": "apportion.credit.spo_chain:SPOChain",
    "spo_tree": "apportion.credit.spo_tree:SPOTree",
    "treepo": "apportion.credit.treepo:TreePO",
    "oar_p": "apportion.credit.oar:OARP",
    "oar_g": "apportion.credit.oar:OARG",
    "ep_grpo": "apportion.credit.ep_grpo:EPGRPO",
    "grpo_vps": "apportion.credit.grpo_vps:GRPOVPS",
    "cw_grpo": "apportion.credit.cw_grpo:CWGRPO",
    "avspo": "apportion.credit.avspo:AVSPO",
    "spae": "apportion.credit.spae:SPAE",
    "step_verified": "apportion.credit.step_verified:StepVerified",
    "prpo": "apportion.credit.prpo:PRPO",
}


@cache
def _paths() -> Mapping[str, str]:
    """Names and where their classes are. A plug-in may not take the name of a method that is here already."""
    found = dict(BUILT_IN)
    for point in entry_points(group="apportion.methods"):
        if not re.fullmatch("[a-z][a-z0-9_]*", point.name):
            raise InputError(f"entry point apportion.methods:{point.name}", point.name, "lower case, digits and _")
        if found.setdefault(point.name, point.value) != point.value:
            raise InputError(
                f"entry point apportion.methods:{point.name}", point.value, "a name not taken yet",
                f"rename it; {point.name!r} is {found[point.name]}",
            )  # fmt: skip
    return found


def method_names() -> list[str]:
    """All registered names, ours first."""
    return list(_paths())


def method_names_of(name: str | Sequence[str]) -> list[str]:
    """The registered names in one string or a list.

    Raises:
        InputError: nothing is registered under one of them.
    """
    names = [part.strip() for part in re.split("[,+]", name)] if isinstance(name, str) else list(name)
    known = method_names()
    for each in names:
        if each not in known:
            raise InputError("method", repr(each), f"one of {', '.join(known)}{nearest(each, known)}")
    return names


def method_class(name: str | Sequence[str]) -> type[CreditMethod]:
    """The class registered under `name`; of several names, the class of their pipeline.

    Raises:
        InputError: nothing is registered under that name, or the names make no pipeline.
    """
    classes = [_load(each) for each in method_names_of(name)]
    return classes[0] if len(classes) == 1 else pipeline_class(*classes)


def make_method(name: str | Sequence[str], settings: Mapping[str, Any] | None = None) -> CreditMethod:
    """The method with these settings; values may be strings, as a command line gives them.

    Args:
        name: a registered name, or several: a pipeline.
        settings: of a pipeline a table for each stage, `{"probepo": {"alpha": 1}}`, or `{"probepo.alpha": 1}`.

    Raises:
        InputError: an unknown method or setting, or a value its setting does not take.
    """
    names, settings = method_names_of(name), settings or {}
    method_class(names)
    by_stage = {names[0]: settings} if len(names) == 1 else _by_stage(names, settings)
    return compose([_make(each, by_stage.get(each, {})) for each in names])


def _load(name: str) -> type[CreditMethod]:
    module, _, attribute = _paths()[name].partition(":")
    where = f"entry point apportion.methods:{name}"
    try:
        cls: type[CreditMethod] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        fix = "repair or uninstall the package"
        raise InputError(where, error, f"{_paths()[name]} to be there", fix) from error
    if cls.name != name:
        raise InputError(where, f"a class with the name {cls.name!r}", "one name", "give both the same")
    return cls


def _make(name: str, settings: Mapping[str, Any]) -> CreditMethod:
    cls = _load(name)
    for key in settings:
        if key not in cls.model_fields:
            known = sorted(cls.model_fields)
            raise InputError(f"{name}.{key}", "an unknown setting", f"one of {', '.join(known)}{nearest(key, known)}")
        if isinstance(settings[key], bool) and cls.model_fields[key].annotation is not bool:
            raise InputError(f"{name}.{key}", str(settings[key]).lower(), "a value that is no true or false")
    try:
        return cls.model_validate(dict(settings))
    except ValidationError as error:
        raise setting_error(name, error) from None


def _by_stage(names: Sequence[str], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of a pipeline as one table a stage, those of `stage.setting` keys among them."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        stage, dot, own = key.partition(".")
        if stage not in names:
            takers = [f"{name}.{key}" for name in names if key in _load(name).model_fields]
            if takers and not dot:
                raise InputError(key, "a setting without its method", f"{' or '.join(takers)} in this pipeline")
            wanted = f"METHOD.SETTING, of {', '.join(names)}{nearest(stage, names)}"
            raise InputError(key, "no method of this pipeline", wanted)
        if not dot and not isinstance(value, Mapping):
            raise InputError(stage, repr(value), f"a table of its settings, or {stage}.SETTING")
        for setting, given in ({own: value} if dot else value).items():
            if setting in found.setdefault(stage, {}):
                raise InputError(f"{stage}.{setting}", "the setting twice", "it once")
            found[stage][setting] = given
    return found


def setting_error(prefix: str, error: ValidationError) -> InputError:
    """The first thing that pydantic found, as an error about the setting `prefix.NAME`."""
    first = error.errors()[0]
    if isinstance(cause := first.get("ctx", {}).get("error"), InputError):
        return InputError(f"{prefix}.{cause.field}", cause.got, cause.expected, cause.fix)
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ").split(", unable to")[0]
    if not first["loc"]:
        return InputError(prefix, message, "settings that fit together")
    return InputError(".".join(filter(None, [prefix, *map(str, first["loc"])])), repr(first["input"]), message)
