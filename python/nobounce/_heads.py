"""Which worker of a tensor-parallel group holds which KV heads, and where each reader takes its heads from."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ListError

_MAX_RANKS = 1024


@dataclass(frozen=True)
class Split:
    """The KV heads of a model over the workers of a group. With more workers than heads, neighbours hold the same head."""

    total: int
    ranks: int

    def __post_init__(self) -> None:
        if not 0 < self.ranks <= _MAX_RANKS or self.total <= 0 or (self.total % self.ranks and self.ranks % self.total):
            raise ListError(f"{self.total} KV heads over {self.ranks} workers: expected that one number divides the other, and at most {_MAX_RANKS} workers")

    @property
    def count(self) -> int:
        """Heads of one worker."""
        return max(1, self.total // self.ranks)

    def first(self, rank: int) -> int:
        """The first head of a worker."""
        return rank * self.total // self.ranks

    def heads(self, rank: int) -> range:
        return range(self.first(rank), self.first(rank) + self.count)

    def sources(self, other: Split, rank: int) -> list[int]:
        """The workers of `other` that hold all heads of worker `rank`, each head once. Readers spread over replicas."""
        found = set()
        for head in self.heads(rank):
            holders = [holder for holder in range(other.ranks) if head in other.heads(holder)]
            found.add(holders[rank % len(holders)])
        return sorted(found)

    def readers(self, other: Split) -> list[list[int]]:
        """For each worker of `other`, the workers of this group that notify it. One that no worker reads is notified by one."""
        sources = [self.sources(other, rank) for rank in range(self.ranks)]
        readers = [[rank for rank in range(self.ranks) if holder in sources[rank]] for holder in range(other.ranks)]
        return [found or [holder % self.ranks] for holder, found in enumerate(readers)]
