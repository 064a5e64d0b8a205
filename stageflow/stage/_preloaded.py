"""The end of what the fork server imports: it is ready to fork."""

import atexit
import os
import signal

# The server was started with SIGINT blocked: Ctrl-C goes to the whole foreground group, and a server that dies of it while
# importing would print over the user's own program. It ignores the signal from here on; processes that come of it need not.
_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one that is pending is thrown away
signal.signal(signal.SIGINT, _handler)

_server = os.getpid()


def _leave_at_once() -> None:
    # The fork server ends when the program has, and holds its stdout until then: an interpreter full of torch takes half a
    # second to take itself apart, for nothing.
    if os.getpid() == _server:
        os._exit(0)


atexit.register(_leave_at_once)
