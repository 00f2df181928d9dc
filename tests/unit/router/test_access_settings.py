"""What could not be served with, or would let everybody in, is refused when the configuration is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from cluster.config_file import ConfigError, parse_config
from router.access.keys import Permission, new_key
from router.config import RouterSettings
from tests.certificates import Authority, Pair

KEY, LINE = new_key("me", [Permission.GENERATE, Permission.ADMIN])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.issue("router")


def refused(section: str) -> str:
    """What is said of a file with this `router` section."""
    with pytest.raises(ConfigError) as caught:
        parse_config(f"name: x\npools: {{colocated: {{}}}}\nrouter:\n{section}", "f.yaml")
    (problem,) = caught.value.problems
    return problem


def tls(cert: Path, key: Path, client_ca: Path | None = None) -> str:
    more = "" if client_ca is None else f", client_ca: {client_ca}"
    return f"  tls: {{cert: {cert}, key: {key}{more}}}\n"


def test_what_fits_is_taken(pair: Pair, authority: Authority) -> None:
    text = f"name: x\npools: {{colocated: {{}}}}\nrouter:\n{tls(pair.cert, pair.key, authority.cert)}"
    router = parse_config(f'{text}  api_keys: {{keys: ["{LINE}"]}}\n  grpc: 0.0.0.0:1\n', "f.yaml").router
    assert router.tls is not None
    assert router.tls.client_ca == authority.cert
    assert router.is_guarded
    assert not RouterSettings().is_guarded


def test_paths_are_meant_from_where_it_is_read_and_errors_show_them_whole(
    pair: Pair, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    for named in (Path(pair.cert.name), Path("~") / pair.cert.name):
        files = RouterSettings.model_validate({"tls": {"cert": named, "key": pair.key.name}}).tls
        assert files is not None
        assert (files.cert, files.key) == (pair.cert, pair.key)
    assert f"'{folder}/missing.pem' cannot be read" in refused(tls(Path("missing.pem"), pair.key))
    assert f"'{folder}/no-keys' cannot be read" in refused("  api_keys: {file: no-keys}\n")


def test_certificates_and_keys_are_refused_by_name(folder: Path, authority: Authority, pair: Pair) -> None:
    other, old = authority.issue("other"), authority.issue("old", for_days=-0.5)
    early = authority.issue("early", since_days=-1)
    missing, empty = folder / "missing.pem", folder / "empty.pem"
    empty.write_text("")
    locked = folder / "locked.key"
    key = load_pem_private_key(pair.key.read_bytes(), password=None)
    form = Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")
    locked.write_bytes(key.private_bytes(*form))
    for section, where, why in (
        (tls(missing, pair.key), "cert", f"'{missing}' cannot be read: No such file"),
        (tls(empty, pair.key), "cert", f"'{empty}' holds no certificate"),
        (tls(pair.key, pair.key), "cert", "holds no certificate"),
        (tls(pair.cert, missing), "key", f"'{missing}' cannot be read"),
        (tls(pair.cert, pair.cert), "key", "holds no private key"),
        (
            tls(pair.cert, other.key),
            "key",
            f"'{other.key}' is not the key of the certificate in '{pair.cert}'",
        ),
        (tls(pair.cert, locked), "key", "has a passphrase"),
        (tls(old.cert, old.key), "cert", f"in '{old.cert}' expired at 2"),
        (tls(early.cert, early.key), "cert", f"in '{early.cert}' begins at 2"),
        (tls(pair.cert, pair.key, missing), "client_ca", "cannot be read"),
        (tls(pair.cert, pair.key, old.cert.with_suffix(".key")), "client_ca", "holds no certificate"),
    ):
        problem = refused(section)
        assert problem.startswith(f"f.yaml:4: router.tls.{where}: "), problem
        assert why in problem


def test_an_expired_authority_may_stand_beside_one_of_today(folder: Path, authority: Authority) -> None:
    old, pair = authority.issue("gone", for_days=-0.5), authority.issue("here")
    both = folder / "both.pem"
    both.write_bytes(old.cert.read_bytes() + authority.cert.read_bytes())
    settings = {"cert": pair.cert, "key": pair.key, "client_ca": both}
    assert RouterSettings.model_validate({"tls": settings}).tls is not None
    assert "expired" in refused(tls(pair.cert, pair.key, old.cert))


def test_keys_that_are_none_are_refused_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{LINE}\n{KEY}\n")
    monkeypatch.setenv("SOME_KEYS", f"{LINE};{KEY}")
    for section, where in (
        (f"  api_keys: {{file: {file}}}\n", f".file: '{file}': line 2 is not NAME PERMISSIONS"),
        (f"  api_keys: {{file: {tmp_path / 'none'}}}\n", f".file: '{tmp_path / 'none'}' cannot be read"),
        ("  api_keys: {env: SOME_KEYS}\n", ".env: 'SOME_KEYS': line 2 is not"),
        ("  api_keys: {env: NO_KEYS_AT_ALL}\n", ".env: the environment has no 'NO_KEYS_AT_ALL'"),
        (f"  api_keys: {{keys: [{KEY}]}}\n", ".keys: line 1 is not"),
        (f"  api_keys: {{keys: {KEY}}}\n", ".keys: line 1 is not"),
        (f"  api_keys: {KEY}\n", ": needs keys of its own: file, env, keys"),
        ("  api_keys: {}\n", ": name one of file, env and keys"),
        (f'  api_keys: {{env: HOME, keys: ["{LINE}"]}}\n', ".env: 'HOME': line 1"),
    ):
        problem = refused(section)
        assert problem.startswith(f"f.yaml:4: router.api_keys{where}"), problem
        assert KEY not in problem


def test_keys_of_a_variable_go_along_to_a_process_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEYS", f"{LINE};{LINE.replace('me', 'you', 1)}")
    settings = RouterSettings.model_validate({"api_keys": {"env": "SOME_KEYS"}})
    monkeypatch.delenv("SOME_KEYS")
    with pytest.raises(ValueError, match="no 'SOME_KEYS'"):
        settings.settled()
    monkeypatch.setenv("SOME_KEYS", LINE)
    settled = settings.settled()
    monkeypatch.delenv("SOME_KEYS")
    keys = RouterSettings.model_validate(settled.model_dump()).api_keys
    assert keys is not None
    assert [key.name for key in keys.read()] == ["me"]


def test_files_are_found_from_another_folder(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text(LINE)
    (tmp_path / "a.pem").write_bytes(pair.cert.read_bytes())
    (tmp_path / "a.key").write_bytes(pair.key.read_bytes())
    monkeypatch.chdir(tmp_path)
    here = {"tls": {"cert": "a.pem", "key": "a.key"}, "api_keys": {"file": "keys"}}
    settled = RouterSettings.model_validate(here).settled()
    monkeypatch.chdir("/")
    assert RouterSettings.model_validate(settled.model_dump()) == settled


OPEN = "grpc: 0.0.0.0:50051"


def test_an_address_beyond_loopback_wants_tls_and_known_callers(pair: Pair, authority: Authority) -> None:
    keys = f'  api_keys: {{keys: ["{LINE}"]}}\n'
    in_the_clear = "is open to the network without encryption: set router.tls and router.api_keys"
    for section, told in (
        (f"  {OPEN}\n", f"router: grpc: 0.0.0.0:50051 {in_the_clear}"),
        (f"  {OPEN}\n{keys}", in_the_clear),
        ("  http: '[::]:8000'\n", f"router: http: [::]:8000 {in_the_clear}"),
        ("  http: pd.example.org:8000\n", in_the_clear),
        (f"  {OPEN}\n{tls(pair.cert, pair.key)}", "is open for everybody who reaches it, Admin included"),
    ):
        problem = refused(section)
        assert told in problem
        assert "insecure: true" in problem
    for section in (
        f"  {OPEN}\n{tls(pair.cert, pair.key)}{keys}",
        f"  {OPEN}\n{tls(pair.cert, pair.key, authority.cert)}",
        f"  {OPEN}\n  insecure: true\n",
        "  grpc: localhost:1\n  http: '[::1]:8000'\n",
        "  grpc: 127.0.0.9:1\n",
    ):
        parse_config(f"name: x\npools: {{colocated: {{}}}}\nrouter:\n{section}", "f.yaml")
