"""The configuration: every field with its unit, and the sizes."""

from ml_collections import ConfigDict

from ccq_jax import checks

# hidden_size, num_layers, num_heads, head_dim, head_v_dim
SIZES: dict[str, dict[str, tuple[int, int, int, int, int]]] = {
    "gated_deltanet": {
        "tiny": (128, 4, 2, 32, 64),
        "500M": (1024, 21, 6, 256, 512),
        "1.3B": (2048, 21, 6, 256, 512),
    },
    "gla": {
        "tiny": (128, 4, 2, 32, 64),
        "340M": (1024, 24, 4, 128, 256),
        "500M": (1280, 21, 5, 128, 256),
        "1.3B": (2048, 24, 4, 256, 512),
    },
    "attention": {
        "tiny": (128, 4, 2, 64, 64),
        "500M": (1280, 21, 10, 128, 128),
        "1.3B": (2048, 24, 16, 128, 128),
    },
}

# Tokens of text that each size is trained on, at 128 sequences of 4096 tokens a step.
TOKENS = {"340M": 15e9, "500M": 15e9, "1.3B": 100e9}


def default(mixer: str = "gated_deltanet", size: str = "tiny") -> ConfigDict:
    """The configuration of a plain model (no CCQ) of one size.

    `tiny` is a run on embedded data that any machine finishes in minutes; the other sizes carry the
    recipe of the CCQ paper (arXiv 2606.01294) and ask for data (`data.source`).

    Raises:
      ValueError: on a mixer or a size that does not exist.
    """
    if mixer not in SIZES:
        raise ValueError(f"mixer is {mixer!r}: it must be one of {', '.join(SIZES)}")
    if size not in SIZES[mixer]:
        known = ", ".join(SIZES[mixer])
        raise ValueError(f"the size is {size!r}: for {mixer} it must be one of {known}")

    config = ConfigDict()
    config.seed = 0  # of initialisation, shuffling and generated data
    # "" = new parameters; or those of a trained model: a run's workdir, or "hf:" and a folder in
    # Hugging Face form. `model` is then that model's, and so is the tokenizer, where it has one:
    # only `ccq` (added if it has none), dtype, remat, implementation and chunk_size count here.
    config.init_from = ""
    config.model = _model(mixer, size)
    config.data = _data()
    config.train = _train()
    config.checkpoint = _checkpoint()
    config.eval = _eval()
    config.mesh = ConfigDict()
    config.mesh.data = -1  # devices along the data axis; -1 = all that fsdp leaves
    config.mesh.fsdp = 1  # devices that parameters and optimizer state are spread over
    if size != "tiny":
        _paper_scale(config, size)
    return config.lock()


def _model(mixer: str, size: str) -> ConfigDict:
    hidden_size, num_layers, num_heads, head_dim, head_v_dim = SIZES[mixer][size]
    model = ConfigDict()
    model.mixer = mixer  # "gated_deltanet", "gla" or "attention"
    model.vocab_size = 0  # 0 = the tokenizer's, rounded up to a multiple of 64
    model.hidden_size = hidden_size  # width of the residual stream
    model.num_layers = num_layers
    model.num_heads = num_heads  # of queries and keys; need not divide hidden_size
    model.num_v_heads = 0  # gated_deltanet only: a multiple of num_heads; 0 = num_heads
    model.head_dim = head_dim  # K: width of one query or key, <= 512; even for attention (RoPE)
    model.head_v_dim = head_v_dim  # V: width of one value, <= 512; attention: = head_dim
    model.intermediate_size = 0  # of SwiGLU; 0 = 8/3 hidden_size, rounded up to a multiple of 256
    model.norm_eps = 1e-6  # of every RMSNorm
    model.conv_size = 4 if mixer == "gated_deltanet" else 0  # width of q, k, v's conv; 0 = none
    model.use_gate = True  # multiply the normalised read by swish(g_proj x); not in attention
    model.gate_low_rank = 16  # gla: rank of the decay's projection
    model.gate_normalizer = 16.0  # gla: log_decay = logsigmoid(.) / gate_normalizer
    model.rope_theta = 10000.0  # attention: base of the rotary frequencies
    model.tie_embeddings = False  # the head is the transposed embedding
    model.initializer_range = 0.02  # standard deviation of linear, conv and embedding weights
    model.dtype = "float32" if size == "tiny" else "bfloat16"  # of compute; parameters: float32
    model.remat = "none"  # recomputed in the backward: "none", "dots" (all but matmuls), "full"
    model.implementation = "auto"  # of the linear operators: or "scan", "xla", "triton", "pallas"
    model.chunk_size = 0  # tokens a chunk in the operators; 0 = the implementation's choice
    model.ccq = _ccq()
    return model


def _ccq() -> ConfigDict:
    ccq = ConfigDict()
    ccq.enabled = False  # condition the query on the keys' covariance, with a learned lambda
    ccq.decay = False  # statistics forget with the backbone's gate; one scalar a key head needed
    ccq.centered = True  # covariance (True) or second moment (False) of the keys
    ccq.key_norm = False  # statistics over L2-normalised keys
    ccq.trace_norm = False  # divide the covariance by its trace
    ccq.lambda_max = 1.0  # lambda = lambda_max * sigmoid(.), > 0
    ccq.bias_init = 0.0  # initial bias in lambda's sigmoid
    ccq.fixed_lambda = -1.0  # >= 0: this lambda instead of the learned one, on any linear model
    return ccq


def _data() -> ConfigDict:
    data = ConfigDict()
    # "stdlib" (this Python's library), "text:GLOB" (.txt, .jsonl, each also .gz or .zst),
    # "arrayrecord:GLOB" (from ccq_jax.data.prepare), "mqar", "niah", or a mixture whose weights,
    # shares of the rows, sum to 1: "0.9*stdlib,0.1*mqar".
    data.source = "stdlib"
    data.validation_source = ""  # what validation reads; "" = the held-out documents of `source`
    data.validation_fraction = 0.05  # of the documents, held out; in [0, 1)
    data.tokenizer = "bytes"  # "bytes", "mistral", or a SentencePiece or tokenizer.json file
    data.workers = 0  # processes that make batches; 0 = threads of this process
    data.prefetch = 2  # batches made ahead, by each worker
    data.cache_dir = ""  # of large texts' token ids; "" = ccq_jax in $XDG_CACHE_HOME or ~/.cache
    data.recall_examples = 256  # in validation, of each recall task, if there is nothing else
    data.mqar = ConfigDict()
    data.mqar.vocab_size = 0  # ids used, even: half keys, half values; 0 = tokenizer's, <= 8192
    data.mqar.num_pairs = 0  # key-value pairs; 4 * num_pairs <= seq_len + 1; 0 = seq_len / 16
    data.mqar.power = 0.01  # a of the law of the gaps to the queries, p(gap) ~ gap^(a - 1)
    data.niah = ConfigDict()
    data.niah.num_needles = 1  # words with a number in the noise; one is asked for
    return data


def _train() -> ConfigDict:
    train = ConfigDict()
    train.steps = 240  # optimizer steps; a larger value continues a finished run
    train.batch_size = 8  # sequences a step over all devices; divisible by devices * accumulation
    train.seq_len = 512  # tokens a sequence
    train.learning_rate = 3e-3  # peak
    train.final_lr_fraction = 0.1  # the cosine ends at this fraction of the peak
    train.warmup_steps = 30  # linear from 0; < steps
    train.weight_decay = 0.1  # on matrices only
    train.beta1 = 0.9
    train.beta2 = 0.95
    train.adam_eps = 1e-8
    train.clip_norm = 1.0  # global gradient norm; 0 = no clipping
    train.ema = 0.0  # decay a step of a running average of the parameters, < 1; 0 = none is kept
    train.only_ccq = False  # train CCQ's parameters and leave the others as they are
    train.ccq_lr_scale = 1.0  # CCQ's learning rate over that of the others
    train.accumulation = 1  # slices of the batch computed one after another
    train.loss_chunk = 0  # positions whose logits are held at once; divides seq_len; 0 = all
    train.log_every = 10  # steps between lines of metrics.jsonl
    return train


def _checkpoint() -> ConfigDict:
    checkpoint = ConfigDict()
    checkpoint.every = 80  # steps; the last step is always saved
    checkpoint.keep = 2  # newest checkpoints kept
    checkpoint.keep_best = 1  # besides these, the ones of lowest validation loss
    return checkpoint


def _eval() -> ConfigDict:
    evaluation = ConfigDict()
    evaluation.every = 80  # steps between validation losses in training; 0 = only at the end
    evaluation.batches = 8  # of train.batch_size sequences of validation data
    evaluation.contexts = (512, 1024, 2048)  # tokens; perplexity by position bucket at each
    evaluation.documents = 64  # held-out documents read at each context, at most
    evaluation.recall_lengths = (128, 256, 512, 1024)  # tokens; accuracy on mqar and niah at each
    evaluation.recall_examples = 64  # sequences for each task and length
    # Of the benchmarks (`eval.py --suite=paper`):
    evaluation.batch_size = 8  # rows of 1024 tokens that each device works on; more if shorter
    evaluation.bos = "none"  # in front of every text: "none", "bos" (if there is one) or "eos"
    evaluation.context_length = 4096  # tokens that a scored one may depend on; 0 = all before it
    evaluation.s_niah = ConfigDict()
    evaluation.s_niah.lengths = (1024, 2048, 4096, 8192)  # tokens, the 128 of the answer included
    evaluation.s_niah.samples = 500  # prompts for each task and length
    evaluation.extrapolation = ConfigDict()
    evaluation.extrapolation.lengths = tuple(range(4096, 20481, 2048))  # tokens read
    evaluation.extrapolation.bucket = 2048  # positions whose losses are averaged
    evaluation.extrapolation.texts = 16  # texts of the greatest length, from each corpus
    evaluation.extrapolation.joined = True  # texts of several documents; else of long ones' starts
    evaluation.longbench_length = 16384  # tokens of a prompt; its middle is cut out
    evaluation.retrieval_length = 2048  # tokens of a context with room for the answer; 0 = all
    evaluation.mqar = ConfigDict()
    evaluation.mqar.lengths = (256, 512, 1024, 2048)  # tokens
    evaluation.mqar.pairs = (4, 16, 64, 256)  # key-value pairs, where the length has room
    return evaluation


def _paper_scale(config: ConfigDict, size: str) -> None:
    """FineWeb-Edu, context 4096, 0.5M tokens a step, 1B tokens of warm-up."""
    tokens_per_step = 128 * 4096
    config.model.remat = "full"
    config.data.source = "arrayrecord:"  # to be completed with the files
    config.data.tokenizer = "mistral"
    config.data.workers = 4
    config.data.prefetch = 8
    config.train.batch_size = 128
    config.train.seq_len = 4096
    config.train.learning_rate = 4e-4
    config.train.steps = round(TOKENS[size] / tokens_per_step)
    config.train.warmup_steps = round(1e9 / tokens_per_step)
    config.train.loss_chunk = 512
    config.checkpoint.every = 1000
    config.eval.every = 1000
    config.eval.batches = 16
    config.eval.contexts = (4096, 8192, 16384)
    config.eval.recall_lengths = (1024, 2048, 4096, 8192)


def resolve(config: ConfigDict, tokenizer_size: int) -> ConfigDict:
    """A copy in which `config.model` is complete: 0 replaced by what it stands for.

    Args:
      config: as `default` makes it.
      tokenizer_size: the number of ids that the tokenizer may emit.

    Raises:
      ValueError: if a `vocab_size` was set that is smaller than `tokenizer_size`.
    """
    config = ConfigDict(config.to_dict())
    if config.model.vocab_size == 0:
        config.model.vocab_size = -(-tokenizer_size // 64) * 64
    elif config.model.vocab_size < tokenizer_size:
        raise ValueError(
            f"model.vocab_size is {config.model.vocab_size}: the tokenizer has {tokenizer_size} "
            "ids, so it must be at least that, or 0"
        )
    config.model = resolve_model(config.model)
    return config.lock()


def resolve_model(model: ConfigDict) -> ConfigDict:
    """A copy of the model's section with `num_v_heads` and `intermediate_size` filled in."""
    model = ConfigDict(model.to_dict())
    if model.num_v_heads == 0:
        model.num_v_heads = model.num_heads
    if model.intermediate_size == 0:
        model.intermediate_size = -(-(8 * model.hidden_size // 3) // 256) * 256
    return model.lock()


def validate(config: ConfigDict) -> None:
    """Refuses a configuration that cannot run, before time or data is spent on it.

    Raises:
      ValueError: one line for each problem: the field, its value, and what would be right.
    """
    _refuse(checks.structure(config, default()) or checks.values(config))


def validate_model(model: ConfigDict) -> None:
    """As `validate`, for the model's section alone."""
    found = checks.structure(model, default().model, "model.")
    _refuse(found or checks.Section("model", model).model())


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError("the configuration cannot run:\n  " + "\n  ".join(problems))
