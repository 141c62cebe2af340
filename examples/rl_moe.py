"""GRPO with a mixture of experts: a tiny Qwen3-MoE that this program makes itself, on two CPU cores.

    python examples/rl_moe.py                                         # random model, two cores, minutes
    python examples/rl_moe.py --tp 2                                  # experts cut over two engine ranks
    python examples/rl_moe.py --model Qwen3-30B-A3B --gpus 8 --trainers 4 --engines 2 --tp 2 --engine sglang

transformers keeps the experts of a layer in one tensor, and checkpoints and engines keep them one by one.  weightcast
cuts the tensors on the way, sharded as they are, and proves every expert on every engine rank.  A model of random
weights cannot calculate, so the reward here is the share of letters in an answer.
"""

from __future__ import annotations

from pathlib import Path

import torch
from grpo.options import checked, parser
from rl_disaggregated import train
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TINY = Path("rl-moe-model")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> None:
    made = parser((__doc__ or "").partition("\n")[0], out="rl-moe", via="broadcast", pause="abort")
    made.set_defaults(model=str(TINY), lr=3e-3, max_tokens=12, steps=10, reward="letters")
    if made.parse_args().model == str(TINY) and not TINY.exists():
        make_model(TINY)
    train(checked(made))


def make_model(folder: Path) -> None:
    """Makes a random Qwen3-MoE of two layers with four experts each, and a byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=512,
        hidden_size=96,
        intermediate_size=160,
        moe_intermediate_size=96,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        dtype="float32",
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


if __name__ == "__main__":
    main()
