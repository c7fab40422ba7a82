"""What Gluon kernels of several operators are made of. Imports nothing but Triton."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def release(empty):
    """Says that these warps have done with a buffer."""
    gl.barrier()
    mbarrier.arrive(empty, count=1)
