"""Several ranks of one model: rank 0 drives, the others follow.

Every rank holds its part of the weights and caches and executes the same plans in the same order; collectives inside the ops
keep them in step. Plans are pure data and travel as msgpack over a private socket. All ranks sample the same tokens from the
same gathered logits with the same noise, so nothing but plans has to travel.

A follower is `python -m firstlight.engine.ranks ADDRESS RANK STORE`, with the options on stdin; the end of stdin
is the end of the driver, and then of the follower. It reports when it is about to join, when it has loaded, with the memory
that it has left for caches, and when its executor is ready; then it only listens. All ranks' caches have the size that fits
the fullest device. One that can't go on leaves the reason in a file beside its socket, where rank 0 finds it whatever it waits for.

On a GPU a rank whose peer has died waits in a kernel, which nothing on the host interrupts. So rank 0 looks after the
processes while it waits for a step, and a thread does wherever else it may wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from firstlight.config import EngineOptions
from firstlight.engine.executor import Executor, Pending
from firstlight.engine.loading import allocate_caches, cache_bytes, load_model, resolve_device
from firstlight.engine.sockets import private_directory, remove_directory_of
from firstlight.errors import FirstlightError
from firstlight.parallel import Mesh
from firstlight.parallel.groups import attach
from firstlight.scheduling.arena import CacheGeometry
from firstlight.scheduling.plan import StepPlan

logger = logging.getLogger(__name__)

STOP = b""
STOP_SECONDS = 5.0
"""For all followers together to end by themselves."""
SEND_MS = 500
"""Between two looks at whether a rank that takes nothing is still alive."""
RECEIVE_MS = 100
"""The same of one that says nothing; also how long what a dead one has sent may take."""
LONGEST_REASON = 2000
"""Characters of why a follower ended, from its end."""
WATCH_SECONDS = 1.0
"""Between two looks of the thread that watches the followers."""
NOTICE_SECONDS = 5.0
"""How long a follower may be dead without the main thread's noticing, before that thread counts as stuck."""
BREAK_SECONDS = 2.0
"""After a collective has failed, how long the end of the process that caused it may take to show."""


class Report(msgspec.Struct):
    """What a follower tells rank 0.

    cache_bytes: that its device has for caches, once the model is loaded. captured: the graphs that its executor has, once it is
    ready.
    """

    cache_bytes: int = 0
    captured: list[str] = []


def encode_plan(plan: StepPlan) -> bytes:
    """A plan as msgpack."""
    return _encoder.encode(plan)


def decode_plan(data: bytes) -> StepPlan:
    """The plan of `encode_plan`."""
    return _decoder.decode(data)


def _array_to_data(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} can't be sent to another rank")


def _data_to_array(kind: type, data: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, raw = data
        return np.frombuffer(raw, dtype).reshape(shape)
    raise NotImplementedError(f"{kind.__name__} can't come from another rank")


_encoder = msgspec.msgpack.Encoder(enc_hook=_array_to_data)
_decoder = msgspec.msgpack.Decoder(StepPlan, dec_hook=_data_to_array)


def rank_device(options: EngineOptions, rank: int) -> torch.device:
    """The device of a rank: the CPU, or the GPU that comes so many after the one of the options (the first, by default)."""
    device = resolve_device(options.device)
    return torch.device(device.type, (device.index or 0) + rank) if device.type == "cuda" else device


def join(options: EngineOptions, rank: int, store: str) -> Mesh:
    """Become a rank of the mesh, among all the others. The current device is this rank's from then on."""
    device = rank_device(options, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return attach(Mesh.of(rank, tp=options.tensor_parallel), rank, store, device)


def _reason_file(address: str) -> Path:
    """Where the follower with the socket at `address` writes why it ends."""
    return Path(address.removeprefix("ipc://") + ".reason")


class Followers:
    """The other ranks' processes, seen from rank 0. `mesh` is rank 0's, with its groups attached.

    If a follower dies and the main thread doesn't notice, because a kernel of its own waits for that rank, this process is ended
    with status 1 after the reason has been logged.
    """

    def __init__(self, options: EngineOptions) -> None:
        """Starts the processes and waits until all have joined. Raises FirstlightError if one can't."""
        self.size = options.tensor_parallel
        self._device = rank_device(options, 0)
        if self._device.type == "cuda":
            first, gpus = self._device.index, torch.cuda.device_count()
            if gpus < first + self.size:
                after = f" from {self._device} on" if first else ""
                raise FirstlightError(
                    f"--tensor-parallel {self.size} needs a GPU for each rank{after}; there are {gpus} in all"
                )
        self._directory = private_directory("firstlight-ranks-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = []
        store = f"tcp://127.0.0.1:{_free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._executor: Executor | None = None
        self._noticed = threading.Event()
        for rank in range(1, self.size):
            channel = self._context.socket(zmq.PAIR)
            channel.set(zmq.LINGER, 0)
            channel.set(zmq.SNDTIMEO, SEND_MS)
            channel.bind(self._address(rank))
            self._sockets.append(channel)
            process = subprocess.Popen(
                [sys.executable, "-m", "firstlight.engine.ranks", self._address(rank), str(rank), store],
                stdin=subprocess.PIPE,
            )
            self._processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is dead already, which `_receive` finds
                process.stdin.write(options.to_json() + b"\n")
                process.stdin.flush()
        threading.Thread(target=self._watch, name="ranks-watch", daemon=True).start()
        try:
            self._receive()
            self.mesh = join(options, 0, store)
        except BaseException as error:
            self.close_after(error)
            raise

    def cache_bytes(self) -> int:
        """Wait until all have loaded the model; what the fullest of their devices has for caches.

        Raises FirstlightError if one has died or can't go on.
        """
        return min(report.cache_bytes for report in self._receive())

    def send_geometry(self, geometry: CacheGeometry) -> None:
        """Tell the others how the cache is split: rank 0's arithmetic holds for all. Raises what `send` does.

        They make their executors then, whose first steps run on all ranks together.
        """
        self._send(msgspec.msgpack.encode(geometry))

    def lead(self, executor: Executor) -> LeadingExecutor:
        """Wait until all are ready for plans; the executor of all ranks, from rank 0's own.

        Raises FirstlightError if one has died, or couldn't capture what rank 0 captured.
        """
        self._executor = executor
        for rank, report in enumerate(self._receive(), start=1):
            if report.captured != executor.captured:
                raise FirstlightError(
                    f"rank {rank} of {self.size} captured {len(report.captured)} CUDA graphs, not the {len(executor.captured)} "
                    "of rank 0, and steps must run alike on all ranks; their logs say why; --no-graphs runs without"
                )
        return LeadingExecutor(executor, self)

    def send(self, plan: StepPlan) -> None:
        """Have every follower execute a plan. Raises FirstlightError if one has died."""
        self._send(encode_plan(plan))

    def check(self, seconds: float = 0.0) -> None:
        """Raise FirstlightError if a follower has died, or does within so many seconds."""
        deadline = time.monotonic() + seconds
        while (death := self._death()) is None:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.01)
        self._noticed.set()
        raise FirstlightError(death)

    def close_after(self, error: BaseException) -> None:
        """`close`, because of an error at the start. Raises FirstlightError instead if it came of a follower's death."""
        try:
            if isinstance(error, RuntimeError):  # so a collective of gloo's ends if a rank is gone
                self.check(BREAK_SECONDS)
        finally:
            self.close()

    def close(self) -> None:
        """End the processes, and this one's part in the group."""
        self._noticed.set()
        for channel in self._sockets:
            try:
                channel.send(STOP, zmq.NOBLOCK)
            except zmq.ZMQError:
                continue  # that rank is gone already
        deadline = time.monotonic() + STOP_SECONDS
        # All ranks leave together. In a thread, since it can wait for ever for one that is dead or stuck.
        leaving = threading.Thread(target=self._leave, name="ranks-leave", daemon=True)
        leaving.start()
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        leaving.join(max(0.0, deadline - time.monotonic()))
        if leaving.is_alive():
            logger.warning("%s still waits for a rank that has ended", self._device)
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _leave(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        if self._executor is not None:
            self._executor.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _send(self, data: bytes) -> None:
        self.check()
        for channel in self._sockets:
            while True:
                try:
                    channel.send(data)
                    break
                except zmq.Again:  # it is behind, or dead: a socket without a peer would wait for ever
                    self.check()

    def _receive(self) -> list[Report]:
        """The next report of each follower."""
        reports = []
        for channel in self._sockets:
            while not channel.poll(RECEIVE_MS):
                if self._death() is not None and not channel.poll(RECEIVE_MS):
                    self.check()
            reports.append(msgspec.msgpack.decode(channel.recv(), type=Report))
        return reports

    def _death(self) -> str | None:
        """Which follower has died, for people."""
        for rank, process in enumerate(self._processes, start=1):
            if (status := process.poll()) is not None:
                reason = "; its log says why"
                with contextlib.suppress(OSError):  # it couldn't write, as one that was killed
                    reason = f": {_reason_file(self._address(rank)).read_text('utf-8', 'replace')}"
                return f"rank {rank} of {self.size} has died (exit status {status}){reason}"
        return None

    def _address(self, rank: int) -> str:
        return f"ipc://{self._directory}/plans{rank}"

    def _watch(self) -> None:
        while not self._noticed.wait(WATCH_SECONDS):
            if (death := self._death()) is not None and not self._noticed.wait(NOTICE_SECONDS):
                logger.critical("%s; this rank is stuck waiting for it, and ends too", death)
                os._exit(1)


class LeadingExecutor:
    """Rank 0's executor: what it executes, the followers execute too."""

    def __init__(self, executor: Executor, followers: Followers) -> None:
        self.executor, self.followers = executor, followers

    def execute(self, plan: StepPlan) -> Pending:
        """Start a plan on every rank. Raises FirstlightError, as does waiting for the result, if a follower has died."""
        self.followers.send(plan)
        try:
            pending = self.executor.execute(plan)
        except RuntimeError:  # so a collective of gloo's ends if a rank is gone; the rank is what to tell of
            self.followers.check(BREAK_SECONDS)
            raise
        pending.check = self.followers.check
        return pending


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end_with_parent(address: str) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    remove_directory_of(address)
    os._exit(1)


def follow(channel: zmq.Socket[bytes], rank: int, store: str, options: EngineOptions) -> None:
    """A follower's life: join, load, then execute what rank 0 sends until told to stop."""

    def report(report: Report) -> None:
        channel.send(msgspec.msgpack.encode(report))

    report(Report())
    mesh = join(options, rank, store)
    loaded = load_model(options, mesh, rank_device(options, rank))
    options = loaded.options
    report(Report(cache_bytes=cache_bytes(options, loaded)))
    data = channel.recv()
    if data != STOP:  # rank 0 could load the model too
        geometry = msgspec.msgpack.decode(data, type=CacheGeometry)
        executor = Executor(loaded, allocate_caches(loaded, geometry), options.max_running, graphs=options.graphs)
        report(Report(captured=executor.captured))
        while (data := channel.recv()) != STOP:
            executor.execute(decode_plan(data))
        executor.close()
    torch.distributed.destroy_process_group()


def main() -> None:
    """Entry point of a follower process."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of a terminal, and is rank 0's to answer
    address, rank, store = sys.argv[1:]
    logging.basicConfig(format=f"firstlight rank {rank}: %(levelname)s: %(message)s")
    options = EngineOptions.from_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, args=(address,), daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = context.socket(zmq.PAIR)
    channel.connect(address)
    try:
        follow(channel, int(rank), store, options)
    except Exception as error:
        ours = isinstance(error, FirstlightError)
        logger.error("stops: %s", error, exc_info=not ours)
        kind = "" if ours else f"{type(error).__name__}: "
        with contextlib.suppress(OSError):  # rank 0 has ended, and the directory with it
            reason = f"{kind}{str(error).strip()[-LONGEST_REASON:]}"
            # Whatever the locale can write, and file names that are no text: an error here would keep the process from ending.
            _reason_file(address).write_text(reason, "utf-8", "backslashreplace")
        os._exit(1)  # at once: leaving in order would wait for kernels that wait for the other ranks
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
