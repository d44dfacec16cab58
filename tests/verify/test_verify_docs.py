"""docs/verifiers.md: every Python block runs, and its tables name what there is.

Planted faults seen caught here: a wrong number in a block, a kind or a setting missing from its table.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from apportion.verify import VERIFIERS

PAGE = (Path(__file__).parents[2] / "docs" / "verifiers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def tiny_model(folder: Path) -> str:
    """A model and tokenizer of a few characters."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<pad>", "<eos>", *"123+="])}))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=7, eos_token_id=1, pad_token_id=0, **sizes)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_blocks_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = BLOCKS[number]
    names: dict[str, Any] = {"MODEL": tiny_model(tmp_path / "model")} if "MODEL" in block else {}
    assert "assert" in block
    exec(compile(block, f"block {number} of docs/verifiers.md", "exec"), names)


def test_the_kinds_and_their_settings_are_all_there() -> None:
    rows = {
        cells[1].strip(" `"): set(re.findall(r"`(\w+)`", cells[4]))
        for cells in (line.split("|") for line in PAGE.splitlines() if line.startswith("| `"))
        if len(cells) == 6
    }
    assert rows == {kind: {field.name for field in fields(v.settings)} for kind, v in VERIFIERS.items()}


def test_the_commands_are_read() -> None:
    """Each `--set` of the page is a key of the configuration."""
    from apportion.train.settings import RunConfig

    keys = re.findall(r"--set '?(\w+)\.(\w+)", PAGE)
    assert keys and all(name in RunConfig.model_fields[section].annotation.model_fields for section, name in keys)
