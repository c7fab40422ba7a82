r"""The model `ccq_jax` of EleutherAI's lm-evaluation-harness.

    python -m ccq_jax.evaluation.harness run --model ccq_jax --model_args workdir=runs/ccq_gdn \
        --tasks hellaswag,piqa

is the harness's own command line with this model in it. In Python, `import
ccq_jax.evaluation.harness` registers the model. Arguments in --model_args:

    workdir or hf      a run's directory, or a folder in Hugging Face form
    step               latest, best, or the step of a checkpoint (latest)
    context_length     tokens that a scored one may depend on; 0 is all before it (4096)
    bos                in front of every text: none, bos or eos (none)
    rows               rows of 1024 tokens that each device works on together (8)
"""

import os
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from ccq_jax import interop
from ccq_jax.config import default, validate
from ccq_jax.evaluation import subject as subjects
from ccq_jax.evaluation.context import Context, prefix
from ccq_jax.evaluation.likelihood import Pair, cut, likelihoods, windows
from ccq_jax.sampling import Sampling

MAX_OUTPUT = 256  # tokens, where a task says nothing


@register_model("ccq_jax")
class HarnessModel(TemplateLM):
    """A model under the harness.

    An empty context is what `bos` says, or the end of a document, which ends what was before.

    Args:
      workdir, hf, step, context_length, bos, rows: see the module.
      context: a loaded model instead of all these.
      batch_size, max_batch_size, device: of the harness's command line, and not used: `rows` counts,
        on all devices that JAX sees.

    Raises:
      ValueError: there is no such checkpoint, or a setting cannot be.
    """

    def __init__(
        self,
        workdir: str = "",
        hf: str = "",
        step: int | str = "latest",
        context_length: int = 4096,
        bos: str = "none",
        rows: int = 8,
        *,
        context: Context | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ):
        super().__init__()
        if context is None:
            if bool(workdir) == bool(hf):
                raise ValueError("give workdir=RUN or hf=FOLDER in model_args, and not both")
            config = default()
            with config.unlocked():
                config.eval.context_length, config.eval.bos = int(context_length), str(bos)
                config.eval.batch_size = int(rows)
            validate(config)
            source = str(workdir) or interop.HF + str(hf)
            config = subjects.describe(source, config)
            context = Context(subjects.load(source, config, step=step), title="lm_eval")
        self.context = context
        settings = context.settings
        self.length = settings.context_length
        self.prefix = prefix(context.tokenizer, settings.bos)

    @property
    def eot_token_id(self) -> int:
        """End of a document."""
        return self.context.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What a text's first token depends on."""
        return self.prefix[0] if self.prefix else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in the harness's caches."""
        return self.context.tokenizer.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids, after `bos` unless `add_special_tokens` is False."""
        front = [] if add_special_tokens is False else self.prefix
        return front + self.context.tokenizer.encode(string)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation after its context, and whether it is greedy."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [cut(context, continuation, self.length) for _, context, continuation in requests]
        found = [(x.logprob, x.greedy) for x in self._score(pairs, "likelihoods")]
        for (text, _, _), result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", text, result)
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts, in windows of `context_length` tokens."""
        pairs: list[Pair] = []
        ends = []
        for request in requests:
            tokens = self.context.tokenizer.encode(request.args[0])
            pairs += windows(tokens, [self.prefix_token_id], self.length)
            ends.append(len(pairs))
        logprobs = [x.logprob for x in self._score(pairs, "texts")]
        found = []
        for start, end, request in zip([0, *ends], ends, requests, strict=False):
            found.append(sum(logprobs[start:end]))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def _score(self, pairs: list[Pair], what: str):
        context = self.context
        with context.subject.on_devices():
            return likelihoods(
                context.model, pairs, context.rows, lambda batches: context.track(batches, what)
            )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to one of the strings `until` or `max_gen_toks` tokens, greedy unless do_sample."""
        groups: dict[tuple, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(_options(request.args[1]), []).append(i)
        texts: dict[int, str] = {}
        for (count, stop, sampling), members in groups.items():
            prompts = [self.tok_encode(requests[i].args[0]) for i in members]
            room = max(1, self.length - count) if self.length else 0
            prompts = [
                (prompt[-room:] if room else prompt) or [self.prefix_token_id] for prompt in prompts
            ]
            made = self.context.generate(prompts, count, stop=stop, sampling=sampling)
            texts |= dict(zip(members, made, strict=True))
            for i in members:
                self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return [texts[i] for i in range(len(requests))]


def _options(given: dict[str, Any]) -> tuple[int, tuple[str, ...], Sampling]:
    """Tokens, stop strings and sampling of a request's generation arguments."""
    until = given.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(until)
    temperature = float(given.get("temperature") or 0) if given.get("do_sample") else 0.0
    sampling = Sampling(temperature, int(given.get("top_k") or 0), float(given.get("top_p") or 1))
    return int(given.get("max_gen_toks") or MAX_OUTPUT), tuple(filter(None, stop)), sampling


def main() -> None:
    """The harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    # The harness would fork for its bootstraps, which may hang: JAX has threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    cli_evaluate()


if __name__ == "__main__":
    main()
