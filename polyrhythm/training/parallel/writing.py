"""Several processes write one version of a store, each the rows that it holds."""

from collections.abc import Iterable

from polyrhythm.training.parallel.channel import Channel
from polyrhythm.weights.export import Rows
from polyrhythm.weights.snapshot import Probe
from polyrhythm.weights.store import WeightStore


def write_together(
    store: WeightStore, rows: Iterable[Rows], version: int, writers: Channel, probe: Probe | None = None
) -> None:
    """Every writer its own rows, and the first what all have whole; nothing is gathered but what they say of their pieces."""
    if writers.num == 1:
        store.publish(rows, version, probe)
        return
    rows = list(rows)
    if writers.is_first:
        store.begin(rows, version)
    writers.wait_for_all()
    own = [part for part in rows if part.rows.numel() and (writers.is_first or not part.is_whole)]
    written = writers.gather(store.write_rows(own, version))
    if writers.is_first:
        store.finish(version, written, probe)
