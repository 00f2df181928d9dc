"""`down` as one sequence: what `up` recorded ends, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable

import grpc

from cluster.errors import PartError, StateError
from cluster.nodes.local_ray import QUIET, remove_folder
from cluster.nodes.processes import end
from cluster.state import ClusterRecord, forget, locked, state_root
from cluster.undisturbed import undisturbed
from kv_transfer.socket_folder import remove_left_overs

# For the router to refuse new requests and everybody to close; Ray's own processes take ever so long.
GRACE_S = 1.5


def down(record: ClusterRecord, tell: Callable[[str], None]) -> None:
    """Raises StateError if something will not end. `tell` answers Ctrl-C; the third one raises
    KeyboardInterrupt, and the record stays: another `down` ends the rest."""
    with locked(record.name), undisturbed(tell):
        end_cluster(record)


def end_cluster(record: ClusterRecord) -> None:
    """A Ray of ours with all that runs under it; in a foreign one this cluster's actors. Raises StateError if
    something stays.
    """
    record.refuse_elsewhere()
    if record.owns_ray:
        left = end(record.processes, record.session, GRACE_S)
        if left:
            raise StateError(f"still running: {', '.join(f'{p.name()} (pid {p.pid})' for p in left)}")
        if record.ray_folder is not None:
            remove_folder(record.ray_folder)
        remove_left_overs()  # workers end without having time for it
    elif record.ray_address is not None:
        _end_guest(record.name, record.ray_address)
    forget(record.name)


def _end_guest(name: str, ray_address: str) -> None:
    """Our actors in a Ray that is not ours. With a Ray that is gone they are gone too."""
    os.environ.update(QUIET)
    from cluster.actors.handles import connected, end_actors  # Ray is loaded only where it is needed

    try:
        with connected(ray_address):
            end_actors(name)
    except PartError as error:
        if isinstance(error.__cause__, ConnectionError):
            return
        if not isinstance(error.__cause__, OSError | grpc.FutureTimeoutError):
            raise
        gone = f"if it is gone for good: rm -r {state_root() / name}"
        raise PartError(f"{str(error).rstrip('.')} ({gone})") from error
