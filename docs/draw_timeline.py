"""Draw docs/timeline.svg: two steps of the same work, in turns and at the same time. A schematic, from the durations below."""

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TARGET = Path(__file__).parent / "timeline.svg"

GROUPS_S = (6.0, 4.5, 4.0, 3.5, 3.0, 2.5)
"""How long each group of a step is generated, longest first."""
TRAIN_S = 1.5
UPDATE_S = 0.6
LOAD_S = 0.5
NUM_ENGINES = 2
NUM_STEPS = 2

SCALE, LEFT, LANE, TOP = 15.5, 92, 24, 46
COLOURS = {"generate": "#5b8fd6", "train": "#e39a3b", "update": "#58a55c", "load": "#8d6cc1"}
WORDS = {
    "generate": "generate a group",
    "train": "forward and backward for a group",
    "update": "update, publish",
    "load": "load, verify",
}


class Span(NamedTuple):
    lane: str
    activity: str
    start_s: float
    end_s: float
    step: int


def run(is_periodic: bool) -> list[Span]:
    """What every process does. Engines take the next group when they are free; a step begins when they have its weights."""
    spans, begin_s = [], 0.0
    for step in range(1, NUM_STEPS + 1):
        finished_s = []
        free = [(begin_s, f"engine {number}") for number in range(1, NUM_ENGINES + 1)]
        for duration_s in GROUPS_S:
            start_s, engine = heapq.heappop(free)
            spans.append(Span(engine, "generate", start_s, start_s + duration_s, step))
            heapq.heappush(free, (start_s + duration_s, engine))
            finished_s.append(start_s + duration_s)
        trained_s = begin_s
        for ready_s in sorted(finished_s):
            start_s = max(trained_s, ready_s if is_periodic else max(finished_s))
            trained_s = start_s + TRAIN_S
            spans.append(Span("trainer", "train", start_s, trained_s, step))
        spans.append(Span("trainer", "update", trained_s, trained_s + UPDATE_S, step))
        begin_s = trained_s + UPDATE_S + LOAD_S
        spans += [Span(engine, "load", trained_s + UPDATE_S, begin_s, step) for _, engine in free]
    return spans


def picture() -> str:
    in_turns, together = run(is_periodic=False), run(is_periodic=True)
    width = LEFT + SCALE * _end_s(in_turns) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} 336" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width:.0f}" height="336" fill="#ffffff"/>',
        *_chart(
            "In turns (sync): the trainer waits for the last group, then the engines wait for the trainer", in_turns, 0
        ),
        *_chart("At the same time (periodic): the same groups, the same weights, the same update", together, 150),
        *_legend(314),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _end_s(spans: list[Span]) -> float:
    return max(span.end_s for span in spans)


def _chart(title: str, spans: list[Span], top: int) -> Iterator[str]:
    yield f'<text x="12" y="{top + 24}" font-weight="600" fill="#1c2126">{title}</text>'
    lanes = [f"engine {number}" for number in range(1, NUM_ENGINES + 1)] + ["trainer"]
    end = LEFT + SCALE * _end_s(spans)
    for number, lane in enumerate(lanes):
        y = top + TOP + number * (LANE + 4)
        yield f'<text x="12" y="{y + 16}" fill="#444c56">{lane}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{LANE}" fill="#eef1f4"/>'
        for span in (span for span in spans if span.lane == lane):
            x, width = LEFT + SCALE * span.start_s, SCALE * (span.end_s - span.start_s)
            yield (
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" fill="{COLOURS[span.activity]}" '
                f'stroke="#ffffff" stroke-width="1.2"><title>{WORDS[span.activity]}, step {span.step}</title></rect>'
            )
    for step in range(1, NUM_STEPS + 1):
        x = LEFT + SCALE * max(span.end_s for span in spans if span.step == step)
        bottom = top + TOP + len(lanes) * (LANE + 4) + 4
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + TOP - 6}" y2="{bottom}" stroke="#1c2126" stroke-dasharray="3 3"/>'
        yield f'<text x="{x - 5:.1f}" y="{bottom + 9}" text-anchor="end" fill="#444c56">step {step} is over</text>'


def _legend(y: int) -> Iterator[str]:
    x = LEFT
    for activity, words in {**WORDS, "wait": "wait"}.items():
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS.get(activity, "#eef1f4")}"/>'
        yield f'<text x="{x + 17}" y="{y + 10}" fill="#1c2126">{words}</text>'
        x += 34 + int(6.4 * len(words))


if __name__ == "__main__":
    TARGET.write_text(picture())
