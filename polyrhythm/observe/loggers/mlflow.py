"""MLflow: the server of MLFLOW_TRACKING_URI, or without one `mlflow/` in the run folder."""

import os
import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from polyrhythm.observe.loggers.logger import LoggedRun, rows_of

PARAMETERS_PER_CALL = 100
"""MLflow takes no more at once."""
NOT_IN_NAMES = re.compile(r"[^\w./ :-]")


class MlflowLogger:
    """Metrics by step, samples as one JSON table per step among the artifacts, the configuration as parameters."""

    def __init__(self, run: LoggedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the store without a database or a server
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run tells nobody who was not named
        from mlflow import MlflowClient

        is_local = "MLFLOW_TRACKING_URI" not in os.environ
        self._client = MlflowClient((run.folder / "mlflow").as_uri() if is_local else None)
        known = run.recall("mlflow")
        self._run_id = known or self._create(run)
        if known:
            self._client.update_run(known, status="RUNNING")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        values = [Metric(NOT_IN_NAMES.sub("_", name), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=values)

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        columns, rows = rows_of(samples)
        if rows:
            table = msgspec.json.encode({"columns": columns, "data": rows}).decode()
            self._client.log_text(self._run_id, table, f"samples/step_{step:06}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _create(self, run: LoggedRun) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        run.remember("mlflow", run_id)
        # Once: MLflow refuses to change a parameter, and what a resumed run may change is in its config.json.
        parameters = [Param(key, str(value)) for key, value in run.parameters.items()]
        for start in range(0, len(parameters), PARAMETERS_PER_CALL):
            self._client.log_batch(run_id, params=parameters[start : start + PARAMETERS_PER_CALL])
        return run_id
