"""`firstlight serve`: from options to a listening server, and back to nothing left behind.

The order is chosen for a quick start: the port is taken first (a port in use is known at once), then the engine
process is started, and while it loads the model this process imports the web framework and loads the tokenizer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket

from firstlight.config import EngineOptions, ServerOptions
from firstlight.errors import FirstlightError
from firstlight.server.spawn import ENGINE, EngineProcess

logger = logging.getLogger(__name__)


class StartError(FirstlightError):
    """The server can't listen as asked. The message says what to do."""


def serve(engine_options: EngineOptions, server_options: ServerOptions, engine: str = ENGINE) -> None:
    """Serve until SIGINT or SIGTERM.

    Prints `firstlight: ready on URL (model NAME)` on stderr when requests can be sent.
    Raises StartError or EngineFailedError when it can't start, and EngineFailedError when the engine died.
    """
    listener = listen(server_options)
    logging.basicConfig(level=logging.INFO, format="firstlight: %(levelname)s: %(message)s")
    signal.signal(signal.SIGTERM, exit_quietly)
    with listener, EngineProcess(engine_options, engine) as process:
        from firstlight.server.http import run  # slow to import, while the engine loads
        from firstlight.server.service import NO_TOKENIZER
        from firstlight.weights.tokenizer import load_tokenizer_and_stops

        tokenizer, stops = load_tokenizer_and_stops(engine_options.model)
        if tokenizer is None:
            logger.warning(NO_TOKENIZER)
        started = process.wait_started()
        asyncio.run(run(process, started, tokenizer, stops, listener, engine_options, server_options))


def listen(options: ServerOptions) -> socket.socket:
    """The bound socket. Raises StartError if it can't be bound, or shouldn't be without an API key."""
    if not is_loopback(options.host) and not options.api_key:
        raise StartError(
            f"--host {options.host} can be reached from other machines: set an API key with --api-key or "
            "FIRSTLIGHT_API_KEY, or keep to --host 127.0.0.1"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise StartError(
            f"can't listen on {options.host}:{options.port}: {error.strerror or error}; "
            "choose another --host or --port (0: any free port)"
        ) from None
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may resolve to anything


def exit_quietly(number: int, frame: object) -> None:
    """A handler for SIGTERM that unwinds the stack, so that the engine process is ended too."""
    raise SystemExit(0)
