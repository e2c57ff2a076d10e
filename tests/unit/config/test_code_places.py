import pytest

from polyrhythm.config import load_config, load_resumed_config, save_config
from polyrhythm.user_code import find_kind, import_attribute

TOML = """
[reward]
functions = ["score.py:score", "helpers:bonus", "here:here", "exact_match", "trl.rewards:think_format_reward"]
options = { "helpers:bonus" = { size = 2 }, score = {} }
[algorithm]
loss = "my_loss.py:Loss"
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    """A configuration with code beside it, read from a working directory that has other code."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "here.py").write_text("here = 1\n")
    beside = tmp_path / "beside"
    beside.mkdir()
    for name in ("score", "helpers", "here", "my_loss"):
        (beside / f"{name}.py").write_text("")
    (beside / "run.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path / "here")
    return beside / "run.toml"


def test_code_beside_the_configuration_is_found_by_its_absolute_path(run_file):
    beside, config = run_file.parent, load_config([run_file])
    assert config.reward.functions == [
        f"{beside}/score.py:score",
        f"{beside}/helpers.py:bonus",
        "here:here",
        "exact_match",
        "trl.rewards:think_format_reward",
    ]
    assert config.reward.options == {f"{beside}/helpers.py:bonus": {"size": 2}, "score": {}}
    assert config.algorithm.loss == f"{beside}/my_loss.py:Loss"


def test_a_file_of_the_working_directory_is_found_wherever_a_run_is_gone_on_with(run_file, tmp_path, monkeypatch):
    config = load_config([], {"reward": {"functions": ["here.py:here", "absent.py:score"]}})
    functions = [f"{tmp_path}/here/here.py:here", "absent.py:score"]
    assert config.reward.functions == functions
    save_config(config, tmp_path / "config.json")
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.chdir("/")
    assert load_resumed_config(tmp_path, {}).reward.functions == functions


def test_a_file_is_a_module_whatever_it_is_called_and_is_loaded_once(tmp_path):
    (tmp_path / "beside_math.py").write_text("five = 5\n")
    (tmp_path / "math.py").write_text(
        "from dataclasses import dataclass\nimport beside_math\n\n@dataclass\nclass Score:\n"
        "    value: int = beside_math.five\n"
    )
    score = import_attribute(f"{tmp_path}/math.py", "Score")
    assert score().value == 5
    assert find_kind("reward", f"{tmp_path}/math.py:Score", {}, "score") is score
    assert import_attribute("math", "pi") > 3
    with pytest.raises(ModuleNotFoundError, match=r"there is no file .*absent\.py"):
        import_attribute(f"{tmp_path}/absent.py", "score")
