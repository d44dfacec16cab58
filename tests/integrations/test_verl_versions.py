"""The declared versions of verl, and that everything used of it is where and what it was."""

import inspect
import subprocess
import sys
from importlib.util import find_spec

import pytest

from apportion.errors import InputError
from apportion.integrations.verl import versions

needs_verl = pytest.mark.skipif(
    find_spec("verl") is None, reason="verl is not installed; `make cluster` installs it and runs this"
)

TRAINER = "verl.trainer.ppo.v1.trainer_base.PPOTrainer"


def installed(monkeypatch, **found):
    monkeypatch.setattr(versions, "found_version", lambda package, module=None: found.get(package))


@pytest.mark.parametrize("found", ["0.9.1", "0.9.2", "0.9.10", "0.9.1+cu128", "0.9.1.post1", "0.9.2.dev3"])
def test_a_supported_verl_passes(monkeypatch, found):
    installed(monkeypatch, verl=found, TransferQueue="0.1.11")
    versions.check_verl()


@pytest.mark.parametrize(
    "found",
    ["0.9.0", "0.9", "0.8.3", "0.9.1.dev0", "0.9.1rc1", "0.10.0", "0.10.0.dev0", "0.10.0rc1", "1.0", "main"],
)
def test_another_verl_is_named_with_the_range_and_the_fix(monkeypatch, found):
    installed(monkeypatch, verl=found, TransferQueue="0.1.11")
    with pytest.raises(InputError) as error:
        versions.check_verl()
    assert str(error.value) == f"verl: got {found}; expected >=0.9.1,<0.10. Fix: pip install 'verl>=0.9.1,<0.10'"


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"verl": None, "TransferQueue": "0.1.11"}, "verl: got none installed"),
        ({"verl": "0.9.1", "TransferQueue": None}, "TransferQueue: got none installed"),
        ({"verl": "0.9.1", "TransferQueue": "0.1.9"}, "TransferQueue: got 0.1.9"),
        ({"verl": "0.9.1", "TransferQueue": "0.2.0"}, "TransferQueue: got 0.2.0"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, found, named):
    installed(monkeypatch, **found)
    with pytest.raises(InputError, match=named):
        versions.check_verl()


def test_a_trl_that_verl_fails_beside_is_named(monkeypatch):
    installed(monkeypatch, verl="0.9.1", TransferQueue="0.1.11", trl="1.16.0")
    with pytest.raises(InputError, match=r"trl: got 1\.16\.0 beside verl.*pip uninstall trl"):
        versions.check_verl()
    installed(monkeypatch, verl="0.9.1", TransferQueue="0.1.11", trl="0.27.0")
    versions.check_verl()


def test_the_imported_package_counts_and_not_the_installed_one(monkeypatch):
    """A source tree on the path hides what pip has installed."""
    other = type(sys)("pytest_of_a_tree")
    other.__version__ = "7.7"
    monkeypatch.setitem(sys.modules, "pytest_of_a_tree", other)
    assert versions.found_version("pytest", "pytest_of_a_tree") == "7.7"
    assert versions.found_version("packaging", "no_such_module").count(".") >= 1
    assert versions.found_version("no-such-package") is None


def test_the_check_of_versions_imports_no_verl():
    code = (
        "import sys, apportion.integrations.verl.versions as v\n"
        "try: v.check_verl()\n"
        "except ValueError: pass\n"
        "assert not {'verl', 'ray', 'transfer_queue'} & {*sys.modules}, 'imported'"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


# The rule, on a package that is made here.

HOST = """
class Thing:
    def __init__(self, a, b=1): ...
    def method(self, x, y): ...
    @classmethod
    def made(cls, name): ...
    @staticmethod
    def still(p): ...
def call(a, b, c=3, *rest, **more): ...
value = 3
"""


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Writes a package `hosted` and pins what is given; returns what moved, one line each."""
    (tmp_path / "hosted").mkdir()
    monkeypatch.syspath_prepend(tmp_path)

    def write(source, called=None, overridden=None, defaults=None, abstract=None):
        (tmp_path / "hosted" / "__init__.py").write_text("")
        (tmp_path / "hosted" / "part.py").write_text(source)
        for name in ("hosted", "hosted.part"):
            sys.modules.pop(name, None)
        monkeypatch.setattr(versions, "OVERRIDDEN", overridden or {})
        monkeypatch.setattr(versions, "SIGNATURES", {**(overridden or {}), **(called or {})})
        monkeypatch.setattr(versions, "DEFAULTS", defaults or {})
        monkeypatch.setattr(versions, "ABSTRACT", abstract or {})
        return [str(error) for error in versions.moved()]

    yield write
    for name in ("hosted", "hosted.part"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("call", ("a", "b")),
        ("call", ("a", "b", "c")),
        ("Thing", ("a",)),
        ("Thing", ("a", "b")),
        ("Thing.method", ("x", "y")),
        ("Thing.made", ("name",)),
        ("Thing.still", ("p",)),
    ],
)
def test_what_fits_is_let_through(host, path, names):
    assert host(HOST, called={f"hosted.part.{path}": names}) == []


@pytest.mark.parametrize(
    ("path", "names", "got"),
    [
        ("call", ("b", "a"), "(a, b, c=3, *rest, **more)"),  # the order
        ("call", ("a",), "(a, b, c=3, *rest, **more)"),  # b has no default and is not given
        ("call", ("a", "b", "d"), "(a, b, c=3, *rest, **more)"),  # gone; **more would swallow it
        ("Thing.method", ("x",), "(x, y)"),
        ("Thing.gone", (), "no hosted.part.Thing.gone"),
        ("gone.deep", (), "no hosted.part.gone"),
        ("value", (), "something that is not called"),
    ],
)
def test_what_moved_is_named_as_found_and_as_expected(host, path, names, got):
    [line] = host(HOST, called={f"hosted.part.{path}": names})
    assert line.startswith(f"hosted.part.{path}: got verl ") and f"has {got}; expected" in line
    assert "Fix: pip install verl==0.9.1" in line
    if not got.startswith("no "):
        assert f"({', '.join(names)})" in line


def test_an_overridden_method_may_not_even_gain_an_optional_parameter(host):
    """verl would give it to ours, which does not take it."""
    path = {"hosted.part.Thing.method": ("x", "y")}
    assert host(HOST, overridden=path) == []
    grown = HOST.replace("method(self, x, y)", "method(self, x, y, z=None)")
    assert host(grown, called=path) == []
    [line] = host(grown, overridden=path)
    assert "has (x, y, z=None); expected (x, y)" in line


def test_a_default_and_an_abstract_method_that_moved_are_named(host):
    pinned = {"called": {"hosted.part.call": ("a", "b", "c")}, "defaults": {"hosted.part.call": {"c": 3}}}
    assert host(HOST, **pinned) == []
    [line] = host(HOST.replace("c=3", "c=4"), **pinned)
    assert "hosted.part.call" in line and "has c=4; expected c=3" in line
    source = "import abc\nclass A(abc.ABC):\n    @abc.abstractmethod\n    def one(self): ...\n"
    assert host(source, abstract={"hosted.part.A": ("one",)}) == []
    more = source + "    @abc.abstractmethod\n    def two(self): ...\n"
    [line] = host(more, abstract={"hosted.part.A": ("one",)})
    assert "hosted.part.A" in line and "abstract methods one, two; expected abstract methods one" in line


def test_a_requirement_that_is_not_installed_is_not_taken_for_a_move(host):
    [line] = host("import no_such_requirement\n", called={"hosted.part.call": ()})
    assert line.startswith("hosted.part: got a failing import: No module named 'no_such_requirement'")
    assert line.endswith("Fix: pip install no_such_requirement")


def test_the_first_that_moved_is_the_error_and_the_others_are_named(host):
    host(HOST, called={"hosted.part.one": (), "hosted.part.call": ("a", "b"), "hosted.part.Thing.two": ()})
    with pytest.raises(InputError) as error:
        versions.check_signatures()
    assert error.value.field == "hosted.part.one" and "\n" not in str(error.value)
    assert "moved as well: hosted.part.Thing.two" in str(error.value)


# verl itself.


@needs_verl
def test_nothing_that_is_used_of_verl_has_moved():
    import verl.trainer.ppo.v1  # noqa: F401

    before = {*sys.modules}
    assert [str(error) for error in versions.moved()] == []
    versions.check_verl()
    versions.check_signatures()
    # It costs nothing that verl's trainer would not have cost anyway.
    assert {*sys.modules} - before == set()


def _grown(self, metrics, timing_raw, sample_batch_size, extra): ...
def _renamed(self, measures, timing_raw, sample_batch_size): ...
def _optional(self, batch, metrics, extra=None): ...


@needs_verl
@pytest.mark.parametrize(
    ("path", "name", "value", "got"),
    [
        (TRAINER, "_step_once", _grown, "(metrics, timing_raw, sample_batch_size, extra)"),
        (TRAINER, "_step_once", _renamed, "(measures, timing_raw, sample_batch_size)"),
        (TRAINER, "_compute_advantage", _optional, "(batch, metrics, extra=None)"),
        ("transfer_queue", "kv_batch_get", lambda keys, select_fields: 0, "(keys, select_fields)"),
        ("verl.trainer.ppo.core_algos", "register_adv_est", lambda name: 0, "(name)"),
    ],
)
def test_a_signature_of_verl_that_moves_is_named(monkeypatch, path, name, value, got):
    monkeypatch.setattr(versions._resolve(path), name, value)
    with pytest.raises(InputError) as error:
        versions.check_signatures()
    assert error.value.field == f"{path}.{name}" and f"has {got}" in str(error.value)


@needs_verl
def test_verls_epsilon_is_pinned(monkeypatch):
    from verl.trainer.ppo import core_algos

    own = core_algos.compute_grpo_outcome_advantage

    def moved(*args, **kwargs): ...

    parameters = inspect.signature(own).parameters
    epsilon = parameters["epsilon"].replace(default=1e-8)
    moved.__signature__ = inspect.Signature(
        [epsilon if parameter.name == "epsilon" else parameter for parameter in parameters.values()]
    )
    monkeypatch.setattr(core_algos, "compute_grpo_outcome_advantage", moved)
    with pytest.raises(InputError, match="epsilon=1e-08; expected epsilon=1e-06"):
        versions.check_signatures()
