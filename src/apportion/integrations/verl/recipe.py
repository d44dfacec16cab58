"""A recipe for verl: a Hydra configuration over verl's own, with a method out of its folder `method/`.

What verl is started with is what was checked: the command names the same file, the same method and the same settings.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from apportion.errors import InputError, nearest
from apportion.integrations.verl.settings import CreditSettings, check_config
from apportion.integrations.verl.versions import SUPPORTED, check_verl

OURS = ("apportion", "recipe")
"""Tables of the configuration that verl does not have: what apportion is asked for, and what a prediction needs."""

_GROUP = "method"
_ANY = "any"
_NODE = 8
_BARE = re.compile(r"[A-Za-z_][\w./:-]*")
_WORDS = frozenset({"true", "false", "null", "nan", "inf"})
# Parts whose dataclasses check their own values as they are made, and load nothing.
_PARTS = ("algorithm", "actor_rollout_ref.rollout")


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe.

    Attributes:
        path: the recipe's file. overrides: in Hydra's syntax, the method among them.
        config: verl's whole configuration, an omegaconf `DictConfig`.
    """

    path: Path
    overrides: tuple[str, ...]
    config: Any

    @property
    def command(self) -> list[str]:
        """What starts verl with this configuration."""
        return [
            sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(self.path.parent.resolve()),
            "--config-name", self.path.stem, *self.overrides,
        ]  # fmt: skip

    @property
    def devices(self) -> int:
        """GPUs of all nodes."""
        return int(self.config.trainer.nnodes * self.config.trainer.n_gpus_per_node)

    @property
    def credit(self) -> CreditSettings | None:
        """What apportion is asked for; None where verl's own trainer runs."""
        if not str(self.config.trainer.v1.trainer_mode).startswith("apportion_"):
            return None
        return CreditSettings.of(plain(self.config.get("apportion")))


def plain(node: Any) -> Any:
    """A part of the configuration as dictionaries and lists, interpolations resolved."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def methods_of(path: Path) -> list[str]:
    """The methods that the recipe's folder has a file for."""
    return sorted(file.stem for file in (path.parent / _GROUP).glob("*.yaml") if file.stem != _ANY)


def compose(
    path: Path, method: str | None = None, settings: Mapping[str, Any] | None = None, gpus: int | None = None
) -> Recipe:
    """Reads a recipe over the configuration of the installed verl.

    Args:
        path: the recipe's YAML file.
        method: one of `methods_of`, or any other that is registered, with its default settings; None is the recipe's.
        settings: key → value, over all else. A key with + before it may be new to verl.
        gpus: of all nodes; more than 8 are whole nodes of 8.

    Raises:
        InputError: verl is missing or of another version, the file, an unknown method or key (with the nearest one), or
            what Hydra refuses.
    """
    if find_spec("verl") is None or find_spec("hydra") is None:
        raise InputError("verl", "not installed here", f"verl {SUPPORTED}", "pip install 'apportion[verl]'")
    check_verl()
    if not path.is_file() or path.suffix != ".yaml":
        raise InputError("recipe", str(path), "a YAML file that exists, such as recipes/cluster/qwen3-4b.yaml")
    overrides = [*_method(path, method), *_devices(gpus)]
    with _refused(path):
        found = _read(path, overrides)
        tree, base = _tree(found), _tree(_verl_alone())
        for key, known in _unknown(tree, base):
            raise InputError(f"{path}: {key}", "a key that verl does not have", _one_of(key.rpartition(".")[2], known))
        for key, value in (settings or {}).items():
            overrides += _override(key, value, tree)
        if settings:
            found = _read(path, overrides)
    return Recipe(path, tuple(overrides), found)


def check(recipe: Recipe) -> None:
    """What verl and apportion would refuse when the run starts.

    Raises:
        InputError: the first of it, with what verl says; a text where verl has a number.
    """
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config, credit = recipe.config, recipe.credit
    with _refused(recipe.path), contextlib.redirect_stdout(io.StringIO()):
        OmegaConf.to_container(config, resolve=True)
        for key, value, usual in _misfits(_tree(config), _tree(_verl_alone())):
            raise InputError(key, repr(value), f"a value like {usual!r}, which verl has there")
        if credit is not None:
            check_config(config, credit, credit.make_method())
        for name in _PARTS:
            omega_conf_to_dataclass(OmegaConf.select(config, name))
        validate_config(config, need_reference_policy(config), need_critic(config))
        mode = str(config.trainer.v1.trainer_mode)
        if config.trainer.use_v1:
            # Both register their trainers as they are imported.
            import_module("apportion.integrations.verl.plugin")
            import_module("verl.trainer.ppo.v1").get_trainer_cls(mode)
    width = config.data.max_prompt_length + config.data.max_response_length
    actor = config.actor_rollout_ref.actor
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size < width:
        raise InputError(
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu,
            f"at least {width}, the longest prompt and response: a row is not split over passes",
        )  # fmt: skip


def check_files(recipe: Recipe) -> None:
    """What a run reads and a dry run does not.

    Raises:
        InputError: a data file or model folder that is not there.
    """
    for key in ("train_files", "val_files"):
        names = recipe.config.data[key]
        for name in [names] if isinstance(names, str) else names:
            if "://" not in name and not Path(name).expanduser().is_file():
                raise InputError(
                    f"data.{key}", name, "a Parquet file that exists",
                    f"apportion cluster-data --data problems.jsonl -o {Path(name).parent}",
                )  # fmt: skip


def literal(value: Any) -> str:
    """A value in the syntax of Hydra's overrides, which reads it back as it was.

    Raises:
        InputError: a value that the syntax has no word for.
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(literal, value))}]"
    if not isinstance(value, str):
        raise InputError("--set", repr(value), "a number, a text, true, false, null or a list of them")
    if _BARE.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # A backslash counts only before a quotation mark.
    escaped = re.sub(r"(\\*)('|$)", lambda m: 2 * m[1] + (m[2] and "\\'"), value)
    return f"'{escaped}'"


def _method(path: Path, method: str | None) -> list[str]:
    if method is None:
        return []
    known = methods_of(path)
    if method in known:
        return [f"{_GROUP}={method}"]
    from apportion.credit.registry import make_method, method_names_of

    try:
        names = method_names_of(method)
        probes = "continuations" in make_method(names).needs
    except InputError as error:
        raise InputError("--method", error.got, error.expected, error.fix) from None
    run = literal("-".join(("${recipe.name}", *names)))
    return [
        f"{_GROUP}={_ANY}", f"apportion.method={literal(names if len(names) > 1 else names[0])}",
        f"trainer.experiment_name={run}",
        *([] if probes else ["++apportion.rescue=null"]),
    ]  # fmt: skip


def _devices(gpus: int | None) -> list[str]:
    if gpus is None:
        return []
    if gpus < 1 or (gpus > _NODE and gpus % _NODE):
        raise InputError("--gpus", gpus, f"1 to {_NODE}, or whole nodes of {_NODE}")
    return [f"trainer.nnodes={max(1, gpus // _NODE)}", f"trainer.n_gpus_per_node={min(gpus, _NODE)}"]


def _read(path: Path, overrides: Sequence[str]) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(str(path.parent.resolve()), version_base=None):
        return hydra_compose(path.stem, ["hydra.searchpath=[pkg://verl.trainer.config]", *overrides])


def _verl_alone() -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return hydra_compose("ppo_trainer")


def _tree(config: Any) -> dict[str, Any]:
    """Keys and values, interpolations as they are written."""
    from omegaconf import OmegaConf

    tree: Any = OmegaConf.to_container(config, resolve=False)
    return dict(tree)


def _unknown(tree: Mapping[str, Any], base: Any, at: str = "") -> Iterator[tuple[str, list[str]]]:
    """Keys of the recipe that verl's configuration has no place for, each with its neighbours' names."""
    known = [*base, *_fields(base.get("_target_"))]
    for key, value in tree.items():
        name = f"{at}.{key}" if at else str(key)
        if name in OURS:
            continue
        if key not in known:
            yield name, known
        elif isinstance(value, Mapping) and isinstance(base.get(key), Mapping) and base[key]:
            yield from _unknown(value, base[key], name)


def _misfits(tree: Mapping[str, Any], base: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Texts, lists and tables where verl has a number or a switch, which its dataclasses would take as they come."""
    for key, value in tree.items():
        usual, name = base.get(key), f"{at}.{key}" if at else str(key)
        if isinstance(usual, Mapping) and isinstance(value, Mapping):
            yield from _misfits(value, usual, name)
        elif isinstance(usual, int | float) and isinstance(value, str | list | Mapping) and "${" not in value:
            yield name, value, usual


def _fields(target: str | None) -> list[str]:
    """Fields of the dataclass that a part of the configuration is made into; verl's files do not write all of them."""
    if target is None:
        return []
    module, _, name = target.rpartition(".")
    return [field.name for field in fields(getattr(import_module(module), name))]


def _override(key: str, value: Any, tree: Mapping[str, Any]) -> list[str]:
    """Hydra's words for one setting; a table is set key by key."""
    if isinstance(value, Mapping):
        return [each for name, inner in value.items() for each in _override(f"{key}.{name}", inner, tree)]
    if key.startswith("+"):
        return [f"{key}={literal(value)}"]
    if key.partition(".")[0] in OURS:
        return [f"++{key}={literal(value)}"]
    node: Any = tree
    for part in key.split("."):
        if node is None or node == {}:
            # A part that verl leaves open.
            return [f"++{key}={literal(value)}"]
        if not isinstance(node, Mapping) or part not in node:
            known = list(node) if isinstance(node, Mapping) else []
            raise InputError(f"--set {key}", "a key that verl does not have", _one_of(part, known),
                             f"+{key}=... adds one all the same")  # fmt: skip
        node = node[part]
    return [f"{key}={literal(value)}"]


def _one_of(word: str, known: list[str]) -> str:
    close = nearest(word, known)
    return f"one of {', '.join(each for each in known if each != '_target_')}{close}" if known else "nothing below it"


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    """What Hydra, omegaconf or verl refuse, as one line."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except InputError:
        raise
    except (HydraException, OmegaConfBaseException, AssertionError, ValueError, TypeError, KeyError) as error:
        cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
        said = " ".join(f"{error} {cause if cause is not error else ''}".split())
        raise InputError(str(path), said[:400], "a configuration that the installed verl takes") from error
