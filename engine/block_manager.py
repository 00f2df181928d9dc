"""Who uses which block of the KV pool. Counts and names only: it never touches the memory.

    FREE ──take──▶ HELD ──last release──▶ CACHED (its content is registered) or FREE (it is not)
    FREE ──reserve──▶ RESERVED ──claim──▶ HELD
                        │  └─────release──▶ FREE
                        └─quarantine─▶ QUARANTINED ──release──▶ FREE
    CACHED ──prefix hit──▶ HELD      CACHED ──evicted, oldest first──▶ FREE

A block that several sequences read is HELD once with as many references. RESERVED and QUARANTINED blocks
have one owner, a reservation, and may be written from outside; nobody else can hit them, because content
is registered only when it is in place. Every operation is O(1) for each block it is given.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

from engine.errors import IntegrityError, NoRoom
from engine.prefix import BlockHash


class BlockState(Enum):
    FREE = "free"
    CACHED = "cached"
    HELD = "held"
    RESERVED = "reserved"
    QUARANTINED = "quarantined"


class BlockManager:
    def __init__(self, num_blocks: int, on_take: Callable[[list[int]], None] | None = None) -> None:
        """`on_take` is told which blocks are about to be given out with their old content worthless."""
        self.num_blocks = num_blocks
        self._on_take = on_take
        self._free = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._state = [BlockState.FREE] * num_blocks
        self._refs = [0] * num_blocks
        self._hash: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._count = dict.fromkeys(BlockState, 0) | {BlockState.FREE: num_blocks}

    @property
    def num_available(self) -> int:
        """What `take` could give: free blocks, and cached ones nobody holds."""
        return self._count[BlockState.FREE] + self._count[BlockState.CACHED]

    def count(self, state: BlockState) -> int:
        return self._count[state]

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest registered prefix. Takes nothing: the blocks may be evicted any time."""
        blocks: list[int] = []
        for name in hashes:
            block = self._by_hash.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_take(self, hits: list[int], num_new: int, spare: int = 0) -> bool:
        """Whether `take(hits, num_new)` would leave at least `spare` blocks available."""
        num_revived = sum(self._state[block] is BlockState.CACHED for block in hits)
        return self.num_available - num_revived >= num_new + spare

    def take(self, hits: list[int], num_new: int) -> list[int]:
        """One more reference on each of `hits` (from `match`), and `num_new` blocks with one each."""
        return self._take(hits, num_new, BlockState.HELD)

    def reserve(self, hits: list[int], num_new: int) -> list[int]:
        """Like `take`, but the new blocks are RESERVED."""
        return self._take(hits, num_new, BlockState.RESERVED)

    def claim(self, blocks: Iterable[int]) -> None:
        """The content of reserved blocks is in place: they are held like any other."""
        self._move_all(blocks, BlockState.RESERVED, BlockState.HELD)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Somebody may still write into these reserved blocks: nobody gets them before `release`."""
        self._move_all(blocks, BlockState.RESERVED, BlockState.QUARANTINED)

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each. Last blocks go first, so that a prefix outlives what follows it."""
        for block in reversed(blocks):
            if self._refs[block] == 0:
                raise IntegrityError(f"block {block} was released more often than taken")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._let_go(block)

    def register(self, block: int, name: BlockHash) -> None:
        """The content of this held block is complete and final. Of two equal ones the first wins."""
        if self._state[block] is not BlockState.HELD:
            raise IntegrityError(
                f"block {block} is {self._state[block].value}: only held blocks hold content"
            )
        if name not in self._by_hash and self._hash[block] is None:
            self._by_hash[name] = block
            self._hash[block] = name

    def forget(self, blocks: Iterable[int]) -> None:
        """Their content cannot be trusted: nobody may hit them again. Who holds them keeps them."""
        for block in blocks:
            self._unregister(block)
            if self._state[block] is BlockState.CACHED:
                del self._cached[block]
                self._to_free(block)

    def _take(self, hits: list[int], num_new: int, new_state: BlockState) -> list[int]:
        if not self.can_take(hits, num_new):
            raise NoRoom(f"{num_new} blocks wanted, {self.num_available} available")
        for block in hits:
            if self._state[block] is BlockState.CACHED:
                del self._cached[block]
                self._move(block, BlockState.HELD)
            self._refs[block] += 1
        new = [self._pop(new_state) for _ in range(num_new)]
        if self._on_take is not None and new:
            self._on_take(new)
        return [*hits, *new]

    def _pop(self, new_state: BlockState) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unregister(block)
        self._move(block, new_state)
        self._refs[block] = 1
        return block

    def _let_go(self, block: int) -> None:
        if self._hash[block] is None:
            self._to_free(block)
        else:
            self._cached[block] = None
            self._move(block, BlockState.CACHED)

    def _to_free(self, block: int) -> None:
        self._free.append(block)
        self._move(block, BlockState.FREE)

    def _unregister(self, block: int) -> None:
        name = self._hash[block]
        if name is not None:
            del self._by_hash[name]
            self._hash[block] = None

    def _move_all(self, blocks: Iterable[int], old: BlockState, new: BlockState) -> None:
        for block in blocks:
            if self._state[block] is not old:
                raise IntegrityError(f"block {block} is {self._state[block].value}, not {old.value}")
            self._move(block, new)

    def _move(self, block: int, state: BlockState) -> None:
        self._count[self._state[block]] -= 1
        self._state[block] = state
        self._count[state] += 1

    def check_integrity(self, owners: Mapping[BlockState, Iterable[int]]) -> None:
        """`owners`: every reference to a HELD, RESERVED or QUARANTINED block, as the owners know them."""
        _require(
            Counter(self._state) == Counter({s: n for s, n in self._count.items() if n}), "counts by state"
        )
        _require(
            sum(self._count.values()) == self.num_blocks, "free+cached+held+reserved+quarantined = total"
        )
        expected = Counter(block for blocks in owners.values() for block in blocks)
        _require(Counter({b: n for b, n in enumerate(self._refs) if n}) == expected, "references = owners")
        for state, blocks in owners.items():
            _require(
                all(self._state[block] is state for block in blocks),
                f"{state.value} blocks are owned as such",
            )
        _require(
            {b for b, s in enumerate(self._state) if s is BlockState.FREE} == set(self._free), "free list"
        )
        _require(len(self._free) == len(set(self._free)), "no block is free twice")
        _require(
            {b for b, s in enumerate(self._state) if s is BlockState.CACHED} == set(self._cached),
            "cached list",
        )
        _require({n: b for b, n in enumerate(self._hash) if n is not None} == self._by_hash, "names = blocks")
        _require(all(self._hash[b] is not None for b in self._cached), "cached blocks have names")
        _require(all(self._hash[b] is None for b in self._free), "free blocks have none")


def _require(is_true: bool, what: str) -> None:
    if not is_true:
        raise IntegrityError(f"the block manager's books do not balance: {what}")
