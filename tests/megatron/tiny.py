"""A tiny model and a tiny batch for tests of the Megatron rooms, and whole logits out of any layout."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_support.config.recipe import Architecture, ModelConfig, ParallelConfig
from megatron_support.megatron.host import setup_host
from megatron_support.megatron.model import build_model
from megatron_support.megatron.parallel import initialize_parallel
from megatron_support.megatron.parts import ModelParts, model_forward
from megatron_support.rollouts.microbatch import context_positions
from megatron_support.types import SamplingParams, TokenBatch

TINY = Architecture(
    vocab_size=100, num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48
)
LENGTHS = (8, 4, 12)


def ready(parallel: ParallelConfig):
    """The CPU host and Megatron's groups on a forked rank."""
    setup_host("cpu")
    return initialize_parallel(parallel)


def tiny_model(parallel: ParallelConfig | None = None, *, seed: int = 5, architecture=TINY, dtype="float32", **options):
    """(model, groups) with random weights; options go to build_model (dtype there as ``compute_dtype``)."""
    parallel = parallel or ParallelConfig()
    groups = ready(parallel)
    config = ModelConfig(architecture=architecture, dtype=dtype)
    if "compute_dtype" in options:
        options["dtype"] = options.pop("compute_dtype")
    return build_model(config, parallel, groups, seed=seed, **options), groups


def tokens(lengths=LENGTHS, vocab: int = 100, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


def token_batch(sequences: list[Tensor], *, packed: bool, groups=None) -> TokenBatch:
    """The sequences packed in a row, or one under the other padded with 0 to the longest (a multiple of 4)."""
    size, rank = (groups.context_size, groups.context_rank) if groups is not None else (1, 0)
    lengths = [len(sequence) for sequence in sequences]
    cut = lambda row: row[context_positions(torch.tensor([len(row)]), size, rank)]
    position = lambda row: torch.arange(len(row))
    if packed:
        input_ids = torch.cat([cut(row) for row in sequences])[None]
        position_ids = torch.cat([cut(position(row)) for row in sequences])[None]
        cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    else:
        rows = [torch.nn.functional.pad(row, (0, max(lengths) - len(row))) for row in sequences]
        input_ids = torch.stack([cut(row) for row in rows])
        position_ids = torch.stack([cut(position(row)) for row in rows])
        cu_seqlens = None
    blank = torch.full((input_ids.numel(),), -1)
    return TokenBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        targets=blank,
        response_mask=blank >= 0,
        sequence_ids=torch.zeros_like(blank),
        token_index=blank,
        sampling=SamplingParams(),
        num_sequences=len(sequences),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths) if packed else None,
    )


def run_pipeline(model: ModelParts, batches: list[TokenBatch], groups, loss=None) -> list:
    """Megatron's schedule over microbatches of one shape: forward and backward of the sum of their ``loss(logits)``,
    or forward only, which returns the logits."""

    def forward_step(iterator, chunk):
        def loss_function(output, non_loss_data=False):
            return output.detach() if loss is None else (loss(output) * len(batches), {})

        return model_forward(chunk, next(iterator)), loss_function

    chunks = list(model.chunks)
    iterators = [iter(batches) for _ in chunks]
    rows, columns = batches[0].input_ids.shape
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=columns * groups.context_size,
        micro_batch_size=rows,
        forward_only=loss is None,
        collect_non_loss_data=loss is None,
    )


def whole_logits(model: ModelParts, sequences: list[Tensor], groups, *, packed: bool) -> Tensor | None:
    """``[sum of lengths, V]`` of the sequences one after the other, on the last stage; None elsewhere."""
    batch = token_batch(sequences, packed=packed, groups=groups)
    count = groups.pipeline_size if model.virtual_pipeline else 1
    with torch.no_grad():
        results = run_pipeline(model, [batch] * count, groups)
    if not groups.is_last_stage:
        return None
    logits = _gather(results[0], groups.tensor, dim=-1)[:, : model.vocab_size]
    parts = _gather_list(logits, groups.context)
    lengths = [len(sequence) for sequence in sequences]
    padded = lengths if packed else [max(lengths)] * len(lengths)
    whole = [logits.new_zeros(length, logits.shape[-1]) for length in padded]
    for rank, part in enumerate(parts):
        start = 0
        for row, length in zip(whole, padded, strict=True):
            positions = context_positions(torch.tensor([length]), groups.context_size, rank)
            row[positions] = part[start : start + len(positions)]
            start += len(positions)
    return torch.cat([row[:length] for row, length in zip(whole, lengths, strict=True)])


def _gather_list(tensor: Tensor, group) -> list[Tensor]:
    if group is None:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _gather(tensor: Tensor, group, dim: int) -> Tensor:
    return torch.cat(_gather_list(tensor, group), dim)


def last_stage(results: list) -> Tensor:
    """The one result that is not None of ranks that all hold the same."""
    found = [result for result in results if result is not None]
    assert found
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)
    return found[0]


def parameter_gradients(model: ModelParts) -> dict[str, Tensor]:
    """Reduced gradients by global parameter name, whole also where DistributedOptimizer leaves a shard on each rank."""
    from megatron_support.megatron.weights.sharding import global_name

    for chunk in model.chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                _gather_shards(buffer)
    return {
        global_name(chunk, name): parameter.main_grad.clone()
        for chunk in model.bare_chunks
        for name, parameter in chunk.named_parameters()
    }


def _gather_shards(buffer) -> None:
    """Each rank of a gradient buffer holds its part of every bucket."""
    group = buffer.data_parallel_group
    for bucket in buffer.buckets:
        parts = list(bucket.grad_data.chunk(group.size()))
        dist.all_gather(parts, parts[group.rank()].clone(), group=group)


def shard_of(name, whole, tensor, rank):
    """This rank's part of a whole parameter, stated independently of the loading code."""
    whole_on_every_rank = ("layernorm.weight", "router.weight", "gate_weight")
    if name.endswith(whole_on_every_rank) or ".local_experts." in name or tensor == 1:
        return whole
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(tensor, 1)[rank]
    if name.endswith("linear_fc1.weight"):
        gate, up = whole.chunk(2)
        return torch.cat([gate.chunk(tensor)[rank], up.chunk(tensor)[rank]])
    return whole.chunk(tensor)[rank]
