"""Write docs/models.md from the tables that the code and the tests use."""

from pathlib import Path

from polyrhythm.models import REFUSED, TESTED
from tests.architectures import ARCHITECTURES

TARGET = Path(__file__).parent / "models.md"
HEAD = """# Models

Written by `make docs` from `polyrhythm/models.py` and `tests/architectures.py`; `polyrhythm models` prints the same lists.

`model` is a folder, a hub id or `smollm2-135m`. Any decoder of transformers runs whose layers call the attention function that they are
given: engine and trainer bring their own function for that, which shares a prompt among its completions, and leave everything else
(norms, biases, experts, positions, parallel blocks, scaled embeddings) to the model's own code. Sliding windows, soft-capped scores and
logits, attention sinks, layers without positions, partial rotations, scaled logits, tied and untied heads are honoured exactly.

Llama, Qwen2 and Qwen3 without sliding windows generate several times faster on a CPU: their layers run on packed weights and compiled kernels.
Kernels are accelerations for the layers they know, never a condition (`POLYRHYTHM_KERNELS=off` runs without them).

When a run starts, engine and trainer compare a few tokens with the model's own forward pass, and refuse a model that differs. What can be
told from `config.json` alone is refused in the first second, by `train`, `--dry-run` and `fetch`.

## Tested

For each a tiny random model with what is special about it: greedy tokens equal those of `generate`, engine and trainer agree to 1e-5, gradients of
shared prompts equal those of separate sequences to 1e-5 (`tests/contracts/test_models.py`).

| type | switched on in the test |
|---|---|
"""
MIDDLE = """
A mixture of experts has one restriction: an expert's product rounds by how many rows it has, so that a completion may differ in its last bits
with what else is in the batch. Everything else of the promise of equal bits holds for all of them.

## Refused by name

| type | because it |
|---|---|
"""
TAIL = """
Also refused: rotary frequencies that depend on the length of a batch (`rope_type` dynamic or longrope), quantised weights, code that a model folder brings
along (it is never run), encoders and encoder-decoders.
"""


def page() -> str:
    rows = [f"| {kind} | {', '.join(map(_told, ARCHITECTURES[kind].items())) or '-'} |" for kind in TESTED]
    refused = [f"| {kind} | {why} |" for kind, why in sorted(REFUSED.items())]
    return HEAD + "\n".join(rows) + "\n" + MIDDLE + "\n".join(refused) + "\n" + TAIL


def _told(option: tuple[str, object]) -> str:
    key, value = option
    return f"{key}={value}" if isinstance(value, int | float) and not isinstance(value, bool) else key


if __name__ == "__main__":
    TARGET.write_text(page())
