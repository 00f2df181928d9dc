"""Blocks taken for sequences whose KV will be written from outside, until they join or it falls through.

    RESERVED ──claim──▶ (the sequence's)      RESERVED ──release──▶ gone
    RESERVED ──quarantine──▶ QUARANTINED ──release──▶ gone

This is the engine's side: blocks and places. Leases and states of the transfer are the decode worker's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.block_manager import BlockManager


@dataclass(frozen=True, slots=True)
class BlockReservation:
    reservation_id: int
    block_ids: tuple[int, ...]  # for prompt and known tokens
    num_cached_blocks: int  # the first so many hold their KV already and must not be written
    num_tokens: int
    will_grow: bool  # its sequence may need more blocks than these


class Reservations:
    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._next_id = 0
        self.num_growth_blocks = 0  # what those reserved may take next, when they run
        self._reserved: dict[int, BlockReservation] = {}
        self._quarantined: dict[int, BlockReservation] = {}

    @property
    def num_reserved(self) -> int:
        return len(self._reserved)

    def take(self, hits: list[int], num_new: int, num_tokens: int, will_grow: bool) -> BlockReservation:
        block_ids = tuple(self._blocks.reserve(hits, num_new))
        reservation = BlockReservation(self._next_id, block_ids, len(hits), num_tokens, will_grow)
        self._reserved[self._next_id] = reservation
        self.num_growth_blocks += will_grow
        self._next_id += 1
        return reservation

    def claim(self, reservation: BlockReservation) -> list[int]:
        """Its blocks, now the caller's. ValueError if it is not RESERVED."""
        if not self._end(reservation):
            raise ValueError(f"reservation {reservation.reservation_id} is gone")
        self._blocks.claim(reservation.block_ids[reservation.num_cached_blocks :])
        return list(reservation.block_ids)

    def quarantine(self, reservation: BlockReservation) -> None:
        """Only what may be written from outside is kept back; its cached blocks are let go."""
        if not self._end(reservation):
            return
        cached, new = _split(reservation)
        self._blocks.release(cached)
        self._blocks.quarantine(new)
        self._quarantined[reservation.reservation_id] = reservation

    def release(self, reservation: BlockReservation) -> None:
        """From either state; nothing to do if it is gone."""
        if self._end(reservation):
            self._blocks.release(list(reservation.block_ids))
        elif self._quarantined.pop(reservation.reservation_id, None) is not None:
            self._blocks.release(_split(reservation)[1])

    def _end(self, reservation: BlockReservation) -> bool:
        """It is RESERVED no longer; False if it was not."""
        was_reserved = self._reserved.pop(reservation.reservation_id, None) is not None
        self.num_growth_blocks -= was_reserved and reservation.will_grow
        return was_reserved

    def cached_blocks(self) -> Iterator[int]:
        for reservation in self._reserved.values():
            yield from _split(reservation)[0]

    def reserved_blocks(self) -> Iterator[int]:
        return _new_blocks(self._reserved.values())

    def quarantined_blocks(self) -> Iterator[int]:
        return _new_blocks(self._quarantined.values())


def _split(reservation: BlockReservation) -> tuple[list[int], list[int]]:
    cut = reservation.num_cached_blocks
    return list(reservation.block_ids[:cut]), list(reservation.block_ids[cut:])


def _new_blocks(reservations: Iterable[BlockReservation]) -> Iterator[int]:
    for reservation in reservations:
        yield from _split(reservation)[1]
