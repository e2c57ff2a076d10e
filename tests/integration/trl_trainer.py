"""What TRL's own GRPOTrainer makes of completions: JSON on stdin, each function's scores and the weighted totals on stdout.

It runs in a process of its own, the only one that imports TRL's trainer.
"""

import asyncio
import importlib
import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerState
from trl.trainer.grpo_trainer import GRPOTrainer


def main() -> None:
    asked = json.load(sys.stdin)
    functions = [make_function(**function) for function in asked["functions"]]
    rows = [
        {**group["columns"], "prompt": group["prompt"], "completion": completion, "completion_ids": ids}
        for group in asked["groups"]
        for completion, ids in zip(group["completions"], group["completion_ids"], strict=True)
    ]
    trainer = make_trainer(functions)
    prompts, completions, completion_ids = (
        [row[key] for row in rows] for key in ("prompt", "completion", "completion_ids")
    )
    completions = [[{"role": "assistant", "content": text}] for text in completions]
    scores = trainer._calculate_rewards(rows, prompts, completions, completion_ids)
    totals = [add_up(scores[:, list(map(int, weights))], list(weights.values())) for weights in asked["weightings"]]
    print(json.dumps({"scores": plain(scores.T), "totals": plain(torch.stack(totals))}))


def add_up(scores: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """As GRPOTrainer._generate_and_score_completions does."""
    totals = (scores * torch.tensor(weights).unsqueeze(0)).nansum(dim=1)
    totals[torch.isnan(scores).all(dim=1)] = torch.nan
    return totals


def make_trainer(functions: list[Any]) -> Any:
    """As much of a trainer as its calculation of rewards asks for."""
    PartialState()  # its logger asks for one
    trainer = object.__new__(GRPOTrainer)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    trainer.__dict__.update(
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=True),
        args=SimpleNamespace(report_to=[], device=torch.device("cpu")),
        is_deepspeed_enabled=False,
        chat_template_kwargs={},
        reward_funcs=functions,
        reward_processing_classes=[tokenizer_of(function) for function in functions],
        reward_func_names=[type(function).__name__ for function in functions],
        state=TrainerState(),
        environments=None,
        async_loop=loop,
        _log_completion_extra=lambda column, values: None,
        _log_metric=lambda name, value: None,
    )
    return trainer


def make_function(spec: str, options: dict[str, Any] | None) -> Any:
    if spec == "reward_model":
        return AutoModelForSequenceClassification.from_pretrained(options["path"]).eval()
    module, _, name = spec.partition(":")
    function = getattr(importlib.import_module(module), name)
    return function if options is None else function(**options)


def tokenizer_of(function: Any) -> Any:
    """TRL's trainer calls a model with what its tokenizer makes of the text."""
    return (
        AutoTokenizer.from_pretrained(function.config._name_or_path) if isinstance(function, torch.nn.Module) else None
    )


def plain(values: torch.Tensor) -> Any:
    """Lists, with None for what is not a number."""
    if values.dim() > 1:
        return [plain(row) for row in values]
    return [None if value != value else value for value in values.tolist()]


if __name__ == "__main__":
    main()
