"""The section says what is wrong with it at load; without the extra an endpoint is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from observability.config import LogFormat, ObservabilityConfig, TracesConfig
from observability.tracing import NO_TRACER, Service, make_tracer

ENDPOINT = "http://127.0.0.1:4317"


def test_nothing_is_traced_unless_asked_for() -> None:
    config = ObservabilityConfig()
    assert config.traces is None
    assert config.log_format is LogFormat.TEXT
    assert make_tracer(config.traces, Service("router", "test", "r")) is NO_TRACER


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://x:1", "http://", "http://a b", ""])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="must be a URL like"):
        TracesConfig(endpoint=endpoint)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_an_endpoint_without_the_extra_is_refused_in_words(protocol: str) -> None:
    section = {"traces": {"endpoint": ENDPOINT, "protocol": protocol}}
    assert ObservabilityConfig.model_validate(section).traces is not None
    complaint = said(
        "sys.modules['opentelemetry'] = None  # as if it were not installed\n"
        "from observability.config import ObservabilityConfig\n"
        f"try: ObservabilityConfig.model_validate({section})\n"
        "except ValueError as error: print(error)\n"
    )
    assert "which is not installed: pip install 'pdserve[otel]'" in complaint


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    """Of all that a router and a worker run."""
    code = (
        "import router.__main__, prefill_worker.worker, decode_worker.worker\n"
        "from observability.config import ObservabilityConfig\n"
        "from observability.tracing import Service, make_tracer\n"
        "make_tracer(ObservabilityConfig().traces, Service('router', 'c', 'i'))\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    assert said(code).strip() == "[]"


def said(code: str) -> str:
    """By a process of its own."""
    command = (sys.executable, "-c", f"import sys\n{code}")
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
