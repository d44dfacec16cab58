"""The embedded policy: its files are whole and safe, are what the card says, and are a start to learn from.

Planted faults seen caught, each in a copy: a changed weight; fresh weights under a card that fits them; padding on
the right; another EOS in the model's or the generation settings; a BOS; a temperature or top-k default; token type
ids; a decoder that puts spaces between tokens; an unknown character that becomes another.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
import torch

from apportion.tasks import (
    ALPHABET,
    ArithmeticTask,
    embedded,
    generate,
    load_policy,
    policy_path,
    verify,
)

CARD = json.loads((policy_path() / "card.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return load_policy()


def test_files_are_the_ones_the_card_describes():
    files = {path.name for path in policy_path().iterdir()}
    assert files == {
        "card.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    weights = (policy_path() / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == CARD["sha256"]
    assert len(weights) < 8 * 2**20


def test_card_says_a_start_to_learn_from():
    assert set(CARD["by_operations"]) == {str(count) for count in range(4, 13)}
    start = CARD["by_operations"]["8"]
    assert 0.30 <= start["accuracy"] <= 0.45
    # Over problems: above the binomial error of all responses (those to one problem go together), and below that
    # of one response a problem (they are not all the same).
    variance = start["accuracy"] * (1 - start["accuracy"])
    responses = start["problems"] * start["group"]
    assert (variance / responses) ** 0.5 < start["stderr"] < (variance / start["problems"]) ** 0.5
    assert start["group"] == 8 and start["mixed_groups"] > 0.8


def test_model_and_tokenizer_agree(policy):
    model, tokenizer = policy
    assert len(tokenizer) == model.config.vocab_size == len(ALPHABET) + 2
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id == model.generation_config.pad_token_id
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert model.config.bos_token_id is None and tokenizer.bos_token is None
    assert model.config.max_position_embeddings >= 512
    assert tokenizer.chat_template is None
    assert not model.training and model.dtype == torch.float32
    assert 0.15e6 <= model.num_parameters() <= 0.2e6
    unusual = model.generation_config.to_diff_dict()
    assert set(unusual) <= {"eos_token_id", "pad_token_id", "transformers_version"}


def test_one_token_a_character_and_an_exact_round_trip(policy):
    _, tokenizer = policy
    texts = [ALPHABET, ALPHABET[::-1], "\n\n\n", "?\n!#", "", *(character for character in ALPHABET)]
    texts += [problem.prompt + problem.solution for problem in generate(ArithmeticTask(detour=1.0), "test", 20)]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert "".join(tokenizer.decode([token]) for token in ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert set(tokenizer("1+1")) == {"input_ids", "attention_mask"}


def test_other_characters_are_an_error(policy):
    with pytest.raises(Exception, match="UNK"):
        policy[1]("1 + 1")


def test_padding_is_on_the_left_and_changes_nothing(policy):
    model, tokenizer = policy
    prompts = [generate(ArithmeticTask(count), "test", 1)[0].prompt for count in (4, 8)]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    assert batch["input_ids"][0, 0] == tokenizer.pad_token_id
    together = model.generate(**batch, max_new_tokens=12, do_sample=False)[:, -12:]
    for row, prompt in enumerate(prompts):
        alone = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=12, do_sample=False)
        assert torch.equal(together[row], alone[0, -12:])


def test_sampled_accuracy_is_that_of_the_card(policy):
    """64 problems at 4 operations, four standard errors of that sample."""
    model, tokenizer = policy
    task = ArithmeticTask(4)
    problems = generate(task, "test", 64)
    batch = tokenizer([problem.prompt for problem in problems], return_tensors="pt")
    torch.manual_seed(0)
    ids = model.generate(**batch, max_new_tokens=task.max_response, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right = sum(verify(text, problem) for text, problem in zip(texts, problems, strict=True)) / 64
    expected = CARD["by_operations"]["4"]["accuracy"]
    assert abs(right - expected) <= 4 * (expected * (1 - expected) / 64) ** 0.5


def test_a_missing_policy_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "embedded.py"))
    with pytest.raises(FileNotFoundError, match=r"make_policy\.py"):
        load_policy()


def test_importing_tasks_loads_neither_torch_nor_transformers():
    heavy = {"torch", "transformers", "pyarrow", "datasets"}
    code = f"import apportion.tasks, sys; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_loading_opens_no_connection():
    code = (
        "import socket\n"
        "def refuse(*_): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from apportion.tasks import load_policy\n"
        "load_policy()"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
