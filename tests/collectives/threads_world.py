"""Nodes in the threads of one process: a Transport over queues, with nodes that die on demand."""

import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from caffepy.collectives.world import DeadNodeError, Request, Tag, World
from caffepy.device.blob import Array


class Wires:
    """The messages between some nodes. `kill` makes a node dead for the others, as ULFM does;
    `cut` loses what is sent from now on, as a broken link does.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.lock = threading.Lock()
        self.queues: dict[tuple[int, int, Tag], deque[Any]] = {}
        self.dead: set[int] = set()
        self.is_cut = False

    def queue(self, source: int, destination: int, tag: Tag) -> deque[Any]:
        with self.lock:
            return self.queues.setdefault((source, destination, tag), deque())

    def kill(self, node: int) -> None:
        self.dead.add(node)

    def cut(self) -> None:
        self.is_cut = True


class _Sent:
    value = None

    def __init__(self, wires: Wires, node: int) -> None:
        self._wires, self._node = wires, node

    def done(self) -> bool:
        if self._node in self._wires.dead:
            raise DeadNodeError(self._node)
        return True


class _Received:
    """What is received in its turn: `before` is the request that stands before it in its queue."""

    def __init__(self, wires: Wires, source: int, queue: deque[Any], into: Array | None) -> None:
        self._wires, self._source, self._queue, self._into = wires, source, queue, into
        self.value: Any = None
        self._is_done = False

    def done(self) -> bool:
        if not self._is_done and self._queue:
            data = self._queue.popleft()
            if self._into is None:
                self.value = pickle.loads(data)
            else:
                self._into[...] = data
            self._is_done = True
        if not self._is_done and self._source in self._wires.dead:
            raise DeadNodeError(self._source)
        return self._is_done


class ThreadsTransport:
    """The Transport of one of the nodes."""

    def __init__(self, wires: Wires, node: int) -> None:
        self.node, self.nodes = node, wires.nodes
        self.hosts: Sequence[str] = [f"host{i}" for i in range(wires.nodes)]
        self.closed: bool | None = None  # `failed` of close
        self._wires = wires

    def _put(self, node: int, tag: Tag, data: object) -> Request:
        if not self._wires.is_cut:
            self._wires.queue(self.node, node, tag).append(data)
        return _Sent(self._wires, node)

    def send(self, node: int, tag: Tag, value: object) -> Request:
        return self._put(node, tag, pickle.dumps(value))

    def receive(self, node: int, tag: Tag) -> Request:
        return _Received(self._wires, node, self._wires.queue(node, self.node, tag), None)

    def send_array(self, node: int, tag: Tag, array: Array) -> Request:
        return self._put(node, tag, np.array(array))

    def receive_array(self, node: int, tag: Tag, array: Array) -> Request:
        return _Received(self._wires, node, self._wires.queue(node, self.node, tag), array)

    def close(self, failed: bool) -> None:
        self.closed = failed


def run_nodes(
    nodes: int, work: Callable[[World], Any], wires: Wires | None = None, seconds: float = 60
) -> list[Any]:
    """Run `work` as each of some nodes, in threads; return what each returned or raised."""
    wires = wires or Wires(nodes)
    results: list[Any] = [None] * nodes

    def run(node: int) -> None:
        try:
            results[node] = work(World(ThreadsTransport(wires, node)))
        except BaseException as error:
            results[node] = error

    threads = [
        threading.Thread(target=run, args=(node,), name=f"node {node}", daemon=True)
        for node in range(nodes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), f"{thread.name} hangs"
    return results
