"""Sets that are joined step by step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Groups:
    """Disjoint sets of names or ops (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, item: Hashable) -> Hashable:
        """What stands for the set of an item; an unknown item is a set of its own."""
        root = item
        while (up := self._parent.setdefault(root, root)) != root:
            root = up
        while self._parent[item] != root:
            self._parent[item], item = root, self._parent[item]
        return root

    def join(self, a: Hashable, b: Hashable) -> None:
        """Make the sets of two items one."""
        self._parent[self.find(a)] = self.find(b)

    def numbers(self, items: Iterable[Hashable]) -> dict[Hashable, int]:
        """A number for every item: the same for items of one set."""
        found: dict[Hashable, int] = {}
        return {item: found.setdefault(self.find(item), len(found)) for item in items}
