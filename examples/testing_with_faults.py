"""Testing your own code: against faults on purpose, with nothing left behind, and without processes where that is enough."""

import torch
import trio
from torch import Tensor, nn

from stageflow import Pipeline, PipelineBroken, StageError
from stageflow.testing import Kill, Raise, inject, launch_in_memory, no_stages_left

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()


async def answer_all(pipe: Pipeline, questions: list[Tensor]) -> list[str]:
    """The code to be tested: it shall get through, whatever happens to single questions."""
    answers: list[str] = []
    for question in questions:
        try:
            await pipe(question)
        except StageError as error:
            answers.append(f"failed: {error.remote_type}")
        except PipelineBroken as error:
            answers.append(f"lost: {error.signal}")
            break
        else:
            answers.append("answered")
    return answers


async def test_a_failing_question_is_skipped() -> None:
    async with launch_in_memory(model, pp=3) as pipe:  # no process: a few milliseconds
        await inject(pipe, Raise(ValueError("no such word")), stage=1, seq=2)
        print(await answer_all(pipe, [torch.ones(8)] * 4))


async def test_a_lost_stage_ends_it() -> None:
    with no_stages_left():
        try:
            async with Pipeline.launch(model, pp=3) as pipe:  # the real thing
                await inject(pipe, Kill(), stage=1, seq=2)
                print(await answer_all(pipe, [torch.ones(8)] * 4))
        except PipelineBroken as error:
            print(error.message.partition("(")[0], "...")


async def main() -> None:
    await test_a_failing_question_is_skipped()
    await test_a_lost_stage_ends_it()


trio.run(main)
