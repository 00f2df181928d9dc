"""A request's JSON body: of bounded size, of the right type, and checked by a pydantic model."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from pdserve.v1.errors import Cancelled, InvalidArgument, ResourceExhausted
from router.deadline import Deadline
from router.http.size import check_size

# A body that is not there by then is not on its way.
MAX_READ_S = 60.0

# Bodies up to this are taken however many others there are.
SMALL_BYTES = 1 << 16

M = TypeVar("M", bound=BaseModel)


class Room:
    """Bytes of all the bodies that are still coming: slow ones would otherwise pile up."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int, so_far: int) -> None:
        """`so_far`: of this body, these included. Raises ResourceExhausted; they are taken all the same."""
        self.num_bytes += num_bytes
        if so_far > SMALL_BYTES and self.num_bytes > self._max_bytes:
            raise ResourceExhausted("too many large bodies at once", reason="QUEUE_FULL", retry_after_s=1.0)

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


async def read_body(request: Request, kind: type[M], max_bytes: int, timeout_s: float, room: Room) -> M:
    """Raises InvalidArgument, which names the first field that is wrong; Cancelled; DeadlineExceeded;
    ResourceExhausted."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # A page of somebody else's could send any other type without its browser asking us first.
        raise InvalidArgument("the content-type must be application/json", reason="MEDIA_TYPE")
    async with Deadline(min(timeout_s, MAX_READ_S)):
        raw = await _read(request, max_bytes, room)
    await check_size(raw)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidArgument(_first_complaint(error)) from error


async def _read(request: Request, max_bytes: int, room: Room) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            room.take(len(chunk), num_bytes)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise Cancelled("the client closed the connection") from error
    finally:
        room.give_back(num_bytes)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> InvalidArgument:
    return InvalidArgument(
        f"the body is too large: at most {max_bytes} bytes are taken", reason="BODY_TOO_LARGE"
    )


def _first_complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return f"the body is no JSON: {first['msg']}"
    place = [str(part) for part in first["loc"]]
    if not place:
        return str(first["msg"])
    if place[0] == "prompt":
        return "prompt: is a string, a list of strings, a list of token ids, or a list of such lists"
    where = f" (at {'.'.join(place[1:])})" if len(place) > 1 else ""
    return f"{place[0]}: {first['msg']}{where}"
