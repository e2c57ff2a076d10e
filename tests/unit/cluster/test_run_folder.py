from pathlib import Path

import pytest

from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import Config
from polyrhythm.errors import UserError


def test_the_folder_of_a_run_that_goes_on_is_not_reopened(tmp_path: Path):
    config = Config(output_dir=str(tmp_path / "runs"), weights={"root": str(tmp_path / "weights")})
    owner = RunFolder.create(config, tmp_path)
    with pytest.raises(UserError, match="still going on"):
        RunFolder(owner.path).reopen(config, first_step=0)
    path = owner.path
    del owner
    RunFolder(path).reopen(config, first_step=0)
