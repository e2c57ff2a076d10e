"""`forward_backward` adds up gradients, `optim_step` makes the update: the two verbs of training."""

from collections import Counter
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polyrhythm.algorithms.advantages import ADVANTAGES
from polyrhythm.algorithms.aggregation import group_divisor, token_weight
from polyrhythm.algorithms.kl import kl_k1, kl_k3
from polyrhythm.algorithms.loss import LossInputs, LossOutputs
from polyrhythm.algorithms.losses import find_loss
from polyrhythm.config import Config
from polyrhythm.errors import RunError
from polyrhythm.interrupts import interrupts
from polyrhythm.observe.activity import Activity, seconds_metric
from polyrhythm.observe.recorder import ActivityRecorder
from polyrhythm.training.optimizer import Optimizer
from polyrhythm.training.packing.layout import Layout, empty_row, pack
from polyrhythm.training.packing.transfer import moved_together
from polyrhythm.training.parallel.part import Part, Sums
from polyrhythm.training.parallel.replica import Replica
from polyrhythm.training.parallel.replicate import WholeReplica
from polyrhythm.training.policy.tri_model import TriModel
from polyrhythm.types import Group, MicroBatch


class Trainer:
    """One replica, or a shard of it. Between two `optim_step`s it may be given any number of micro-batches in any order.

    `optim_step` and `metrics` are collective: every process calls them, and gets the same.
    """

    def __init__(
        self,
        config: Config,
        policy: PreTrainedModel,
        recorder: ActivityRecorder | None = None,
        replica: Replica | None = None,
    ):
        self.config = config
        self.replica = replica or WholeReplica()
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.models = TriModel(policy, config.training, config.algorithm, config.rollout.temperature, dtype)
        self.replica.hold(self.models)
        self.loss = find_loss(config.algorithm.loss)
        self.optimizer = Optimizer(policy, config.training, config.num_steps, self.models.masters)
        self.device = next(policy.parameters()).device
        self.recorder = recorder or ActivityRecorder("trainer")
        self.num_updates_in_step = 0
        self.divisor = 0.0
        self.version = 0
        self.sums = Sums()
        self.positions: list[int] = []
        self.parts: list[list[Part]] = []
        self.update_metrics: dict[str, float] = {}

    @property
    def policy(self) -> PreTrainedModel:
        return self.models.policy

    def begin_step(self, version: int) -> None:
        self.version = version
        self.num_updates_in_step = 0
        self.sums = Sums()
        self.positions = []
        self.parts = []
        self.update_metrics = {}
        self.replica.begin_update()
        self.models.remember_old_policy()

    def forward_backward(self, micro_batch: MicroBatch) -> None:
        """Add the gradient of the micro-batch's summed loss to the parameters' gradients."""
        with interrupts.allowed(), self.recorder.doing(Activity.FORWARD_BACKWARD):
            self._refuse_other_versions(micro_batch)
            kept = []
            for group, advantages in zip(micro_batch.groups, micro_batch.advantages, strict=True):
                divisor = group_divisor(self.config.algorithm.aggregation, len(group.rollouts), group.num_sampled)
                self.divisor += divisor
                self.sums.add("divisor", divisor)
                self.sums.add("groups", 1)
                self.positions.append(group.position)
                if any(advantages) or (self.config.algorithm.kl_coef > 0 and group.rollouts):  # as CostModel prices it
                    kept.append((group, advantages))
                else:
                    self.sums.add("skipped_groups", 1)
            self._forward_backward(kept)

    def optim_step(self) -> None:
        """Divide by what the micro-batches of all replicas added to the divisor, clip, update.

        With elastic ranks it may turn out that one is lost: then nothing is updated, and `step.updates()` has the same update
        once more, with what the lost one had.
        """
        part = Part(self.positions, self.sums, self.recorder.seconds(Activity.WAIT))
        parts, divisor = [part], self.divisor
        if not self.replica.is_alone:
            with self.recorder.doing(Activity.AGREE):
                parts = self.replica.agree(part)
            if parts is None:
                return
            with self.recorder.doing(Activity.REDUCE):  # who left after it would fail the others after their update
                divisor = self.replica.add_up(self.optimizer.gradients(), self.divisor)
            if divisor is None:
                return
        with self.recorder.doing(Activity.UPDATE):
            if divisor > 0:
                self.update_metrics = self.optimizer.step(divisor)
            self.divisor = 0.0
            self.sums, self.positions = Sums(), []
            self.parts.append(parts)
            self.num_updates_in_step += 1
        if self.num_updates_in_step < self.config.training.updates_per_step:
            self.replica.begin_update()

    def metrics(self) -> dict[str, float]:
        """Of the step so far, over all replicas."""
        sums = Sums.of_all([*(part.sums for parts in self.parts for part in parts), self.sums])
        balance = _balance(self.parts) if self.parts and len(self.parts[-1]) > 1 else {}
        return {**self.update_metrics, **_step_metrics(sums), **balance}

    def _refuse_other_versions(self, micro_batch: MicroBatch) -> None:
        for group in micro_batch.groups:
            for rollout in group.rollouts:
                if rollout.policy_version != self.version or micro_batch.version != self.version:
                    raise RunError(
                        f"group {group.position} of step {group.step} holds a rollout of policy v{rollout.policy_version} "
                        f"while v{self.version} is trained: off-policy data is refused"
                    )

    def _forward_backward(self, kept: list[tuple[Group, list[float]]]) -> None:
        groups = [group for group, _ in kept]
        advantages = [advantages for _, advantages in kept]
        layouts = pack(
            [(group.prompt_ids, [r.trace.token_ids for r in group.rollouts]) for group in groups],
            share_prompt=self.models.shares_prompts,
            max_tokens=self.config.training.tokens_per_micro_batch,
            loss_masks=[[r.trace.sampled_mask for r in group.rollouts] for group in groups],
        )
        num_empty = self.replica.num_passes(len(layouts)) - len(layouts)
        rows = [layout.to(self.device) for layout in [*layouts, *[empty_row()] * num_empty]]
        algorithm = self.config.algorithm
        references = [self.models.score_reference(row).logprobs_N if algorithm.kl_coef > 0 else None for row in rows]
        needs_old = self.num_updates_in_step > 0 or (algorithm.kl_coef > 0 and algorithm.kl_estimator == "k1")
        olds = [self.models.score_old(row).logprobs_N if needs_old else None for row in rows]
        layouts, empty = rows[: len(layouts)], rows[len(layouts) :]
        olds, references = olds[: len(layouts)], references[: len(layouts)]
        if algorithm.kl_coef > 0 and algorithm.kl_estimator == "k1":
            advantages = self._advantages_less_kl(groups, layouts, olds, references)
        for layout, old_N, reference_N in zip(layouts, olds, references, strict=True):
            self._backward_layout(layout, groups, advantages, old_N, reference_N)
        for row in empty:
            self.models.pass_without_gradient(row)

    def _backward_layout(
        self, layout: Layout, groups: list[Group], advantages: list[list[float]], old_N: Tensor | None,
        reference_N: Tensor | None,
    ) -> None:  # fmt: skip
        algorithm = self.config.algorithm
        scores = self.models.score(layout)
        weights = [_token_weights(algorithm.aggregation, group, self.config.rollout.max_tokens) for group in groups]
        rollout_logprobs_N, advantages_N, weights_N = moved_together(
            [_rollout_logprobs(layout, groups), _per_token(layout, advantages), _per_token(layout, weights)],
            self.device,
        )
        inputs = LossInputs(
            policy_logprobs_N=scores.logprobs_N,
            old_logprobs_N=scores.logprobs_N.detach() if old_N is None else old_N,
            reference_logprobs_N=reference_N,
            rollout_logprobs_N=rollout_logprobs_N,
            advantages_N=advantages_N,
            weights_N=weights_N,
            sequence_N=layout.sequence_N,
        )
        outputs = self.loss(inputs, algorithm)
        outputs.loss.backward()
        self._measure(layout, inputs, outputs, scores.entropy_N)

    def _advantages_less_kl(
        self, groups: list[Group], layouts: list[Layout], olds: list[Tensor | None], references: list[Tensor | None]
    ) -> list[list[float]]:
        """k1 in the reward: each rollout's reward loses kl_coef times its summed log-ratio, then the group is compared."""
        penalties = [[0.0] * len(group.rollouts) for group in groups]
        for layout, old_N, reference_N in zip(layouts, olds, references, strict=True):
            assert old_N is not None and reference_N is not None
            penalty_N = kl_k1(old_N, reference_N)
            rows = zip(layout.group_N.tolist(), layout.rollout_N.tolist(), penalty_N.tolist(), strict=True)
            for group, rollout, penalty in rows:
                penalties[group][rollout] += self.config.algorithm.kl_coef * penalty
        advantage = ADVANTAGES[self.config.algorithm.advantage]
        return [
            advantage([(r.reward or 0.0) - p for r, p in zip(group.rollouts, penalty, strict=True)])
            for group, penalty in zip(groups, penalties, strict=True)
        ]

    @torch.no_grad()
    def _measure(self, layout: Layout, inputs: LossInputs, outputs: LossOutputs, entropy_N: Tensor) -> None:
        logprobs_N, old_N = inputs.policy_logprobs_N, inputs.old_logprobs_N
        ratio_N = torch.exp(logprobs_N - old_N)
        gap_N = old_N - inputs.rollout_logprobs_N  # of the same weights: what is left is how they are computed
        totals = {
            "loss": outputs.loss.detach(),
            "entropy": entropy_N.sum(),
            "ratio": ratio_N.sum(),
            "mismatch_abs": gap_N.abs().sum(),
            "mismatch_k1": -gap_N.sum(),
            "mismatch_k3": (torch.expm1(gap_N) - gap_N).sum(),
        }
        if inputs.reference_logprobs_N is not None:
            totals["kl_k1"] = kl_k1(logprobs_N, inputs.reference_logprobs_N).sum()
            totals["kl_k3"] = kl_k3(logprobs_N, inputs.reference_logprobs_N).sum()
        maxima = {"ratio_abs_gap": (ratio_N - 1).abs().max(), "mismatch_abs": gap_N.abs().max()}
        self.sums.take(totals, maxima, outputs.sums)
        self.sums.add("tokens", layout.num_targets)
        self.sums.add("row_tokens", layout.num_tokens)


def _token_weights(aggregation: str, group: Group, max_tokens: int) -> list[float]:
    total = group.num_sampled
    return [token_weight(aggregation, r.trace.num_sampled, total, max_tokens) for r in group.rollouts]


def _per_token(layout: Layout, values: list[list[float]]) -> Tensor:
    """Spread one value per rollout over the rollout's tokens."""
    starts, flat = [0], []
    for row in values:
        flat.extend(row)
        starts.append(len(flat))
    index_N = torch.tensor(starts)[layout.group_N] + layout.rollout_N
    return torch.tensor(flat, dtype=torch.float32)[index_N]


def _rollout_logprobs(layout: Layout, groups: list[Group]) -> Tensor:
    """The engine's log-probability of each target token."""
    in_the_row = dict.fromkeys(zip(layout.group_N.tolist(), layout.rollout_N.tolist(), strict=True))
    values = [x for group, rollout in in_the_row for x in groups[group].rollouts[rollout].trace.rollout_logprobs]
    return torch.tensor(values, dtype=torch.float32)


def _balance(parts: list[list[Part]]) -> dict[str, float]:
    """How long the ranks waited on average, and how evenly they were used: with two of them 0.5 is even, 1.0 is one rank that did everything."""
    tokens: Counter[int] = Counter()
    for update in parts:
        for rank, part in enumerate(update):
            tokens[rank] += int(part.sums.totals.get("row_tokens", 0))
    return {
        seconds_metric(Activity.WAIT): fmean(part.wait_s for part in parts[-1]),
        "ranks/num": len(parts[-1]),
        "ranks/largest_share": max(tokens.values()) / (tokens.total() or 1.0),
    }


def _step_metrics(sums: Sums) -> dict[str, float]:
    """Names and meanings are in observe/metrics.py. A mean over no tokens would be a lie: it is left out."""
    total = sums.totals.get
    metrics = {
        "train/loss": total("loss", 0.0) / (total("divisor", 0.0) or 1.0),
        "train/tokens": total("tokens", 0.0),
        "train/row_tokens": total("row_tokens", 0.0),
        "groups/skipped": total("skipped_groups", 0.0),
    }
    if tokens := total("tokens", 0.0):
        metrics |= {
            "train/entropy": total("entropy", 0.0) / tokens,
            "train/ratio_mean": total("ratio", 0.0) / tokens,
            "train/ratio_abs_gap_max": sums.maxima["ratio_abs_gap"],
            "mismatch/logprob_abs_mean": total("mismatch_abs", 0.0) / tokens,
            "mismatch/logprob_abs_max": sums.maxima["mismatch_abs"],
            "mismatch/k1": total("mismatch_k1", 0.0) / tokens,
            "mismatch/k3": total("mismatch_k3", 0.0) / tokens,
        }
        if "kl_k1" in sums.totals:
            metrics |= {"kl/k1": total("kl_k1", 0.0) / tokens, "kl/k3": total("kl_k3", 0.0) / tokens}
        metrics |= {name: value / tokens for name, value in sums.of_the_loss.items()}
    return metrics
