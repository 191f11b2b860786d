"""Megatron-LM on a forked CPU rank: its argument parser, model, optimizer and ``train_step``; and rollouts for it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shlex
import sys
import typing
from unittest import mock

import torch
import typing_extensions
from torch import Tensor

from megatron_support.config.recipe import ParallelConfig
from megatron_support.megatron.attention import EagerCoreAttention
from megatron_support.megatron.host import setup_host
from megatron_support.megatron.parallel import initialize_parallel
from megatron_support.megatron.weights.sharding import global_name
from tests.megatron.tiny import shard_of

VOCAB, WIDTH, MICRO, SEQUENCES = 93, 16, 2, 8

MISSING = "" if importlib.util.find_spec("megatron.training") else "megatron.training is not importable"
"""Why the tests cannot run. The wheel of megatron-core 0.16.1 has no such package, that of 0.19.2 has."""

if not MISSING:  # once, before ranks are forked
    if not hasattr(typing, "override"):  # all that 0.19.2 takes from Python 3.12 on this path
        typing.override = typing_extensions.override
    import megatron.training.training  # noqa: F401

_FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --ffn-hidden-size 48 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --transformer-impl local
    --no-bias-swiglu-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-rope-fusion --no-bias-dropout-fusion --use-cpu-initialization --distributed-backend gloo
    --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 8 --lr 0.01 --clip-grad 0 --adam-eps 1e-3
    --train-iters 4
    --rl-default-temperature 0.9 --rl-default-top-k 60 --rl-default-top-p 0.9
    --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.28 --grpo-kl-beta 0.05
    --rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 3.0
"""


def flags(*extra: str) -> list[str]:
    """A command line; what the rollouts' shape says is in it."""
    shape = {"seq-length": WIDTH, "max-position-embeddings": WIDTH, "micro-batch-size": MICRO}
    shape |= {"global-batch-size": SEQUENCES, "vocab-size": VOCAB}
    return [
        *shlex.split(_FLAGS),
        *(word for name, value in shape.items() for word in (f"--{name}", str(value))),
        *extra,
    ]


def start(command_line: list[str]):
    """Megatron-LM's args, as its own parser makes them, and this rank's groups."""
    from megatron.training import arguments

    setup_host("cpu")
    with on_command_line(command_line):
        args = arguments.parse_and_validate_args()
    return args, initialize(args)


@contextlib.contextmanager
def on_command_line(command_line: list[str]):
    """What Megatron-LM parses for the length of a block, off a GPU and without its report of every argument."""
    from megatron.training import arguments

    with (
        mock.patch.object(sys, "argv", ["train", *command_line]),
        mock.patch.object(arguments, "get_device_arch_version", lambda: 9),  # it asks a GPU
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield


def initialize(args):
    """What ``pretrain`` makes before the model, off a GPU; this rank's groups."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.initialize import initialize_megatron

    layout = {"tensor": args.tensor_model_parallel_size, "pipeline": args.pipeline_model_parallel_size}
    groups = initialize_parallel(ParallelConfig.from_dict(layout | {"context": args.context_parallel_size}))
    with contextlib.redirect_stdout(io.StringIO()):
        initialize_megatron(allow_no_cuda=True, skip_mpu_initialization=True)
    model_parallel_cuda_manual_seed(1)
    return groups


def build(args, container=None):
    """(model chunks, optimizer, scheduler, config) of Megatron-LM."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config
    from megatron.training import training
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    with contextlib.redirect_stdout(io.StringIO()):
        container = container or pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        container.model.transformer_layer_spec = layer_spec()
        model, optimizer, scheduler = training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=container,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    config = get_model_config(model[0])
    config.finalize_model_grads_func = finalize_model_grads  # as ``train`` does before its loop
    return model, optimizer, scheduler, config


def layer_spec():
    """Megatron's local layer with an attention that knows packing and context parallelism off a GPU."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = EagerCoreAttention
    return layer


def set_weights(model, groups) -> None:
    """Equal whole weights under every tensor-parallel size."""
    for name, parameter in named(model):
        dimension = split_dimension(name)
        shape = list(parameter.shape)
        if dimension is not None:
            shape[dimension] *= groups.tensor_size
        generator = torch.Generator().manual_seed(sum(name.encode()))
        whole = torch.randn(shape, generator=generator) * 0.1
        if "norm" in name:
            whole = 1 + whole
        with torch.no_grad():
            parameter.copy_(shard_of(name, whole, groups.tensor_size, groups.tensor_rank))


def split_dimension(name: str) -> int | None:
    """Which dimension of a parameter tensor-parallel ranks share."""
    if "norm" in name:
        return None
    return 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0


def named(model):
    """(global name, parameter) of the one chunk of this rank."""
    bare = model[0].module
    return [(global_name(bare, name), parameter) for name, parameter in bare.named_parameters()]


def rollouts(step: int = 0) -> dict[str, Tensor]:
    """All sequences of one step in Megatron-LM's columns: some tokens outside a support, one sequence masked whole."""
    generator = torch.Generator().manual_seed(step)

    def logprobs() -> Tensor:
        return -4 - 0.6 * torch.rand(SEQUENCES, WIDTH - 1, generator=generator)

    positions = torch.arange(WIDTH).repeat(SEQUENCES, 1)
    lengths = torch.randint(8, WIDTH + 1, (SEQUENCES, 1), generator=generator)
    mask = ((positions >= 4) & (positions < lengths)).float()
    mask[3] = 0
    old, inference = logprobs(), logprobs()
    old[torch.rand(old.shape, generator=generator) < 0.1] = -torch.inf
    return {
        "tokens": torch.randint(0, VOCAB, (SEQUENCES, WIDTH), generator=generator),
        "advantages": torch.randn(SEQUENCES, generator=generator),
        "old_logprobs": old,
        "loss_mask": mask,
        "position_ids": positions,
        "ref_logprobs": logprobs(),
        "inference_logprobs": inference,
    }


def microbatches(columns: dict[str, Tensor], groups) -> list[dict[str, Tensor]]:
    """This data-parallel rank's, each ``MICRO`` sequences."""
    pieces = [{name: values[i : i + MICRO] for name, values in columns.items()} for i in range(0, SEQUENCES, MICRO)]
    share = len(pieces) // groups.data_size
    return pieces[groups.data_rank * share :][:share]


def train(model, optimizer, scheduler, config, step, iterator):
    """Megatron-LM's ``train_step``: what it returns, and the gradients it left."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import training

    result = training.train_step(
        step,
        RerunDataIterator(iterator),
        model,
        optimizer,
        scheduler,
        config,
        get_forward_backward_func(),
        iteration=0,
    )
    return result, {name: parameter.main_grad.clone() for name, parameter in named(model)}
