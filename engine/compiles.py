"""torch's compiler at work: a step may meet a shape that has still to be compiled, which takes long."""

from __future__ import annotations

from torch._dynamo.callback import callback_handler

from engine.progress import Progress


def tell_compiles(progress: Progress) -> None:
    """From now on, of every one in this process."""
    callback_handler.register_start_callback(lambda _: progress.compile_began())
    callback_handler.register_end_callback(lambda _: progress.compile_ended())
