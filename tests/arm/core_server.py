"""Runs the calls of :mod:`remote_core` with the native module of this process. Needs no package."""

import ctypes
import math
import mmap
import os
import pickle
import struct
import sys
import types

GUARD = 4096  # bytes before and after each region, which no kernel may touch
PATTERN = b"\xa5" * GUARD


class Region:
    """A copy of memory of the other process, at the same place in a page."""

    def __init__(self, place, content):
        self.size = len(content)
        # Pages of its own: the core takes an address below 4 GiB for freed memory.
        self.buffer = mmap.mmap(-1, 3 * GUARD + self.size + GUARD)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer)) + GUARD
        self.address = first + (place - first) % GUARD
        ctypes.memmove(self.address - GUARD, PATTERN + content + PATTERN, self.size + 2 * GUARD)

    def content(self):
        around = ctypes.string_at(self.address - GUARD, self.size + 2 * GUARD)
        if around[:GUARD] != PATTERN or around[-GUARD:] != PATTERN:
            raise MemoryError("a kernel wrote outside its tensors")
        return around[GUARD:-GUARD]


class Tensor:
    """The methods of a tensor that the core calls, on the memory of a region or its own."""

    is_cpu, requires_grad = True, False

    def __init__(self, dtype, shape, strides, memory, address):
        # The core compares dtypes by their identity.
        self.dtype, self.shape, self._strides = sys.intern(dtype), shape, strides
        self._memory, self._address = memory, address

    def stride(self):
        return self._strides

    def data_ptr(self):
        return self._address

    def is_neg(self):
        return False

    def __int__(self):
        return ctypes.c_int64.from_address(self._address).value

    def zero_(self):
        ctypes.memset(self._address, 0, math.prod(self.shape) * BYTES[self.dtype])

    def contiguous(self):
        made, size = empty(self.shape, self.dtype), BYTES[self.dtype]
        for n, place in enumerate(places(self.shape, self._strides)):
            ctypes.memmove(made._address + n * size, self._address + place * size, size)
        return made

    def to(self, dtype):
        made = empty(self.shape, dtype)
        for n, place in enumerate(places(self.shape, self._strides)):
            number = number_at(self._address + place * BYTES[self.dtype], self.dtype)
            content = packed(number, dtype)
            ctypes.memmove(made._address + n * len(content), content, len(content))
        return made

    def float(self):
        return self.to("float32")

    def double(self):
        return self.to("float64")

    def sum(self, dimension, keepdim):
        assert keepdim
        kept = [1 if n == dimension else size for n, size in enumerate(self.shape)]
        return summed_to(types.SimpleNamespace(shape=kept, dtype=self.dtype), self)

    def narrow(self, dimension, start, length):
        shape, offset = list(self.shape), start * self._strides[dimension] * BYTES[self.dtype]
        shape[dimension] = length
        place = self._address + offset
        return Tensor(self.dtype, tuple(shape), self._strides, self._memory, place)

    def unsqueeze(self, dimension):
        shape, strides = ([*x[:dimension], 1, *x[dimension:]] for x in (self.shape, self._strides))
        return Tensor(self.dtype, tuple(shape), tuple(strides), self._memory, self._address)

    def squeeze(self, dimension):
        assert self.shape[dimension] == 1
        shape, strides = (x[:dimension] + x[dimension + 1 :] for x in (self.shape, self._strides))
        return Tensor(self.dtype, shape, strides, self._memory, self._address)

    def sent(self):
        return "tensor", self.dtype, self.shape, self._memory.content()


BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "bool": 1, "int32": 4, "int64": 8}
BYTES |= {"int8": 1, "float8_e4m3fn": 1}
CODES = {"float32": "f", "float64": "d", "float16": "e"}  # of struct


def number_at(address, dtype):
    """The number at an address."""
    content = ctypes.string_at(address, BYTES[dtype])
    if dtype == "bfloat16":  # the upper half of a float32
        dtype, content = "float32", bytes(2) + content
    return struct.unpack(CODES[dtype], content)[0]


def places(shape, strides):
    """The places of all elements, in the order of their indices."""
    found = [0]
    for size, stride in zip(shape, strides):  # noqa: B905  (of any Python)
        found = [place + n * stride for place in found for n in range(size)]
    return found


def empty(shape, dtype, device="cpu"):
    """A new tensor, filled with zeros."""
    strides = tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))
    memory = Region(0, bytes(math.prod(shape) * BYTES[dtype]))
    return Tensor(dtype, tuple(shape), strides, memory, memory.address)


def summed_to(like, grad):
    """``grad`` summed to the shape of a tensor that was broadcast, in its dtype."""
    sums = [0.0] * math.prod(like.shape)
    kept = [0 if size == 1 else 1 for size in like.shape]
    dense = [math.prod(like.shape[n + 1 :]) * keep for n, keep in enumerate(kept)]
    missing = len(grad.shape) - len(like.shape)
    to = places(grad.shape, [0] * missing + dense)
    for place, from_ in zip(to, places(grad.shape, grad.stride())):  # noqa: B905  (of any Python)
        sums[place] += number_at(grad.data_ptr() + from_ * BYTES[grad.dtype], grad.dtype)
    made = empty(like.shape, like.dtype)
    for n, number in enumerate(sums):
        content = packed(number, like.dtype)
        ctypes.memmove(made.data_ptr() + n * len(content), content, len(content))
    return made


def new_rows(like, width):
    return empty((*like.shape[:-1], width), like.dtype)


def packed(number, dtype):
    """The bytes of a number in a dtype."""
    if dtype == "bfloat16":  # the upper half of a float32, rounded
        (bits,) = struct.unpack("I", struct.pack("f", number))
        return struct.pack("H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    return struct.pack(CODES[dtype], number)


def torch_for_the_core():
    """The parts of PyTorch that csrc/tensors.cpp uses."""
    torch = types.ModuleType("torch")
    torch.Tensor, torch.nn = (
        Tensor,
        types.SimpleNamespace(Parameter=type("Parameter", (Tensor,), {})),
    )
    torch.empty = empty
    torch.empty_like = lambda like, memory_format=None: empty(like.shape, like.dtype)
    torch.contiguous_format, torch.get_num_threads = None, lambda: os.cpu_count() or 1
    for name in BYTES:
        setattr(torch, name, name)
    return torch


def returned(value):
    """A result as it is sent back."""
    if isinstance(value, tuple):
        return ("tuple", *(returned(item) for item in value))
    return value.sent() if isinstance(value, Tensor) else value


def arrived(value, regions):
    """An argument as the core takes it: tensors become views of the regions."""
    if not isinstance(value, tuple):
        return value
    kind, *rest = value
    if kind == "tensor":
        number, offset, dtype, shape, strides, needs_gradient = rest
        region = regions[number]
        tensor = Tensor(dtype, shape, strides, region, region.address + offset)
        tensor.requires_grad = needs_gradient
        return tensor
    if kind == "answer":
        return lambda: rest[0]
    return tuple(arrived(item, regions) for item in rest)


def main():
    """Answer calls of the core until the input ends."""
    sys.path.insert(0, sys.argv[1])
    import _cpu

    _cpu.use_torch(torch_for_the_core(), None)
    _cpu.use_rules(new_rows, summed_to, lambda: False)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            name, args, named, memory = pickle.load(requests)
        except EOFError:
            return
        regions = [Region(*part) for part in memory]
        error = None
        try:
            given = [arrived(arg, regions) for arg in args]
            by_name = {key: arrived(arg, regions) for key, arg in named.items()}
            result = returned(getattr(_cpu, name)(*given, **by_name))
            written = [region.content() for region in regions]
        except Exception as raised:
            error, result = type(raised).__name__, str(raised)
            written = [content for _, content in memory]
        pickle.dump((error, result, written), answers)
        answers.flush()


main()
