"""Every manifest of every overlay is one that Kubernetes takes, and says what ours must say."""

import re
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from unit.deploy.custom_resources import SCHEMAS
from unit.deploy.rendered import DEPLOY, OVERLAYS, Object, environment, of_kind, pod_templates, render

VERSIONS = ("1.30", "1.36")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid(overlay: str, version: str) -> None:
    """Kubernetes' own kinds by its schemas, strictly: a mistyped field is refused."""
    own = [item for item in render(overlay) if item["kind"] not in SCHEMAS]
    assert {"Deployment", "Service", "ConfigMap", "NetworkPolicy", "Role"} <= {item["kind"] for item in own}
    for item in own:
        assert kubernetes_validate.validate(item, version, strict=True) == version


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_custom_resource_has_its_shape(overlay: str) -> None:
    """No field that the resource does not have, none missing."""
    for item in render(overlay):
        if item["kind"] in SCHEMAS:
            jsonschema.validate(item, SCHEMAS[item["kind"]])


def test_the_overlays_use_each_custom_resource() -> None:
    """So that the test above is not empty."""
    kinds = {item["kind"] for overlay in OVERLAYS for item in render(overlay)}
    assert set(SCHEMAS) <= kinds


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", ["gpu-2p-dp8ep"])
def test_pods_of_custom_resources_are_valid(overlay: str, version: str) -> None:
    """A LeaderWorkerSet's pods, which its own schema leaves open, by Kubernetes' schema of a Pod."""
    for pod in (pod for pod in pod_templates(overlay) if pod.kind in SCHEMAS):
        item = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod.name}, "spec": pod.spec}
        assert kubernetes_validate.validate(item, version, strict=True) == version


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_role_is_there(overlay: str) -> None:
    """Prefill and decode nodes, and the proxy with its Service, autoscaler and disruption budget."""
    assert {pod.role for pod in pod_templates(overlay)} == {"prefill", "decode", "proxy"}
    for kind in ("Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"):
        assert "lockstep-proxy" in of_kind(overlay, kind), kind


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_service_variables_in_pods(overlay: str) -> None:
    """Kubernetes would put LOCKSTEP_PROXY_SERVICE_HOST into every pod, which our services refuse by name."""
    assert all(pod.spec["enableServiceLinks"] is False for pod in pod_templates(overlay))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_run_as_the_images_user_on_a_read_only_root(overlay: str) -> None:
    """Not root, nothing to write but mounted volumes, no privileges to gain."""
    (user,) = re.findall(r"useradd --system --uid (\d+)", (DEPLOY / "images" / "Dockerfile").read_text())
    for pod in pod_templates(overlay):
        security, of_container = pod.spec["securityContext"], pod.container["securityContext"]
        assert (security["runAsUser"], security["runAsNonRoot"]) == (int(user), True)
        assert of_container["readOnlyRootFilesystem"] is True
        assert of_container["allowPrivilegeEscalation"] is False
        assert of_container["capabilities"]["drop"] == ["ALL"]
        mounts = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
        assert {"/tmp", "/var/cache/lockstep"} <= set(mounts)
        assert set(mounts.values()) == {volume["name"] for volume in pod.spec["volumes"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_get_longer_than_their_drain(overlay: str) -> None:
    """The kubelet's SIGKILL comes after the drain, a wait before it, and the teardown of engines."""
    for pod in pod_templates(overlay):
        drain_s = float(environment(overlay, pod)["LOCKSTEP_DRAIN_TIMEOUT_S"])
        stop = pod.container.get("lifecycle", {}).get("preStop", {})
        waits_s = float(stop["exec"]["command"][1]) if stop else 0.0
        assert pod.spec["terminationGracePeriodSeconds"] >= waits_s + drain_s + 30, pod.name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rollouts_start_the_new_pod_first(overlay: str) -> None:
    """A rolling update never takes the last prefill node or proxy away."""
    for deployment in of_kind(overlay, "Deployment").values():
        assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_select_pods_that_are_there(overlay: str) -> None:
    """Each Service has pods, and the named ports that it points at."""
    pods = list(pod_templates(overlay))
    for name, service in of_kind(overlay, "Service").items():
        chosen = [pod for pod in pods if selects(service["spec"]["selector"], pod.template)]
        assert chosen, name
        for pod in chosen:
            ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
            for port in service["spec"]["ports"]:
                assert ports[port["targetPort"]] == port["port"], (name, pod.name)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_of_workloads_are_apart(overlay: str) -> None:
    """No workload counts the pods of another one as its own."""
    pods = list(pod_templates(overlay))
    workloads = {
        (kind, name): item
        for kind in ("Deployment", "StatefulSet")
        for name, item in of_kind(overlay, kind).items()
    }
    for (kind, name), item in workloads.items():
        chosen = {
            (p.kind, p.name) for p in pods if selects(item["spec"]["selector"]["matchLabels"], p.template)
        }
        assert chosen == {(kind, name)}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_proxy_may_ask_for_endpoints(overlay: str) -> None:
    """Reading EndpointSlices, nothing else, by no other account."""
    (role,) = of_kind(overlay, "Role").values()
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    (binding,) = of_kind(overlay, "RoleBinding").values()
    assert [subject["name"] for subject in binding["subjects"]] == ["lockstep-proxy"]
    accounts = of_kind(overlay, "ServiceAccount")
    for pod in pod_templates(overlay):
        account = accounts[pod.spec["serviceAccountName"]]
        reads = account.get("automountServiceAccountToken", True)
        assert reads is (pod.role == "proxy")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_references_exist(overlay: str) -> None:
    """Volume claims, ConfigMaps and scaled workloads are objects of the same overlay."""
    for pod in pod_templates(overlay):
        for volume in pod.spec["volumes"]:
            claim = volume.get("persistentVolumeClaim")
            assert claim is None or claim["claimName"] in of_kind(overlay, "PersistentVolumeClaim")
        for source in pod.container["envFrom"]:
            assert source["configMapRef"]["name"] in of_kind(overlay, "ConfigMap")
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for item in of_kind(overlay, kind).values():
            target = item["spec"]["scaleTargetRef"]
            assert target["name"] in of_kind(overlay, target["kind"])
            if kind == "ScaledObject":
                assert "replicas" not in of_kind(overlay, target["kind"])[target["name"]]["spec"]


def test_the_readme_says_what_each_overlay_needs() -> None:
    """One row an overlay, none for one that is not there."""
    text = (DEPLOY / "kubernetes" / "README.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| [^|]+ \| [^|]+ \|$", text, re.MULTILINE)
    assert tuple(rows) == OVERLAYS
    assert {path.name for path in (DEPLOY / "kubernetes" / "overlays").iterdir()} == set(OVERLAYS)


def selects(selector: dict[str, Any], template: Object) -> bool:
    return selector.items() <= template["metadata"]["labels"].items()
