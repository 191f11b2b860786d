"""The actor step in a Megatron loop of your own: your schedule call and optimizer step, our log-probabilities and loss.

python examples/own_loop.py                                            (one rank)
torchrun --standalone --nproc-per-node 2 examples/own_loop.py          (data parallel)
"""

from pathlib import Path

from megatron_support import ActorLossConfig, grpo_advantages
from megatron_support import megatron as ms
from megatron_support.config.recipe import MicrobatchConfig, ModelConfig, OptimizerSettings, ParallelConfig
from megatron_support.rollouts import read_rollouts

ROLLOUTS = Path(__file__).parent / "data/swap_values.jsonl"
TINY = {"vocab_size": 259, "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
COLUMNS = ("advantages", "prev_logprobs", "generation_logprobs")


def main() -> None:
    with ms.running_host("auto") as host:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        groups = ms.initialize_parallel(layout := ParallelConfig())
        config = ModelConfig.from_dict({"architecture": TINY, "dtype": "float32"})
        model = ms.wrap_ddp(ms.build_model(config, layout, groups, seed=1))
        optimizer, scheduler = ms.build_optimizer(OptimizerSettings(lr=1e-3), model.chunks, total_steps=3)
        loss_config = ActorLossConfig.from_dict({"surrogate": {"type": "ppo_clip", "clip_high": 0.28}})
        microbatch = MicrobatchConfig(max_tokens=64)
        rollouts = read_rollouts(ROLLOUTS, vocab_size=model.vocab_size)
        for step in range(3):
            previous = ms.compute_logprobs(model, rollouts, groups=groups, microbatch=microbatch)
            rollouts = rollouts.with_columns(
                prev_logprobs=previous.filtered,  # -inf where a token is outside the support
                advantages=grpo_advantages(rollouts.rewards, rollouts.group_ids)[rollouts.sequence_ids],
            )
            batch = ms.prepare_minibatch(
                rollouts, microbatch=microbatch, groups=groups, device=host.device, columns=COLUMNS
            )
            for chunk in model.chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            loss = ms.MegatronActorLoss(loss_config, model=model, minibatch=batch, groups=groups)
            records = get_forward_backward_func()(
                forward_step_func=loss.forward_step,
                data_iterator=iter(batch.microbatches),
                model=model.chunks[0],
                num_microbatches=len(batch),
                seq_length=batch.seq_length,
                micro_batch_size=batch.micro_batch_size,
                forward_only=False,
            )
            _, grad_norm, _ = optimizer.step()
            scheduler.step(increment=1)
            excluded = sum(record.metrics["policy_support_excluded_tokens"].compute() for record in records)
            if groups.is_main:
                print(f"step {step}: gradient norm {grad_norm:.4f}, {excluded:.0f} tokens excluded on this rank")


if __name__ == "__main__":
    main()
