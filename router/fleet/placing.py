"""Puts the placement policy to work: views of the table in, an attempt's workers and their charges out."""

from __future__ import annotations

from pdserve.v1.errors import DeadlineExceeded, PdserveError, Unavailable
from router.attempt import Attempt
from router.fleet.placement import choose_colocated, choose_prefill, rank_decode
from router.fleet.worker import Worker
from router.fleet.worker_info import Role
from router.fleet.workers import Route, WorkerTable
from router.seen_prefixes import SeenPrefixes
from router.tokens import PrefillReport


class Placing:
    def __init__(self, table: WorkerTable, backlog_limit: int) -> None:
        self._table = table
        self._backlog_limit = backlog_limit
        self._seen = SeenPrefixes()

    def place(self, attempt: Attempt) -> bool:
        """Give the attempt its prefill worker, if one can start it soon, and charge that worker."""
        instance_id = self._choose(attempt)
        if instance_id is None:
            return False
        worker = self._table.get(instance_id)
        worker.holdings.charges[attempt.key] = attempt.num_tokens
        self._table.chosen(worker)
        attempt.prefill_worker = worker
        return True

    def hopeless(self) -> PdserveError | None:
        """Why waiting is in vain, by the controller's word."""
        reason = self._table.unrecoverable_reason
        return None if reason is None else Unavailable(reason, reason="POOL_UNRECOVERABLE")

    def note_prefill(self, attempt: Attempt, report: PrefillReport) -> None:
        """Its first token is here."""
        self._seen.note(attempt.request.plan.prompt_token_ids)
        if attempt.prefill_worker is not None:
            num_computed = attempt.num_tokens - report.cached_tokens
            attempt.prefill_worker.pace.note(num_computed, report.prefill_ms / 1000)

    def too_late(self, attempt: Attempt) -> PdserveError | None:
        """Why its first token cannot come in time any more, by the pace of the workers that are there.

        Of one that ran before nothing is said: what it had is in caches.
        """
        left_s = attempt.request.deadline.left_s
        if left_s == 0.0:
            return DeadlineExceeded("its time is over before it could begin")
        if attempt.request.num_attempts > 1:
            return None
        prompt = attempt.request.plan.prompt_token_ids
        if self._least_s(len(prompt)) <= left_s:
            return None
        least_s = self._least_s(len(prompt) - self._seen.num_tokens(prompt))
        if least_s <= left_s:
            return None
        told = f"{len(prompt)} prompt tokens take at least {least_s:.1f} s here, and {left_s:.1f} s are left"
        return DeadlineExceeded(told, reason="DEADLINE_TOO_SHORT")

    def _least_s(self, num_tokens: int) -> float:
        role = Role.COLOCATED if self._table.route is Route.COLOCATED else Role.PREFILL
        workers = self._table.usable(role)
        return min(
            (each.pace.least_s(num_tokens, not each.holdings.charges) for each in workers), default=0.0
        )

    def uncached_tokens(self, attempt: Attempt) -> int:
        """Of those to be prefilled, the ones that are not known to lie in the cache of a prefill worker: one
        that had this prompt, for another of n sequences or for an attempt before, has it still.
        """
        request = attempt.request
        had_it = request.affinity.prefill_instance
        if had_it is None or had_it in request.avoid or not self._table.can_use(had_it):
            return attempt.num_tokens
        return 1 + len(attempt.known_token_ids)

    def decode_candidates(self, attempt: Attempt) -> list[Worker]:
        """Best first. For the colocated route the one worker that was chosen for both phases."""
        chosen = attempt.prefill_worker
        if chosen is not None and chosen.info.role is Role.COLOCATED:
            return [chosen] if chosen.is_usable else []
        views = [worker.decode_view() for worker in self._table.usable(Role.DECODE)]
        request = attempt.request
        ranked = rank_decode(views, prefer=request.affinity.decode_instance, avoid=request.avoid)
        return [self._table.get(instance_id) for instance_id in ranked]

    def _choose(self, attempt: Attempt) -> str | None:
        request, num_tokens, limit = attempt.request, attempt.num_tokens, self._backlog_limit
        prefer, avoid = request.affinity.prefill_instance, request.avoid
        if self._table.route is Route.DISAGGREGATED and self._table.usable(Role.DECODE):
            views = [worker.prefill_view() for worker in self._table.usable(Role.PREFILL)]
            return choose_prefill(views, num_tokens, limit, prefer=prefer, avoid=avoid)
        if self._table.route is Route.COLOCATED:
            workers = self._table.usable(Role.COLOCATED)
            prefills = [worker.prefill_view() for worker in workers]
            decodes = [worker.decode_view() for worker in workers]
            return choose_colocated(prefills, decodes, num_tokens, limit, prefer=prefer, avoid=avoid)
        return None
