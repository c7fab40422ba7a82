"""Times flash-linear-attention's Triton kernels on the shapes of ours, as `kernels.bench --peers` does.

    python -m kernels.peers gated_delta_rule gdn1.3B bfloat16

Prints one JSON object, with medians in milliseconds, or why there is no figure. The first run of a shape
tunes itself for some minutes; TRITON_CACHE_DIR keeps what it finds.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import Any

from kernels import shapes

PACKAGE = "flash-linear-attention"


def unavailable() -> str | None:
    """Why nothing can be timed here, or None."""
    try:
        import fla  # noqa: F401
        import torch
    except ImportError as error:
        return f"{error}; install {PACKAGE} and a CUDA build of PyTorch"
    return None if torch.cuda.is_available() else "PyTorch sees no CUDA device"


def measure(operator: str, name: str, dtype: str) -> dict[str, Any]:
    """The record of one operator, like those of `kernels.bench`."""
    import torch
    import triton

    run, leaves = _problem(operator, shapes.SHAPES[name], getattr(torch, dtype))
    d_out = torch.randn_like(run())

    def forward_backward() -> None:
        for x in leaves:
            x.grad = None
        run().backward(d_out)

    record = {"op": operator, "implementation": PACKAGE, "shape": name, "dtype": dtype}
    for part, function in (("forward", run), ("forward_backward", forward_backward)):
        torch.cuda.reset_peak_memory_stats()
        ms = triton.testing.do_bench(function, warmup=50, rep=300, return_mode="median")
        record[f"{part}_ms"] = round(ms, 4)
        record[f"{part}_peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    versions = {x: importlib.metadata.version(x) for x in (PACKAGE, "torch", "triton")}
    return record | {"device": torch.cuda.get_device_name(), "versions": versions}


def _problem(operator: str, shape: shapes.Shape, dtype: Any) -> tuple[Callable[[], Any], list[Any]]:
    """The call, and the tensors that need gradients."""
    import torch
    import torch.nn.functional as F

    def normal(*sizes: int) -> Any:
        return torch.randn(shape.batch, shape.length, *sizes, device="cuda")

    def leaf(x: Any, dtype: Any = dtype) -> Any:
        return x.to(dtype).requires_grad_()

    torch.manual_seed(0)
    key = shape.heads, shape.key_width
    heads = shape.heads_of(operator)
    v = leaf(normal(heads, shape.value_width))
    if operator == "gated_delta_rule":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        q, k = (leaf(F.normalize(normal(*key), dim=-1)) for _ in range(2))
        log_decay = leaf(F.logsigmoid(normal(heads)) / 16, torch.float32)
        beta = leaf(normal(heads).sigmoid(), torch.float32)
        leaves = [q, k, v, log_decay, beta]
        return lambda: chunk_gated_delta_rule(*leaves)[0], leaves
    from fla.ops.gla import chunk_gla

    leaves = [leaf(normal(*key)), leaf(normal(*key)), v, leaf(F.logsigmoid(normal(*key)) / 16)]
    return lambda: chunk_gla(*leaves)[0], leaves


def main(argv: list[str]) -> int:
    """Prints the record of `argv`: operator, shape, dtype. Returns the process's exit status."""
    operator, name, dtype = argv
    reason = "it has no such operator" if operator == "ccq_query" else unavailable()
    if reason is not None:
        record = {"op": operator, "implementation": PACKAGE, "shape": name, "dtype": dtype}
        print(json.dumps(record | {"unavailable": reason}), flush=True)
        return 1
    print(json.dumps(measure(operator, name, dtype)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
