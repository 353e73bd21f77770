"""ResumeState: saves what a run needs to continue exactly, and restores it.

`snapshot` reads and writes the files, `positions` knows the data layers and random numbers.
"""

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from caffepy.core.errors import CaffeError, ConfigError, DivergenceError
from caffepy.device.blob import Array
from caffepy.net.weights import load_weights
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.proto.text import format as format_text
from caffepy.solver import snapshot
from caffepy.solver.divergence import check_history, check_params
from caffepy.solver.iteration import Iterations
from caffepy.solver.positions import (
    compare_layers,
    set_positions,
    take_positions,
    warn_of_layers,
)
from caffepy.solver.sidecar import reading
from caffepy.solver.statistics import mean

log = logging.getLogger(__name__)


class ResumeState:
    """The snapshots of a solver: saved, restored, owed."""

    def __init__(self, iterations: Iterations, run: dict[str, Any], folder: str) -> None:
        self.iterations = iterations
        self.run = run  # the identity of the run
        self._folder = folder  # that names are relative to, wherever layers change to
        self._started = time.time()  # when this part of the run began, in its sidecars
        self._begun = self._started  # the same of its first part
        self.keep: int | None = None  # number of snapshots of this run to keep; None: all
        self.started_at = 0  # the iteration of the state that was restored
        self.rescued = False  # it lies in a folder of `snapshot.write_elsewhere`
        self.workers_positions: list[dict[str, Any]] = []  # of the workers in that state
        self.images = 0  # in an iteration of all solvers that wrote that state, 0 if unknown
        self.statistics: list[list[Array]] = []  # of each solver in that state, if of several
        self.group: dict[str, Any] = {}  # of the workers' group in that state
        self.lock = threading.Lock()  # of `faults`, which may save from any thread
        self._restored_from: str | None = None
        self._saved: tuple[int, str] | None = None  # iteration and state file of the last snapshot
        self._failed_at = -1  # the iteration at which writing a snapshot failed

    @property
    def saved_now(self) -> str | None:
        """The state file that was written at this iteration, if any."""
        return self._saved[1] if self._saved and self._saved[0] == self.iterations.iter else None

    @property
    def failed_now(self) -> bool:
        """True if writing a snapshot at this iteration failed."""
        return self._failed_at == self.iterations.iter

    @property
    def rescued_now(self) -> bool:
        """True if the state that was restored is of this iteration and one that was rescued."""
        return self.rescued and self.started_at == self.iterations.iter

    @property
    def last_file(self) -> str | None:
        """The state file to resume from, if any: the last one written, else the one restored."""
        return self._saved[1] if self._saved else self._restored_from

    def before(self, iteration: int) -> list[str]:
        """Return the state files of this run, as they were written or restored, of iterations
        before this one, the last first.
        """
        is_earlier = (self._saved[0] if self._saved else self.started_at) < iteration
        last = [self.last_file] if is_earlier and self.last_file else []
        found = snapshot.under(self.iterations.step.param.snapshot_prefix)
        ours = [f.state for f in found if f.begun == self._begun and f.iteration < iteration]
        return [*last, *(state for state in ours if state not in last)]

    def save(self, last: bool = False) -> None:
        """Write model, sidecar and state; ConfigError if that fails, DivergenceError if a parameter
        or its history is not finite.

        If that of the `last` snapshot of a run fails, on a full disk, say, the files are written to
        a new folder, in the working directory or among temporary files, which the error names.
        """
        iterations, step = self.iterations, self.iterations.step
        workers = iterations.trainer.workers
        with self._settled() as statistics:
            self._write(statistics, last)
            if self.keep and workers.writes_files:
                prefix = os.path.join(self._folder, step.param.snapshot_prefix)
                snapshot.remove_old(prefix, self._begun, self.keep)

    def take(self) -> tuple[snapshot.State, dict[str, Any]]:
        """Return what the state file and the sidecar of a snapshot would have now; the arrays are
        the solver's own where it is on the CPU. It raises what `save` raises.
        """
        with self._settled() as statistics:
            return self._content(self._files(), statistics)

    @contextmanager
    def _settled(self) -> Iterator[list[list[Array]]]:
        """Return a block in which the solver has what a snapshot saves; of several solvers it
        yields the statistics of each.
        """
        iterations, step = self.iterations, self.iterations.step
        workers = iterations.trainer.workers
        step.phase_timer.stop()
        with workers.during("snapshot"):
            with step.device.scope():
                iterations.recover()
                iterations.collect(wait=True)
            statistics = workers.statistics.each(iterations.statistics.own)
            with iterations.statistics.replaced(mean(statistics)):
                yield statistics if statistics[1:] else []

    def _files(self) -> snapshot.Files:
        param = self.iterations.step.param
        hdf5 = param.snapshot_format == SolverParameter.HDF5
        return snapshot.Files.of(param.snapshot_prefix, self.iterations.iter, hdf5)

    def _write(self, statistics: list[list[Array]], last: bool) -> None:
        """Write the files; those of several solvers have the `statistics` of each, too."""
        step, files = self.iterations.step, self._files()
        workers, reporter = self.iterations.trainer.workers, self.iterations.trainer.reporter
        self._failed_at = files.iteration
        state, sidecar = self._content(files, statistics)
        announce, diff = reporter.snapshotted, step.param.snapshot_diff

        def write(files: snapshot.Files) -> None:
            snapshot.write(files, step.net, state, sidecar, diff, announce, self._folder)

        try:
            workers.write(lambda: write(files))
        except CaffeError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOSPC:
                error.message += self._room(files)
            if self.last_file:
                error.message += f"; {self.last_file} is the last one that is complete"
            if last:
                workers.write(partial(self._write_elsewhere, files, write, error))
            raise
        self._failed_at, self._saved = -1, (files.iteration, files.state)
        workers.saved(state, sidecar)

    def _room(self, files: snapshot.Files) -> str:
        step = self.iterations.step
        need = step.params.data.nbytes * (2 if step.param.snapshot_diff else 1)
        need += sum(flat.nbytes for flat in step.optimizer.history)
        folder = os.path.dirname(os.path.join(self._folder, files.prefix))
        try:
            free = shutil.disk_usage(folder).free
        except OSError:
            return ""
        return f" (a snapshot takes {need >> 10} KiB, and {free >> 10} KiB are free)"

    def _write_elsewhere(
        self, files: snapshot.Files, write: Callable[[snapshot.Files], None], error: CaffeError
    ) -> None:
        """Write files that could not be written, as `error` says, to a new folder and add its name
        to the message; if that fails, too, there is none.
        """
        if rescued := snapshot.write_elsewhere(files, write, self._folder):
            error.message += (
                f". This one is in {os.path.dirname(rescued.state)}: --snapshot {rescued.state}, "
                "or --snapshot auto from here, goes on from it"
            )

    def _content(
        self, files: snapshot.Files, statistics: list[list[Array]]
    ) -> tuple[snapshot.State, dict[str, Any]]:
        iterations, step = self.iterations, self.iterations.step
        workers, on_host = iterations.trainer.workers, step.device.on_host
        number, param = files.iteration, step.param
        check_params(step.net, number)
        history = [
            part for flat in step.optimizer.history for part in step.params.split(on_host(flat))
        ]
        check_history(step.net, number, history)
        state = snapshot.State(number, files.model, history, iterations.current_step)
        return state, {
            "type": param.type,
            "iteration": number,
            "run": self.run,
            "started": self._started,
            "begun": self._begun,
            "settings": format_text(param),
            "rate_factor": iterations.rate_factor,
            "plateau": iterations.plateau.state() if iterations.plateau.used else {},
            "positions": {**iterations.positions(), "workers": workers.positions()},
            "statistics": statistics,
            "images": iterations.trainer.images,
            "group": workers.state(),
            "control": step.update_state.state(),
            **iterations.display.state(number),
        }

    def try_to_save(self) -> None:
        """Write a snapshot; if that fails, log it and continue.

        DivergenceError is raised, and so is what has ended the run of the workers.
        """
        try:
            self.save()
        except DivergenceError:
            raise
        except CaffeError as error:
            if self.iterations.trainer.workers.failed:
                raise
            number = self.iterations.iter
            if self.iterations.trainer.workers.writes_files:
                log.error("No snapshot of iteration %d: %s; training goes on", number, error)

    def restore(self, path: str, stays: bool = True) -> None:
        """Continue from a snapshot; exactly, if its sidecar lies beside it. The run can go on from
        it later unless the file does not stay.
        """
        iterations, step = self.iterations, self.iterations.step
        with iterations.trainer.workers.restoring():
            state, content = snapshot.read_state(path), snapshot.read_sidecar(path) or {}
            if content:
                with reading(snapshot.sidecar_of(path)):
                    kind = str(content["type"])
                if kind != step.param.type:
                    raise ConfigError(
                        f"this state was written by a solver of type {kind}, but this one is "
                        f'{step.param.type}; set type: "{kind}", or give the model as weights to '
                        "start anew from it",
                        path,
                    )
            own: list[Array] = [
                part for flat in step.optimizer.history for part in step.params.split(flat)
            ]
            iterations.recover()
            snapshot.check_histories(state, own, step.param.type, path)
            model = snapshot.find_model(state.learned_net, path)
            if content:
                snapshot.verify(content, path, model)
                self._restore_sidecar(content, snapshot.sidecar_of(path))
            else:
                iterations.rate_factor = 1.0
            step.update_state.set_state(content.get("control", {}))
            filled = load_weights(step.net, model)
            log.info("SGDSolver: restoring history")
            with step.device.scope():
                for mine, read in zip(own, state.history, strict=True):
                    step.device.upload(np.asarray(read, mine.dtype).reshape(mine.shape), mine)
            with reading(snapshot.sidecar_of(path)):
                plateau = dict(content.get("plateau", {}))
                iterations.move_to(state.iteration, state.current_step, plateau)
            self.started_at = state.iteration
            self.rescued = snapshot.is_rescued(path, step.param.snapshot_prefix)
            self._saved, self._restored_from = None, path if stays else None
            learning = {step.net.nodes[param.layer].name for param in step.net.learnable}
            warn_of_layers(f"{model} has no weights for", learning - filled, "they start anew")
            if iterations.rate_factor != 1:
                message = "%s has a learning rate of %g times the solver's, after a divergence"
                log.info(message, path, iterations.rate_factor)
            if not content:
                iterations.display.reset()
                self.workers_positions, self.statistics, self.images = [], [], 0
                self.group = {}
                log.info(
                    "No .caffepystate file lies beside %s: data and random numbers start anew, as "
                    "in Caffe",
                    path,
                )

    def _restore_sidecar(self, content: dict[str, Any], path: str) -> None:
        """Restore positions and loss window; a sidecar that is damaged changes nothing."""
        nets, device = self.iterations.nets, self.iterations.step.device
        before = take_positions(nets, device)
        try:
            with reading(path):
                compare_layers(content["positions"], nets, path)
                workers = list(content["positions"].get("workers", []))
                statistics = [list(map(np.asarray, of)) for of in content.get("statistics", [])]
                mean(statistics)  # they are of one form
                factor = float(content.get("rate_factor", 1.0))
                if not 0 < factor <= 1:
                    raise ValueError(f"rate_factor {factor}")
                images = int(content.get("images", 0))
                # those of workers here, too: their threads must meet no damage
                for positions in (*filter(None, workers), content["positions"]):
                    set_positions(positions, nets, device)
                self.iterations.display.restore(content)
                self.workers_positions, self.statistics, self.images = workers, statistics, images
                self.group = dict(content.get("group", {}))
                self.iterations.rate_factor = factor
                # parts of a run follow each other even if the clock was set back
                self._started = max(time.time(), float(content.get("started", 0)))
                self._begun = float(content.get("begun", self._started))
        except CaffeError:
            set_positions(before, nets, device)
            raise
