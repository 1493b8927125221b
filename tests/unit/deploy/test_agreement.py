"""What the manifests, compose files and images say of flags, ports, paths and names is what the code has.

Each command line is read by the service's own parser under the environment that its container gets.
"""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from unit.deploy import commands
from unit.deploy.rendered import (
    DEPLOY,
    OVERLAYS,
    PodTemplate,
    compose,
    env_file,
    environment,
    of_kind,
    pod_templates,
    render,
)

from decode_node.config import DecodeConfig
from lockstep import health
from lockstep.config import known_variables
from lockstep.node.config import NodeConfig
from proxy.config import ProxyConfig

DOCKERFILE = (DEPLOY / "images" / "Dockerfile").read_text()
METRICS_PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
PROXY_PORT = 8000
"""vLLM's own default, which nothing here changes."""


def argv_of(pod: PodTemplate, values: dict[str, str]) -> list[str]:
    """Role and arguments, those of a shell as the shell would leave them."""
    if "command" not in pod.container:
        return [commands.expand(argument, values) for argument in pod.container["args"]]
    assert pod.container["command"] == ["sh", "-c"]
    (script,) = pod.container["args"]
    # The only arithmetic there is, for the first host.
    script = re.sub(r"\$\(\(LWS_WORKER_INDEX \* \d+\)\)", "0", script)
    leader = values | {"LWS_LEADER_ADDRESS": "lockstep-decode-0.lockstep-decode"}
    words = [commands.expand(word, leader) for word in shlex.split(script)]
    assert words[:2] == ["exec", "lockstep"]
    return words[2:]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_commands_on_kubernetes_are_read(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag is known to its service, each LOCKSTEP_ variable to some service, and no value is refused."""
    for pod in pod_templates(overlay):
        with monkeypatch.context() as patch:
            values = environment(overlay, pod)
            for name, value in values.items():
                patch.setenv(name, "10.0.0.1" if value.startswith("<") else value)
            role, *argv = argv_of(pod, values)
            assert role == pod.role
            config, rest = commands.read(role, argv)
            check_ports(overlay, pod, config, getattr(rest, "data_parallel_size", 1))


def check_ports(overlay: str, pod: PodTemplate, config: object, num_ranks: int) -> None:
    """The container's ports are those its service listens on; the network policy opens them to its peers."""
    ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
    if not isinstance(config, NodeConfig):
        assert ports == {"http": PROXY_PORT}
        assert opened(overlay, "lockstep-proxy") == {("", PROXY_PORT, PROXY_PORT)}
        return
    assert ports == {"grpc": config.port, "http": config.http_port, "side-channel": config.side_channel_port}
    first, last = environment(overlay, pod)["UCX_TCP_PORT_RANGE"].split("-")
    rules = opened(overlay, "lockstep-node")
    assert ("proxy", config.port, config.port) in rules
    assert ("prefill,decode", int(first), int(last)) in rules
    ((_, low, high),) = [rule for rule in rules if rule[1] == config.side_channel_port]
    assert low + num_ranks - 1 <= high


def opened(overlay: str, policy: str) -> set[tuple[str, int, int]]:
    """(components of the pods that may, first port, last port) of a network policy, "" for everybody."""
    rules = set()
    for rule in of_kind(overlay, "NetworkPolicy")[policy]["spec"]["ingress"]:
        peers = []
        for peer in rule.get("from", []):
            selector = peer.get("podSelector", {})
            peers += [selector.get("matchLabels", {}).get("app.kubernetes.io/component", "")]
            peers += [",".join(term["values"]) for term in selector.get("matchExpressions", [])]
        for port in rule["ports"]:
            rules.add((",".join(filter(None, peers)), port["port"], port.get("endPort", port["port"])))
    return rules


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_proxy_finds_the_nodes(overlay: str) -> None:
    """Its selectors choose the Services of each role alone; EndpointSlices have their labels."""
    (proxy,) = (pod for pod in pod_templates(overlay) if pod.role == "proxy")
    values = environment(overlay, proxy)
    for role in ("prefill", "decode"):
        selector = dict(term.split("=") for term in values[f"LOCKSTEP_{role.upper()}_K8S"].split(","))
        services = of_kind(overlay, "Service")
        chosen = [
            name for name, item in services.items() if selector.items() <= item["metadata"]["labels"].items()
        ]
        assert chosen == [f"lockstep-{role}"]
        ports = {port["name"]: port["port"] for port in services[chosen[0]]["spec"]["ports"]}
        assert ports[ProxyConfig().k8s_port_name] == NodeConfig().port


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secrets_are_the_documented_ones(overlay: str) -> None:
    """Each key that a pod or the monitor asks for is in the README's command that makes the secret."""
    readme = (DEPLOY / "kubernetes" / "README.md").read_text()
    documented = set(re.findall(r"--from-(?:literal|file)=([a-z-]+)", readme))
    asked = set(re.findall(r"key: ([a-z-]+)\n\s*name: lockstep\n", yaml.safe_dump(render(overlay))))
    assert "grpc-token" in asked
    assert asked <= documented


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_routes_that_are_there(overlay: str) -> None:
    """Liveness and readiness by the health port's own routes; a slow start gets at least its deadline."""
    app = health.build_app(lambda: "", CollectorRegistry())
    routes = {getattr(route, "path", "") for route in app.routes}
    for pod in pod_templates(overlay):
        probes = {name: pod.container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
        assert all(probe["httpGet"]["port"] == "http" for probe in probes.values())
        paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
        assert set(paths.values()) <= routes
        assert (paths["liveness"], paths["readiness"]) == ("/healthz", "/readyz")
        start = probes["startup"]
        if pod.role != "proxy":
            assert start["periodSeconds"] * start["failureThreshold"] > NodeConfig().warmup_timeout_s
    for monitor in of_kind(overlay, "ServiceMonitor").values():
        assert {endpoint["path"] for endpoint in monitor["spec"]["endpoints"]} <= routes


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_scrapes_find_every_service(overlay: str) -> None:
    """The monitor's port is one that each Service of ours has, and its labels are theirs."""
    for monitor in of_kind(overlay, "ServiceMonitor").values():
        wanted = monitor["spec"]["selector"]["matchLabels"]
        for service in of_kind(overlay, "Service").values():
            assert wanted.items() <= service["metadata"]["labels"].items()
            assert monitor["spec"]["jobLabel"] in service["metadata"]["labels"]
            ports = {port["name"] for port in service["spec"]["ports"]}
            assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_autoscaling_queries_name_metrics_that_exist(overlay: str) -> None:
    """docs/metrics.md is held to the code by a test of its own."""
    documented = set(re.findall(r"^\| `(lockstep_\w+)` \|", METRICS_PAGE, re.MULTILINE))
    for scaled in of_kind(overlay, "ScaledObject").values():
        for trigger in scaled["spec"]["triggers"]:
            named = set(re.findall(r"lockstep_\w+", trigger["metadata"]["query"]))
            assert named
            assert named <= documented


def test_overlays_name_the_images_that_the_dockerfile_builds() -> None:
    """lockstep-<target>; the proxy's is the same in all."""
    targets = set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE))
    for overlay in OVERLAYS:
        for pod in pod_templates(overlay):
            flavour = "node-cpu" if overlay == "cpu-demo" else "node-cuda"
            expected = "proxy" if pod.role == "proxy" else flavour
            assert expected in targets
            assert re.search(rf"/lockstep-{expected}:[\d.]+$", pod.container["image"]), pod.name


def test_the_image_exposes_and_checks_the_default_ports() -> None:
    """Per target: what it listens on, what its health check asks."""
    config = NodeConfig()
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S))
    for target, check, exposed in (
        ("node-cpu", config.http_port, [config.port, config.http_port, config.side_channel_port]),
        ("node-cuda", config.http_port, [config.port, config.http_port, config.side_channel_port]),
        ("proxy", PROXY_PORT, [PROXY_PORT]),
    ):
        (line,) = re.findall(r"^EXPOSE (.*)$", stages[target], re.MULTILINE)
        assert [int(port.split("-")[0]) for port in line.split()] == exposed
        assert re.findall(r'healthcheck.py", "(\d+)"\]', stages[target]) == [str(check)]


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.cuda.yaml")])
def test_commands_of_compose_are_read(files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under lockstep.env, which all services get; the proxy's addresses are those of the other two."""
    values = {"MODEL": "some/model", "SERVED_MODEL_NAME": "name"}
    for name, value in env_file(DEPLOY / "compose" / "lockstep.env").items():
        monkeypatch.setenv(name, value)
    services = compose(files[-1])["services"]
    for role in ("prefill", "decode", "proxy"):
        first, *argv = (commands.expand(argument, values) for argument in services[role]["command"])
        assert first == role
        config, _ = commands.read(role, argv)
        if isinstance(config, ProxyConfig):
            assert config.prefill_addresses == (f"prefill:{NodeConfig().port}",)
            assert config.decode_addresses == (f"decode:{DecodeConfig().port}",)


def test_variables_of_compose_are_in_the_example() -> None:
    """.env.example has each that a compose file fills in, and no other."""
    used = set()
    for name in ("compose.yaml", "compose.cuda.yaml"):
        text = (DEPLOY / "compose" / name).read_text()
        used |= set(re.findall(r"\$\{(\w+)", text))
    assert used == set(env_file(DEPLOY / "compose" / ".env.example"))


def test_one_environment_file_has_known_variables_only() -> None:
    """lockstep.env goes to every service as it is."""
    names = {name for name in env_file(DEPLOY / "compose" / "lockstep.env") if name.startswith("LOCKSTEP_")}
    assert names
    assert names <= known_variables()


def test_compose_starts_in_order_and_stays_up() -> None:
    """Each service is restarted, waits until what it needs is well, and has longer than its drain to stop."""
    services = compose("compose.yaml")["services"]
    assert set(services) == {"prefill", "decode", "proxy", "prometheus", "grafana"}
    assert {service["restart"] for service in services.values()} == {"unless-stopped"}
    waits = {name: service.get("depends_on", {}) for name, service in services.items()}
    assert {name: set(on) for name, on in waits.items()} == {
        "prefill": set(),
        "decode": set(),
        "proxy": {"prefill", "decode"},
        "prometheus": {"proxy"},
        "grafana": {"prometheus"},
    }
    assert all(on["condition"] == "service_healthy" for service in waits.values() for on in service.values())
    drain_s = float(env_file(DEPLOY / "compose" / "lockstep.env")["LOCKSTEP_DRAIN_TIMEOUT_S"])
    for role in ("prefill", "decode", "proxy"):
        assert float(services[role]["stop_grace_period"].removesuffix("s")) >= drain_s + 30
    admin_port = services["proxy"]["environment"]["LOCKSTEP_ADMIN_PORT"]
    assert services["proxy"]["ports"] == [
        f"${{BIND_ADDRESS:-127.0.0.1}}:${{HTTP_PORT:-8000}}:{PROXY_PORT}",
        f"127.0.0.1:${{ADMIN_PORT:-{admin_port}}}:{admin_port}",
    ]
    assert "ports" not in services["prefill"]
    assert "ports" not in services["decode"]
