"""The life of a pipeline: its end, what is left, what it uses while idle, its sockets, its output, its arguments."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
import trio.testing
from torch import nn

from stageflow import Pipeline, StageInfo

REPOSITORY = Path(__file__).resolve().parent.parent
X = torch.ones(2, 4)


def tiny(pp: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(pp)))


async def launch_once(pp: int = 2, **options: Any) -> None:
    async with Pipeline.launch(tiny(pp), pp=pp, **options) as pipe:
        await pipe(X)


class Large(nn.Module):
    def __init__(self, mebibytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(mebibytes, 2**18), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[0, 0]


class Sleep(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def status(field: str, pid: int | str = "self") -> int:
    """A field of `/proc/PID/status`, as it stands there (kB for memory)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise LookupError(field)


# ---- the end ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_stages_exit_with_code_0_when_the_block_is_left(method: str) -> None:  # D1
    with trio.fail_after(30):
        async with Pipeline.launch(tiny(), pp=2, start_method=method) as pipe:
            await pipe(X)
            pids = [info.pid for info in pipe.stages]
        assert [rank.exitcode for rank in pipe._ranks] == [0, 0]
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_closing_twice_is_fine() -> None:  # D1
    with trio.fail_after(30):
        launch = Pipeline.launch(tiny(), pp=2)
        pipe = await launch.__aenter__()
        await pipe(X)
        assert not await launch.__aexit__(None, None, None)
        assert not await launch.__aexit__(None, None, None)


async def test_use_after_close_is_closed_resource_error() -> None:  # D1
    with trio.fail_after(30):
        async with Pipeline.launch(tiny(), pp=2) as pipe:
            async with pipe.map([X, X]) as outputs:
                await anext(outputs)
            ticket = await pipe.submit(X)
        with pytest.raises(trio.ClosedResourceError):
            await pipe(X)
        with pytest.raises(trio.ClosedResourceError):
            await pipe.submit(X)
        with pytest.raises(trio.ClosedResourceError):
            pipe.submit_nowait(X)
        with pytest.raises(trio.ClosedResourceError):
            async with pipe.map([X]) as outputs:
                await anext(outputs)
        with pytest.raises(trio.ClosedResourceError):
            async with pipe.starmap([(X,)]) as outputs:
                await anext(outputs)
        with pytest.raises(trio.ClosedResourceError):
            await pipe.run_batch(X, n_microbatches=2)
        with pytest.raises(trio.ClosedResourceError):
            await pipe.call(lambda stage: 1)
        with pytest.raises(trio.ClosedResourceError):
            await ticket
        assert repr(pipe) == "<Pipeline of 2 stages on cpu: closed>"
        assert len(pipe.stages) == 2  # what is known stays known


async def test_statistics_after_close_are_the_last_or_closed_resource_error() -> None:  # D1
    with trio.fail_after(30):
        async with Pipeline.launch(tiny(), pp=2) as pipe:
            await pipe(X)
        with contextlib.suppress(trio.ClosedResourceError):
            assert pipe.statistics().done == 1


def test_use_after_close_in_another_run_is_closed_resource_error() -> None:  # D1: as in a later cell of a notebook
    pipes = []

    async def first() -> None:
        with trio.fail_after(30):
            async with Pipeline.launch(tiny(), pp=2) as pipe:
                pipes.append(pipe)

    async def second() -> None:
        with trio.fail_after(30):
            with pytest.raises(trio.ClosedResourceError):
                await pipes[0](X)

    trio.run(first)
    trio.run(second)


async def test_waiters_are_told_when_the_block_is_left() -> None:  # D1
    told = []

    async def wait(pipe: Pipeline) -> None:
        with pytest.raises(trio.ClosedResourceError):
            await pipe(X)
        told.append(pipe)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            async with Pipeline.launch(nn.Sequential(Sleep(0.5), Sleep(0)), pp=2, window=1) as pipe:
                for _ in range(3):
                    nursery.start_soon(wait, pipe)
                await trio.testing.wait_all_tasks_blocked()
        assert len(told) == 3


# ---- what is left -------------------------------------------------------------------------------------------------------


def temporary_directories(where: Path) -> list[str]:
    return [path.name for path in where.glob("stageflow-*")]


async def test_fifty_launches_leave_nothing_behind(open_fds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # D2
    with trio.fail_after(60):
        await launch_once()  # the fork server, its temporary directory and Trio's own stay

        def look() -> dict[str, Any]:
            gc.collect()
            # Trio keeps idle worker threads for ten seconds: their number says when the last one was busy, nothing else.
            names = [thread.name for thread in threading.enumerate()]
            trios = [name for name in names if name.startswith("Trio thread")]
            return {
                "descriptors": sorted(what.split(":")[0] for what in open_fds().values()),
                "tasks": len(os.listdir("/proc/self/task")) - len(trios),
                "threads": sorted(set(names) - set(trios)),
                "temporary directories": temporary_directories(tmp_path),
                "shared memory": sorted(os.listdir("/dev/shm")),
                "cuts of memory": "memfd:" in Path("/proc/self/maps").read_text(),
            }

        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        async with Pipeline.launch(tiny(), pp=2) as pipe:
            await pipe(X)
            assert temporary_directories(tmp_path) == []  # so a program that is killed leaves none, either
        for _ in range(9):
            await launch_once()
        before, kilobytes = look(), status("VmRSS")
        for _ in range(50):
            await launch_once()
        with trio.move_on_after(5):  # a thread that has just ended may still be listed
            while (after := look()) != before:
                await trio.sleep(0.5)
        grown = status("VmRSS") - kilobytes
        print(f"grown by {grown} kB in 50 launches")
        assert after == before
        assert grown < 6 * 1024


async def test_launches_that_fail_leave_nothing_behind(
    open_fds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # D2
    def build(stage: StageInfo) -> nn.Module:
        raise RuntimeError("no")

    with trio.fail_after(60):
        await launch_once()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        before = sorted(what.split(":")[0] for what in open_fds().values())
        for _ in range(5):
            with pytest.raises(Exception, match="no"):
                async with Pipeline.launch(build, pp=2):
                    pass
        assert sorted(what.split(":")[0] for what in open_fds().values()) == before
        assert temporary_directories(tmp_path) == []


async def test_memory_of_the_stages_is_free_after_the_block(open_fds) -> None:  # D3
    with trio.fail_after(60):
        await launch_once()
        gc.collect()
        before, shm = status("VmRSS"), sorted(os.listdir("/dev/shm"))
        model = nn.Sequential(Large(64), Large(64))
        async with Pipeline.launch(model, pp=2) as pipe:
            assert (await pipe(torch.zeros(1))).item() == 2
            pids = [info.pid for info in pipe.stages]
            assert all(info.bytes == 64 * 2**20 for info in pipe.stages)
            assert sum(status("RssShmem", pid) + status("RssAnon", pid) for pid in pids) > 128 * 1024
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert not [what for what in open_fds().values() if "memfd" in what]
        assert "memfd:" not in Path("/proc/self/maps").read_text()
        assert sorted(os.listdir("/dev/shm")) == shm
        del model, pipe
        gc.collect()
        assert status("VmRSS") - before < 16 * 1024


async def test_a_closed_pipeline_does_not_keep_the_model() -> None:  # D3: as in a notebook, where `pipe` lives on
    with trio.fail_after(30):
        model = tiny()
        first = weakref.ref(model[0])
        async with Pipeline.launch(model, pp=2) as pipe:
            await pipe(X)
        del model
        gc.collect()
        assert repr(pipe).endswith("closed>")
        assert first() is None


# ---- idle ---------------------------------------------------------------------------------------------------------------


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """CPU time of each process, all threads, from the scheduler's nanoseconds."""
    return {
        pid: sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
        for pid in pids
    }


async def test_an_idle_pipeline_uses_no_cpu() -> None:  # D4
    with trio.fail_after(30):
        async with Pipeline.launch(tiny(4), pp=4) as pipe:
            await pipe(X)
            pids = [os.getpid(), *(info.pid for info in pipe.stages if info.pid)]
            await trio.sleep(0.5)  # what a start leaves to do
            before, since = cpu_seconds(pids), time.monotonic()
            await trio.sleep(3)
            seconds = time.monotonic() - since
            used = [100 * (after - before[pid]) / seconds for pid, after in cpu_seconds(pids).items()]
        print("per cent of a core, controller first:", *(f"{each:.2f}" for each in used))
        assert sum(used) < 1


async def test_waiting_for_a_slow_stage_uses_no_cpu() -> None:  # D4
    with trio.fail_after(30):
        model = nn.Sequential(nn.Identity(), Sleep(1.5), nn.Identity(), nn.Identity())
        async with Pipeline.launch(model, pp=4, window=4) as pipe:
            pids = [os.getpid(), *(info.pid for info in pipe.stages if info.pid)]
            before, since = cpu_seconds(pids), time.monotonic()
            async with pipe.map([torch.ones(2**18)] * 2) as outputs:  # too large to ride in a header
                async for _ in outputs:
                    pass
            seconds = time.monotonic() - since
            used = [100 * (after - before[pid]) / seconds for pid, after in cpu_seconds(pids).items()]
        print("per cent of a core, controller first:", *(f"{each:.2f}" for each in used))
        assert max(used) < 10  # spinning is 100


# ---- sockets ------------------------------------------------------------------------------------------------------------


def tcp_sockets(pids: Iterable[int]) -> list[tuple[int, str, bool]]:
    """The TCP sockets of these processes: pid, local address in hex, whether it listens."""
    owners: dict[str, int] = {}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                what = os.readlink(descriptor)
            except FileNotFoundError:
                continue
            if what.startswith("socket:["):
                owners[what[8:-1]] = pid
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[9] in owners:
                found.append((owners[fields[9]], fields[1].split(":")[0], fields[3] == "0A"))
    return found


def is_loopback(address: str) -> bool:
    """Of 127.0.0.0/8, ::1 or ::ffff:127.0.0.0/8, as the kernel writes them: words of four bytes, little end first."""
    if len(address) == 8:
        return address.endswith("7F")
    return address == "0" * 24 + "01000000" or (address.startswith("0" * 16 + "FFFF0000") and address.endswith("7F"))


async def test_no_socket_beyond_loopback() -> None:  # D4a
    with trio.fail_after(30):
        async with Pipeline.launch(tiny(4), pp=4) as pipe:
            await pipe(torch.ones(2**16, 4))
            pids = [os.getpid(), *(info.pid for info in pipe.stages if info.pid)]
            sockets = tcp_sockets(pids)
        print(f"{len(sockets)} TCP sockets, {sum(listens for *_, listens in sockets)} of them listen")
        assert {pid for pid, *_ in sockets} >= set(pids[2:-1]), "the stages' own were not found: is this test blind?"
        assert [found for found in sockets if not is_loopback(found[1])] == []


SMALL_PROGRAM = """
import socket, sys, torch, trio
from torch import nn
from stageflow import Pipeline

async def main():
    with trio.fail_after(50):
        async with Pipeline.launch(nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity()), pp=3) as pipe:
            print(socket.gethostname(), (await pipe(torch.ones(2**18))).sum().item())

trio.run(main)
"""


def without_network(tmp_path: Path, how: str, setup: str) -> subprocess.CompletedProcess[str]:
    """Run the small program in a namespace of its own; skip where that is not allowed."""
    if not shutil.which("unshare") or subprocess.run(["unshare", how, "sh", "-c", setup], capture_output=True).returncode:
        pytest.skip(f"needs the right to run `unshare {how}` and `{setup}`")
    (tmp_path / "program.py").write_text(SMALL_PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    return subprocess.run(
        ["unshare", how, "sh", "-c", f"{setup} && exec {sys.executable} program.py"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_host_name_that_does_not_resolve_changes_nothing(tmp_path: Path) -> None:  # D4a
    done = without_network(tmp_path, "-u", "hostname bogus.invalid")
    assert (done.returncode, done.stdout, done.stderr) == (0, "bogus.invalid 262144.0\n", "")


def test_no_network_at_all_changes_nothing(tmp_path: Path) -> None:  # D4a
    done = without_network(tmp_path, "-n", "ip link set lo up")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" 262144.0\n")


def test_not_even_a_loopback_is_a_launch_error_that_says_so(tmp_path: Path) -> None:  # D4a: gloo needs the loopback
    done = without_network(tmp_path, "-n", "true")
    assert done.returncode == 1
    assert "LaunchError" in done.stderr
    assert "127.0.0.1" in done.stderr


# ---- output -------------------------------------------------------------------------------------------------------------


def test_each_line_is_marked_with_its_stage_on_its_own_stream(run_script) -> None:  # D5
    done = run_script(
        """
        import os, sys, torch, trio
        from torch import nn
        from stageflow import Pipeline

        class Talk(nn.Module):
            def forward(self, x):
                print("out", int(x))
                print("err", int(x), file=sys.stderr)
                os.write(1, "raw déjà\\r\\n".encode())
                os.write(2, b"bad \\xff byte\\n")
                return x + 1

        async def main():
            async with Pipeline.launch([Talk(), Talk()], pp=2) as pipe:
                await pipe(torch.tensor(10))
                await pipe.call(lambda stage: (sys.stdout.write("no newline"), sys.stderr.write("none here"), None)[-1])

        trio.run(main)
        """
    )
    assert done.returncode == 0, done.stderr
    out, err = done.stdout.splitlines(), done.stderr.splitlines()
    for stage in (0, 1):
        mark = f"[stage {stage}] "
        assert [line for line in out if line.startswith(mark)] == [
            f"{mark}out {10 + stage}",
            f"{mark}raw déjà",
            f"{mark}no newline",
        ]
        assert [line for line in err if line.startswith(mark)] == [
            f"{mark}err {10 + stage}",
            f"{mark}bad � byte",
            f"{mark}none here",
        ]
    assert (len(out), len(err)) == (6, 6)


@pytest.mark.parametrize("newline", ["\\n", ""], ids=["lines", "one endless line"])
def test_a_flood_on_stderr_neither_blocks_nor_fills_memory(run_script, newline: str) -> None:  # D5
    done = run_script(
        f"""
        import resource, sys, torch, trio
        from torch import nn
        from stageflow import Pipeline

        class Flood(nn.Module):
            def forward(self, x):
                line = "x" * 99 + "{newline or "x"}"
                for _ in range(200_000):
                    sys.stderr.write(line)
                return x + 1

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        async def main():
            async with Pipeline.launch([nn.Identity(), Flood()], pp=2) as pipe:
                before = peak()
                with trio.fail_after(50):
                    print((await pipe(torch.ones(1))).item())
            print(peak() - before)

        trio.run(main)
        """
    )
    assert done.returncode == 0, done.stderr[-1000:]
    result, grown = done.stdout.split()
    assert result == "2.0"
    print(f"the controller grew by {grown} kB")
    assert int(grown) < 20 * 1024
    assert all(line.startswith("[stage 1] ") for line in done.stderr.splitlines())
    notes = re.findall(r"^\[stage 1\] \.\.\. (\d+) lines dropped: .*\n", done.stderr, re.MULTILINE)
    dropped = sum(map(int, notes))
    print(f"{dropped} lines dropped")
    if newline:
        assert done.stderr.count("x" * 99 + "\n") + dropped == 200_000
    else:  # pieces of a line are not lines, but none is missing without a word
        assert done.stderr.count("x") == 20_000_000 or dropped


async def test_a_stage_is_named_in_ps() -> None:  # D5
    with trio.fail_after(30):
        async with Pipeline.launch(tiny(4), pp=4) as pipe:
            names = [Path(f"/proc/{info.pid}/comm").read_text() for info in pipe.stages]
        assert names == [f"stageflow {stage}/4\n" for stage in range(4)]


# ---- launching ----------------------------------------------------------------------------------------------------------


async def test_eight_stages() -> None:
    with trio.fail_after(60):
        model = tiny(8)
        async with Pipeline.launch(model, pp=8) as pipe:
            assert [info.stage_index for info in pipe.stages] == list(range(8))
            assert len({info.pid for info in pipe.stages}) == 8
            torch.testing.assert_close(await pipe(X), model(X).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("pp", [1, 2])
async def test_spawned_stages_work(pp: int) -> None:
    with trio.fail_after(60):
        model = tiny(pp)
        async with Pipeline.launch(model, pp=pp, start_method="spawn") as pipe:
            torch.testing.assert_close(await pipe(X), model(X).detach(), rtol=0, atol=0)


async def test_the_next_launch_is_quick() -> None:
    with trio.fail_after(60):
        await launch_once(4)
        seconds = []
        for _ in range(5):
            since = time.perf_counter()
            async with Pipeline.launch(tiny(4), pp=4):
                seconds.append(time.perf_counter() - since)
        print(f"median of 5 launches of 4 stages: {statistics.median(seconds):.3f} s")
        assert statistics.median(seconds) < 1.5


NAN = math.nan
WRONG: list[tuple[str, Any]] = [
    *[("pp", value) for value in (0, -1, True, 2.0, "2", None)],
    *[("window", value) for value in (0, -1, True, 1.5, "4")],
    *[(f"{name}_timeout", value) for name in ("start", "stall", "shutdown") for value in (0, -1, NAN, -math.inf, "5", None)],
    *[
        ("devices", value)
        for value in (["cpu"], ["cpu"] * 3, [], "nonsense", "meta", "cuda:99", ["cpu", "nonsense"], None, "")
    ],
    *[("backend", value) for value in ("nccl", "x", None)],
    *[("threads", value) for value in (0, -1, 1.5, True)],
    *[("start_method", value) for value in ("fork", "x")],
    *[("seed", value) for value in ("x", 1.5, 2**80)],
    *[("split", value) for value in ("x", [1], [1, 1, 1], [2, 0], [3, -1], None)],
]


@pytest.mark.parametrize(("argument", "value"), WRONG, ids=lambda value: repr(value))
def test_a_wrong_argument_is_a_value_error_that_names_it(argument: str, value: Any) -> None:
    arguments = {"pp": 2, argument: value}
    with pytest.raises(ValueError, match=rf"\b{argument}\b") as caught:
        Pipeline.launch(tiny(), **arguments)
    assert "\n" not in str(caught.value)
    assert str(value) in str(caught.value) or "found" in str(caught.value)


async def test_one_device_may_be_a_torch_device() -> None:
    with trio.fail_after(30):
        async with Pipeline.launch(tiny(), pp=2, devices=torch.device("cpu")) as pipe:  # type: ignore[arg-type]
            assert [info.device for info in pipe.stages] == ["cpu", "cpu"]


async def test_infinite_timeouts_are_fine() -> None:
    with trio.fail_after(30):
        await launch_once(start_timeout=math.inf, stall_timeout=math.inf, shutdown_timeout=math.inf)


async def test_a_wrong_number_of_micro_batches_is_a_value_error_that_names_it() -> None:
    with trio.fail_after(30):
        async with Pipeline.launch(tiny(), pp=2) as pipe:
            for n in (0, -1):
                with pytest.raises(ValueError, match="n_microbatches"):
                    await pipe.run_batch(X, n_microbatches=n)
            assert (await pipe.run_batch(X, n_microbatches=3)).shape == (2, 4)  # no more than there are rows


async def test_misuse_of_a_launch_says_how_it_goes() -> None:
    with trio.fail_after(30):
        launch = Pipeline.launch(tiny(), pp=2)
        with pytest.raises(TypeError, match=r"async with Pipeline\.launch"):
            await launch
        with pytest.raises(TypeError, match=r"async with Pipeline\.launch"):
            with launch:  # type: ignore[attr-defined]
                pass
        with pytest.raises(TypeError, match=r"async with Pipeline\.launch"):
            launch(X)  # type: ignore[operator]
        with pytest.raises(AttributeError, match=r"pipe\.submit"):
            launch.submit(X)  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match=r"async with Pipeline\.launch"):
            Pipeline()
        async with launch as pipe:  # none of it has spoilt it
            await pipe(X)


async def test_a_launch_is_entered_once() -> None:
    with trio.fail_after(30):
        launch = Pipeline.launch(tiny(), pp=2)
        async with launch as pipe:
            with pytest.raises(RuntimeError, match="entered once"):
                async with launch:
                    pass
            await pipe(X)
        with pytest.raises(RuntimeError, match="entered once"):
            async with launch:
                pass


def test_nothing_is_started_before_the_block(stray_processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Pipeline.launch(tiny(), pp=2)
    assert stray_processes() == {}
    assert list(tmp_path.iterdir()) == []


async def test_nested_pipelines() -> None:
    with trio.fail_after(30):
        async with Pipeline.launch(tiny(), pp=2) as outer:
            async with Pipeline.launch(tiny(3), pp=3) as inner:
                y = await inner(await outer(X))
                assert len({info.pid for pipe in (outer, inner) for info in pipe.stages}) == 5
            with pytest.raises(trio.ClosedResourceError):
                await inner(X)
            assert (await outer(y)).shape == y.shape


async def test_representations() -> None:
    with trio.fail_after(30):
        async with Pipeline.launch(tiny(), pp=2) as pipe:
            assert repr(pipe) == "<Pipeline of 2 stages on cpu: 0 of 4 in flight>"
            ticket = await pipe.submit(X)
            assert repr(pipe) == "<Pipeline of 2 stages on cpu: 1 of 4 in flight>"
            assert repr(ticket) in ("<Ticket for micro-batch 0: in flight>", "<Ticket for micro-batch 0: arrived>")
            await ticket
            assert repr(ticket) == "<Ticket for micro-batch 0: taken>"
            stages = await pipe.call(lambda stage: repr(stage))
            assert stages == [f"<Stage {k} of 2 on cpu: Sequential>" for k in (0, 1)]
        assert repr(pipe) == "<Pipeline of 2 stages on cpu: closed>"


# ---- what the launch sets and what it leaves alone ----------------------------------------------------------------------


async def test_threads_of_each_stage() -> None:
    with trio.fail_after(30):
        async with Pipeline.launch(tiny(), pp=2, threads=3) as pipe:
            assert await pipe.call(lambda stage: torch.get_num_threads()) == [3, 3]
        async with Pipeline.launch(tiny(), pp=2) as pipe:
            each = max(1, len(os.sched_getaffinity(0)) // 2)
            assert await pipe.call(lambda stage: torch.get_num_threads()) == [each, each]
    assert torch.get_num_threads() == 1  # ours


async def test_stage_k_is_seeded_with_seed_plus_k() -> None:
    with trio.fail_after(30):
        async with Pipeline.launch(tiny(), pp=2, seed=41) as pipe:
            assert await pipe.call(lambda stage: torch.initial_seed()) == [41, 42]
            drawn = await pipe.call(lambda stage: torch.rand(3))
        for k, values in enumerate(drawn):
            expected = torch.rand(3, generator=torch.Generator().manual_seed(41 + k))
            torch.testing.assert_close(values, expected, rtol=0, atol=0)
        async with Pipeline.launch(tiny(), pp=2) as pipe:
            seeds = await pipe.call(lambda stage: torch.initial_seed())
            assert seeds == [(torch.initial_seed() + k) % 2**64 for k in (0, 1)]


def test_the_default_process_group_is_left_to_the_user(run_script) -> None:
    done = run_script(
        """
        import torch, torch.distributed as dist, trio
        from torch import nn
        from stageflow import Pipeline

        def own_group(name):
            dist.init_process_group("gloo", store=dist.FileStore(name, 1), rank=0, world_size=1)
            x = torch.ones(1)
            dist.all_reduce(x)
            dist.destroy_process_group()

        def group_of_stages(stage, name):
            store = dist.FileStore(name, stage.num_stages)
            dist.init_process_group("gloo", store=store, rank=stage.rank, world_size=stage.num_stages)
            x = torch.tensor(stage.rank + 1)
            dist.all_reduce(x)
            dist.destroy_process_group()
            return int(x)

        async def main():
            with trio.fail_after(50):
                own_group("before")
                async with Pipeline.launch(nn.Sequential(nn.Identity(), nn.Identity()), pp=2) as pipe:
                    await pipe(torch.ones(2**16))
                    print(dist.is_initialized(), await pipe.call(lambda stage: dist.is_initialized()))
                    own_group("inside")
                    print(await pipe.call(group_of_stages, "stages"))
                    print((await pipe(torch.ones(2**16))).sum().item())
                own_group("after")
                print(dist.is_initialized())

        trio.run(main)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False [False, False]", "[3, 3]", "65536.0", "False"]


def ends_of(links: dict[int, str]) -> set[str]:
    return {what for what in links.values() if what.startswith(("pipe:", "socket:"))}


def ends_of_process(pid: int | str | None) -> set[str]:
    links = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links[int(descriptor.name)] = os.readlink(descriptor)
        except FileNotFoundError:
            continue
    return ends_of(links)


def report_ends(answers: Any, go: Any) -> None:
    """In a forked child: which pipes and sockets it holds; then stay until told to end."""
    answers.send(ends_of_process("self"))
    go.poll(60)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_of_the_controller_does_not_hold_the_pipeline(open_fds) -> None:
    fork = multiprocessing.get_context("fork")
    with trio.fail_after(30):
        await launch_once()
        before = ends_of(open_fds())
        async with Pipeline.launch(tiny(), pp=2) as pipe:
            await pipe(X)
            # multiprocessing keeps one to each stage too, its `parent_sentinel`, which nothing of ours looks at.
            theirs = {os.readlink(f"/proc/self/fd/{end}") for r in pipe._ranks for end in r.process._popen.finalizer._args}
            ours = ends_of(open_fds()) - before - theirs
            assert len(ours) > 6
            answers, child_answers = fork.Pipe(duplex=False)
            child_go, go = fork.Pipe(duplex=False)
            child = fork.Process(target=report_ends, args=(child_answers, child_go))
            child.start()
            assert answers.poll(20)
            # Those that lead to a stage; not what wakes the controller's own threads.
            held = answers.recv() & ours & {end for info in pipe.stages for end in ends_of_process(info.pid)}
            await pipe(X)
            pids = [info.pid for info in pipe.stages]
        assert child.is_alive()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        go.send(None)
        child.join(10)
        assert child.exitcode == 0
        for end in (answers, child_answers, child_go, go):
            end.close()
        child.close()
        assert held == set()
