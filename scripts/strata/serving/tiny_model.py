"""Makes a tiny model offline, so that the cpu base has something to serve: random weights, a byte-level
tokenizer.

Runs in the serving engine's Python (torch, transformers, tokenizers): ``python -m strata.serving.tiny_model
DIRECTORY``. The same seed gives the same weights; the text it writes is noise.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

SEED = 20260817
MAX_POSITIONS = 4096
_SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|turn|>")
_TEMPLATE = (
    "{%- for message in messages -%}<|turn|>{{ message.role }}: {{ message.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|turn|>assistant: {%- endif -%}"
)


def ready(directory: Path) -> bool:
    """Whether the model is there; it arrives by rename, so it is whole or absent."""
    return (directory / "config.json").is_file()


def place() -> Path:
    """Where the model is kept: a cache directory that is writable here."""
    for parent in (
        os.environ.get("XDG_CACHE_HOME"),
        "/var/cache",
        str(Path.home() / ".cache"),
        tempfile.gettempdir(),
    ):
        if parent and os.access(parent, os.W_OK):
            return Path(parent) / "strata" / f"tiny-model-{SEED}"
    return Path(tempfile.mkdtemp(prefix="strata-")) / f"tiny-model-{SEED}"


def make(directory: Path) -> None:
    """Write tokenizer, configuration and weights (about half a million parameters, float32) to
    ``directory``.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=directory.name + ".", dir=directory.parent))
    try:
        _tokenizer(unfinished)
        _model(unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(directory)
        except OSError:
            if not ready(directory):  # another process may have been faster: its model is the same
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_SPECIAL[0],
        bos_token=_SPECIAL[1],
        eos_token=_SPECIAL[2],
        additional_special_tokens=[_SPECIAL[3]],
        model_max_length=MAX_POSITIONS,
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(directory)


def _model(directory: Path) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3MoeConfig(
        vocab_size=384,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    model.generation_config.do_sample = False
    model.to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
