"""The small policy inside the package: a character-level Llama that half knows chained arithmetic modulo 100.

``policy/`` holds its weights, tokenizer and card (accuracy, seed and command), all made by
``scripts/make_policy.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def policy_path() -> Path:
    """The folder of the embedded policy, in the layout that ``from_pretrained`` reads.

    Raises FileNotFoundError when the weights are not there.
    """
    path = Path(__file__).parent / "policy"
    if not (path / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"the embedded policy is missing from {path}: reinstall apportion, or run scripts/make_policy.py"
        )
    return path


def load_policy(device: str = "cpu") -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The embedded policy (float32, evaluation mode, on ``device``) and its tokenizer, without any network.

    The tokenizer pads on the left, adds no token of its own, and raises on a character outside
    ``arithmetic.ALPHABET``. A response ends with the EOS token, which the policy writes itself.
    """
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    path = policy_path()
    model = LlamaForCausalLM.from_pretrained(path, local_files_only=True, use_safetensors=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    return model.eval().to(device), tokenizer
