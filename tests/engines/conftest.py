"""Hosts of vLLM: a fake, TRL's client of it, and both of the real one where it is installed."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
from fake_vllm import FakeClient, FakeLLM
from policies import VOCABULARY
from vllm_worlds import INSTALLED, LLAMA, LONGEST, MODEL, states, weights

from apportion.engines.vllm_hosts import Colocated, Host, own_llm
from apportion.engines.vllm_server import Server


@pytest.fixture(autouse=True)
def vllm_module(request, monkeypatch) -> None:
    """The engine finds the fake's `SamplingParams` unless the test is of the real vLLM."""
    if not request.module.__name__.startswith("test_vllm"):
        return
    real = request.node.get_closest_marker("skipif") or "-real" in request.node.nodeid or "[real" in request.node.nodeid
    if not real:
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=fake_vllm.SamplingParams, LLM=FakeLLM))


@pytest.fixture(scope="session")
def real_llm() -> Any:
    # What a machine without tuning gets; read when vLLM is imported.
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    before = states()
    llm = own_llm(LLAMA, LONGEST, block_size=32, enforce_eager=True, max_num_seqs=128, max_num_batched_tokens=LONGEST)
    assert states() == before
    return llm


@pytest.fixture(scope="session")
def real_client(tmp_path_factory) -> Iterator[Any]:
    """TRL's client of a server started here."""
    tokenizers, transformers = importlib.import_module("tokenizers"), importlib.import_module("transformers")
    folder = tmp_path_factory.mktemp("served")
    LLAMA.save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0")
    tokenizer = tokenizers.Tokenizer(words)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    arguments = {
        "--model": folder, "--host": "127.0.0.1", "--port": port, "--dtype": "float32", "--block-size": 32,
        "--max-model-len": LONGEST, "--logprobs-mode": "processed_logprobs", "--max-logprobs": -1,
        "--max-num-batched-tokens": LONGEST,
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enforce-eager",
        "--no-enable-chunked-prefill",
    ]
    command += [str(each) for pair in arguments.items() for each in pair]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as server,
    ):
        try:
            client = importlib.import_module("trl.generation.vllm_client").VLLMClient
            yield client(base_url=f"http://127.0.0.1:{port}", connection_timeout=600)
        finally:
            server.terminate()


HOSTS = ["fake", "fake_server", *(["real", "real_server"] if INSTALLED else [])]
COLOCATED = HOSTS[::2]


def host_of(name: str, request) -> Host:
    if name == "fake":
        return Colocated(FakeLLM(MODEL, LONGEST))
    if name == "fake_server":
        return Server(FakeClient(FakeLLM(MODEL, LONGEST)))
    if name == "real_server":
        return Server(request.getfixturevalue("real_client"))
    host = Colocated(request.getfixturevalue("real_llm"))
    host.load(weights(LLAMA))
    return host


@pytest.fixture(params=HOSTS)
def host(request) -> Host:
    return host_of(request.param, request)


@pytest.fixture(params=COLOCATED)
def colocated(request) -> Colocated:
    found = host_of(request.param, request)
    assert isinstance(found, Colocated)
    return found


@pytest.fixture
def fake_server(request) -> Server:
    found = host_of("fake_server", request)
    assert isinstance(found, Server)
    return found
