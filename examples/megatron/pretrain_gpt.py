"""Pretrain a GPT with Megatron's own loop and our optimizer: the two marked lines are all.

torchrun --nproc-per-node 8 examples/megatron/pretrain_gpt.py --optimizer muon \
    --use-distributed-optimizer --muon-tp-mode duplicated \
    --overlap-grad-reduce --overlap-param-gather ...
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_lw.integrations import megatron as megatron_lw  # the first line


def datasets(sizes: Any, vp_stage: int | None = None) -> Any:
    """Training, validation and test sets of made-up text."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="90,5,5",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


def loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Sum of the losses of all tokens, the number of tokens, and both for the log."""
    total, tokens = (output.float().view(-1) * mask.view(-1)).sum(), mask.sum()
    return total, tokens.int(), {"lm loss": torch.stack([total.detach(), tokens])}


def forward_step(data: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """One micro-batch through the model."""
    batch = next(data)
    inputs = (batch["tokens"], batch["position_ids"], batch.get("attention_mask"))
    return model(*inputs, labels=batch["labels"]), partial(loss, batch["loss_mask"].float())


if __name__ == "__main__":
    megatron_lw.install()  # the second line
    datasets.is_distributed = True  # type: ignore[attr-defined]
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
