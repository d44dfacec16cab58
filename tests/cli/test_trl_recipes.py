"""The recipes for TRL with vLLM: each resolves with each of its methods, and its launcher's files are accelerate's.

Faults planted in a copy, each caught here: a misspelt option of the trainer; probe_engine left out beside use_vllm; a
stage 3 in zero2.yaml; a recipe without its rescue.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from apportion.cli import app

RECIPES = Path(__file__).parents[2] / "recipes" / "trl"
NAMES = ("deepseekmath-7b", "qwen3-4b", "r1-distill-qwen-1.5b")
METHODS: dict[str, list[str]] = {"grpo": [], "probepo": [], "vineppo": ["--set", "method.samples=9"]}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder without weights, which a dry run does not read, and problems."""
    folder = tmp_path_factory.mktemp("trl")
    LlamaConfig(vocab_size=3, max_position_embeddings=8192).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "<eos>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    (folder / "problems.jsonl").write_text(64 * (json.dumps({"problem": "1+2?", "answer": "3"}) + "\n"))
    return folder


def test_there_is_one_for_each_setting() -> None:
    assert sorted(file.stem for file in RECIPES.glob("*.toml")) == sorted(NAMES)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_resolves_with_every_method(here: Path, name: str, method: str) -> None:
    result = CliRunner().invoke(app, [
        "train", str(RECIPES / f"{name}.toml"), "--dry-run", "--method", method, *METHODS[method],
        "--model", str(here / "model"), "--data", str(here / "problems.jsonl"),
    ])  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    found = tomllib.loads(result.stdout)
    assert found["method"]["name"] == method and found["trainer"]["use_vllm"] is True
    assert found["trainer"]["vllm_mode"] == "server" and found["trainer"]["num_generations"] == 8
    expected = {"probepo": {"budget": 40, "samples": 8}, "vineppo": {"samples": 9}, "grpo": {}}[method]
    assert expected.items() <= found["method"].items()
    # Cutoff rescue is of the 2K setting alone.
    assert ("rescue_cue" in found["trainer"]) is (name == "r1-distill-qwen-1.5b")


@pytest.mark.parametrize(("file", "kind"), [("ddp.yaml", "MULTI_GPU"), ("zero2.yaml", "DEEPSPEED")])
def test_the_launchers_files_are_accelerates(file: str, kind: str) -> None:
    found = load_config_from_file(str(RECIPES / file))
    assert found.distributed_type == kind and found.num_processes == 8 and found.mixed_precision == "bf16"
    # Parameters are whole on each rank up to stage 2.
    assert kind == "MULTI_GPU" or found.deepspeed_config["zero_stage"] == 2


def test_comments_name_files_that_are_there() -> None:
    for name in NAMES:
        text = (RECIPES / f"{name}.toml").read_text()
        assert f"recipes/trl/{name}.toml" in text and "recipes/trl/zero2.yaml" in text
        assert "[paper" in text and "[ours]" in text
