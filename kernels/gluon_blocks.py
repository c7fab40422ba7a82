"""What Gluon kernels of several operators are made of. Imports nothing but Triton and `triton_blocks`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.triton_blocks import LOG2_E


@gluon.jit
def exp(x):
    """As `triton_blocks.exp`."""
    return gl.exp2(x * LOG2_E)


@gluon.jit
def release(empty):
    """Says that these warps have done with a buffer."""
    gl.barrier()
    mbarrier.arrive(empty, count=1)


@gluon.jit
def hidden_zero(count):
    """Zero, which the compiler does not know: else it unrolls loops, or keeps addresses in registers, which spill."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r,r", [count], dtype=gl.int32, is_pure=False, pack=1
    )
