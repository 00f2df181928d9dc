"""The record of a running cluster on this machine: what `up` wrote and `status`, `generate`, `down` read.

$XDG_STATE_HOME/pdserve/<name>/     (default ~/.local/state/pdserve; mode 0700)
    cluster.json                    the record
    lock                            held by the `up` or `down` that is at work
    secret                          what every call between the cluster's parts shows; mode 0600
    targets.json, control.json      the controller's own: what was asked for last, and where it serves
    router-0.json …                 each router's configuration
    router-0.sock …                 where it serves this user's commands, if its ports want keys or TLS
    logs/                           one file for each of our processes, kept after `down`
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.errors import StateError
from cluster.nodes.processes import ProcessId, family
from router.bind import unix_target

_LOCK = "lock"


class ClusterRecord(BaseModel):
    """Written before the first process starts, and again as more is known."""

    model_config = ConfigDict(frozen=True)

    name: str
    router: str  # host:port
    # Of all replicas.
    routers: tuple[str, ...] = ()
    # Whether keys or certificates have to be shown at the routers' ports.
    is_guarded: bool = False
    ray_address: str | None = None
    # A Ray of ours: its folder, and the Unix session that all its processes are in.
    ray_folder: Path | None = None
    session: ProcessId | None = None
    processes: tuple[ProcessId, ...] = ()
    # Where `up` ran: a home folder may be that of several machines.
    host: str = Field(default_factory=socket.gethostname)

    @property
    def owns_ray(self) -> bool:
        return self.ray_folder is not None

    def doors(self) -> tuple[str, ...]:
        """Where commands of this user reach the routers, without keys and TLS."""
        routers = self.routers or (self.router,)
        if not self.is_guarded:
            return routers
        folder = state_root() / self.name
        return tuple(unix_target(router_socket(folder, index)) for index in range(len(routers)))

    def is_running(self) -> bool:
        """Of a foreign Ray nothing is known here: its clusters run until `down`."""
        return not self.owns_ray or bool(family(self.processes, self.session))

    @property
    def is_elsewhere(self) -> bool:
        """Whether our Ray is another machine's, as far as can be told."""
        is_of_another_boot = self.session is not None and not self.session.is_of_this_boot
        return is_of_another_boot and self.host != socket.gethostname()

    def refuse_elsewhere(self) -> None:
        """Raises StateError where our Ray is another machine's: it reads what is in the cluster's folder."""
        if not self.is_elsewhere:
            return
        raise StateError(
            f'the cluster "{self.name}" was started on {self.host}, with which this machine shares '
            f"{state_root()}: end it there, or give this one another name. If {self.host} is no more: "
            f"rm -r {state_root() / self.name}"
        )


def state_root() -> Path:
    """Raises StateError."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return Path(base).expanduser() / "pdserve"
    except RuntimeError as error:
        raise StateError("there is no home folder for the state of clusters: set XDG_STATE_HOME") from error


def cluster_folder(name: str) -> Path:
    folder = state_root() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(name: str) -> Iterator[Path]:
    """The cluster's folder, for one `up` or `down` at a time. Raises StateError if another is at work.

    A folder in which nothing is left but the lock goes with it.
    """
    with _locked_file(name) as folder:
        try:
            yield folder
        finally:
            if [path.name for path in folder.iterdir()] == [_LOCK]:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked_file(name: str) -> Iterator[Path]:
    while True:
        folder = cluster_folder(name)
        with open(folder / _LOCK, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                told = f'another command is just starting or ending the cluster "{name}"'
                raise StateError(told) from error
            # Its holder may have removed it between our opening and our locking.
            if _is_at(lock.fileno(), folder / _LOCK):
                yield folder
                return


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def fresh_folder(folder: Path) -> None:
    """Forget what an earlier cluster of this name left."""
    clear_folder(folder, keep_logs=False)
    (folder / "logs").mkdir(mode=0o700)


def clear_folder(folder: Path, keep_logs: bool) -> bool:
    """Logs are kept only where somebody has written something; the answer says whether."""
    routers = (path.name for ending in ("json", "sock") for path in folder.glob(f"router-*.{ending}"))
    for name in ("cluster.json", "secret", "targets.json", "control.json", *routers):
        (folder / name).unlink(missing_ok=True)
    logs = folder / "logs"
    if keep_logs and any(path.stat().st_size for path in logs.glob("*")):
        return True
    shutil.rmtree(logs, ignore_errors=True)
    return False


def control_file(folder: Path) -> Path:
    """Where the controller that is there says where it serves: {"address": host:port}."""
    return folder / "control.json"


def router_file(folder: Path, index: int) -> Path:
    return folder / f"router-{index}.json"


def router_socket(folder: Path, index: int) -> Path:
    return folder / f"router-{index}.sock"


def write_record(record: ClusterRecord) -> None:
    write_whole(cluster_folder(record.name) / "cluster.json", record.model_dump_json(indent=2))


def write_whole(path: Path, text: str) -> None:
    """All or nothing: a reader never sees half a file."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def read_record(name: str) -> ClusterRecord | None:
    """Raises StateError."""
    folder = state_root() / name
    try:
        return ClusterRecord.model_validate_json((folder / "cluster.json").read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise StateError(
            f"{folder / 'cluster.json'} is damaged, or of another version of pdserve: end the cluster with "
            f"that one. If nothing of it runs any more: rm -r {folder} ({error})"
        ) from error


def forget(name: str) -> None:
    """That it runs, and its secret, which opens nothing any more."""
    for each in ("cluster.json", "secret"):
        (state_root() / name / each).unlink(missing_ok=True)


def running_clusters() -> list[ClusterRecord]:
    """A record that cannot be read, such as another version's, is in nobody's way; StateError only where no
    other cluster runs.
    """
    running, error = _running()
    if error is not None and not running:
        raise error
    return running


def _running() -> tuple[list[ClusterRecord], StateError | None]:
    """And what there is to say of the first record that cannot be read."""
    root, running, first = state_root(), [], None
    for name in sorted(folder.name for folder in root.iterdir()) if root.is_dir() else ():
        try:
            record = read_record(name)
        except StateError as error:
            first = first or error
            continue
        if record is not None and record.is_running():
            running.append(record)
    return running, first


def find_cluster(name: str | None) -> ClusterRecord:
    """The one of that name, or the only one that runs. Raises StateError."""
    if name is not None:
        named = read_record(name)
        if named is not None and named.is_running():
            return named
        names = ", ".join(record.name for record in _running()[0])
        raise StateError(f'no cluster "{name}" runs here' + (f"; these do: {names}" if names else ""))
    running = running_clusters()
    if len(running) == 1:
        return running[0]
    if running:
        names = ", ".join(record.name for record in running)
        raise StateError(f"several clusters run ({names}); choose one by name")
    raise StateError("no cluster runs here; start one with: pdserve up cluster_configs/local-cpu.yaml")
