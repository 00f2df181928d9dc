"""A log line in both formats: whole on one line, its fields apart, whatever a client calls its request."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from observability.config import LogFormat, LogLevel, ObservabilityConfig
from observability.logs import fields, log_by, message_of

log = logging.getLogger("tests.lines")
FORGED = "x\n2026 INFO router FINISHED request_id=you"


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = before
    root.setLevel(level)


def lines(format: LogFormat, level: LogLevel = LogLevel.INFO) -> io.StringIO:
    written = io.StringIO()
    log_by(logging.StreamHandler(written), ObservabilityConfig(log_format=format, log_level=level))
    return written


def test_text_has_the_fields_behind_the_message_and_none_that_is_not_known(root: logging.Logger) -> None:
    written = lines(LogFormat.TEXT)
    known = fields(request_id="mine", transfer_id="ab/1", worker=None, trace_id="0f", _private=1)
    log.info("QUEUED %d", 7, extra=known)
    (line,) = written.getvalue().splitlines()
    assert line.endswith("QUEUED 7 request_id=mine transfer_id=ab/1 trace_id=0f")
    assert " INFO tests.lines pid=" in line


def test_json_is_one_object_a_line(root: logging.Logger) -> None:
    written = lines(LogFormat.JSON)
    log.info("QUEUED %d", 7, extra=fields(request_id=FORGED, num_tokens=3))
    try:
        raise ValueError("a\nb")
    except ValueError:
        log.exception("broke")
    first, second = map(json.loads, written.getvalue().splitlines())
    assert (first["message"], first["request_id"], first["num_tokens"]) == ("QUEUED 7", FORGED, 3)
    assert (first["level"], first["logger"]) == ("INFO", "tests.lines")
    assert first["timestamp"].endswith("+00:00")
    assert second["exc_info"].endswith("ValueError: a\nb")


def test_a_request_id_cannot_forge_a_line_or_a_field(root: logging.Logger) -> None:
    written = lines(LogFormat.TEXT)
    log.info("QUEUED", extra=fields(request_id=FORGED))
    log.info("QUEUED", extra=fields(request_id="x worker=evil"))
    first, second = written.getvalue().splitlines()
    assert first.endswith(f"QUEUED request_id={FORGED!r}")
    assert second.endswith("QUEUED request_id='x worker=evil'")


def test_the_level_is_the_one_that_was_set(root: logging.Logger) -> None:
    written = lines(LogFormat.TEXT, LogLevel.WARNING)
    log.info("not told")
    log.warning("told")
    assert "not told" not in written.getvalue()
    assert "told" in written.getvalue()


def test_debug_is_for_every_part_of_ours_and_no_library(root: logging.Logger) -> None:
    written = lines(LogFormat.TEXT, LogLevel.DEBUG)
    root_folder = Path(__file__).parents[3]
    project = (root_folder / "pyproject.toml").read_text()
    packages = re.findall(r"^packages = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)[0]
    names = re.findall(r'"([^"]+)"', packages)
    ours = [name for name in names if any((root_folder / name.replace(".", "/")).glob("*.py"))]
    assert len(ours) > 20
    for name in (*ours, "grpc._cython", "asyncio", "routers"):
        logging.getLogger(name).debug("low of %s", name)
        logging.getLogger(name).info("high of %s", name)
    told = [line.split(" of ")[1] for line in written.getvalue().splitlines() if " low of " in line]
    assert told == ours
    for name in (*ours, "grpc._cython", "asyncio", "routers"):
        assert f" high of {name}\n" in written.getvalue()


@pytest.mark.parametrize("format", LogFormat)
def test_what_a_line_says_can_be_told_to_people(format: LogFormat, root: logging.Logger) -> None:
    written = lines(format)
    log.error("cannot serve: %s", "no port", extra=fields(worker="p"))
    said = message_of(written.getvalue().strip())
    assert "cannot serve: no port" in said
    assert "{" not in said
    assert message_of("7") == "7"
