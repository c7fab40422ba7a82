"""What is checked in a configuration before anything starts; `ccq_jax.config.validate` calls it."""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

MIXERS = ("gated_deltanet", "gla", "attention")
IMPLEMENTATIONS = ("auto", "scan", "xla", "triton", "pallas")

_Accept = tuple[Callable[[Any], bool], str]
_POSITIVE: _Accept = (lambda x: x > 0, "above 0")
_NOT_NEGATIVE: _Accept = (lambda x: x >= 0, "0 or above")
_AT_LEAST_1: _Accept = (lambda x: x >= 1, "at least 1")
_CHUNK_SIZES = (0, 16, 32, 64, 128, 256)


def structure(config: ConfigDict, like: ConfigDict, prefix: str = "") -> list[str]:
    """Fields that are missing, unknown, or of another type than in `like`."""
    if not hasattr(config, "keys"):
        return [f"{prefix.rstrip('.')} is {config!r}: it must be a section with {', '.join(like)}"]
    problems = [f"{prefix}{name} is missing" for name in like if name not in config]
    for name in config:
        field = f"{prefix}{name}"
        if name not in like:
            problems.append(f"{field} is {config[name]!r}: there is no such field")
        elif isinstance(like[name], ConfigDict):
            problems += structure(config[name], like[name], field + ".")
        elif not _same_type(config[name], like[name]):
            kind = type(like[name]).__name__
            problems.append(f"{field} is {config[name]!r}: its type must be {kind}")
    return problems


def _same_type(value: object, like: object) -> bool:
    if isinstance(like, bool):
        return isinstance(value, bool)
    if isinstance(like, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(like, int):
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(like, tuple):
        return isinstance(value, tuple | list) and all(_same_type(v, like[0]) for v in value)
    return isinstance(value, type(like))


def values(config: ConfigDict) -> list[str]:
    """Fields whose value cannot run; asks for a config without problems of structure."""
    problems = Section("model", config.model).model()
    problems += Section("data", config.data).data()
    problems += Section("train", config.train).train()
    problems += Section("checkpoint", config.checkpoint).checkpoint()
    problems += Section("eval", config.eval).eval()
    if config.train.only_ccq and not config.model.ccq.enabled:
        problems.append(
            "train.only_ccq is True: model.ccq.enabled must be True, to have parameters"
        )
    problems += Section("mesh", config.mesh).mesh()
    return problems


class Section:
    """The checks of each section; `found` collects what they refuse."""

    def __init__(self, section: str, config: ConfigDict):
        self.section = section
        self.config = config
        self.found: list[str] = []

    def refuse(self, field: str, what: str) -> None:
        """Notes that a field's value cannot be, and `what` would be right."""
        value = self.config
        for name in field.split("."):
            value = value[name]
        self.found.append(f"{self.section}.{field} is {value!r}: {what}")

    def check(self, fields: str, accept: Callable[[Any], bool], what: str) -> None:
        """Refuses each of the space-separated fields whose value `accept` does not take."""
        for field in fields.split():
            value = self.config
            for name in field.split("."):
                value = value[name]
            if not accept(value):
                self.refuse(field, f"it must be {what}")

    def one_of(self, field: str, values: tuple[str, ...]) -> None:
        """Refuses a field that is not one of `values`."""
        if self.config[field] not in values:
            self.refuse(field, f"it must be one of {', '.join(values)}")

    def model(self) -> list[str]:
        """Problems of `config.model`."""
        c = self.config
        self.one_of("mixer", MIXERS)
        self.one_of("dtype", ("float32", "bfloat16"))
        self.one_of("remat", ("none", "dots", "full"))
        self.one_of("implementation", IMPLEMENTATIONS)
        self.check(
            "hidden_size num_layers num_heads head_dim head_v_dim gate_low_rank",
            *_AT_LEAST_1,
        )
        self.check("vocab_size num_v_heads intermediate_size conv_size", *_NOT_NEGATIVE)
        self.check("chunk_size", lambda x: x in _CHUNK_SIZES, "0, 16, 32, 64, 128 or 256")
        self.check("norm_eps gate_normalizer rope_theta initializer_range", *_POSITIVE)
        self.check("head_dim head_v_dim", lambda x: x <= 512, "at most 512")
        if c.num_v_heads not in (0, c.num_heads):
            if c.mixer != "gated_deltanet":
                self.refuse("num_v_heads", f"for {c.mixer} it must be 0 or num_heads")
            elif c.num_heads >= 1 and c.num_v_heads % c.num_heads:
                self.refuse("num_v_heads", f"it must be a multiple of num_heads, {c.num_heads}")
        if c.mixer == "attention":
            if c.head_dim % 2:
                self.refuse("head_dim", "RoPE turns pairs, so it must be even")
            if c.head_v_dim != c.head_dim:
                self.refuse("head_v_dim", f"in attention it must be head_dim, {c.head_dim}")
            if c.conv_size:
                self.refuse("conv_size", "attention has no short convolution: it must be 0")
        return self._ccq()

    def _ccq(self) -> list[str]:
        c, ccq = self.config, self.config.ccq
        self.check("ccq.lambda_max", *_POSITIVE)
        active = ccq.enabled or ccq.fixed_lambda >= 0
        if active and c.mixer == "attention":
            field = "ccq.enabled" if ccq.enabled else "ccq.fixed_lambda"
            self.refuse(field, "softmax attention normalises its reads: CCQ needs a linear mixer")
        if ccq.decay and (c.mixer != "gated_deltanet" or c.num_v_heads not in (0, c.num_heads)):
            self.refuse(
                "ccq.decay",
                "statistics decay with one scalar gate a key head, which only gated_deltanet "
                "with num_v_heads = num_heads has",
            )
        return self.found

    def data(self) -> list[str]:
        """Problems of `config.data`."""
        for part in self.config.source.split(","):
            name, _, where = part.split("*")[-1].strip().partition(":")
            if name in ("text", "arrayrecord") and not where:
                self.refuse("source", f"name the files, as in {name}:/data/fineweb-edu/*.{name}")
        if not self.config.tokenizer:
            self.refuse("tokenizer", "it must be bytes, mistral, or a tokenizer's file")
        self.check("validation_fraction", lambda x: 0 <= x < 1, "in [0, 1)")
        if not self.config.validation_fraction and not self.config.validation_source:
            self.refuse("validation_fraction", "it must be above 0, or give validation_source")
        self.check("workers prefetch mqar.num_pairs", *_NOT_NEGATIVE)
        if self.config.workers > 0 and self.config.prefetch == 0:
            self.refuse("prefetch", "it must be at least 1, or workers 0")
        vocab_size_fits = lambda x: x == 0 or (x >= 4 and x % 2 == 0)
        self.check("mqar.vocab_size", vocab_size_fits, "even and at least 4, or 0")
        self.check("mqar.power", *_POSITIVE)
        self.check("recall_examples niah.num_needles", *_AT_LEAST_1)
        return self.found

    def train(self) -> list[str]:
        """Problems of `config.train`."""
        c = self.config
        self.check(
            "steps batch_size seq_len accumulation log_every", lambda x: x >= 1, "at least 1"
        )
        self.check("warmup_steps loss_chunk", *_NOT_NEGATIVE)
        self.check("learning_rate adam_eps", *_POSITIVE)
        self.check("weight_decay clip_norm", *_NOT_NEGATIVE)
        self.check("final_lr_fraction", lambda x: 0 <= x <= 1, "between 0 and 1")
        self.check("beta1 beta2 ema", lambda x: 0 <= x < 1, "in [0, 1)")
        self.check("ccq_lr_scale", *_POSITIVE)
        if c.warmup_steps >= c.steps >= 1:
            self.refuse("warmup_steps", f"it must be less than train.steps, {c.steps}")
        if c.accumulation >= 1 and c.batch_size % c.accumulation:
            self.refuse("accumulation", f"it must divide train.batch_size, {c.batch_size}")
        if c.loss_chunk >= 1 and c.seq_len % c.loss_chunk:
            self.refuse("loss_chunk", f"it must divide train.seq_len, {c.seq_len}")
        return self.found

    def checkpoint(self) -> list[str]:
        """Problems of `config.checkpoint`."""
        self.check("every keep", *_AT_LEAST_1)
        self.check("keep_best", *_NOT_NEGATIVE)
        return self.found

    def eval(self) -> list[str]:
        """Problems of `config.eval`."""
        self.check("every", *_NOT_NEGATIVE)
        self.check("batches documents recall_examples", *_AT_LEAST_1)
        lengths = lambda x: all(n >= 1 for n in x)
        self.check("contexts recall_lengths", lengths, "lengths of at least 1")
        some = lambda x: len(x) > 0 and lengths(x)
        lists = "s_niah.lengths extrapolation.lengths mqar.lengths mqar.pairs"
        self.check(lists, some, "one or more numbers of at least 1")
        self.check("batch_size s_niah.samples longbench_length", *_AT_LEAST_1)
        self.check("extrapolation.bucket extrapolation.texts", *_AT_LEAST_1)
        self.check("context_length retrieval_length", *_NOT_NEGATIVE)
        self.one_of("bos", ("none", "bos", "eos"))
        return self.found

    def mesh(self) -> list[str]:
        """Problems of `config.mesh`."""
        self.check("data", lambda x: x == -1 or x >= 1, "-1 (all that fsdp leaves) or at least 1")
        self.check("fsdp", *_AT_LEAST_1)
        return self.found
