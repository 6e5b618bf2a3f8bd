"""Starting the engine process, and making sure of its end.

The socket is an ipc socket in a fresh directory that only this user may enter (0700), so no other user can speak to the
engine. The child gets a pipe as stdin: options first, then silence for as long as this process lives.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import zmq

from firstlight.config import EngineOptions
from firstlight.engine.messages import (
    MAX_MESSAGE_BYTES,
    Failed,
    Shutdown,
    Started,
    decode_from_engine,
    encode,
)
from firstlight.engine.sockets import private_directory
from firstlight.errors import FirstlightError

ENGINE = "firstlight.engine.engine:Engine"
"""Where the engine's class is found, as `module:name`."""
SHUTDOWN_SECONDS = 5.0
"""How long the engine gets to end a step and free its devices, before SIGTERM, and again before SIGKILL."""


class EngineFailedError(FirstlightError):
    """The engine could not start, or died. The message is for people."""


class EngineProcess:
    """A started engine process, not yet loaded; a context manager that ends it.

    socket: a zmq PAIR socket to it. Use it from one thread at a time.
    """

    def __init__(self, options: EngineOptions, engine: str = ENGINE) -> None:
        self._started = False
        self.directory = private_directory("firstlight-")
        address = f"ipc://{self.directory}/engine"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.set(zmq.SNDHWM, 0)  # bounded by the API's own limit on requests
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(address)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "firstlight.engine.process", address, engine],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is this process's to handle: it drains first
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which `wait_started` reports
            self._process.stdin.write(options.to_json() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def wait_started(self) -> Started:
        """Wait until the model is loaded. Raises EngineFailedError when it can't be, or the process dies on the way."""
        while True:
            ready = self.socket.poll(100)
            if not ready:
                if self.alive or self.socket.poll(0):
                    continue
                raise EngineFailedError(self.obituary())
            message = decode_from_engine(self.socket.recv())
            if isinstance(message, Started):
                self._started = True
                return message
            if isinstance(message, Failed):
                raise EngineFailedError(message.message)

    def watch(self, on_death: Callable[[], object]) -> None:
        """Call `on_death` from another thread when the process ends."""

        def wait() -> None:
            self._process.wait()
            on_death()

        threading.Thread(target=wait, name="engine-watch", daemon=True).start()

    def obituary(self) -> str:
        """How the process ended, in a sentence."""
        status = self._process.poll()
        if status is None:
            return "the engine process runs but doesn't answer"
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        hint = " (out of memory?)" if status == -9 else ""
        return f"the engine process {how}{hint}; its last lines are above"

    def close(self) -> None:
        """End the process, gently first, and remove the socket. May be called twice."""
        ways: list[Callable[[], None]] = [self._process.terminate, self._process.kill]
        if self._started:
            ways.insert(0, self._ask_to_shut_down)
        for end in ways:
            end()
            try:
                self._process.wait(SHUTDOWN_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.socket.close()
        self._context.term()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _ask_to_shut_down(self) -> None:
        if self.alive and not self.socket.closed:
            with contextlib.suppress(zmq.Again):  # it has closed its end, and is on its way out
                self.socket.send(encode(Shutdown()), zmq.NOBLOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
