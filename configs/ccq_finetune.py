r"""CCQ attached to a trained backbone, which is trained on with it.

    python train.py --config=configs/ccq_finetune.py --workdir=DIR --config.init_from=BACKBONE

BACKBONE is the workdir of a run (of configs/gdn.py, configs/gla.py), or `hf:` and a folder in Hugging
Face form. The model and its tokenizer are the backbone's; lambda's parameters are added. Lambda
begins at 3e-4, so that the loss begins where the backbone's ended. CCQ's own learning rate is higher,
for its parameters have far to go.

Measured with `--config.train.seq_len=256 --config.train.steps=120` and seeds 1, 2, 3, from 240 steps
of configs/gdn.py at that length, whose validation loss is 1.8370 nats a byte (Python 3.11, JAX 0.10.2,
CPU): 1.7614, 1.7634, 1.7732 with CCQ, and within 2e-6 of that without. CCQ does not help here, and
lambda stays where it began. docs/finetune.png is of these runs and of others that began at lambda 2
(`--config.model.ccq.lambda_max=4.0 --config.model.ccq.bias_init=0.0`):

    python -m ccq_jax.curves runs/backbone runs/without_CCQ-* runs/CCQ-* ... --out=docs/finetune.png

    --config.train.only_ccq=True          leaves the backbone as it is
    --config.model.ccq.enabled=False      trains it on without CCQ, for comparison
"""

from ml_collections import ConfigDict

from ccq_jax.config import default


def get_config(arg: str = "tiny") -> ConfigDict:
    """The configuration; `init_from` is to be set. `arg` is the size whose recipe and data it has."""
    config = default(size=arg)
    config.init_from = "BACKBONE"
    config.model.ccq.enabled = True
    config.model.ccq.bias_init = -8.0
    config.train.steps = 200 if arg == "tiny" else 2000
    config.train.warmup_steps = 10 if arg == "tiny" else 100
    config.train.learning_rate = 1e-3 if arg == "tiny" else 1e-4
    config.train.ccq_lr_scale = 30.0
    config.train.adam_eps = 1e-15  # lambda's gradients are as small as lambda: 1e-8 would hide them
    config.eval.every = config.train.steps // 10
    return config
