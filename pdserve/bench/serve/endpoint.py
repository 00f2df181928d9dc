"""Where an OpenAI-compatible server is, and how it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Api(Enum):
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url` is the server's, with or without /v1. `model` None: the first that it lists."""

    url: str
    api: Api = Api.COMPLETIONS
    model: str | None = None
    api_key: str | None = None
    # Put into every request's body, over what stands there.
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"

    @property
    def path(self) -> str:
        return f"{self.base}/{'completions' if self.api is Api.COMPLETIONS else 'chat/completions'}"
