"""Computes an exported model's logits in plain PyTorch: no kernels, no JAX, nothing of this package.

    python -m ccq_jax.torch_reference DIR 100 101 102          the likeliest tokens after these ids

    from ccq_jax.torch_reference import Model
    Model("DIR").logits(torch.tensor([[100, 101, 102]]))       # [batch, tokens, vocabulary]

DIR is a folder in Hugging Face form, of ccq_jax.export or flash-linear-attention. It needs torch and
safetensors. Every recurrence runs token by token, as the papers write it: Gated DeltaNet (arXiv
2412.06464), GLA (arXiv 2312.06635), and CCQ (arXiv 2606.01294) in front of either.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

MODELS = ("gated_deltanet", "gla", "transformer")


class Model:
    """A folder's model; `dtype` is that of parameters and computation."""

    def __init__(self, directory: str | Path, dtype: torch.dtype = torch.float32):
        folder = Path(directory)
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        if self.config.get("model_type") not in MODELS:
            raise ValueError(
                f"model_type is {self.config.get('model_type')!r}: it must be one of {', '.join(MODELS)}"
            )
        self.tensors = {name: x.to(dtype) for name, x in _read(folder).items()}
        self.kind = self.config["model_type"]
        self.eps = self.config.get("norm_eps", 1e-6)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token logits [B, T, N] of token ids [B, T], from the first token on."""
        x = self.tensors["model.embeddings.weight"][tokens]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            y = rms_norm(x, self.tensors[layer + "attn_norm.weight"], self.eps)
            x = x + self._mix(layer + "attn.", y)
            y = rms_norm(x, self.tensors[layer + "mlp_norm.weight"], self.eps)
            gate, up = (self._linear(f"{layer}mlp.{name}_proj", y) for name in ("gate", "up"))
            x = x + self._linear(layer + "mlp.down_proj", F.silu(gate) * up)
        x = rms_norm(x, self.tensors["model.norm.weight"], self.eps)
        tied = self.config.get("tie_word_embeddings", False)
        return x @ self.tensors["model.embeddings.weight" if tied else "lm_head.weight"].T

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.tensors[name + ".weight"].T
        return y + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else y

    def _heads(self, name: str, x: Tensor, heads: int) -> Tensor:
        """A projection, its short convolution if it has one, and its heads: [B, T, H, width]."""
        y = self._linear(f"{name}_proj", x)
        kernel = self.tensors.get(f"{name}_conv1d.weight")
        if kernel is not None:
            past = F.pad(y.transpose(1, 2), (kernel.shape[-1] - 1, 0))
            y = F.silu(F.conv1d(past, kernel, groups=kernel.shape[0]).transpose(1, 2))
        elif self.kind == "gated_deltanet":
            y = F.silu(y)
        return y.unflatten(-1, (heads, -1))

    def _mix(self, name: str, x: Tensor) -> Tensor:
        heads = self.config["num_heads"]
        value_heads = self.config.get("num_v_heads") or heads
        q, k = (self._heads(name + part, x, heads) for part in "qk")
        v = self._heads(name + "v", x, value_heads)
        if self.kind == "transformer":
            return self._linear(name + "o_proj", self._attention(q, k, v).flatten(2))
        if self.kind == "gated_deltanet":
            q, k = unit(q), unit(k)
            dt = F.softplus(self._linear(name + "a_proj", x) + self.tensors[name + "dt_bias"])
            decay = -self.tensors[name + "A_log"].exp() * dt
            beta = self._linear(name + "b_proj", x).sigmoid()
            q = self._condition(name, q, k, decay)
            q, k = (y.repeat_interleave(value_heads // heads, 2) for y in (q, k))
            o = gated_delta_rule(q, k, v, decay, beta)
        else:
            low = self._linear(name + "gk_proj.0", x)
            decay = F.logsigmoid(self._linear(name + "gk_proj.1", low)).view_as(q) / 16
            o = gated_linear_attention(self._condition(name, q, k, None), k, v, decay)
        norms = ("o_norm", "g_norm_swish_gate", "g_norm")
        norm = next(
            self.tensors[f"{name}{n}.weight"] for n in norms if f"{name}{n}.weight" in self.tensors
        )
        o = rms_norm(o, norm, self.eps)
        if f"{name}g_proj.weight" in self.tensors:
            o = o * F.silu(self._linear(name + "g_proj", x)).view_as(o)
        return self._linear(name + "o_proj", o.flatten(2))

    def _condition(self, name: str, q: Tensor, k: Tensor, decay: Tensor | None) -> Tensor:
        """CCQ, if the model has it."""
        ccq = self.config.get("ccq")
        if ccq is None:
            return q
        weight, bias = (self.tensors[f"{name}lambda_proj.{x}"] for x in ("weight", "bias"))
        lam = ccq.get("lambda_max", 1.0) * ((q * weight).sum(-1) + bias).sigmoid()
        if ccq.get("key_norm", False):
            k = unit(k)
        return ccq_query(
            q,
            k,
            lam,
            decay if ccq.get("decay", False) else None,
            centered=ccq.get("centered", True),
            trace_norm=ccq.get("trace_norm", False),
        )

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        width, length = q.shape[-1], q.shape[1]
        theta = self.config.get("rope_theta", 10000.0)
        frequency = theta ** (-torch.arange(0, width, 2, dtype=q.dtype) / width)
        angle = (torch.arange(length, dtype=q.dtype)[:, None] * frequency)[:, None]
        q, k = (rotate(x, angle.cos(), angle.sin()) for x in (q, k))
        scores = torch.einsum("bthk,bshk->bhts", q, k) * width**-0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        p = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("bhts,bshv->bthv", p, v)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x^2 + eps) * weight."""
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def unit(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6)."""
    return x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + K/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def ccq_query(
    q: Tensor, k: Tensor, lam: Tensor, decay: Tensor | None, *, centered: bool, trace_norm: bool
) -> Tensor:
    """q_t - lambda_t Sigma_t q_t, with the sums of the definition, in float64 for their sake.

    Shapes: q, k [B, T, H, K], lam and decay (natural log) [B, T, H].
    """
    q64, k64, lam = q.double(), k.double(), lam.double()
    count = torch.zeros_like(lam[:, 0])
    total = torch.zeros_like(k64[:, 0])
    outer = torch.zeros(*k64[:, 0].shape, k64.shape[-1], dtype=torch.float64)
    out = []
    for t in range(q.shape[1]):
        keep = torch.ones_like(count) if decay is None else decay[:, t].double().exp()
        key = k64[:, t]
        count = keep * count + 1
        total = keep[..., None] * total + key
        outer = keep[..., None, None] * outer + key[..., :, None] * key[..., None, :]
        sigma = outer / count[..., None, None]
        second = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)  # the mean of |k|^2
        if centered:
            mean = total / count[..., None]
            sigma = sigma - mean[..., :, None] * mean[..., None, :]
        scale = lam[:, t]
        if trace_norm:
            trace = sigma.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=0)
            scale = scale / (trace + 1e-4 * second + 1e-12)
        out.append(q64[:, t] - scale[..., None] * (sigma @ q64[:, t, ..., None])[..., 0])
    return torch.stack(out, 1).to(q.dtype)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """S = e^g S;  S += beta k (v - S^T k)^T;  o = K^-0.5 S^T q.

    Shapes: q, k [B, T, H, K], v [B, T, H, V], decay (natural log) and beta [B, T, H].
    """
    state = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=v.dtype)
    out = []
    for t in range(q.shape[1]):
        state = decay[:, t].exp()[..., None, None] * state
        error = v[:, t] - (state.mT @ k[:, t, ..., None])[..., 0]
        state = state + (beta[:, t, :, None] * k[:, t])[..., None] * error[..., None, :]
        out.append((state.mT @ q[:, t, ..., None])[..., 0])
    return torch.stack(out, 1) * q.shape[-1] ** -0.5


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """S = diag(e^g) S + k v^T;  o = K^-0.5 S^T q.

    Shapes: q, k, decay (natural log) [B, T, H, K], v [B, T, H, V].
    """
    state = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=v.dtype)
    out = []
    for t in range(q.shape[1]):
        state = decay[:, t].exp()[..., None] * state + k[:, t, ..., None] * v[:, t, ..., None, :]
        out.append((state.mT @ q[:, t, ..., None])[..., 0])
    return torch.stack(out, 1) * q.shape[-1] ** -0.5


def _read(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file() and not (folder / files[0]).is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if strangers := [name for name in files if Path(name).name != name or "\\" in name]:
        raise ValueError(f"{index} names {strangers[0]!r}, which is not a file of the folder")
    tensors: dict[str, Tensor] = {}
    for name in files:
        tensors |= load_file(folder / name)
    return tensors


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(prog="python -m ccq_jax.torch_reference")
    parser.add_argument("directory", type=Path, help="a folder in Hugging Face form")
    parser.add_argument("ids", type=int, nargs="+", help="token ids")
    flags = parser.parse_args(argv)
    logits = Model(flags.directory).logits(torch.tensor([flags.ids]))[0, -1]
    likeliest = logits.log_softmax(-1).topk(5)
    for log_p, token in zip(*likeliest, strict=True):
        print(f"{token.item():8d}  {log_p.exp().item():7.2%}  logit {logits[token].item():.5f}")


if __name__ == "__main__":
    main()
