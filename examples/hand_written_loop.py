"""A training loop of one's own, in plain torch: `python examples/hand_written_loop.py [MODEL NUM_STEPS LEARNING_RATE]`.

Conductor and engines generate and score in processes of their own while this one computes gradients. The loss is GRPO's
with one update per step: the advantage times the log-probability of each token, summed, then divided by the tokens.
"""

import sys

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import polyrhythm

ROWS = [{"prompt": f"Count to {number}:"} for number in range(2, 34)]


def digits(completions, **_):
    """The share of characters that are digits."""
    return [sum(c in "0123456789" for c in text) / max(1, len(text)) for text in completions]


def loss_of(policy, group, advantages):
    """Of all rollouts of one problem, summed over their tokens. Padding comes last, so causal attention never sees it."""
    num_prompt, completions = len(group.prompt_ids), [rollout.trace.token_ids for rollout in group.rollouts]
    ids = pad_sequence([torch.tensor(group.prompt_ids + ids) for ids in completions], batch_first=True)
    mask = pad_sequence([torch.ones(len(ids)) for ids in completions], batch_first=True)
    logits = policy(ids).logits[:, num_prompt - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(2, ids[:, num_prompt:, None]).squeeze(2)
    return -(torch.tensor(advantages)[:, None] * logprobs * mask).sum()


def main(model="smollm2-135m", num_steps=20, learning_rate=1e-5):
    sizes = polyrhythm.RolloutConfig(group_size=8, groups_per_step=8, max_tokens=24)
    with polyrhythm.rollouts(
        model=model, dataset=ROWS, rewards=digits, num_steps=int(num_steps), rollout=sizes
    ) as loader:
        policy = AutoModelForCausalLM.from_pretrained(loader.model_dir, dtype=torch.float32)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=float(learning_rate), betas=(0.9, 0.95), weight_decay=0.0)
        loader.publish(policy)  # version 0: engines begin
        for step in loader.steps():  # engines hold these weights, verified
            rewards = []
            for update in step.updates():
                num_tokens = 0
                for micro_batch in update:  # groups as they finish; the others are still being generated
                    for group, advantages in zip(micro_batch.groups, micro_batch.advantages, strict=True):
                        loss_of(policy, group, advantages).backward()
                        num_tokens += group.num_sampled
                        rewards += [rollout.reward for rollout in group.rollouts]
                for parameter in policy.parameters():
                    parameter.grad /= num_tokens
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            loader.publish(policy)  # closes the step: engines begin the next one with these weights
            print(f"step {step.version + 1}: reward {sum(rewards) / len(rewards):.3f}", flush=True)
        policy.save_pretrained(loader.folder / "model")


if __name__ == "__main__":
    main(*sys.argv[1:])
