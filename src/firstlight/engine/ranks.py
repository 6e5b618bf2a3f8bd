"""Several ranks of one model: rank 0 drives, the others follow.

Every rank holds its part of the weights and caches and executes the same plans in the same order; collectives inside the ops
keep them in step. Plans are pure data and travel as msgpack over a private socket. All ranks sample the same tokens from the
same gathered logits with the same noise, so nothing but plans has to travel.

A follower is `python -m firstlight.engine.ranks ADDRESS RANK STORE`, with the options on stdin; the end of stdin
is the end of the driver, and then of the follower.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from firstlight.config import EngineOptions
from firstlight.engine.executor import Executor, Pending
from firstlight.engine.loading import BoundModel, allocate_caches, load_model, resolve_device
from firstlight.engine.sockets import private_directory, remove_directory_of
from firstlight.errors import FirstlightError
from firstlight.parallel import Mesh
from firstlight.parallel.groups import attach
from firstlight.scheduling.arena import CacheGeometry
from firstlight.scheduling.plan import StepPlan

STOP = b""
STOP_SECONDS = 5.0
SEND_MS = 500
"""Between two looks at whether a rank that takes nothing is still alive."""


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
    """The device of a rank: the GPU with its number, or the CPU."""
    device = resolve_device(options.device)
    return torch.device(device.type, rank) if device.type == "cuda" else device


def backend_of(device: torch.device) -> str:
    """torch.distributed's backend for a device."""
    return "nccl" if device.type == "cuda" else "gloo"


class Followers:
    """The other ranks' processes, seen from rank 0. `mesh` is rank 0's, with its groups attached."""

    def __init__(self, options: EngineOptions) -> None:
        """Starts the processes and waits until all have joined. Raises FirstlightError if one can't."""
        self.size = options.tensor_parallel
        if resolve_device(options.device).type == "cuda" and (gpus := torch.cuda.device_count()) < self.size:
            raise FirstlightError(f"--tensor-parallel {self.size} needs a GPU for each rank; there are {gpus}")
        self._directory = private_directory("firstlight-ranks-")
        address = f"ipc://{self._directory}/plans"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = []
        store = f"tcp://127.0.0.1:{_free_port()}"
        self._processes = []
        for rank in range(1, self.size):
            sender = self._context.socket(zmq.PUSH)
            sender.set(zmq.LINGER, 0)
            sender.set(zmq.SNDTIMEO, SEND_MS)
            sender.bind(f"{address}{rank}")
            self._sockets.append(sender)
            process = subprocess.Popen(
                [sys.executable, "-m", "firstlight.engine.ranks", f"{address}{rank}", str(rank), store],
                stdin=subprocess.PIPE,
            )
            assert process.stdin is not None
            process.stdin.write(options.model_dump_json(exclude_unset=True).encode() + b"\n")
            process.stdin.flush()
            self._processes.append(process)
        try:
            self.mesh = attach(Mesh.of(0, tp=self.size), 0, store, backend_of(rank_device(options, 0)))
        except BaseException:
            self.close()
            raise

    def send_geometry(self, geometry: CacheGeometry) -> None:
        """Tell the others how the cache is split: rank 0's arithmetic holds for all. Raises what `send` does."""
        self._send(msgspec.msgpack.encode(geometry))

    def send(self, plan: StepPlan) -> None:
        """Have every follower execute a plan. Raises FirstlightError if one has died."""
        self._send(encode_plan(plan))

    def _send(self, data: bytes) -> None:
        self._check_alive()
        for sender in self._sockets:
            while True:
                try:
                    sender.send(data)
                    break
                except zmq.Again:  # it is behind, or dead: a socket without a peer would wait for ever
                    self._check_alive()

    def _check_alive(self) -> None:
        for rank, process in enumerate(self._processes, start=1):
            if (status := process.poll()) is not None:
                raise FirstlightError(f"rank {rank} of {self.size} has died (exit status {status}); its log says why")

    def close(self) -> None:
        """End the processes."""
        for sender in self._sockets:
            try:
                sender.send(STOP, zmq.NOBLOCK)
            except zmq.ZMQError:
                continue  # that rank is gone already
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)


class LeadingExecutor:
    """Rank 0's executor: what it executes, the followers execute too."""

    def __init__(self, executor: Executor, followers: Followers) -> None:
        self.executor, self.followers = executor, followers

    def execute(self, plan: StepPlan) -> Pending:
        """Start a plan on every rank."""
        self.followers.send(plan)
        return self.executor.execute(plan)


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


def follow(address: str, rank: int, store: str, options: EngineOptions) -> None:
    """A follower's life: join, load, then execute what rank 0 sends until told to stop."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plans = context.socket(zmq.PULL)
    plans.connect(address)
    device = rank_device(options, rank)
    mesh = attach(Mesh.of(rank, tp=options.tensor_parallel), rank, store, backend_of(device))
    loaded: BoundModel = load_model(options, mesh, device)
    data = plans.recv()
    if data != STOP:  # rank 0 could load the model too
        geometry = msgspec.msgpack.decode(data, type=CacheGeometry)
        executor = Executor(loaded, allocate_caches(loaded, geometry), options.max_running, graphs=options.graphs)
        while (data := plans.recv()) != STOP:
            executor.execute(decode_plan(data))
    context.destroy(linger=0)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Entry point of a follower process."""
    address, rank, store = sys.argv[1:]
    options = EngineOptions.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, args=(address,), daemon=True).start()
    follow(address, int(rank), store, options)


if __name__ == "__main__":
    main()
