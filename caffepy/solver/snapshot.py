"""Snapshots: Caffe's model and state files in both formats, and the sidecar with which a resumed
run continues exactly.

All three files are on the disk before the first gets its name; they get their names in the order
model, sidecar, state. If a process is killed in between, `clean` completes the snapshot.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape as glob_escape
from glob import glob
from itertools import cycle, dropwhile
from tempfile import gettempdir, mkdtemp
from typing import Any, NamedTuple

import numpy as np

from caffepy.core.errors import CaffeError, ConfigError, reason
from caffepy.core.files import find_stale, remove_stale, replacing_all
from caffepy.core.hdf5 import check_contents
from caffepy.core.names import nearest
from caffepy.device.blob import Array, shape_string
from caffepy.net import Net
from caffepy.net.weights import check_hdf5, new_hdf5, write_binary, write_hdf5
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import SolverState
from caffepy.solver import sidecar
from caffepy.solver.identity import difference
from caffepy.solver.update import rules

log = logging.getLogger(__name__)

STATE_NAME = re.compile(r"_iter_(\d+)\.solverstate(\.h5)?$")
MODEL_NAME = re.compile(r"_iter_\d+(?P<end>\.caffemodel(\.h5)?)$")


@dataclass
class State:
    """Content of a solverstate; `iteration` is the number of updates."""

    iteration: int
    learned_net: str
    history: list[Array]
    current_step: int


class Files(NamedTuple):
    """The names of one snapshot's files; only caffepy reads the sidecar."""

    prefix: str
    iteration: int
    hdf5: bool
    model: str
    state: str
    sidecar: str

    @classmethod
    def of(cls, prefix: str, iteration: int, hdf5: bool) -> "Files":
        """Return the names of the snapshot of an iteration."""
        stem, end = f"{prefix}_iter_{iteration}", ".h5" if hdf5 else ""
        model, state = f"{stem}.caffemodel{end}", f"{stem}.solverstate{end}"
        return cls(prefix, iteration, hdf5, model, state, f"{stem}.caffepystate")

    @classmethod
    def of_state(cls, path: str) -> "Files | None":
        """Return the names of the snapshot of a state file; None if it has another kind of name."""
        match = STATE_NAME.search(path)
        return cls.of(path[: match.start()], int(match[1]), bool(match[2])) if match else None


def write(
    files: Files,
    net: Net,
    state: State,
    more: dict[str, Any],
    diff: bool,
    announce: Callable[[str, str], None],
    folder: str = "",
) -> None:
    """Write a snapshot of this net: see `write_files`."""
    write_model = write_hdf5 if files.hdf5 else write_binary
    write_files(files, lambda path: write_model(net, path, diff), state, more, announce, folder)


def write_files(
    files: Files,
    write_model: Callable[[str], None],
    state: State,
    more: dict[str, Any],
    announce: Callable[[str, str], object],
    folder: str = "",
) -> None:
    """Write a snapshot, every file whole or not at all; ConfigError names one that cannot be
    written.

    `write_model` writes the model to a path; `more` goes into the sidecar; `announce` is called
    before each file. Names are relative to `folder`.
    """
    name, write_state = ("HDF5", _write_hdf5) if files.hdf5 else ("binary proto", _write_binary)
    at_hand = files.model
    try:
        names = [files.model, files.sidecar, files.state]
        with replacing_all([os.path.join(folder, name) for name in names]) as new:
            model_file, sidecar_file, state_file = new
            announce(f"to {name}", files.model)
            write_model(model_file)
            at_hand = files.state
            announce(f"solver state to {name}", files.state)
            write_state(state, state_file)
            at_hand = files.sidecar
            sums = {
                kind: {"name": os.path.basename(name), "sha256": sidecar.checksum(written)}
                for kind, name, written in (
                    ("model", files.model, model_file),
                    ("state", files.state, state_file),
                )
            }
            sidecar.write(sidecar_file, {**sums, **more})
            at_hand = files.model
    except CaffeError as error:
        raise error.at(at_hand) from None
    except (OSError, RuntimeError) as error:  # h5py raises both
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        message = f"this file of a snapshot cannot be written: {reason}"
        raise ConfigError(message, at_hand) from error


def clean(prefix: str) -> None:
    """Complete the snapshots under a prefix, or rescued from there, whose process was killed while
    it renamed their files; remove other unfinished files that killed processes left there.
    """
    _clean(prefix)
    for rescued in _rescued_prefixes(prefix):
        _clean(rescued)
        with suppress(OSError):  # there are snapshots in it
            os.rmdir(os.path.dirname(rescued))


def _clean(prefix: str) -> None:
    folder, name = os.path.split(prefix)
    numbered = r"_iter_\d+\.(?:caffemodel|solverstate|caffepystate)(?:\.h5)?"
    ours = rf"{re.escape(name)}(?:{numbered}|_metrics\.csv|_curve\.png)"
    with suppress(OSError):  # no such folder
        left = find_stale(folder, ours)
        for temporary, path in left:
            files = Files.of_state(path)
            of_sidecar = [new for new, final in left if files and final == files.sidecar]
            for new in [*of_sidecar, files.sidecar] if files else ():
                if files and _belong_together(sidecar.head(new), files.model, temporary, path):
                    os.replace(new, files.sidecar)
                    os.replace(temporary, path)
                    log.info("Completed %s, which a killed run left unfinished", path)
                    break
    for path in remove_stale(folder, ours):
        log.info("Removed %s, which a killed run left unfinished", path)


def _belong_together(content: dict[str, Any], model: str, state: str, name: str) -> bool:
    """True if a sidecar has the checksums of this model and of this state, whose name is `name`."""
    with suppress(CaffeError, KeyError, TypeError):
        sums = {"name": os.path.basename(name), "sha256": sidecar.checksum(state)}
        return bool(
            content["state"] == sums and content["model"]["sha256"] == sidecar.checksum(model)
        )
    return False


def _write_binary(state: State, path: str) -> None:
    """Write several messages, which read as one, so that only one blob at a time is copied."""
    with open(path, "wb") as file:
        head = SolverState(iter=state.iteration, learned_net=state.learned_net)
        file.write(head.SerializeToString())
        for array in state.history:
            file.write(SolverState(history=[binary.array_to_blob(array)]).SerializeToString())
        file.write(SolverState(current_step=state.current_step).SerializeToString())


def _write_hdf5(state: State, path: str) -> None:
    import h5py  # here, since it takes 20 ms

    with new_hdf5(path) as file:
        file["iter"] = np.array([state.iteration], np.int32)
        file["current_step"] = np.array([state.current_step], np.int32)
        # A fixed-length string that ends with NUL, as Caffe expects.
        name = state.learned_net.encode() + b"\0"
        kind, scalar = h5py.h5t.C_S1.copy(), h5py.h5s.create(h5py.h5s.SCALAR)
        kind.set_size(len(name))
        timeless = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        timeless.set_obj_track_times(False)  # equal runs write equal files
        data = h5py.h5d.create(file.id, b"learned_net", kind, scalar, timeless)
        value = np.array(name, dtype=f"S{len(name)}")
        data.write(h5py.h5s.ALL, h5py.h5s.ALL, value, mtype=kind)
        history = file.create_group("history")
        for i, array in enumerate(state.history):
            history[str(i)] = array


def read_state(path: str) -> State:
    """Read a state in either format; ConfigError says what the file is if it is none."""
    if binary.sniff(path) != "HDF5":
        proto = binary.read_state(path)
        try:
            history = [binary.blob_to_array(blob) for blob in proto.history]
        except ConfigError as error:
            raise error.at(path) from None
        return State(proto.iter, proto.learned_net, history, proto.current_step)
    import h5py

    try:
        with h5py.File(path, "r") as file:
            check_contents(file)
            if "iter" not in file or "history" not in file:
                weights = "; it looks like a caffemodel (weights), did you mean --weights?"
                hint = weights if "data" in file else ""
                raise ConfigError(f"this HDF5 file is not a solver state{hint}", path)
            history = [file["history"][str(i)][()] for i in range(len(file["history"]))]
            learned_net = file["learned_net"][()] if "learned_net" in file else b""
            step = np.ravel(file["current_step"][()])[0] if "current_step" in file else 0
            iteration = int(np.ravel(file["iter"][()])[0])
            return State(iteration, os.fsdecode(learned_net.rstrip(b"\0")), history, int(step))
    except CaffeError:
        raise
    except Exception as error:  # h5py fails in many ways on damaged files
        raise ConfigError(f"not a whole HDF5 solver state: {error}", path) from None


def check_histories(state: State, own: Sequence[Array], kind: str, path: str) -> None:
    """Raise ConfigError unless the history fits a solver of type `kind` in number, shapes and
    signs.

    Caffe's states do not name the type that wrote them; how many histories there are and which have
    negative values distinguishes the types, except SGD from Nesterov, and states that lack a
    negative value by their type or by chance.
    """
    history, blobs = state.history, len(own) // rules[kind].histories
    negative = [i for i, array in enumerate(history) if (array < 0).any()]
    if len(history) != len(own):
        count, one = len(history) // max(blobs, 1), own[:blobs]
        of_this_net = len(history) == count * blobs and all(map(_same_shape, cycle(one), history))
        looks = "is it of another net or of another solver type?"
        if of_this_net and (kinds := _kinds(count, negative, blobs)):
            histories = "one history" if count == 1 else "two histories"
            looks = f"it looks like a state with {histories}: {kinds}; {_way_out(kinds)}"
        raise ConfigError(
            f"Incorrect length of history blobs: {len(history)} in the file, {len(own)} in this "
            f"solver of type {kind}; {looks}",
            path,
        )
    for i, (mine, read) in enumerate(zip(own, history, strict=True)):
        if not _same_shape(mine, read):
            raise ConfigError(
                f"history blob {i} has shape {shape_string(read.shape)} in the file, "
                f"{shape_string(mine.shape)} in this solver",
                path,
            )
    wrong = [i for i in negative if i // blobs in rules[kind].never_negative]
    if wrong:
        kinds = _kinds(rules[kind].histories, negative, blobs)
        looks = f"it looks like a state of {kinds}" if kinds else "no solver writes such a state"
        more = f" and {len(wrong) - 1} more" if wrong[1:] else ""
        raise ConfigError(
            f"this is no state of a solver of type {kind}, as this one is: {looks} (negative "
            f"values in history blob {wrong[0]}{more}); {_way_out(kinds)}",
            path,
        )


def _kinds(count: int, negative: Sequence[int], blobs: int) -> str:
    """List the solver types with `count` histories of `blobs` blobs, these being negative."""
    signed = {i // blobs for i in negative}
    kinds = [
        kind
        for kind in rules
        if rules[kind].histories == count and signed.isdisjoint(rules[kind].never_negative)
    ]
    return " or ".join(filter(None, [", ".join(kinds[:-1]), *kinds[-1:]]))


def _way_out(kinds: str) -> str:
    change = f"set type to {kinds}, or " if kinds else ""
    return f"{change}give the model as weights to start anew from it"


def _same_shape(mine: Array, read: Array) -> bool:
    """True if the shapes agree but for leading ones, which old files add."""
    significant = [tuple(dropwhile(lambda n: n == 1, array.shape)) for array in (mine, read)]
    return mine.size == read.size and significant[0] == significant[1]


def find_model(learned_net: str, state_path: str) -> str:
    """Return the model that a state names: the one beside the state, else as it is named, from the
    working directory; ConfigError if gone.
    """
    if not learned_net:
        raise ConfigError(
            "this state names no model, so there are no weights to go on with", state_path
        )
    folder = os.path.dirname(state_path)
    beside = [os.path.join(folder, name) for name in (os.path.basename(learned_net), learned_net)]
    for place in (*beside, learned_net):
        if os.path.isfile(place):
            if not os.path.exists(learned_net):
                log.info("%s does not exist; using %s", learned_net, place)
            elif not os.path.samefile(place, learned_net):
                log.info("Using %s beside the state, not %s", place, learned_net)
            return place
    raise ConfigError(
        f"its model {learned_net} exists neither beside it nor in the working directory",
        state_path,
    )


def sidecar_of(state_path: str) -> str:
    """Return the name of the sidecar of a state file that is named like one."""
    files = Files.of_state(state_path)
    assert files
    return files.sidecar


def read_sidecar(state_path: str) -> dict[str, Any] | None:
    """Read the sidecar that was written with this state, if any; ConfigError if it is damaged."""
    files = Files.of_state(state_path)
    content = sidecar.read(files.sidecar) if files else None
    if not files or not content:
        return None
    with sidecar.reading(files.sidecar):
        owner = str(content["state"]["name"])
    if owner != os.path.basename(state_path):
        log.warning("%s belongs to %s; it is ignored", files.sidecar, owner)
        return None
    return content


def verify(content: dict[str, Any], state_path: str, model_path: str) -> None:
    """Raise ConfigError unless state and model have the checksums in this sidecar."""
    for kind, path in (("state", state_path), ("model", model_path)):
        with sidecar.reading(sidecar_of(state_path)):
            expected = str(content[kind]["sha256"])
        _compare(path, expected)


def verify_model(path: str) -> None:
    """Raise ConfigError if a sidecar lies beside this model and has another checksum."""
    if match := MODEL_NAME.search(path):
        stem = path[: match.start("end")]
        model = sidecar.head(f"{stem}.caffepystate").get("model")
        if isinstance(model, dict) and model.get("name") == os.path.basename(path):
            _compare(path, str(model.get("sha256")))


def _compare(path: str, expected: str) -> None:
    if sidecar.checksum(path) != expected:
        raise ConfigError(
            "this file was damaged or changed after the snapshot was written; if that is on "
            "purpose, remove the .caffepystate file beside it",
            path,
        )


class Found(NamedTuple):
    """A snapshot that lies under a prefix; in their order, the newest is the last.

    `started` is when the part of a run that wrote it began; without a sidecar it is the time of the
    file. `begun` is when the first part did, and `run` the `identity` of the run; 0 and empty if
    they are not known.
    """

    started: float
    iteration: int
    written: float
    state: str
    run: dict[str, Any]
    begun: float


def under(prefix: str) -> list[Found]:
    """Return the snapshots under a prefix, the newest first."""
    found = []
    for path in glob(f"{glob_escape(prefix)}_iter_*.solverstate*"):
        files = Files.of_state(path)
        if files and files.prefix == prefix:
            written = os.lstat(path).st_mtime
            content = sidecar.head(files.sidecar)
            started, run, begun = written, {}, 0.0
            with suppress(KeyError, TypeError, ValueError):
                if content["state"]["name"] == os.path.basename(path):
                    started, run = float(content["started"]), dict(content["run"])
                    begun = float(content["begun"])
            found.append(Found(started, files.iteration, written, path, run, begun))
    return sorted(found, key=lambda snapshot: snapshot[:4], reverse=True)


def write_elsewhere(
    files: Files, write: Callable[[Files], object], folder: str = ""
) -> Files | None:
    """Write files in a new folder, in the working directory or where temporary files are, and
    return their names; None if that fails, too. Names are relative to `folder`.
    """
    for place in (folder, None):
        new = ""
        try:
            new = mkdtemp(prefix=_rescued(os.path.join(folder, files.prefix)), dir=place)
            name = os.path.join(new, os.path.basename(files.prefix))
            write(rescued := Files.of(name, files.iteration, files.hdf5))
        except (CaffeError, OSError):
            shutil.rmtree(new, ignore_errors=True)
        else:
            return rescued
    return None


def _rescued(prefix: str) -> str:
    """Return how names of folders begin to which snapshots of this prefix are rescued."""
    place = hashlib.sha256(os.fsencode(os.path.abspath(prefix))).hexdigest()[:8]
    return f"{os.path.basename(prefix)[:40]}_rescued_{place}_"


def is_rescued(path: str, prefix: str) -> bool:
    """True if this state file lies in a folder of `write_elsewhere` of this prefix."""
    return os.path.basename(os.path.dirname(path)).startswith(_rescued(prefix))


def candidates(prefix: str) -> list[Found]:
    """Return the snapshots under a prefix, and those of `write_elsewhere` that are this user's, the
    newest first.
    """
    found = under(prefix)
    for rescued in _rescued_prefixes(prefix):
        found += under(rescued)
    return sorted(found, key=lambda snapshot: snapshot[:4], reverse=True)


def _rescued_prefixes(prefix: str) -> list[str]:
    """Return the prefixes of snapshots in this user's folders of `write_elsewhere`."""
    found, places = list[str](), [""]
    with suppress(OSError):  # there is no such folder where nothing can be written
        places.append(gettempdir())
    for place in places:
        for folder in glob(os.path.join(glob_escape(place), f"{glob_escape(_rescued(prefix))}*")):
            with suppress(OSError):
                if os.lstat(folder).st_uid == os.getuid():
                    found.append(os.path.join(folder, os.path.basename(prefix)))
    return found


def instead_of(path: str) -> str:
    """Return words on the snapshot that a user may want whose state file `path` is not there: the
    newest under its prefix, else the one whose name is nearest.
    """
    files = Files.of_state(path)
    if files and (found := under(files.prefix)):
        return f"; the newest under {files.prefix} is {found[0].state}"
    states = glob(os.path.join(glob_escape(os.path.dirname(path)), "*_iter_*.solverstate*"))
    return nearest(path, sorted(states))


def remove_old(prefix: str, begun: float, keep: int) -> None:
    """Remove all but the newest `keep` snapshots of the run that began then; the state goes first,
    since it stands for the others.
    """
    ours = [snapshot for snapshot in under(prefix) if snapshot.begun == begun]
    for files in map(Files.of_state, (snapshot.state for snapshot in ours[keep:])):
        for path in (files.state, files.sidecar, files.model) if files else ():
            try:
                os.unlink(path)
            except OSError as error:
                log.warning("%s, an old snapshot, cannot be removed: %s", path, reason(error))


def check_models(prefix: str, weights: Sequence[str]) -> None:
    """Raise ConfigError if a model lies under a prefix without states and is not among `weights`:
    a run from scratch may overwrite it.
    """
    known = {os.path.realpath(path) for path in weights}
    for path in sorted(glob(f"{glob_escape(prefix)}_iter_*.caffemodel*")):
        match = MODEL_NAME.search(path)
        if match and path[: match.start()] == prefix and os.path.realpath(path) not in known:
            raise ConfigError(
                f"no snapshot can be resumed: {path} is there, but not its .solverstate; bring "
                "that back, or give the model as --weights, or move it away to start from scratch"
            )


def newest_good(prefix: str, run: Mapping[str, Any] | None = None) -> str | None:
    """Return the state file of the newest snapshot under the prefix, or rescued from there, that is
    of this run, if given, and not damaged; None if there is no snapshot.

    Others are skipped, with a line in the log; ConfigError if there are only such.
    """
    found = candidates(prefix)
    others = []
    for snapshot in found:
        if run and snapshot.run and (differs := difference(run, snapshot.run)):
            others.append(f"{snapshot.state} is of another run, with {differs}")
            log.warning("%s; it is skipped", others[-1])
            continue
        if is_whole(snapshot.state):
            return snapshot.state
    if others:
        raise ConfigError(
            f"no snapshot under {prefix} is of this run: {others[0]}; give it as --snapshot to go "
            "on from it all the same, or set another snapshot_prefix"
        )
    if found:
        raise ConfigError(
            f"none of the {len(found)} snapshot(s) under {prefix} is whole; remove them to start "
            "from scratch"
        )
    return None


def is_whole(path: str) -> bool:
    """True if the snapshot of this state file is not damaged, else a line in the log says why."""
    try:
        content, state = read_sidecar(path), read_state(path)
        model = find_model(state.learned_net, path)
        if content:
            verify(content, path, model)
        elif binary.sniff(model) == "HDF5":
            check_hdf5(model)
        else:
            binary.read_net(model)
    except CaffeError as error:
        log.warning("%s cannot be resumed from: %s", path, error)
        return False
    return True


def warn_of_earlier(prefix: str) -> None:
    """Log a warning if snapshots lie under the prefix of a run that starts at iteration 0."""
    if found := under(prefix):
        log.warning(
            "This run starts at iteration 0, but %d snapshot(s) of an earlier one lie under %s, "
            "the newest is %s; those of the same iterations are overwritten. --snapshot auto goes "
            "on from them; another snapshot_prefix keeps them",
            *(len(found), prefix, found[0].state),
        )
