"""The engine process: one loop that drives an engine and speaks `messages` with the API process.

Started by `firstlight.server.spawn` as `python -m firstlight.engine.process ADDRESS ENGINE`, a fresh interpreter:
nothing is forked from a process with threads. Options come as one line of JSON on stdin. Stdin then stays open for as
long as the parent lives, and its end is how the engine learns that the parent is gone, however it went: it then exits
too.

While there is work the loop looks at the socket between steps without waiting; without work it sleeps in `poll`, and looks
every second whether the engine is sound.
SIGINT is left to the parent (Ctrl-C reaches both); SIGTERM and `Shutdown` end the loop after the step it is in.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import zmq

from firstlight.config import EngineOptions
from firstlight.engine.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    Accepted,
    Delta,
    EngineStats,
    Failed,
    FromEngine,
    Generate,
    GetStats,
    MessageError,
    Rejected,
    Shutdown,
    Started,
    ToEngine,
    Tokens,
    decode_to_engine,
    encode,
)
from firstlight.engine.sockets import remove_directory_of
from firstlight.errors import FirstlightError
from firstlight.scheduling.errors import RequestRefusedError
from firstlight.scheduling.request import Request

logger = logging.getLogger(__name__)

ORPHAN_GRACE_SECONDS = 5.0
"""How long a step may go on after the parent's death before the process is ended under it."""
IDLE_CHECK_MS = 1000
"""Between two looks at whether an engine without work could still do any."""
FAREWELL_MS = 2000
"""How long the last messages may take to reach the parent at exit."""
READABLE_ERRORS = (FirstlightError, ValueError, OSError)
"""Raised with messages for people; anything else is a fault of ours and is logged with its traceback."""


class DrivenEngine(Protocol):
    """What the loop needs of an engine. All methods are called from one thread."""

    max_context: int
    vocab_size: int

    @property
    def facts(self) -> Mapping[str, str]:
        """What was loaded, for people."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestRefusedError (or another FirstlightError or ValueError) for one that can never
        run."""

    def abort(self, id: str) -> None:
        """Forget a request; no more deltas for it. Unknown ids are ignored."""

    def step(self) -> Sequence[Delta]:
        """One step: at most one delta a request."""

    def has_work(self) -> bool:
        """Whether `step` would do something: requests waiting or running, or plans in flight."""

    def check(self) -> None:
        """Called now and then without work. Raises FirstlightError if the engine can't go on."""

    def stats(self) -> EngineStats:
        """Counts now, and sums since the start."""

    def close(self) -> None:
        """Free devices and end processes of its own."""


class Loop:
    """Drives `engine` until told to stop; `socket` is connected to the API process."""

    def __init__(self, engine: DrivenEngine, socket: zmq.Socket[bytes]) -> None:
        self.engine = engine
        self.socket = socket
        self.stopping = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    def stop(self) -> None:
        """End the loop after the step it is in. May be called by a signal handler or another thread."""
        self.stopping = True
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._wake_write, b"\0")

    def run(self) -> None:
        """Serve until `stop` or `Shutdown`. What the engine raises in a step or a check is raised here."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while not self.stopping:
            if not self.engine.has_work():
                poller.poll(IDLE_CHECK_MS)
                self.engine.check()
            self._drain()
            if self.engine.has_work() and not self.stopping:
                deltas = self.engine.step()
                if deltas:
                    self._send(Tokens(list(deltas)))

    def _drain(self) -> None:
        """Handle every message that has arrived; never waits."""
        accepted: list[str] = []
        while not self.stopping:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = decode_to_engine(data)
            except MessageError as error:
                logger.error("refused what the API process sent: %s", error)
                continue
            self._handle(message, accepted)
        if accepted:
            self._send(Accepted(accepted))

    def _handle(self, message: ToEngine, accepted: list[str]) -> None:
        if isinstance(message, Generate):
            try:
                self.engine.add(message.request())
            except RequestRefusedError as refusal:
                self._send(Rejected(message.id, refusal.status, str(refusal)))
            except (FirstlightError, ValueError) as error:
                self._send(Rejected(message.id, 400, str(error)))
            else:
                accepted.append(message.id)
        elif isinstance(message, Abort):
            for id in message.ids:
                self.engine.abort(id)
        elif isinstance(message, GetStats):
            self._send(self.engine.stats())
        elif isinstance(message, Shutdown):
            self.stopping = True

    def _send(self, message: FromEngine) -> None:
        """Send, waiting while the API process is behind: the engine then pauses rather than queues without bound."""
        data = encode(message)
        while not self.stopping:
            try:
                self.socket.send(data)
                return
            except zmq.Again:
                logger.warning("the API process does not read; the engine waits")


def main() -> None:
    """Entry point of the process; see the module docstring."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # while loading; later the loop is stopped instead
    logging.basicConfig(level=logging.INFO, format="firstlight engine: %(levelname)s: %(message)s")
    address, engine_name = sys.argv[1:]
    options_json = sys.stdin.buffer.readline()
    orphaned = threading.Event()
    threading.Thread(target=_follow_parent, args=(orphaned, address), daemon=True).start()

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.set(zmq.SNDTIMEO, 1000)
    socket.set(zmq.LINGER, FAREWELL_MS)
    socket.connect(address)
    status = 1
    try:
        status = _serve(socket, engine_name, options_json, orphaned)
    finally:
        # The parent may send SIGTERM on top of a failure: an exit that has begun isn't interrupted by another.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        socket.close()
        context.term()
    sys.exit(status)


def _serve(socket: zmq.Socket[bytes], engine_name: str, options_json: bytes, orphaned: threading.Event) -> int:
    """Load, then loop; the exit status. Every failure is told to the parent in a sentence and logged in full."""
    try:
        module, _, attribute = engine_name.partition(":")
        factory = getattr(importlib.import_module(module), attribute)
        engine: DrivenEngine = factory(EngineOptions.from_json(options_json))
    except Exception as error:
        if not isinstance(error, READABLE_ERRORS):
            logger.exception("the engine could not start")
        socket.send(encode(Failed(_readable(error))))
        return 1
    loop = Loop(engine, socket)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    threading.Thread(target=_stop_when, args=(orphaned, loop), daemon=True).start()
    try:
        socket.send(encode(Started(engine.max_context, engine.vocab_size, dict(engine.facts))))
        loop.run()
        return 0
    except Exception as error:
        logger.exception("the engine stops")
        socket.send(encode(Failed(_readable(error))))
        return 1
    finally:
        engine.close()


def _follow_parent(orphaned: threading.Event, address: str) -> None:
    """Wait for the end of stdin, which is the parent's end; then stop the loop, or the process if it doesn't stop."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    remove_directory_of(address)
    orphaned.set()
    threading.Event().wait(ORPHAN_GRACE_SECONDS)
    os._exit(1)


def _stop_when(orphaned: threading.Event, loop: Loop) -> None:
    orphaned.wait()
    loop.stop()


def _readable(error: Exception) -> str:
    """One line for people; exceptions whose message alone would not explain them bring their type."""
    text = str(error).strip()
    if isinstance(error, READABLE_ERRORS) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main()
