"""A pipeline in a real Jupyter kernel (A12).

Found: a plain `trio.run(main)` in a cell works. The kernel's thread runs asyncio, but Trio does not mind: a cell's sync code
is run inside one asyncio callback, and a Trio run nested there is just a long call. After `%autoawait trio` a cell may hold
`async with` at its top level. Without it, a bare `await` runs under asyncio, and Trio refuses that by itself. What stages
print arrives in the cell's output, because it goes through the kernel's `sys.stdout`. Interrupting the kernel (SIGINT) ends
the cell with `KeyboardInterrupt`, and its pipeline with it.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

REPOSITORY = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),  # jupyter_client's own
    pytest.mark.slow,
]


class Notebook:
    def __init__(self, manager: Any, client: Any) -> None:
        self.manager = manager
        self.client = client

    def start(self, source: str) -> str:
        return self.client.execute(source)

    def finish(self, cell: str, on_output: Callable[[str], None] = lambda _text: None) -> tuple[dict[str, str], Any]:
        """What a cell printed on each stream, its value under "value"; and the reply."""
        printed: dict[str, str] = {}
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != cell:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    printed[content["name"]] = printed.get(content["name"], "") + content["text"]
                    on_output(content["text"])
                case "execute_result":
                    printed["value"] = content["data"]["text/plain"]
                case "status" if content["execution_state"] == "idle":
                    break
        while (reply := self.client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != cell:
            pass
        return printed, reply["content"]

    def run(self, source: str) -> dict[str, str]:
        printed, reply = self.finish(self.start(source))
        assert reply["status"] == "ok", "\n".join(reply.get("traceback", ()))
        return printed


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path),
    }
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(env=environment, cwd=str(tmp_path), stdout=-3, stderr=-3)
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


DEFINITIONS = """
import os, torch, trio
from torch import nn
from stageflow import Pipeline

class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.double = lambda x: x * FACTOR
    def forward(self, x):
        print("here is", type(self).__name__)
        return self.double(x)

FACTOR = 2

async def main():
    with trio.fail_after(50):
        async with Pipeline.launch([Double(), Double()], pp=2) as pipe:
            print((await pipe(torch.ones(3))).tolist())
            return len({os.getpid(), *await pipe.call(lambda stage: os.getpid())})
"""


def test_a_pipeline_in_cells(notebook: Notebook) -> None:
    assert notebook.run(DEFINITIONS) == {}
    # A plain trio.run in a cell.
    printed = notebook.run("trio.run(main)")
    assert printed["value"] == "3"
    assert sorted(printed["stdout"].splitlines()) == [
        "[4.0, 4.0, 4.0]",
        "[stage 0] here is Double",
        "[stage 1] here is Double",
    ]
    # The same class, defined anew in another cell, is the one that runs.
    again = notebook.run("class Double(nn.Module):\n    def forward(self, x):\n        return x - 1\n\ntrio.run(main)")
    assert again == {"value": "3", "stdout": "[-1.0, -1.0, -1.0]\n"}
    # In a thread, as a program of its own.
    threaded = notebook.run("import threading\nt = threading.Thread(target=trio.run, args=(main,))\nt.start()\nt.join()")
    assert threaded == {"stdout": "[-1.0, -1.0, -1.0]\n"}
    # The block itself in a cell; it lives as long as the cell.
    notebook.run("%autoawait trio")
    block = notebook.run(
        "async with Pipeline.launch([Double(), Double()], pp=2) as pipe:\n    print((await pipe(torch.ones(2))).tolist())"
    )
    assert block == {"stdout": "[-1.0, -1.0]\n"}


def test_what_goes_wrong_in_cells(notebook: Notebook, stray_processes) -> None:
    notebook.run(DEFINITIONS)
    # An error in a stage is the cell's error, with the line of the cell that raised.
    notebook.run("def fail(stage):\n    return 1 / 0\n")
    failed = notebook.start(
        "async def failing():\n"
        "    async with Pipeline.launch([Double(), Double()], pp=2) as pipe:\n"
        "        await pipe.call(fail, stages=1)\n"
        "trio.run(failing)"
    )
    _, reply = notebook.finish(failed)
    assert reply["ename"] == "StageError"
    assert "ZeroDivisionError" in reply["evalue"]
    assert "in fail" in reply["evalue"]
    # Without autoawait's trio a bare block is under asyncio: Trio says so, and nothing is left behind.
    bare = notebook.start("async with Pipeline.launch([Double(), Double()], pp=2) as pipe:\n    pass")
    _, reply = notebook.finish(bare)
    assert (reply["status"], reply["ename"]) == ("error", "RuntimeError")
    assert "async context" in reply["evalue"]
    # Interrupting the kernel ends the cell and the pipeline in it; the kernel lives on.
    hanging = notebook.start(
        "async def hanging():\n"
        "    async with Pipeline.launch([Double(), Double()], pp=2) as pipe:\n"
        "        print('pids', *[info.pid for info in pipe.stages], flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(hanging)"
    )
    pids: list[int] = []

    def interrupt(text: str) -> None:
        if text.startswith("pids"):
            pids.extend(map(int, text.split()[1:]))
            notebook.manager.interrupt_kernel()

    _, reply = notebook.finish(hanging, interrupt)
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    assert len(pids) == 2
    assert not set(pids) & set(stray_processes())
    assert notebook.run("trio.run(main)")["value"] == "3"


def test_a_kernel_that_is_shut_down_takes_its_stages_with_it(notebook: Notebook, stray_processes) -> None:
    notebook.run(DEFINITIONS)
    notebook.start(
        "async def hanging():\n"
        "    async with Pipeline.launch([Double(), Double()], pp=2) as pipe:\n"
        "        print('pids', *[info.pid for info in pipe.stages], flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(hanging)"
    )
    pids: set[int] = set()
    while not pids:
        try:
            message = notebook.client.get_iopub_msg(timeout=60)
        except queue.Empty:
            pytest.fail("the cell printed nothing")
        text = message["content"].get("text", "")
        if text.startswith("pids"):
            pids = set(map(int, text.split()[1:]))
    assert pids <= set(stray_processes())
    notebook.manager.shutdown_kernel(now=True)  # SIGKILL; that nothing is left is checked after every test
