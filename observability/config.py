"""The `observability` section of the cluster's YAML: what every process logs, and where its traces go."""

from __future__ import annotations

import re
from enum import Enum
from importlib.util import find_spec
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

_ENDPOINT = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")


class LogFormat(Enum):
    TEXT = "text"
    # One JSON object a line.
    JSON = "json"


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class TraceProtocol(Enum):
    """OTLP's two transports."""

    GRPC = "grpc"
    HTTP = "http"


def _checked_endpoint(endpoint: str) -> str:
    if _ENDPOINT.fullmatch(endpoint) is None:
        raise ValueError("must be a URL like http://127.0.0.1:4317")
    return endpoint


class TracesConfig(BaseModel):
    """Where spans go. Refused where the extra is not installed: better than traces that never come."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # A collector that speaks OTLP. Over http:// nothing is encrypted.
    endpoint: Annotated[str, AfterValidator(_checked_endpoint)]
    protocol: TraceProtocol = TraceProtocol.GRPC
    # Of requests whose client has not decided: how many are traced.
    sample_ratio: float = Field(default=1.0, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _can_export(self) -> TracesConfig:
        if not _is_installed(f"opentelemetry.exporter.otlp.proto.{self.protocol.value}"):
            raise ValueError(
                "traces need OpenTelemetry, which is not installed: pip install 'pdserve[otel]', "
                "or leave the endpoint out"
            )
        return self


class ObservabilityConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    # None: no spans are made, and nothing of OpenTelemetry is imported.
    traces: TracesConfig | None = None
    log_format: LogFormat = LogFormat.TEXT
    log_level: LogLevel = LogLevel.INFO


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even what it would be in
        return False
