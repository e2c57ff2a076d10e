"""Event files for TensorBoard, in `tensorboard/` of the run folder: `tensorboard --logdir runs` shows all runs.

TensorBoard's own writer is used, which needs neither torch nor TensorFlow.
"""

import importlib
import time
from collections.abc import Sequence
from typing import Any

from polyrhythm.observe.loggers.logger import LoggedRun, rows_of


class TensorboardLogger:
    """Metrics as scalars, samples as a text table, the configuration as hyperparameters."""

    def __init__(self, run: LoggedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        if run.num_finished_steps:
            # TensorBoard forgets what other files say about this step and later ones: it is made again.
            session_log = _messages("compat.proto.event").SessionLog
            self._add(run.num_finished_steps + 1, session_log=session_log(status=session_log.START))
        else:
            self._add(0, summary=_hyperparameters(run))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        summary = _messages("compat.proto.summary").Summary
        values = [summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=summary(value=values))

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        columns, rows = rows_of(samples)
        if rows:
            self._add(step, summary=_text_table("samples", [columns, *rows]))

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        event = _messages("compat.proto.event").Event
        self._writer.add_event(event(wall_time=time.time(), step=step, **what))
        self._writer.flush()


def _text_table(tag: str, rows: list[list[Any]]) -> Any:
    """A table of strings is shown as a table; each cell is Markdown."""
    import numpy
    from tensorboard.plugins.text import metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    summary = _messages("compat.proto.summary").Summary
    cells = numpy.array([[_as_code(cell) for cell in row] for row in rows], dtype=object)
    return summary(
        value=[summary.Value(
            tag=tag, metadata=metadata.create_summary_metadata(tag, description=""), tensor=make_tensor_proto(cells)
        )]
    )  # fmt: skip


def _as_code(cell: Any) -> bytes:
    """Indented, so that what a model writes is shown as it is and not as Markdown."""
    return "\n".join(f"    {line}" for line in str(cell).split("\n")).encode()


def _hyperparameters(run: LoggedRun) -> Any:
    from google.protobuf.struct_pb2 import Value
    from tensorboard.plugins.hparams import metadata

    summaries, hparams = _messages("compat.proto.summary"), _messages("plugins.hparams.plugin_data")
    start = hparams.SessionStartInfo(group_name=run.name, start_time_secs=time.time())
    for key, value in run.parameters.items():
        if isinstance(value, bool):
            start.hparams[key].CopyFrom(Value(bool_value=value))
        elif isinstance(value, int | float):
            start.hparams[key].CopyFrom(Value(number_value=value))
        else:
            start.hparams[key].CopyFrom(Value(string_value=str(value)))
    content = hparams.HParamsPluginData(session_start_info=start, version=metadata.PLUGIN_DATA_VERSION)
    about = summaries.SummaryMetadata(
        plugin_data=summaries.SummaryMetadata.PluginData(
            plugin_name=metadata.PLUGIN_NAME, content=content.SerializeToString()
        )
    )
    return summaries.Summary(value=[summaries.Summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=about)])


def _messages(name: str) -> Any:
    """A module of protocol buffers, which is generated and says nothing about types."""
    return importlib.import_module(f"tensorboard.{name}_pb2")
