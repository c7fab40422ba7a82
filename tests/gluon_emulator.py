"""Runs kernels written in Gluon, or in Triton's plain language, in NumPy: no Triton and no GPU are needed.

Each group of warps is a thread, which waits at barriers as on a GPU: a group that waits for what never
comes, a barrier at which too many arrive and an address outside its array are errors. Memory starts full
of NaN. The warps of a group go in step, and a copy or product is done when it is asked for: what depends
on the time that these take is not seen.
"""

import contextlib
import sys
import threading
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels import gluon_util, triton_util

SECONDS = 60  # for any wait
FLOAT32 = np.dtype(np.float32)
SIXTEEN_BITS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


class Whole(int):
    """A constexpr that is a whole number."""

    value = property(int)


class Fraction(float):
    """A constexpr that is not."""

    value = property(float)


def constexpr(x):
    return Whole(x) if isinstance(x, int) else Fraction(x)


class Tensor(np.ndarray):
    """An array in registers; a number is one of no dimensions."""

    type = types.SimpleNamespace(layout=None)

    def __array_ufunc__(self, function, method, *inputs, **options):
        # Values never change in place. A whole number takes the type of the other operand.
        options.pop("out", None)
        arrays = [np.asarray(x) if isinstance(x, Tensor) else x for x in inputs]
        fractions = [
            x.dtype for x in arrays if isinstance(x, np.ndarray) and x.dtype.kind not in "iub"
        ]
        if fractions:
            arrays = [
                x.astype(fractions[0]) if isinstance(x, np.ndarray) and x.dtype.kind in "iu" else x
                for x in arrays
            ]
        return narrowed(getattr(function, method)(*arrays, **options))

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else self.astype(dtype)

    def permute(self, order):
        return self.transpose(order)

    def expand_dims(self, axis):
        return tensor(np.expand_dims(self, axis))


def narrowed(x):
    x = np.asarray(x)
    return (x.astype(FLOAT32) if x.dtype == np.float64 else x).view(Tensor)


def tensor(x, dtype=None):
    return np.array(x, dtype).view(Tensor)


class Pointer:
    """To the elements of an array in memory."""

    def __init__(self, array, offset=0):
        self.array, self.offset = array, np.asarray(offset)
        self.dtype = types.SimpleNamespace(element_ty=array.dtype)

    def __add__(self, offset):
        return Pointer(self.array, self.offset + np.asarray(offset))

    def __sub__(self, offset):
        return self + -np.asarray(offset)

    def __getitem__(self, key):
        return Pointer(self.array, self.offset[key])

    def places(self, mask):
        offset, mask = np.broadcast_arrays(self.offset, True if mask is None else mask)
        inside = (offset >= 0) & (offset < self.array.size)
        assert (inside | ~mask).all(), f"outside an array of {self.array.size}: {offset[mask]}"
        return np.where(mask, offset, 0), mask


def load(pointer, mask=None, other=0):
    places, mask = pointer.places(mask)
    return tensor(np.where(mask, pointer.array[places], np.asarray(other, pointer.array.dtype)))


def store(pointer, x, mask=None):
    places, mask = pointer.places(mask)
    pointer.array[places[mask]] = np.broadcast_to(x, mask.shape)[mask].astype(pointer.array.dtype)


class Tiles:
    """A tensor descriptor."""

    layout = None

    def __init__(self, array, block):
        self.array, self.block, self.dtype = array, block, array.dtype
        self.nbytes_per_cta = int(np.prod(block)) * array.dtype.itemsize

    def places(self, at):
        """Of a block's elements that are in the array: there, and in the block."""
        starts = [int(x) for x in at]
        ends = [
            min(x + n, size)
            for x, n, size in zip(starts, self.block, self.array.shape, strict=True)
        ]
        inside = tuple(slice(x, max(x, end)) for x, end in zip(starts, ends, strict=True))
        return inside, tuple(slice(0, x.stop - x.start) for x in inside)


class Memory:
    """Shared memory, or a view of it."""

    def __init__(self, array):
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def index(self, n):
        return Memory(self.array[int(n)])

    def slice(self, start, length, dim=0):
        return Memory(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order):
        return Memory(self.array.transpose(order))

    def reshape(self, shape):
        return Memory(self.array.reshape(shape))

    def _reinterpret(self, dtype, shape, layout):
        assert dtype == self.dtype, (dtype, self.dtype)
        return self.reshape(shape)

    def _keep_alive(self):
        pass

    def load(self, layout=None):
        return tensor(self.array)

    def store(self, x):
        assert x.dtype == self.dtype, (x.dtype, self.dtype)
        self.array[...] = x


class Barrier:
    """An mbarrier, or several."""

    changed = threading.Condition()
    failed = False

    def __init__(self, number=1):
        self.parts = [self] if number == 1 else [Barrier() for _ in range(number)]
        self.phase = self.bytes = 0

    def index(self, n):
        return self.parts[int(n)]

    def init(self, count):
        self.count = self.missing = count

    def arrive(self, count=1, expected=0):
        with self.changed:
            assert self.missing >= count, "more arrive at a barrier than it waits for"
            self.missing -= count
            self.bytes += expected
            self.turn()

    def come(self, number):
        with self.changed:
            self.bytes -= number
            self.turn()

    def turn(self):
        if self.missing == self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count
            self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            done = lambda: Barrier.failed or self.phase % 2 != int(parity) % 2
            assert self.changed.wait_for(done, SECONDS), "a group waits for ever"
            if Barrier.failed:
                raise RuntimeError("another group failed")


def copy_in(source, at, barrier, target):
    there, here = source.places(at)
    block = np.zeros(source.block, source.dtype)
    block[here] = source.array[there]
    target.array[...] = block.reshape(target.shape)
    barrier.come(source.nbytes_per_cta)


def copy_out(target, at, source):
    there, here = target.places(at)
    target.array[there] = source.array.reshape(target.block)[here]


def product(a, b, total, use_acc=True, is_async=False):
    a, b = (np.asarray(x.array if isinstance(x, Memory) else x).astype(np.float32) for x in (a, b))
    return tensor(a @ b + (np.asarray(total) if use_acc else 0), np.float32)


def wait_for_products(pending, deps):
    return tuple(deps) if len(deps) > 1 else deps[0]


def allocate(dtype, shape, layout):
    if layout == "barriers":
        return Barrier(shape[0])
    return Memory(np.full(shape, np.nan, dtype))


def assembly(code, constraints, arguments, dtype, is_pure, pack):
    if code.startswith("mov.u32 $0, 0"):
        return tensor(0)
    assert code.startswith("cvt.rn."), code
    return arguments[0].to(dtype)


def scan(x, axis, combine):
    assert axis == 0
    sums = [x[0]]
    for row in x[1:]:
        sums.append(combine(sums[-1], row))
    return tensor(np.stack(sums))


def swap(pointer, value, sem):
    old = load(pointer)
    store(pointer, value)
    return old


def loop(*bounds):
    return (tensor(n) for n in range(*(int(x) for x in bounds)))


class Program:
    """The block that runs now, and how many there are."""

    number = count = 0


def specialize(groups, warps, registers):
    assert len(groups) == len(warps) + 1 == len(registers) + 1
    errors = []

    def run(function, arguments):
        try:
            function(*arguments)
        except Exception as error:
            with Barrier.changed:
                errors.append(error)
                Barrier.failed = True
                Barrier.changed.notify_all()

    threads = [threading.Thread(target=run, args=group) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        Barrier.failed = False
        raise errors[0]


def of_layout(*arguments):
    return None


LANGUAGE = {
    "constexpr": constexpr,
    "float32": FLOAT32,
    "bfloat16": SIXTEEN_BITS[0],
    "float16": SIXTEEN_BITS[1],
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "static_range": range,
    "program_id": lambda axis: tensor(Program.number),
    "num_programs": lambda axis: tensor(Program.count),
    "load": load,
    "store": store,
    "arange": lambda start, end, layout=None: tensor(np.arange(start, end)),
    "zeros": lambda shape, dtype, layout=None: tensor(np.zeros(shape, dtype)),
    "full": lambda shape, value, dtype, layout=None: tensor(np.full(shape, value, dtype)),
    "zeros_like": lambda x: tensor(np.zeros_like(x)),
    "where": lambda condition, x, y: narrowed(np.where(condition, x, y)),
    "sum": lambda x, axis: tensor(np.sum(x, axis, dtype=x.dtype)),
    "max": lambda x, axis: tensor(np.max(x, axis)),
    "abs": np.abs,
    "floor": np.floor,
    "exp2": np.exp2,
    "associative_scan": scan,
    "join": lambda x, y: tensor(np.stack([x, y], -1)),
    "split": lambda x: (x[..., 0], x[..., 1]),
    "atomic_add": lambda pointer, value, sem: swap(pointer, load(pointer) + value, sem),
    "atomic_xchg": swap,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "exp": np.exp,
    "trans": lambda x: x.permute((1, 0)),
    "dot": lambda a, b, total=0.0, input_precision=None: product(a, b, total),
    "convert_layout": lambda x, layout: x,
    "barrier": lambda: None,
    "inline_asm_elementwise": assembly,
    "allocate_shared_memory": allocate,
    "warp_specialize": specialize,
    **dict.fromkeys(
        [
            *("NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout"),
            *("BlockedLayout", "SliceLayout", "DotOperandLayout"),
        ],
        of_layout,
    ),
}
HOPPER = {
    "fence_async_shared": lambda: None,
    "warpgroup_mma": product,
    "warpgroup_mma_wait": wait_for_products,
    "mbarrier": types.SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=lambda barrier, count: barrier.init(count),
        wait=lambda barrier, parity: barrier.wait(parity),
        arrive=lambda barrier, count: barrier.arrive(count),
        expect=lambda barrier, number: barrier.arrive(1, int(number)),
    ),
    "tma": types.SimpleNamespace(
        async_copy_global_to_shared=copy_in,
        async_copy_shared_to_global=copy_out,
        store_wait=lambda pending: None,
    ),
}


def call(kernel, *operands, out, grid, num_warps, num_stages, maxnreg=None, **constants):
    """As `triton_util.call`."""
    results, tree = jax.tree.flatten(out)

    def argument(x, writes):
        if isinstance(x, int):
            return tensor(x)
        array = gluon_util.array_of(x)
        if isinstance(array, jax.Array):
            memory = np.array(array) if writes else np.asarray(array)
        else:
            fill = 0 if jnp.issubdtype(array.dtype, jnp.integer) else np.nan
            memory = np.full(array.shape, fill, array.dtype)
        return (
            Tiles(memory, x.block) if isinstance(x, gluon_util.Tiles) else Pointer(memory.ravel())
        )

    arguments = [argument(x, False) for x in operands]
    written = [argument(x, True) for x in results]
    Program.count = grid[0]
    for name in [name for name in sys.modules if _is_kernel(name)]:
        sys.modules[name].range = loop
    for Program.number in range(grid[0]):
        kernel(*arguments, *written, **constants)
    arrays = [jnp.asarray(x.array).reshape(y.shape) for x, y in zip(written, results, strict=True)]
    return jax.tree.unflatten(tree, arrays)


def _is_kernel(name):
    *package, module = name.split(".")
    imports_triton = module.startswith("triton_") or module == "gluon_blocks"
    return (
        package[:1] == ["kernels"]
        and imports_triton
        and module not in ("triton_util", "triton_tiles")
    )


def _forget(names):
    """Takes modules out, so that they are imported anew."""
    modules = {name: sys.modules.pop(name) for name in names}
    for name in modules:
        package, _, module = name.rpartition(".")
        if hasattr(sys.modules.get(package), module):
            delattr(sys.modules[package], module)
    return modules


def _language():
    """Modules in the place of Triton's."""
    jit = lambda function: function
    contents = {
        "triton": {"jit": jit, "next_power_of_2": lambda n: 1 << (n - 1).bit_length()},
        "triton.language": LANGUAGE,
        "triton.experimental": {},
        "triton.experimental.gluon": {"jit": jit, "constexpr_function": jit},
        "triton.experimental.gluon.language": LANGUAGE,
        "triton.experimental.gluon.language.nvidia": {},
        "triton.experimental.gluon.language.nvidia.hopper": HOPPER,
    }
    modules = {}
    for name, values in contents.items():
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(values)
        package, _, module = name.rpartition(".")
        if package:
            setattr(modules[package], module, modules[name])
    return modules


@contextlib.contextmanager
def emulated(monkeypatch, cores=2):
    """Kernels run here as if for an H200 with so many multiprocessors."""
    is_triton = lambda name: name.split(".")[0] == "triton"
    kept = _forget([name for name in sys.modules if is_triton(name) or _is_kernel(name)])
    sys.modules.update(_language())
    monkeypatch.setattr(triton_util, "call", call)
    monkeypatch.setattr(triton_util, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.setattr(triton_util, "num_cores", lambda: cores)
    monkeypatch.setattr(gluon_util, "_jaxlib", lambda: gluon_util)
    try:
        yield
    finally:
        _forget([name for name in sys.modules if is_triton(name) or _is_kernel(name)])
        sys.modules.update(kept)
        for name, module in kept.items():
            package, _, last = name.rpartition(".")
            if package in sys.modules:
                setattr(sys.modules[package], last, module)
