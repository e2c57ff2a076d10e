"""What is refused before Ray is asked, and what is made of its answers. Without Ray."""

import socket
from pathlib import Path

import pytest

from polyrhythm.cluster.ray import checks
from polyrhythm.cluster.ray.checks import authentication, check_ray, existing_cluster
from polyrhythm.config import ClusterConfig, ConductorConfig, Config, EngineConfig
from polyrhythm.errors import UserError

HERE = {"address": "127.0.0.1", "total": {"CPU": 4}, "free": {"CPU": 4}}
ELSEWHERE = {"address": "203.0.113.9", "total": {"CPU": 4}, "free": {"CPU": 4}}


@pytest.fixture
def head():
    """The address of somebody who listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def saying(monkeypatch):
    def saying(**answer: object) -> None:
        monkeypatch.setattr(checks, "look", lambda address, environment: answer)

    return saying


def config_of(address: str = "", host: str = "127.0.0.1", **cluster: str) -> Config:
    return Config(
        cluster=ClusterConfig.model_validate({"kind": "ray", "address": address, **cluster}),
        conductor=ConductorConfig(host=host),
    )


def token_file(folder: Path, mode: int = 0o600, content: str = "0" * 64) -> str:
    path = folder / "token"
    path.write_text(content)
    path.chmod(mode)
    return str(path)


def test_ray_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'polyrhythm\[ray\]'"):
        check_ray(config_of())


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://10.0.0.1:10001", ":6379", "head:port", "head:\u00b2"])
def test_an_address_must_be_host_and_port(address):
    with pytest.raises(UserError, match="must be HOST:PORT"):
        existing_cluster(config_of(address))


def test_what_cannot_be_the_name_of_a_host_is_refused():
    with pytest.raises(UserError, match=r"cluster\.address='a\.\.b:6379': nobody answers there \(no such host\)"):
        existing_cluster(config_of("a..b:6379"))


def test_what_is_no_head_of_a_cluster_is_refused(head, saying):
    saying()
    with pytest.raises(UserError, match="is no head of a Ray cluster"):
        existing_cluster(config_of(head))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_conductor_that_nodes_cannot_reach_is_refused_by_its_key(head, saying, host):
    saying(nodes=[HERE, ELSEWHERE])
    with pytest.raises(
        UserError, match=r"conductor.host='.*' cannot be reached from the Ray cluster's node 203.0.113.9"
    ):
        existing_cluster(config_of(head, host))
    assert existing_cluster(config_of(head, "192.0.2.7")).node_here == "127.0.0.1"


def test_a_run_must_be_started_on_a_node(head, saying):
    saying(nodes=[ELSEWHERE])
    with pytest.raises(UserError, match=r"this machine is not a node of the Ray cluster .*nodes: 203.0.113.9"):
        existing_cluster(config_of(head, "192.0.2.7"))


def test_the_placement_is_told_line_by_line(head, saying):
    saying(nodes=[HERE])
    assert check_ray(config_of(head)) == [
        f"Ray: the Ray cluster at {head}",
        "  engine-0 (CPU 1) fits on 127.0.0.1",
        "  trainer (CPU 1) fits on 127.0.0.1",
    ]


def test_a_device_must_be_asked_for():
    config = Config(device="cuda", cluster=ClusterConfig(kind="ray"), engine=EngineConfig(resources={"CPU": 1}))
    with pytest.raises(UserError, match=r"needs engine.resources = \{GPU = 1\}"):
        check_ray(config)


def test_a_token_file_must_be_there_have_a_token_and_be_for_its_owner_alone(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        authentication(config_of("h:1", token_file=str(tmp_path / "none")))
    with pytest.raises(UserError, match="is empty"):
        authentication(config_of("h:1", token_file=token_file(tmp_path, content="\n")))
    with pytest.raises(UserError, match="chmod 600"):
        authentication(config_of("h:1", token_file=token_file(tmp_path, mode=0o644)))
    path = token_file(tmp_path)
    assert authentication(config_of("h:1", token_file=path))["RAY_AUTH_TOKEN_PATH"] == path


def test_without_a_token_file_it_is_as_the_user_has_told_ray(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert authentication(config_of("h:1")) == {"RAY_AUTH_MODE": "disabled"}
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "somewhere")
    assert authentication(config_of("h:1")) == {"RAY_AUTH_MODE": "token"}
