"""Whole predictions from configurations, and `apportion cost` as a command."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from apportion.cli import app
from apportion.cost import (
    NAMED,
    Assumed,
    Hardware,
    ModelShape,
    Unpredicted,
    calibrate,
    describe,
    find_hardware,
    predict,
    predict_beside,
    predict_run,
)
from apportion.credit.registry import make_method, method_names
from apportion.errors import InputError
from apportion.train.clock import PHASES
from apportion.train.settings import load_config

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
IDEAL = Hardware("ideal", {"float32": 1e12}, ((1.0, 1e11),), 1e10)


def predicted(hardware: Hardware = IDEAL, assumed: Assumed | None = None, **settings):
    return predict_run(load_config(None, settings), hardware, assumed)


@pytest.fixture
def large(tmp_path):
    """Llama-7B as a folder with nothing but its configuration."""
    LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000,
        max_position_embeddings=4096, tie_word_embeddings=False,
    ).save_pretrained(tmp_path / "7b")  # fmt: skip
    return tmp_path / "7b"


def test_the_embedded_task_is_read_from_its_own_solutions():
    shape, plan, work = describe(load_config(None, {"method.name": "grpo"}), 1, Assumed())
    assert shape.parameters == 173_760
    # Prompts '47+8*7-9+5*3-6+2+1=?' and a newline: 2 + 8·2 + 3. Eight paragraphs of nine, '#', two digits, EOS.
    assert (work.prompt, work.longest_prompt, work.response, work.step) == (21, 21, 76, 9)
    # trainer.max_completion_length is 8·19 + 1 + 2 + 1. One response in 10.9 has a correction, 10 tokens: of 256 the
    # most has ⌈ln 256/ln 10.9⌉ = ⌈2.32⌉ of them.
    assert (work.limit, work.longest, work.rows, work.size) == (156, 76 + 3 * 10, 256, 8)
    # The card's accuracy for eight operations; of nine steps each follows the right way with its ninth root.
    assert work.pass_rate == 0.376875 and work.agreement == pytest.approx(0.376875 ** (1 / 9))
    assert (plan.micro, plan.steps, plan.generations, plan.training.recompute) == (128, 2, 1.0, False)


def test_grpo_by_hand():
    found = predicted(**{"method.name": "grpo"}, assumed=Assumed(response=50, longest=100, prompt=20))
    assert found.tokens["tokens/actor"] == 256 * 50
    assert not any(value for name, value in found.tokens.items() if name != "tokens/actor")
    assert [name for name, value in found.seconds.items() if value] == ["generate", "update"]
    # Updates: 2 passes of 128·120 tokens with 3 times the FLOPs of 3 layers; products alone are a lower bound.
    products = 2 * 3 * 2 * 3 * 57_472 * 128 * 120 / 1e12
    assert products < found.parts["passes of the update"] < 10 * products
    # Of 256 rows, 120 tokens wide, 2·3·32 numbers each.
    assert found.memory["cache"] == 256 * 120 * 192 * 4


def test_seconds_are_parts_and_phases_of_the_clock():
    found = predicted(find_hardware("h100"), **{"method.name": "probepo"})
    assert tuple(found.seconds) == PHASES
    assert sum(found.parts.values()) == pytest.approx(found.total) and found.total > 0


def test_passes_for_credit_are_counted_where_a_method_needs_them():
    rows = 256 * (21 + 106)

    def passes(name: str, **more) -> tuple[float, float]:
        tokens = predicted(**{"method.name": name, **more}).tokens
        return tokens["measure/forwards"], tokens["measure/forward_tokens"]

    assert passes("grpo") == (0, 0) and passes("cw_grpo") == (2, rows)
    # Entropies and the reference model's; with a KL term TRL makes the latter itself.
    assert passes("ep_grpo") == (4, 2 * rows) and passes("ep_grpo", **{"trainer.beta": 0.1}) == (2, rows)


def test_a_batch_that_serves_several_updates_is_shared_out():
    once = predicted(**{"method.name": "probepo"}, assumed=Assumed(response=76, longest=100))
    settings = {"method.name": "probepo", "trainer.num_iterations": 2}
    twice = predicted(**settings, assumed=Assumed(response=76, longest=100))
    assert twice.tokens["tokens/actor"] == once.tokens["tokens/actor"] / 2
    assert twice.parts["probing"] == pytest.approx(once.parts["probing"] / 2)
    assert twice.parts["passes of the update"] == once.parts["passes of the update"]
    # Then TRL keeps old log-probabilities, and the method makes no pass of its own.
    assert twice.parts["reference and old log-probabilities"] > 0 == twice.parts["log-probabilities for credit"]


def test_devices_multiply_tokens_and_not_seconds(large):
    settings = {
        "model.name": str(large), "model.dtype": "bfloat16", "data.path": "nowhere.jsonl", "method.name": "grpo",
        "trainer.max_completion_length": 1024,
    }  # fmt: skip
    one, eight = (predicted(find_hardware(name), Assumed(prompt=200), **settings) for name in ("h100", "h100x8"))
    assert one.tokens["tokens/actor"] == 32 * 512 and eight.tokens["tokens/actor"] == 8 * 32 * 512
    exchange = eight.parts["exchange of gradients"]
    assert eight.total == pytest.approx(one.total + exchange) and exchange == pytest.approx(
        2 * 7 / 8 * 6_738_415_616 * 2 / (0.7 * 450e9)
    )
    # bfloat16 with AdamW: 2 + 2 + 4 bytes a weight and the rest; in float32 twice as much, which does not fit.
    assert one.fits and 53.9e9 < one.memory["peak"] < 73.6e9
    whole = predicted(find_hardware("h100x8"), Assumed(prompt=200), **{**settings, "model.dtype": "float32"})
    assert not whole.fits and any("trainer.fsdp" in note for note in whole.notes)
    adapted = predicted(find_hardware("rtx4090"), Assumed(prompt=200), **{**settings, "model.lora": 8})
    assert adapted.fits is (adapted.memory["peak"] <= 0.92 * 24e9) and adapted.memory["optimizer"] == 8 * 19_988_480


def test_answers_of_a_users_file_take_time_to_grade(large):
    settings = {"model.name": str(large), "data.path": "nowhere.jsonl", "method.name": "vineppo"}
    found = predicted(find_hardware("h200x2"), Assumed(prompt=64), **settings)
    # On one of two devices, 2 ms each: 32 responses and half of the continuations.
    assert found.seconds["grade"] == pytest.approx(2e-3 * (32 + found.tokens["probe/continuations"] / 2))
    assert predicted(find_hardware("h200"), **{"method.name": "grpo"}).seconds["grade"] == 0


def test_sharded_weights_are_divided(large):
    settings = {
        "model.name": str(large), "data.path": "nowhere.jsonl", "method.name": "grpo", "trainer.fsdp": "full_shard"
    }  # fmt: skip
    try:
        found = predicted(find_hardware("h100x8"), Assumed(prompt=64), **settings)
    except InputError as error:
        pytest.skip(f"this release of TRL takes no fsdp here: {error}")
    assert found.memory["optimizer"] == pytest.approx(8 * 6_738_415_616 / 8) and found.fits


def test_more_probes_take_more_of_everything():
    few, many = (predicted(**{"method.name": "probepo", "method.budget": n, "method.min_gap": 4}) for n in (8, 40))
    assert many.tokens["probe/tokens"] > few.tokens["probe/tokens"]
    assert many.parts["probing"] > few.parts["probing"] and many.parts["rollouts"] == few.parts["rollouts"]


def test_what_is_expected_is_within_the_cap():
    for name in ("probepo", "vineppo", "oar_p", "spo_chain"):
        found = predicted(**{"method.name": name})
        assert found.cap is not None and found.cap.total >= found.total
        assert all(found.cap.tokens[kind] >= value for kind, value in found.tokens.items())


def test_a_prediction_is_the_same_at_every_call():
    assert predicted(**{"method.name": "vineppo"}) == predicted(**{"method.name": "vineppo"})


def test_a_measurement_that_is_not_planned_is_said():
    found = predicted(**{"method.name": "oar_p", "method.answer_pattern": "ANSWER=(x)"})
    assert any("Nothing is counted for oar_p" in note for note in found.notes)
    assert any("verifier" in note for note in predicted(**{"method.name": "step_verified"}).notes)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_a_prediction(path):
    config = load_config(path)
    assumed = Assumed(prompt=100) if config.data.path else Assumed()
    if config.model.name == "smollm2":
        _, plan, work = describe(load_config(path, {"model.name": "embedded"}), 1, Assumed(prompt=100))
        found = predict(ModelShape.llama(30, 576, 9, 3, 64, 1536, 49152, True), plan, work, NAMED["l40s"])
    else:
        found = predict_run(config, NAMED["l40s"], assumed)
    assert found.total > 0 and found.tokens["tokens/actor"] > 0 and found.memory["peak"] > 0
    assert not any("Nothing is counted" in note for note in found.notes)


def test_bfloat16_needs_figures_for_it():
    with pytest.raises(InputError, match=r"model.dtype: got bfloat16; expected one of float32 on ideal"):
        predicted(**{"model.dtype": "bfloat16"})


def test_lengths_that_do_not_fit_are_refused(large):
    for assumed, words in (
        (Assumed(response=200), "--response-length: got 200"),
        (Assumed(longest=157), "--longest: got 157"),
        (Assumed(response=50, longest=40), "--longest: got 40; expected at least the mean response, 50"),
    ):
        with pytest.raises(InputError, match=words):
            predicted(assumed=assumed)
    settings = {"model.name": str(large), "data.path": "x.jsonl", "trainer.max_completion_length": 4000}
    with pytest.raises(InputError, match=r"trainer.max_completion_length: got 4000; expected at most 3896"):
        predicted(assumed=Assumed(prompt=200), **settings)
    for field, value in (("response", 0), ("longest", -1), ("prompt", 0), ("step", 3), ("response", float("nan"))):
        with pytest.raises(InputError, match="expected at least"):
            Assumed(**{field: value})
    with pytest.raises(InputError, match=r"--pass-rate: got 1\.5"):
        Assumed(pass_rate=1.5)


def test_a_mixture_of_experts_is_refused(tmp_path):
    from transformers import MixtralConfig

    MixtralConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=10,
    ).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(InputError, match="a mixture of experts; expected a dense model"):
        predicted(assumed=Assumed(prompt=5), **{"model.name": str(tmp_path), "data.path": "x.jsonl"})


def run(*arguments: object):
    return CliRunner().invoke(app, ["cost", *map(str, arguments)])


def recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def test_command_prints_tokens_seconds_and_memory(tmp_path):
    path = recipe(tmp_path, '[method]\nname = "grpo"\n[run]\nsteps = 50\n')
    done = run("--config", path, "--hardware", "h100x8", "--response-length", 70)
    assert done.exit_code == 0 and done.stderr == "", (done.output, done.exception)
    assert "One step of grpo on h100x8 (the vendor's data sheet, dense, not verified here)" in done.stdout
    for words in (
        "143,360",
        "passes of the update",
        "fits",
        "50 steps: ",
        "of 70 tokens, the longest 106",
        "38% right",
    ):
        assert words in done.stdout
    plain = run("--config", path, "--hardware", "h100x8", "--json", "--set", "method.name=vineppo")
    data = json.loads(plain.stdout)
    assert data["method"] == "vineppo" and data["fits"] is True
    assert data["total_seconds"] == pytest.approx(sum(data["seconds"].values()))
    assert data["at_most"]["total_seconds"] >= data["total_seconds"]


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("", ["--hardware", "h100y"], "--hardware: got 'h100y'; expected one of h100, "),
        ('[model]\nname = "missing/folder"\n', ["--hardware", "h100"], "model.name: got 'missing/folder'"),
        ('[method]\nname = "probep"\n', ["--hardware", "h100"], "did you mean 'probepo'?"),
        ('[modle]\nname = "x"\n', ["--hardware", "h100"], "did you mean 'model'?"),
        ("not toml", ["--hardware", "h100"], "expected valid TOML"),
        ('[data]\npath = "missing.jsonl"\n', ["--hardware", "h100"], "missing.jsonl"),
        ("", ["--hardware", "h100", "--pass-rate", "2"], "--pass-rate: got 2.0; expected 0 to 1"),
        ("", ["--hardware", "h100", "--longest", "9999"], "--longest: got 9999"),
        ("[trainer]\nnum_generations = 7\n", ["--hardware", "h100"], "trainer: got"),
    ],
)
def test_bad_input_is_one_line(tmp_path, text, arguments, words):
    done = run("--config", recipe(tmp_path, text), *arguments)
    assert done.exit_code == 2 and done.stdout == "", (done.output, done.exception)
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ") and words in done.stderr, done.stderr


def test_a_missing_recipe_is_one_line(tmp_path):
    done = run("--config", tmp_path / "none.toml", "--hardware", "h100")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and "a TOML file that exists" in done.stderr


def test_this_machine_can_be_measured(monkeypatch):
    monkeypatch.setattr(calibrate, "_BUDGET", 0.001)
    monkeypatch.setattr(calibrate, "_REPEATS", 1)
    before = torch.get_rng_state()
    machine = calibrate.calibrate(ModelShape.llama(1, 16, 2, 1, 8, 16, 32, tied=True))
    assert torch.equal(before, torch.get_rng_state())
    assert 1e7 < machine.flops["float32"] < 1e15 and machine.memory > 1e8 and not machine.overlaps
    assert all(1e6 < rate < 1e13 for _, rate in machine.bandwidth) and 1e7 < machine.reading < 1e13
    assert 0 < machine.overheads.call + machine.overheads.layer < 1 and machine.overheads.token > 0
    assert min(machine.forward, machine.training, machine.decoding) >= 0.25
    found = predicted(machine, **{"method.name": "grpo"})
    assert 0.01 < found.total < 10_000


def test_the_machine_a_run_is_predicted_for(monkeypatch):
    config = load_config(None, {"method.name": "grpo"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("apportion.cost.kept.kept_machine", lambda config: IDEAL)
    assert predict_beside(config) == predict_run(config, IDEAL)
    with pytest.raises(Unpredicted, match="2 processes share this CPU"):
        predict_beside(config, 2)
    monkeypatch.setattr("apportion.cost.kept.kept_machine", lambda config: None)
    with pytest.raises(Unpredicted, match="has not been measured"):
        predict_beside(config)
    monkeypatch.setattr("apportion.cost.kept.measured_machine", lambda config: (IDEAL, True))
    assert predict_beside(config, measure=True) == predict_run(config, IDEAL)
    # As if on GPUs, where the trainer's own options cannot be made on this machine.
    monkeypatch.setattr("apportion.cost.recipe.predict_run", lambda config, machine: machine.name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert predict_beside(config, 8) == "h200x8"
    assert predict_beside(load_config(None, {"trainer.use_cpu": True}), measure=True) == "ideal"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(Unpredicted, match="no figures of Tesla T4"):
        predict_beside(config)


def test_what_is_not_counted_is_not_laid_beside_a_run(large):
    def told(**settings) -> set[str]:
        names = predicted(**settings).metrics()
        return {name.removeprefix("predicted/") for name in names if "seconds" in name or "probe/" in name}

    probes = {"probe/tokens", "probe/continuations"}
    seconds = {f"seconds/{phase}" for phase in PHASES}
    # Grading of generated problems is free, which is said by saying nothing.
    assert told(**{"method.name": "probepo"}) == probes | seconds - {"seconds/grade"}
    passes = {"predicted/measure/forwards", "predicted/measure/forward_tokens", "predicted/tokens/actor"}
    assert passes <= predicted(**{"method.name": "probepo"}).metrics().keys()
    assert told(**{"method.name": "step_verified"}) == probes | seconds - {"seconds/grade", "seconds/probe"}
    unplanned = {"method.name": "oar_p", "method.answer_pattern": "ANSWER=(x)"}
    assert told(**unplanned) == seconds - {"seconds/grade", "seconds/probe"}
    assert not any("measure/" in name for name in predicted(**unplanned).metrics())
    streamed = predicted(**{"method.name": "probepo", "trainer.stream": True})
    assert {name for name in streamed.metrics() if "seconds" in name} == {"predicted/seconds/update"}
    assert "predicted/tokens/actor" in streamed.metrics() and any("stream" in note for note in streamed.notes)
    files = {"model.name": str(large), "data.path": "nowhere.jsonl", "method.name": "grpo"}
    for kind, graded in (("auto", True), ("math", True), ("exact", False)):
        found = predicted(NAMED["h200"], Assumed(prompt=64), **files, **{"reward.kind": kind})
        assert ("predicted/seconds/grade" in found.metrics()) is graded and (found.seconds["grade"] > 0) is graded


@pytest.mark.parametrize("name", method_names())
def test_every_method_has_a_prediction(name):
    found = predicted(**{"method.name": name})
    assert not any("Nothing is counted" in note for note in found.notes)
    told = found.metrics()
    asked = make_method(name).needs & {"continuations", "belief", "sensitivity", "confidence", "divergence"}
    assert (told.get("predicted/seconds/probe", 0) > 0) is bool(asked)
    assert told["predicted/seconds/update"] > 0 and told["predicted/memory/peak"] > 0
