"""The sources that the flags ask for."""

from proxy.discovery.addresses import split_list
from proxy.discovery.config import DiscoveryConfig
from proxy.discovery.dns import Names
from proxy.discovery.endpoint_slices import EndpointSlices
from proxy.discovery.kubernetes_api import Access
from proxy.discovery.nodes_file import NodesFile
from proxy.discovery.source import Nodes, Source
from proxy.nodes import Role


def fixed_nodes(config: DiscoveryConfig) -> Nodes:
    """The nodes of the flags themselves, in their order."""
    nodes: dict[str, Role] = dict.fromkeys(config.prefill_addresses, "prefill")
    return {**nodes, **dict.fromkeys(config.decode_addresses, "decode")}


def sources(config: DiscoveryConfig) -> list[Source]:
    """Those that are read again and again. Raises ConfigError for one that cannot be used."""
    found: list[Source] = []
    if config.nodes_file is not None:
        found.append(NodesFile(config.nodes_file, config.discovery_interval_s))
    names: dict[Role, str] = {"prefill": config.prefill_dns, "decode": config.decode_dns}
    for role, value in names.items():
        if value:
            found.append(Names(role, split_list(value), config.discovery_interval_s))
    selectors: dict[Role, str] = {"prefill": config.prefill_k8s, "decode": config.decode_k8s}
    for role, selector in selectors.items():
        if selector:
            access = Access.of_pod(config.k8s_api_url, config.k8s_credentials_dir, config.k8s_namespace)
            found.append(EndpointSlices(role, selector, config.k8s_port_name, access))
    return found
