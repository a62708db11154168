"""Runs the calls of :mod:`remote_core` with the native module of this process. Needs no package."""

import ctypes
import pickle
import sys

GUARD = 4096  # bytes before and after each region, which no kernel may touch
PATTERN = b"\xa5" * GUARD


class Region:
    """A copy of memory of the other process, at the same place in a page."""

    def __init__(self, place, content):
        self.size = len(content)
        self.buffer = ctypes.create_string_buffer(3 * GUARD + self.size + GUARD)
        first = ctypes.addressof(self.buffer) + GUARD
        self.address = first + (place - first) % GUARD
        ctypes.memmove(self.address - GUARD, PATTERN + content + PATTERN, self.size + 2 * GUARD)

    def content(self):
        around = ctypes.string_at(self.address - GUARD, self.size + 2 * GUARD)
        if around[:GUARD] != PATTERN or around[-GUARD:] != PATTERN:
            raise MemoryError("a kernel wrote outside its tensors")
        return around[GUARD:-GUARD]


def arrived(value, regions):
    if isinstance(value, dict):
        return {name: arrived(item, regions) for name, item in value.items()}
    if not isinstance(value, tuple):
        return value
    kind, *rest = value
    if kind == "address":
        return regions[rest[0]].address + rest[1]
    if kind == "answer":
        return lambda: rest[0]
    return tuple(arrived(item, regions) for item in rest)


def main():
    sys.path.insert(0, sys.argv[1])
    import _cpu

    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            name, args, memory = pickle.load(requests)
        except EOFError:
            return
        regions = [Region(*part) for part in memory]
        error = None
        try:
            result = getattr(_cpu, name)(*(arrived(arg, regions) for arg in args))
            written = [region.content() for region in regions]
        except Exception as raised:
            error, result = type(raised).__name__, str(raised)
            written = [content for _, content in memory]
        pickle.dump((error, result, written), answers)
        answers.flush()


main()
