"""A stream of micro-batches: ``pipe.map`` and ``pipe.starmap``.

Rules of this file:

* One task feeds: it takes an item from the source, waits for a slot, submits, and hands the ticket on in order. So the
  window is full whenever the source can fill it, and a slow consumer holds the source back.
* Leaving the block, in whatever way, ends the feeder and lets go of the tickets: their slots come back by themselves.
* An error of the source takes its place in the stream: what was submitted before it comes out first. One that nobody got to
  see by iterating is raised at the end of the block, unless the block raises by itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, cast, final

import trio

from stageflow.controller._tickets import Ticket

Source = Iterable[Any] | AsyncIterable[Any]


class _End:
    """Marks the end of the source, with the error that ended it, if any."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


@final
class Results:
    """The results of a stream, in order of submission: an async iterator.

    A result whose stage raised comes as a raised ``StageError`` in its place; iterate again to go on with the next one.
    """

    def __init__(self, receive: trio.MemoryReceiveChannel[Ticket | _End]) -> None:
        self._receive = receive
        self._end: _End | None = None

    @property
    def ended(self) -> bool:
        """Whether the end of the source has been reached by iterating."""
        return self._end is not None

    def __aiter__(self) -> Results:
        return self

    async def __anext__(self) -> Any:
        if self._end is not None:
            await trio.lowlevel.checkpoint()
            raise StopAsyncIteration
        ticket = await self._receive.receive()
        if isinstance(ticket, _End):
            self._end = ticket
            if ticket.error is not None:
                raise ticket.error
            raise StopAsyncIteration
        return await ticket


@final
class MapContext(AbstractAsyncContextManager[Results]):
    """What ``pipe.map(...)`` returns: enter it with ``async with`` to get the results."""

    def __init__(self, submit: Callable[[Any], Awaitable[Ticket]], source: Source) -> None:
        if not isinstance(source, (Iterable, AsyncIterable)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"map takes an iterable or an async iterable of inputs: found {type(source).__name__}")
        self._context = _run(submit, source)

    async def __aenter__(self) -> Results:
        return await self._context.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._context.__aexit__(kind, error, trace)

    def __aiter__(self) -> AsyncIterator[Any]:
        raise TypeError(
            "pipe.map(...) feeds the pipeline from a task of its own, so it needs a block that says how long it lives:\n"
            "    async with pipe.map(inputs) as outputs:\n"
            "        async for y in outputs: ..."
        )


@asynccontextmanager
async def _run(submit: Callable[[Any], Awaitable[Ticket]], source: Source) -> AsyncGenerator[Results]:
    # No bound on the channel: each ticket in it holds a slot of the window, which is the bound.
    send, receive = trio.open_memory_channel[Ticket | _End](float("inf"))
    end: _End | None = None
    body_error: BaseException | None = None
    owner = trio.lowlevel.current_task()

    async def submit_owned(item: Any) -> Ticket:
        ticket = await submit(item)
        ticket.owned_by(owner)
        return ticket

    async def feed() -> None:
        nonlocal end
        error: Exception | None = None
        try:
            if isinstance(source, AsyncGenerator):
                async with aclosing(
                    cast("AsyncGenerator[Any]", source)
                ):  # nobody else will, if the block is left before its end
                    async for item in source:
                        send.send_nowait(await submit_owned(item))
            elif isinstance(source, AsyncIterable):
                async for item in source:
                    send.send_nowait(await submit_owned(item))
            else:
                for item in source:
                    send.send_nowait(await submit_owned(item))
        except trio.Cancelled:
            raise
        except Exception as raised:
            error = raised
        except BaseException as raised:  # Ctrl-C or SystemExit in the source: out at once, as it is
            nonlocal body_error
            body_error = raised
            nursery.cancel_scope.cancel()
            return
        end = _End(error)
        send.send_nowait(end)

    results = Results(receive)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed, name="stageflow map feeder")
            try:
                yield results
            except trio.Cancelled:
                raise
            except BaseException as raised:
                body_error = body_error or raised
            nursery.cancel_scope.cancel()
    finally:
        send.close()
        receive.close()  # lets go of the tickets nobody came for
    if body_error is not None:
        raise body_error
    if end is not None and end.error is not None and not results.ended:
        raise end.error
