"""TRL's completions as a source: files that TRL itself wrote, and rows of every kind it can write."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from foreign_records import checked
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from apportion.errors import InputError
from apportion.report.foreign.text import PIECES
from apportion.report.source import open_source

WORDS = ["<pad>", "<eos>", "a", "b", "1", "2"]


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [len(text) / 10 for text in completions]


def holds_one(completions: list[str], **kwargs: Any) -> list[float | None]:
    # Every other response cannot be judged.
    return [None if i % 2 else float("1" in text) for i, text in enumerate(completions)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of two steps of TRL's own GRPOTrainer, with a column that the user logged."""
    from datasets import Dataset

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.padding_side = "left"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    out = tmp_path_factory.mktemp("trl") / "out"

    def logs(completions: list[str], log_extra: Any = None, **kwargs: Any) -> list[float]:
        log_extra("certainty", [0.5] * len(completions))
        return [0.0] * len(completions)

    args = GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=8, num_generations=4, max_completion_length=6, max_steps=2,
        save_strategy="no", report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
        logging_steps=1, seed=7, log_completions=True, num_completions_to_print=0,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(config), reward_funcs=[length, holds_one, logs], args=args,
        train_dataset=Dataset.from_dict({"prompt": ["a", "b", "a b", "1"]}), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    trainer.save_state()
    return out


def test_what_trl_wrote_is_shown_with_trls_own_advantages(written: Path) -> None:
    source = open_source(written)
    assert source.steps() == [1, 2]
    for step in source.steps():
        recorded = pq.read_table(written / "completions" / f"completions_{step:05d}.parquet").to_pylist()
        view = checked(source, step)
        rollouts, credit = source.read("rollouts", step), source.read("credit", step)
        assert len(recorded) == len(rollouts) == 8
        for row, r, c in zip(recorded, rollouts, credit, strict=True):
            assert (r["prompt"], r["text"]) == (row["prompt"], row["completion"])
            assert c["base"] == row["advantage"] and set(c["advantage"]) == {row["advantage"]}
            # TRL's weights are 1 here, so the plain sum is its reward; None counts in no sum.
            judged = 0.0 if row["holds_one"] is None else row["holds_one"]
            assert r["reward"] == pytest.approx(row["length"] + judged)
        assert view.summary["method"] == "trl: recorded advantages"
        assert view.summary["settings"]["tokens"] == PIECES
        # `certainty` is a column of floats as well, but no reward: the trainer's own log tells them apart.
        assert "length, holds_one, logs;" in view.summary["settings"]["reward"]


def test_metrics_are_the_trainers_own_where_it_logged_them(written: Path) -> None:
    rows = open_source(written).metrics()
    history = json.loads((written / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in rows] == [1, 2]
    for row, logged in zip(rows, history, strict=False):
        assert row["reward"] == logged["reward"] and row["entropy"] == logged["entropy"]
        # In tokens, as TRL counts them; the pieces of text are fewer.
        assert row["completions/mean_length"] == logged["completions/mean_length"]
        assert row["credit/zero_variance"] == pytest.approx(logged["frac_reward_zero_std"])


def test_one_file_and_the_folder_of_files_are_opened_as_well(written: Path) -> None:
    folder = written / "completions"
    assert open_source(folder).steps() == [1, 2]
    one = open_source(folder / "completions_00002.parquet")
    assert one.steps() == [2] and one.read("credit", 2) == open_source(written).read("credit", 2)


def completions(path: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)
    return path


def row(prompt: Any, completion: Any, advantage: float | None, **rewards: float | None) -> dict[str, Any]:
    return {"step": 4, "prompt": prompt, "completion": completion, **rewards, "advantage": advantage}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_conversations_are_shown_after_their_roles(tmp_path: Path) -> None:
    prompt = [said("system", "Be brief."), said("user", "6*7?")]
    turns = [said("assistant", "look up"), said("tool", "42"), said("assistant", "it is 42")]
    path = completions(
        tmp_path / "completions_00004.parquet",
        [row(prompt, [said("assistant", "42")], 0.5, ok=1.0), row(prompt, turns, -0.5, ok=0.0)],
    )
    source = open_source(path)
    checked(source, 4)
    first, second = source.read("rollouts", 4)
    assert first["prompt"] == "system: Be brief.\n\nuser: 6*7?" and first["text"] == "42"
    assert second["text"] == "assistant: look up\n\ntool: 42\n\nassistant: it is 42"
    credit = source.read("credit", 4)
    assert first["mask"] == [True] and credit[0]["advantage"] == [0.5]
    # The tool's answer and the roles were not sampled.
    texts = open_texts(second)
    assert [t for t, ours in zip(texts, second["mask"], strict=True) if ours] == ["look", " up", "it", " is", " 42"]
    assert set(credit[1]["advantage"]) == {0.0, -0.5}


def open_texts(r: dict[str, Any]) -> list[str]:
    starts = [*r["char_start"], len(r["text"])]
    return [r["text"][a:b] for a, b in pairwise(starts)]


def test_images_in_a_prompt_are_named(tmp_path: Path) -> None:
    prompt = [said("user", [{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}])]
    path = completions(tmp_path / "c.parquet", [row(prompt, "a cat", 0.0, ok=1.0)])
    assert open_source(path).read("rollouts", 4)[0]["prompt"] == "user: [image]What is it?"


def test_rewards_and_advantages_that_are_missing(tmp_path: Path) -> None:
    nan = math.nan
    path = completions(
        tmp_path / "c.parquet",
        [
            row("p", "a", 1.5, ok=1.0, short=nan), row("p", "b", nan, ok=None, short=None),
            row("p", "c", None, ok=nan, short=-0.25), row("p", "d", -0.5, ok=0.5, short=0.25),
        ],
    )  # fmt: skip
    source = open_source(path)
    view = checked(source, 4)
    assert [r["reward"] for r in source.read("rollouts", 4)] == [1.0, None, -0.25, 0.75]
    assert [r["base"] for r in source.read("credit", 4)] == [1.5, 0, 0, -0.5]
    assert view.summary["counts"] == {"without_advantage": 2}
    # (1 - .25 + .75)/3
    assert source.metrics()[0]["reward"] == 0.5 and source.read("credit", 4)[1]["mean"] == 0.5


def test_without_an_advantage_in_any_row_grpos_is_worked_out(tmp_path: Path) -> None:
    rows = [row("p", "a", None, ok=r) for r in (1.0, 0.0, 0.0, 0.0)]
    source = open_source(completions(tmp_path / "c.parquet", rows))
    assert source.read("credit", 4)[0]["base"] == pytest.approx(1.49970006)
    assert source.read("credit", 4)[0]["method"] == "trl: grpo (from recorded rewards)"


def test_a_file_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "completions"
    completions(folder / "completions_00003.parquet", [row("p", "a", 0.0, ok=1.0)])
    last = completions(folder / "completions_00004.parquet", [row("p", "a", 0.0, ok=1.0)])
    last.write_bytes(last.read_bytes()[:-30])
    assert open_source(tmp_path).steps() == [3]
    with pytest.raises(InputError, match="wait for the trainer"):
        open_source(last).steps()
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"step": 3, "rew')
    assert [each["step"] for each in open_source(tmp_path).metrics()] == [3]


def test_the_last_checkpoints_log_is_read_until_the_run_has_its_own(tmp_path: Path) -> None:
    completions(tmp_path / "completions" / "completions_00003.parquet", [row("p", "a", 0.0, ok=1.0)])
    for step in (9, 10):
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        state.parent.mkdir()
        log = [{"step": 3, "kl": step, "note": "x"}, {"step": "4"}, 5, {"step": 10, "kl": 0.5}]
        state.write_text(json.dumps({"log_history": log}))
    rows = open_source(tmp_path).metrics()
    assert [each["step"] for each in rows] == [3, 10]
    assert rows[0]["kl"] == 10 and rows[0]["reward"] == 1.0 and "note" not in rows[0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "p", "completion": "a"}], "advantage of c.parquet: got the columns prompt, completion"),
        ([row(3, "a", 0.0)], "prompt of c.parquet: got values of type int64"),
        ([row("p", ["a"], 0.0)], "completion of c.parquet: got values of type list"),
        ([row("p", [{"content": 3}], 0.0)], "content of completion[0] of row 0 of c.parquet: got 3"),
        ([row("p", "a", 1e39)], "advantage of row 0 of c.parquet: got 1e+39"),
        ([row("p", "a", 0.0, ok=math.inf)], "ok of row 0 of c.parquet: got inf"),
        ([{**row("p", "a", 0.0), "step": -1}], "step of row 0 of c.parquet: got -1"),
    ],
)
def test_a_table_of_another_kind_is_named(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    path = completions(tmp_path / "c.parquet", rows)
    with pytest.raises(InputError) as error:
        open_source(path).read("rollouts", 4)
    assert str(error.value).startswith(message)


def test_bytes_that_are_no_text_are_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    table = pa.table({"step": [1], "prompt": broken, "completion": ["a"], "advantage": [0.0]})
    pq.write_table(table, path)
    with pytest.raises(InputError, match=r"c\.parquet"):
        open_source(path).read("rollouts", 1)
