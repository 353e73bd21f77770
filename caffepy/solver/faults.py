"""Reactions of a solver to errors: nothing of this happens in a run that goes well.

An error in a step stops the workers. If training as one failed, or data are bad, the snapshot that
the run owes is written before the run ends; a device whose memory cannot be read makes that
impossible, and the error says what is left.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from caffepy.core.errors import CaffeError, DataError, DivergenceError, LostDeviceError
from caffepy.solver.divergence import LostBlobsError, first_blob
from caffepy.solver.iteration import Iterations
from caffepy.solver.positions import set_positions, take_positions
from caffepy.solver.resume_state import ResumeState
from caffepy.solver.signals import StopError
from caffepy.solver.worker_group import WorkerGroup

log = logging.getLogger(__name__)


@contextmanager
def stopping_workers(iterations: Iterations) -> Iterator[None]:
    """A block of iterations: after an error, stop the workers and raise its root cause."""
    step, workers = iterations.step, iterations.trainer.workers
    try:
        yield
    except BaseException as error:
        try:
            if not step.device.lost and (isinstance(error, CaffeError) or workers.failed):
                iterations.collect(wait=True)  # an error of an earlier iteration comes first
        finally:
            iterations.interrupted = True
        if isinstance(error, LostBlobsError) and type(workers) is WorkerGroup:
            _name_blob(error, iterations)
        cause = workers.root_cause(error) if isinstance(error, Exception) else error
        workers.stop(cause)
        if step.begun:
            with suppress(Exception):  # of a device that failed, say
                step.restore_stats()
        if cause is not error:
            raise cause from error
        raise


def _name_blob(error: LostBlobsError, iterations: Iterations) -> None:
    """Run forward again, step by step, from where the iteration that diverged began, to name the
    first blob that is not finite. Parameters are as they were, since nothing was updated; positions
    and running statistics are restored. Code of the user is not run again, and whatever fails here
    leaves the error as it is.
    """
    step, net = iterations.step, iterations.step.net
    if any(layer.may_modify_gradients for layer in net.layers):
        return
    device, positions = step.device, iterations.positions()
    now, writes_files = take_positions([net], device), device.writes_files
    device.writes_files = False
    try:
        with suppress(Exception):
            set_positions(positions, [net], device)
            for _ in range(step.param.iter_size):
                if blob := first_blob(net, step.graphs.eager_steps):
                    error.name_blob(blob)
                    break
    finally:
        device.writes_files = writes_files
        with suppress(Exception):
            step.restore_stats()
            set_positions(now, [net], device)


@contextmanager
def saving_what_was_learned(resume_state: ResumeState) -> Iterator[None]:
    """A block that trains: after an error, write the snapshot that the run owes."""
    device, workers = resume_state.iterations.step.device, resume_state.iterations.trainer.workers
    try:
        yield
    except Exception as error:
        if not device.lost and not isinstance(error, DivergenceError):
            save_before_failing(resume_state, error)
        if device.lost:
            lost = [each for each in (device, *workers.devices) if each.lost]
            names = " and ".join(f"GPU {each.index}" for each in lost)
            left = "is lost; set snapshot in the solver to lose less the next time"
            if last := resume_state.last_file:
                left = f"after the last snapshot is lost; go on from that with --snapshot {last}"
            raise LostDeviceError(
                f"{names} failed ({device.lost}), and the memory cannot be read any more: what was "
                f"learned {left}"
            ) from error
        raise
    except StopError as error:
        save_before_failing(resume_state, error)
        raise


def rescue(resume_state: ResumeState, error: BaseException) -> None:
    """Write the snapshot that the run owes, if the state is consistent, from any thread."""
    resume_state.iterations.trainer.workers.stop(error)
    with suppress(Exception), resume_state.iterations.step.device.scope():
        resume_state.iterations.collect(wait=True)
    save_before_failing(resume_state, error)


def save_before_failing(resume_state: ResumeState, error: BaseException) -> None:
    """Write the snapshot that the run owes, of its last complete iteration."""
    with resume_state.lock:  # the main thread may answer after all while another one saves
        _save_before_failing(resume_state, error)


def _save_before_failing(resume_state: ResumeState, error: BaseException) -> None:
    step, iteration = resume_state.iterations.step, resume_state.iterations.iter
    wanted = step.param.snapshot > 0 or step.param.snapshot_after_train
    if isinstance(error, StopError):
        wanted = error.saves or step.param.snapshot_after_train
    learned_more = iteration != resume_state.started_at and not resume_state.saved_now
    if not (wanted and learned_more and step.whole):
        return
    if step.begun:
        step.restore_stats()
    what = "The data failed" if isinstance(error, DataError) else "A solver failed"
    what = str(error) if isinstance(error, StopError) else what
    if resume_state.iterations.trainer.workers.writes_files:
        text = "%s; what was learned up to iteration %d is saved before the run ends"
        log.warning(text, what, iteration)
    try:
        resume_state.save(last=True)
    except Exception as error:  # the error that ends the run is the one to raise
        log.error("No snapshot of iteration %d: %s", iteration, error)
