"""SmolLM2-135M learns sums of reasoning-gym from two rewards: `python examples/chain_sum.py [MODEL NUM_STEPS CURVE.svg]`.

One reward is reasoning-gym's own rule for the answer, the other asks for a number and nothing else. The model is small: four solved
problems before the question show it what is wanted.
"""

import sys
from pathlib import Path

import polyrhythm

SOLVED = {"31 + 46": 77, "58 - 23": 35, "17 + 25": 42, "64 - 90": -26}
SHOTS = "".join(f"{left} = {right}\n" for left, right in SOLVED.items())
CURVES = {"reward/score/mean": "answer is right", "reward/format/mean": "answer is a number"}


def main(model="smollm2-135m", num_steps=40, curve=""):
    run = polyrhythm.train(
        model=model,
        task={
            "name": "reasoning_gym",
            "options": {
                "dataset": "chain_sum",
                "min_terms": 2,
                "max_terms": 2,
                "min_digits": 2,
                "max_digits": 2,
                "size": 2000,
            },
        },
        prompt={"form": "text", "template": SHOTS + "{question}"},
        rewards=["polyrhythm.tasks.reasoning_gym:score", "format"],
        reward_weights=[1.0, 0.2],
        reward={"options": {"format": {"pattern": r"-?\d+"}}},
        num_steps=int(num_steps),
        rollout={"group_size": 8, "groups_per_step": 16, "max_tokens": 6, "stop": ["\n"]},
        training={"learning_rate": 1e-5, "warmup_steps": 5},
        seed=1,
    )
    print(run)
    for name, what in CURVES.items():
        values = [step[name] for step in run.metrics]
        print(f"{what}: {mean(values[:5]):.2f} in the first steps, {mean(values[-5:]):.2f} in the last")
    if curve:
        Path(curve).write_text(draw(run.metrics), encoding="utf-8")
    return run


def mean(values):
    return sum(values) / len(values)


def draw(metrics, width=640, height=300, margin=40):
    """The means of both rewards at every step, as an SVG."""
    x = [margin + (width - 2 * margin) * place / max(1, len(metrics) - 1) for place in range(len(metrics))]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    ]
    for share in (0.0, 0.5, 1.0):
        y = height - margin - share * (height - 2 * margin)
        lines.append(
            f'<path d="M{margin} {y:.1f}H{width - margin}" stroke="#ccc"/><text x="8" y="{y + 4:.1f}">{share:.1f}</text>'
        )
    for (name, what), color, row in zip(CURVES.items(), ("#1f6feb", "#d4712a"), (16, 32), strict=True):
        y = [height - margin - step[name] * (height - 2 * margin) for step in metrics]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        lines.append(f'<text x="{margin}" y="{row}" fill="{color}">{what}</text>')
    lines.append(f'<text x="{width - margin}" y="{height - 12}" text-anchor="end">step {len(metrics)}</text></svg>')
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
