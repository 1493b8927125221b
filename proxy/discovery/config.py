"""The flags that say where nodes are; every source adds to the others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator

from lockstep.config import ServiceConfig
from lockstep.errors import ConfigError
from proxy.discovery.addresses import split_host_port, split_list


class DiscoveryConfig(ServiceConfig):
    """A part of the proxy's flags; docs/cluster.md describes them."""

    prefill: str = Field("", description="prefill nodes, HOST:PORT[,HOST:PORT...]")
    decode: str = Field("", description="decode nodes, HOST:PORT[,HOST:PORT...]")
    nodes_file: Path | None = Field(
        None,
        description='file with a node a line, "prefill HOST:PORT" or "decode HOST:PORT"; it is re-read',
    )
    prefill_dns: str = Field(
        "", description="names of prefill nodes, NAME:PORT[,...]; each address of a name is a node"
    )
    decode_dns: str = Field("", description="names of decode nodes, as --prefill-dns")
    discovery_interval_s: float = Field(
        2.0, gt=0, description="how often the file and the names are read again"
    )
    prefill_k8s: str = Field(
        "", description="label selector of the Kubernetes EndpointSlices that list the prefill nodes"
    )
    decode_k8s: str = Field("", description="label selector of those of the decode nodes")
    k8s_namespace: str = Field("", description="their namespace; that of this pod if not given")
    k8s_port_name: str = Field("grpc", description="name of the nodes' gRPC port in the EndpointSlices")
    k8s_api_url: str = Field("", description="URL of the API server; that of this pod's cluster if not given")
    k8s_credentials_dir: Path = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        description="directory with the service account's token, ca.crt and namespace",
    )

    @field_validator("prefill", "decode", "prefill_dns", "decode_dns")
    @classmethod
    def _addresses(cls, value: str) -> str:
        addresses = split_list(value)
        for address in addresses:
            split_host_port(address)
        if len(set(addresses)) != len(addresses):
            raise ValueError("an address is listed twice")
        return value

    @classmethod
    def load(cls, argv: Sequence[str], prog: str, description: str) -> tuple[Self, list[str]]:
        """As ServiceConfig.load; raises ConfigError too where nothing says where the nodes of a role are."""
        config, rest = super().load(argv, prog, description)
        config._check_sources()
        return config, rest

    @property
    def prefill_addresses(self) -> tuple[str, ...]:
        """In the order given."""
        return split_list(self.prefill)

    @property
    def decode_addresses(self) -> tuple[str, ...]:
        """In the order given."""
        return split_list(self.decode)

    def _check_sources(self) -> None:
        for role, given in (
            ("prefill", (self.prefill, self.prefill_dns, self.prefill_k8s)),
            ("decode", (self.decode, self.decode_dns, self.decode_k8s)),
        ):
            if self.nodes_file is None and not any(given):
                raise ConfigError(
                    f"--{role}: nothing says where the {role} nodes are; give --{role} HOST:PORT, "
                    f"--{role}-dns NAME:PORT, --{role}-k8s SELECTOR or --nodes-file PATH"
                )
        for address in set(self.prefill_addresses) & set(self.decode_addresses):
            raise ConfigError(f"--decode: {address} is listed under --prefill too; a node has one role")
