"""Where the shared data lies, if it is there at all."""

import gzip
import json
import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("APPORTION_SHARED", Path(__file__).resolve().parents[2].parent / "shared"))


@pytest.fixture(scope="session")
def shared_rows():
    """`shared_rows("data/math500.jsonl.gz")`: the rows of a shared file, or a skip that says what is missing."""

    def load(name):
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"no {path} (set APPORTION_SHARED)")
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    return load
