"""A script that starts a run: what its processes find of it, and that it does not start again in them."""

import importlib
import os
import sys

import pytest

from polyrhythm.errors import UserError
from polyrhythm.runs.script import name_of_class, script_modules_found
from polyrhythm.tasks.addition import Addition


def test_a_module_that_trains_when_it_is_imported_is_told_where_to_put_that(tmp_path, monkeypatch):
    (tmp_path / "trains_at_once.py").write_text("import polyrhythm\npolyrhythm.train(model='nowhere')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r'trains_at_once\.py.*below `if __name__ == "__main__":`'):
        importlib.import_module("trains_at_once")


def test_a_class_is_found_by_its_module_or_by_the_script_it_is_in(monkeypatch):
    assert name_of_class(Addition) == "polyrhythm.tasks.addition:Addition"
    of_a_script = type("Squares", (), {"__module__": "__main__"})
    # The workers of pytest-xdist have no script either.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/me/own_task.py", raising=False)
    assert name_of_class(of_a_script) == "own_task:Squares"
    monkeypatch.delattr(sys.modules["__main__"], "__file__")  # as in a notebook
    with pytest.raises(UserError, match="the class Squares is in no file"):
        name_of_class(of_a_script)


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_processes_of_a_run_find_modules_beside_the_script_and_the_environment_is_as_before(
    tmp_path, monkeypatch, before
):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before:
        monkeypatch.setenv("PYTHONPATH", before)
    with script_modules_found():
        found = os.environ["PYTHONPATH"].split(os.pathsep)
        assert found[0] == str(tmp_path) and not any(path.startswith(sys.prefix) for path in found)
    assert os.environ.get("PYTHONPATH") == before
