"""Log records of stages reach the controller's handlers; what can't be shown in time is dropped and counted."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch
import trio
from torch import nn

from stageflow import Pipeline

cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.ones(1)


class Says(nn.Module):
    """Logs what it is told to, on the logger `its.own`."""

    def __init__(self, say: Callable[[logging.Logger], Any]) -> None:
        super().__init__()
        self.say = say

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.say(logging.getLogger("its.own"))
        return x + 1


class Kept(logging.Handler):
    """Keeps records, and lets tests wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._more:
            self.records.append(record)
            self._more.notify_all()

    async def wait_for(self, count: int) -> list[logging.LogRecord]:
        def wait() -> None:
            with self._more:
                assert self._more.wait_for(lambda: len(self.records) >= count, timeout=20), self.records

        await trio.to_thread.run_sync(wait)
        return self.records


@contextmanager
def kept(name: str = "its", level: int = logging.DEBUG) -> Iterator[Kept]:
    logger, handler = logging.getLogger(name), Kept()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
        logging.root.manager._clear_cache()  # type: ignore[attr-defined]


async def one(say: Callable[[logging.Logger], Any], pp: int = 2) -> None:
    with trio.fail_after(30):
        async with Pipeline.launch([Says(say) for _ in range(pp)], pp=pp) as pipe:
            assert (await pipe(X)).item() == pp + 1


async def test_a_record_comes_with_all_that_it_says_and_where_it_is_from() -> None:
    def say(logger: logging.Logger) -> None:
        try:
            raise ValueError("größer")
        except ValueError:
            logger.exception("failed at %s of %d", "step", 3, extra={"step": 3, "thing": [1, object], "none": None})

    with kept() as handler:
        await one(say, pp=3)
        records = sorted(await handler.wait_for(3), key=lambda record: record.stage_index)
    for stage, record in enumerate(records):
        assert (record.stage_index, record.tp_index, record.rank) == (stage, 0, stage)
        assert (record.name, record.levelname, record.getMessage()) == ("its.own", "ERROR", "failed at step of 3")
        assert "ValueError: größer" in record.exc_text
        assert record.filename == "test_logs.py"
        assert record.funcName == "say"
        assert (record.step, record.none) == (3, None)
        assert record.thing == "[1, <class 'object'>]"
        assert record.processName == f"stageflow stage {stage}/3"
        assert record.process > 0
        assert "ValueError: größer" in logging.Formatter("%(message)s").format(record)


async def test_the_controllers_level_holds_in_the_stages() -> None:
    def say(logger: logging.Logger) -> None:
        logger.debug("debug %s", Untold())
        logger.info("info")

    with kept(level=logging.INFO) as handler:
        await one(say, pp=1)
        assert [record.getMessage() for record in await handler.wait_for(1)] == ["info"]


class Untold:
    """Whose text is asked for only if the record is made."""

    def __str__(self) -> str:
        raise AssertionError("a record below the level was made")


async def test_a_level_that_the_controller_raises_later_holds_at_once() -> None:
    with kept() as handler, trio.fail_after(30):
        async with Pipeline.launch([Says(lambda logger: logger.info("info"))], pp=1) as pipe:
            await pipe(X)
            await handler.wait_for(1)
            logging.getLogger("its").setLevel(logging.WARNING)
            await pipe(X)
            await pipe.call(lambda _stage: logging.getLogger("its").warning("warning"))
            records = await handler.wait_for(2)
    assert [record.getMessage() for record in records] == ["info", "warning"]


async def test_logging_that_is_disabled_is_disabled_in_stages() -> None:
    with kept() as handler:
        logging.disable(logging.INFO)
        try:
            await one(lambda logger: (logger.info("info"), logger.warning("warning")), pp=1)
        finally:
            logging.disable(logging.NOTSET)
        assert [record.getMessage() for record in await handler.wait_for(1)] == ["warning"]


async def test_what_the_stages_threads_and_builds_log_comes_too() -> None:
    def build(_stage: Any) -> nn.Module:
        logging.getLogger("its").warning("building")
        return Says(lambda logger: threading.Thread(target=logger.warning, args=("thread",), name="mine").start())

    with kept() as handler, trio.fail_after(30):
        async with Pipeline.launch(build, pp=1) as pipe:
            await pipe(X)
            records = await handler.wait_for(2)
    assert [record.getMessage() for record in records] == ["building", "thread"]
    assert records[1].threadName == "mine"


async def test_odd_records_are_sent_as_well_as_can_be() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    def say(logger: logging.Logger) -> None:
        logger.warning("odd", extra={"odd": Odd()})
        logger.warning("%d", "no number")  # logging itself complains, on stderr
        logger.warning("x" * 10**6)
        logger.warning("many", extra={f"field{i}": "y" * 1000 for i in range(1000)})
        logger.warning("last \ud800")

    with kept() as handler:
        await one(say, pp=1)
        odd, huge, many, last = await handler.wait_for(4)
    assert odd.odd == "<its repr() raised RuntimeError>"
    assert set(huge.getMessage()) == {"x"}
    assert 1000 <= len(huge.getMessage()) < 32 * 1024
    assert many.getMessage() == "many"
    assert last.getMessage() == "last \ud800"


async def test_a_handler_that_raises_harms_nothing() -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no")

    raises = Raises()
    with kept() as handler:
        logging.getLogger("its").addHandler(raises)
        try:
            await one(lambda logger: logger.warning("warning"))
            await handler.wait_for(2)
        finally:
            logging.getLogger("its").removeHandler(raises)


async def test_a_handler_that_hangs_holds_nobody_up_and_what_is_lost_is_counted() -> None:
    """The flood is far larger than what may wait to be handled; the stage gets on all the same."""
    go_on = threading.Event()
    count = 20_000

    class Hangs(Kept):
        def emit(self, record: logging.LogRecord) -> None:
            go_on.wait(20)
            super().emit(record)

    def say(logger: logging.Logger) -> None:
        for number in range(count):
            logger.warning("number %d %s", number, "x" * 100)

    def lost() -> int:
        return sum(record.args[0] for record in notes.records)  # type: ignore[index, misc]

    hangs, notes = Hangs(), Kept()
    logging.getLogger("stageflow").addHandler(notes)
    logger = logging.getLogger("its")
    logger.addHandler(hangs)
    logger.propagate = False
    try:
        with trio.fail_after(30):
            async with Pipeline.launch([Says(say)], pp=1) as pipe:
                assert (await pipe(X)).item() == 2
                go_on.set()
                await hangs.wait_for(100)
                await notes.wait_for(1)
                await pipe.call(lambda _stage: logging.getLogger("its").warning("the last"))
                while hangs.records[-1].getMessage() != "the last":
                    await hangs.wait_for(len(hangs.records) + 1)
                while len(hangs.records) - 1 + lost() < count:  # it is said a little later
                    await notes.wait_for(len(notes.records) + 1)
    finally:
        go_on.set()
        logger.removeHandler(hangs)
        logger.propagate = True
        logging.getLogger("stageflow").removeHandler(notes)
    assert all(record.stage_index == 0 for record in notes.records)
    assert lost() > 0
    assert len(hangs.records) - 1 + lost() == count
    assert len(notes.records) < 40  # a flood is not answered by a flood


def test_without_handlers_a_warning_is_shown_with_its_stage(run_script) -> None:
    done = run_script("""
        import logging, torch, trio
        from torch import nn
        from stageflow import Pipeline

        class Says(nn.Module):
            def forward(self, x):
                logging.getLogger("its.own").warning("two\\nlines")
                logging.getLogger("its.own").info("unseen")
                return x

        async def main():
            async with Pipeline.launch([nn.Identity(), Says()], pp=2) as pipe:
                await pipe(torch.ones(1))

        trio.run(main)
    """)
    assert done.stderr.splitlines() == ["[stage 1] two", "[stage 1] lines"]


def test_basic_config_in_the_controller_is_all_that_is_needed(run_script) -> None:
    done = run_script("""
        import logging, torch, trio
        from torch import nn
        from stageflow import Pipeline

        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(processName)s %(name)s: %(message)s")

        class Says(nn.Module):
            def forward(self, x):
                logging.basicConfig(level=logging.DEBUG)  # as libraries do; here it changes nothing
                logging.getLogger("its.own").info("hello")
                return x

        async def main():
            async with Pipeline.launch([Says(), Says()], pp=2) as pipe:
                await pipe(torch.ones(1))

        logging.getLogger("its.own").info("before")
        trio.run(main)
    """)
    assert done.stderr.splitlines() == [
        "INFO MainProcess its.own: before",
        "INFO stageflow stage 0/2 its.own: hello",
        "INFO stageflow stage 1/2 its.own: hello",
    ]
