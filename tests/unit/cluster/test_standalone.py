from pathlib import Path

import pytest

from polyrhythm.cluster.standalone import is_loopback, read_credential, standalone_engine
from polyrhythm.errors import UserError

TOKEN = "0123456789abcdef"


def token_file(folder: Path, content: str, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", "127.0.0.1.example.org"])
def test_an_address_that_others_can_reach_needs_a_token(host):
    with pytest.raises(UserError, match=f"--host {host} is open to other machines: give --token-file"):
        standalone_engine("no-model", host=host, port=0, token_file=None, num_threads=0)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_addresses_need_none(host):
    assert is_loopback(host)
    with pytest.raises(UserError, match="model='no-model' is not there"):
        standalone_engine("no-model", host=host, port=0, token_file=None, num_threads=0)


def test_a_token_is_one_line_of_a_file_that_only_its_owner_can_read(tmp_path):
    assert read_credential(token_file(tmp_path, f"{TOKEN}\n")) == TOKEN
    for mode in (0o644, 0o640, 0o604, 0o620):
        with pytest.raises(UserError, match="can be read by others: chmod 600"):
            read_credential(token_file(tmp_path, TOKEN, mode))


@pytest.mark.parametrize("content", ["", "\n", TOKEN[:-1], f"{TOKEN} {TOKEN}", f"{TOKEN}\n{TOKEN}"])
def test_an_empty_short_or_second_token_is_refused(tmp_path, content):
    with pytest.raises(UserError, match="must hold one token of at least 16 characters"):
        read_credential(token_file(tmp_path, content))


def test_a_token_file_that_is_missing_or_no_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_credential(tmp_path / "none")
    with pytest.raises(UserError, match="cannot be read: it is not plain text"):
        read_credential(token_file(tmp_path, TOKEN + "é"))
