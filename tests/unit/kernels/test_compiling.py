"""A kernel is compiled when it is first needed; where that fails, it is said, and torch operators do the work."""

import logging

import pytest

from polyrhythm.kernels import compiling, elementwise
from polyrhythm.kernels.compiling import forget_kernels


@pytest.fixture(autouse=True)
def no_kernels_loaded():
    """Kernels are looked for anew, in this test and after it."""
    forget_kernels()
    yield
    forget_kernels()


def test_a_machine_without_a_compiler_has_no_kernels_and_is_told(monkeypatch, caplog):
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        assert elementwise._load() is None
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_named_with_its_reason(monkeypatch, caplog, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho this machine is odd >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("POLYRHYTHM_CACHE", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        assert elementwise._load() is None
    assert "this machine is odd" in caplog.text


def test_kernels_are_kept_where_nobody_else_can_put_any(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("POLYRHYTHM_CACHE", str(tmp_path))
    assert elementwise._load() is not None
    assert (tmp_path / "kernels").stat().st_mode & 0o77 == 0
    (tmp_path / "kernels").chmod(0o777)
    forget_kernels()
    assert elementwise._load() is None
    assert "can be written by others" in caplog.text


def test_a_place_where_no_kernels_can_be_kept_is_said_and_harms_nothing(monkeypatch, tmp_path, caplog):
    (tmp_path / "kernels").touch()
    monkeypatch.setenv("POLYRHYTHM_CACHE", str(tmp_path))
    assert elementwise._load() is None
    assert "torch operators are used" in caplog.text


def test_a_kernel_that_does_not_load_is_made_again_the_next_time(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYRHYTHM_CACHE", str(tmp_path / "good"))
    assert elementwise._load() is not None
    (library,) = (tmp_path / "good" / "kernels").iterdir()
    monkeypatch.setenv("POLYRHYTHM_CACHE", str(tmp_path / "bad"))
    (tmp_path / "bad" / "kernels").mkdir(mode=0o700, parents=True)
    (tmp_path / "bad" / "kernels" / library.name).touch()
    forget_kernels()
    assert elementwise._load() is None
    forget_kernels()
    assert elementwise._load() is not None
