"""What is wrong with certificates is told before anything starts, with the setting that it is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config_file import parse_config
from cluster.errors import LaunchError
from cluster.folders import with_absolute_paths
from cluster.preflight import refuse_early
from tests.unit.trust.certificates import PartsAuthority
from trust.errors import TrustError
from trust.tls import MutualTls


def test_parts_of_one_authority_take_each_other(tmp_path: Path) -> None:
    PartsAuthority(tmp_path).files("part").check()


def complaint(files: MutualTls) -> str:
    with pytest.raises(TrustError) as refused:
        files.check()
    return str(refused.value)


@pytest.mark.parametrize("setting", ["ca", "cert", "key"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, setting: str) -> None:
    files = PartsAuthority(tmp_path).files("part").model_copy(update={setting: tmp_path / "gone.pem"})
    assert complaint(files) == f"{setting}: {tmp_path}/gone.pem cannot be read: No such file or directory"


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    authority = PartsAuthority(tmp_path)
    files = authority.files("part").model_copy(update={"key": authority.files("other").key})
    assert complaint(files) == f"key: {tmp_path}/other.key does not belong to {tmp_path}/part.pem"


def test_a_certificate_that_has_ended_is_refused(tmp_path: Path) -> None:
    files = PartsAuthority(tmp_path).files("part", for_days=-1)
    assert complaint(files) == f"cert: {tmp_path}/part.pem is refused: certificate has expired"


def test_a_certificate_for_another_name_is_refused(tmp_path: Path) -> None:
    authority = PartsAuthority(tmp_path)
    assert "not valid for 'pdserve'" in complaint(authority.files("part", "elsewhere"))
    authority.files("part", "elsewhere").model_copy(update={"name": "elsewhere"}).check()


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    ours, theirs = PartsAuthority(tmp_path), PartsAuthority(tmp_path, "other-ca")
    files = theirs.files("part").model_copy(update={"ca": ours.cert})
    assert complaint(files).startswith(f"cert: {tmp_path}/part.pem is refused: ")


@pytest.mark.parametrize("setting", ["ca", "cert", "key"])
def test_a_file_that_is_no_pem_is_refused(tmp_path: Path, setting: str) -> None:
    files = PartsAuthority(tmp_path).files("part")
    (tmp_path / "words.pem").write_text("no certificate and no key")
    assert "words.pem" in complaint(files.model_copy(update={setting: tmp_path / "words.pem"}))


def test_up_refuses_them_before_it_starts_anything(tmp_path: Path) -> None:
    files = PartsAuthority(tmp_path).files("part", for_days=-1)
    config = parse_config(
        "name: x\npools: {colocated: {engine: {num_blocks: 8}}}\n"
        f"network: {{tls: {{ca: {files.ca}, cert: {files.cert}, key: {files.key}}}}}\n",
        "f",
    )
    with pytest.raises(LaunchError, match=r"^network\.tls\.cert: .* expired$"):
        refuse_early(config)


def test_paths_are_meant_from_where_up_runs_and_links_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.pem").symlink_to("target.pem")
    config = parse_config(
        "name: x\npools: {colocated: {}}\nnetwork: {tls: {ca: ca.pem, cert: link.pem, key: ~/k.pem}}\n", "f"
    )
    tls = with_absolute_paths(config).network.tls
    assert tls is not None
    assert (tls.ca, tls.cert) == (tmp_path / "ca.pem", tmp_path / "link.pem")
    assert tls.key == Path.home() / "k.pem"
