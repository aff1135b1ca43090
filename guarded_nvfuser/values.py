"""Value numbers: whether two names of a program hold one value, where a pass (CSE, removal of casts) swapped them."""

from __future__ import annotations

from thunder.core import dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from guarded_nvfuser.effects import is_random, prim_id, tensors
from guarded_nvfuser.states import Entry, Program


class Values:
    """Value numbers of a program's names, computed in one walk; equal numbers mean equal values.

    A value is an op, its constants and its operands, each in the state in which it was read. Chains of float casts
    count as the last one applied to the first operand, because thunder's remove_redundant_casts takes them so.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.number: dict[str, int] = {}
        self.root: dict[str, tuple[str, int]] = {}  # before its float casts: the name, and the state it was read in
        self._interned: dict[tuple, int] = {}
        self._producer: dict[str, Entry] = {}
        for entry in program.entries.values():
            if not entry.bsym.subsymbols or prim_id(entry.bsym) is not None:
                self._enter(entry)

    def state_to_read(self, reader: Entry, meant: str, found: str) -> int | None:
        """The state in which `found` must be read to stand for `meant`.

        Args:
            reader: the op that reads.
            meant: the name that the program reads there.
            found: the name that a pass put in its place.

        Returns:
            A state of `found`'s buffer; None where the two do not hold one value.
        """
        root, state = self.root.get(meant, (meant, reader.sees.get(meant, 0)))
        if root == found:
            return state
        if self._of(meant, reader.sees.get(meant, 0)) == self._of(found, self.program.bound.get(found, 0)):
            return self.program.bound.get(found, 0)
        return None

    def difference(self, reader: Entry, meant: str, found: str) -> tuple[BoundSymbol, str, int, int] | None:
        """Where the computations of two names part because they read one buffer in two states.

        Returns:
            The program's read, the name it reads, the state that it must see and the one that the other computation
            saw; None where they part otherwise.
        """
        seen, stack = set(), [(reader.bsym, reader.sees.get(meant, 0), meant, self.program.bound.get(found, 0), found)]
        while stack:
            bsym, must, name, state, other = stack.pop()
            if (name, other) in seen:
                continue
            seen.add((name, other))
            if must != state and self.program.buffer_of[name] == self.program.buffer_of[other]:
                return bsym, name, must, state
            left, right = self._producer.get(name), self._producer.get(other)
            if left is not None and right is not None and len(left.args) == len(right.args):
                stack += [
                    (left.bsym, left.sees.get(a, 0), a, right.sees.get(b, 0), b) for a, b in zip(left.args, right.args)
                ]
        return None

    def _of(self, name: str, state: int) -> int:
        """A name's value when its buffer is in a state."""
        number = self.number.get(name)
        if number is None:
            number = self._intern(("input", name))
        if state == self.program.bound.get(name, 0):
            return number
        return self._intern(("state", number, state))

    def _enter(self, entry: Entry) -> None:
        bsym, outs = entry.bsym, tensors(entry.bsym.flat_outs)
        self._producer.update((out.name, entry) for out in outs)
        if is_random(bsym):
            return
        if prim_id(bsym) is PrimIDs.COPY_:  # the target holds what was copied into it
            source = self._of(entry.args[0], entry.sees[entry.args[0]])
            self.number.update((out.name, source) for out in outs)
            return
        if prim_id(bsym) is PrimIDs.UPDATE_ALIASES and len(outs) == len(entry.args):
            for out, arg in zip(outs, entry.args):
                self.number.setdefault(out.name, self._of(arg, entry.sees[arg]))
            return
        operands = tuple(self._of(arg, entry.sees.get(arg, 0)) for arg in entry.args)
        constants = repr([value for value in bsym.flat_args if not isinstance(value, Proxy)])
        if prim_id(bsym) is PrimIDs.CONVERT_ELEMENT_TYPE and self._is_float_cast(entry, outs):
            source, state = self.root.get(entry.args[0], (entry.args[0], entry.sees[entry.args[0]]))
            self.root[outs[0].name] = source, state
            operands = (self._of(source, state),)
            if self.program.proxies[source].dtype == outs[0].dtype:
                self.number.setdefault(outs[0].name, operands[0])
                return
        for position, out in enumerate(outs):
            self.number.setdefault(out.name, self._intern((bsym.sym.name, bsym.sym.id, constants, operands, position)))

    @staticmethod
    def _is_float_cast(entry: Entry, outs: tuple[TensorProxy, ...]) -> bool:
        args = tensors(entry.bsym.flat_args)
        return all(dtypes.is_float_dtype(proxy.dtype) for proxy in (*args[:1], *outs[:1])) and len(args) == 1 == len(
            outs
        )

    def _intern(self, value: tuple) -> int:
        return self._interned.setdefault(value, len(self._interned))
